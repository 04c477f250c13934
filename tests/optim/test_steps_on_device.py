"""Optimizer steps on the simulated device: the host waits once, the bits are the CPU's, and failures change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import move, simulated_device

import weft
import weft.optim.slices.adamw
from weft import optim
from weft.optim.matrix.rekls import VARIANTS
from weft.optim.matrix.rule import Advancing
from weft.optim.matrix.stable import STABLE

SHAPES = ((6, 5), (5,), (7, 3), (3,), (), (0, 4))
Make = Callable[[list[nn.Parameter], weft.Axis], Any]


@pytest.fixture(autouse=True, scope="module")
def simulated() -> Any:
    return simulated_device()


def sharded(parameters: list[nn.Parameter], axis: weft.Axis, **options: Any) -> optim.ShardedAdamW:
    groups = [{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.05}]
    return optim.ShardedAdamW(groups, lr=0.02, group=axis, bucket_bytes=80, **options)


def rekls(parameters: list[nn.Parameter], axis: weft.Axis, **options: Any) -> optim.REKLS:
    return optim.REKLS(parameters, lr=0.02, group=axis.subset([axis.rank]), data_group=axis, **options)


def matrices(kind: Any, parameters: list[nn.Parameter], axis: weft.Axis, **options: Any) -> Any:
    return kind(parameters, lr=0.02, group=axis.subset([axis.rank]), data_group=axis, **options)


def rekls_adamw(parameters: list[nn.Parameter], axis: weft.Axis) -> optim.REKLS:
    group = [{"params": parameters, "algorithm": "adamw"}]
    return optim.REKLS(group, lr=0.02, group=axis.subset([axis.rank]), data_group=axis)


def overlapped(
    parameters: list[nn.Parameter], axis: weft.Axis, variant: str = "stable", **options: Any
) -> optim.OverlappedStep:
    """Three parts, of which two send along one axis."""
    parts = [
        rekls([p for p in parameters if p.ndim == 2 and p.numel()], axis, variant=variant),
        optim.ShardedAdamW([p for p in parameters if p.ndim == 1], lr=0.02, group=axis),
        optim.ShardedAdamW([p for p in parameters if not p.ndim or not p.numel()], lr=0.02, group=axis),
    ]
    return optim.OverlappedStep(parts, **options)


STEPS: dict[str, Make] = {
    "ShardedAdamW": sharded,
    "ShardedAdamW, clip": lambda p, axis: sharded(p, axis, clip=0.5),
    "REKLS exact": lambda p, axis: rekls(p, axis, variant="exact"),
    "REKLS stable": lambda p, axis: rekls(p, axis, variant="stable"),
    "REKLS stable, l2": lambda p, axis: rekls(p, axis, variant="stable", weight_decay_method="l2", max_factor_dim=4),
    "REKLS adamw": rekls_adamw,
    "SOAP": lambda p, axis: matrices(optim.SOAP, p, axis, root_every=2),
    "Muon": lambda p, axis: matrices(optim.Muon, p, axis),
    "NorMuon": lambda p, axis: matrices(optim.NorMuon, p, axis),
    "OverlappedStep": overlapped,
    "OverlappedStep, clip": lambda p, axis: overlapped(p, axis, clip=0.5, bucket_bytes=40),
    "OverlappedStep, clip, overlap_backward": lambda p, axis: overlapped(
        p, axis, "exact", clip=0.5, overlap_backward=True
    ),
}


def parameters_on(device: str, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    make = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=make).to(device, dtype)) for shape in SHAPES]


def backward(parameters: list[nn.Parameter], step: int, rank: int, factor: float = 1.0) -> None:
    """Gradients with the same bits on every device."""
    make = torch.Generator().manual_seed(100 * step + rank + 1)
    loss = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=make).to(parameter.dtype) * factor
        loss = loss + (parameter * grad.to(parameter.device)).sum()
    loss.backward()


def world(size: int, device: str) -> weft.world.VirtualWorld:
    return weft.world.VirtualWorld(size, rules="nccl", device=device)


def train(make: Make, size: int, device: str, steps: int = 2, dtype: torch.dtype = torch.float32) -> list[Any]:
    """(weights, norm, host syncs of each step by kind and place) of each rank."""

    def program(axis: weft.Axis) -> tuple[list[Tensor], Any, list[dict[str, int]]]:
        from weft.world.simulated import current_rank

        parameters = parameters_on(device, dtype)
        optimizer, syncs = make(parameters, axis), []
        for step in range(steps):
            backward(parameters, step, axis.rank)
            current_rank().host_sync_places.clear()
            optimizer.step()
            syncs.append(current_rank().places_of_syncs())
            optimizer.zero_grad()
        return move([p.detach() for p in parameters], "cpu"), getattr(optimizer, "norm", None), syncs

    return world(size, device).run(program).results


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def by_turns(kinds: Iterable[str], others: Iterable[Any]) -> list[Any]:
    """Every kind with one of the others, each of those in its turn; with all of them in `make soak`."""
    others = list(others)
    return [
        pytest.param(kind, other, marks=[] if at % len(others) == turn else pytest.mark.slow)
        for at, kind in enumerate(kinds)
        for turn, other in enumerate(others)
    ]


@pytest.mark.parametrize(("kind", "size"), by_turns(STEPS, [1, 2, 3]))
def test_the_host_waits_once_in_a_step_and_the_bits_are_the_cpus(kind: str, size: int) -> None:
    """The same operators see operands that lie alike in memory: BLAS rounds by that too."""
    wanted, found = (train(STEPS[kind], size, device) for device in ("cpu", "sim"))
    for rank, ((weights, norm, _), (ours, our_norm, syncs)) in enumerate(zip(wanted, found, strict=True)):
        assert same(weights, ours) and (norm is None or math.isclose(norm, our_norm, rel_tol=1e-12)), rank
        for step in syncs:  # decompositions: torch waits for them to see whether they converged
            once = [place for place in step if not place.startswith("eigh at rule.py")]
            assert [step[place] for place in once] == [1] and once[0].startswith("synchronize at device.py"), step


@pytest.mark.parametrize(
    ("kind", "dtype"), by_turns(["ShardedAdamW, clip", "REKLS stable", "REKLS exact"], [torch.bfloat16, torch.float64])
)
def test_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    wanted, found = (train(STEPS[kind], 2, device, dtype=dtype) for device in ("cpu", "sim"))
    assert all(same(one[0], other[0]) for one, other in zip(wanted, found, strict=True))


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_adamw_takes_all_tensors_of_a_group_at_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One foreach call for each group of a bucket, not a few small kernels for each parameter."""
    calls, adamw = [], weft.optim.slices.adamw.adamw

    def counted(parameters: list[Tensor], *args: Any, **options: Any) -> None:
        calls.append((len(parameters), options["foreach"]))
        adamw(parameters, *args, **options)

    monkeypatch.setattr(weft.optim.slices.adamw, "adamw", counted)
    groups = lambda p: [{"params": p[:2]}, {"params": p[2:5], "lr": 0.05}]  # noqa: E731
    train(lambda p, axis: optim.ShardedAdamW(groups(p), lr=0.02, group=axis), 1, device, steps=1)
    assert sorted(calls) == [(2, True)] * 2 + [(3, True)] * 2  # by NCCL's rules a program runs twice


def test_start_and_work_do_not_make_the_host_wait(simulated: Any) -> None:
    def program(axis: weft.Axis) -> int:
        parameters = parameters_on("sim")
        optimizer = sharded(parameters, axis, clip=0.5)
        for step in range(2):
            backward(parameters, step, axis.rank)
            with simulated.no_host_sync():
                optimizer.start()
                optimizer.work()
            assert step or optimizer.norm is None
            optimizer.finish()
            assert math.isfinite(optimizer.norm)
        return 1

    assert world(2, "sim").run(program).results == [1, 1]


@pytest.mark.parametrize(
    ("kind", "scaled"),
    by_turns(["REKLS stable", "OverlappedStep, clip", "OverlappedStep, clip, overlap_backward"], [True, False]),
)
def test_a_scaler_leaves_its_numbers_on_the_device(kind: str, scaled: bool) -> None:
    """The scale is a power of two; infinities that it has found pass the step over."""

    def program(axis: weft.Axis) -> tuple[list[Tensor], list[Tensor], int]:
        from weft.world.simulated import current_rank

        parameters = parameters_on("sim")
        optimizer = STEPS[kind](parameters, axis)
        before = [p.detach().cpu() for p in parameters]
        optimizer.found_inf = torch.tensor(float(not scaled and axis.rank == 1)).to("sim")
        optimizer.grad_scale = torch.tensor(1024.0).to("sim")
        backward(parameters, 0, axis.rank, 1024.0)
        current_rank().host_syncs.clear()
        optimizer.step()
        syncs = sum(n for kind, n in current_rank().host_syncs.items() if kind != "eigh")
        return before, [p.detach().cpu() for p in parameters], syncs

    wanted = train(STEPS[kind], 2, "cpu", steps=1)
    for (before, after, syncs), (weights, _, _) in zip(world(2, "sim").run(program).results, wanted, strict=True):
        assert syncs == 1 and same(after, weights if scaled else before)


# Numbers at the ends.


def of_size(factors: list[float]) -> Callable[[str, str], list[list[Tensor]]]:
    """Training by stable and exact REKLS and ShardedAdamW with gradients of some sizes, one for each step."""

    def run(device: str, variant: str) -> list[list[Tensor]]:
        def program(axis: weft.Axis) -> list[Tensor]:
            parameters = parameters_on(device)
            make = {"slices": sharded, "stable": STEPS["REKLS stable"], "exact": STEPS["REKLS exact"]}[variant]
            optimizer = make(parameters, axis)
            for step, factor in enumerate(factors):
                backward(parameters, step, axis.rank, factor)
                optimizer.step()
                optimizer.zero_grad()
            return [p.detach().cpu() for p in parameters]

        return world(2, device).run(program).results

    return run


SIZES = [[0.0, 0.0, 1.0, 0.0, 1.0], [1e-30, 1e20, 1.0], [2.0**50, 1.0, 2.0**45], [1e38]]


@pytest.mark.parametrize(
    ("variant", "factors"),
    [*by_turns(["stable", "exact"], SIZES[:2]), *by_turns(["exact", "stable", "slices"], SIZES[2:])],
)
def test_gradients_of_any_size(variant: str, factors: list[float]) -> None:
    """What the CPU decides by looking is chosen on the device: no gradient yet, one that fades, one that is scaled."""
    run = of_size(factors)
    for wanted, found in zip(run("cpu", variant), run("sim", variant), strict=True):
        assert all(one.isfinite().all() for one in found) and same(wanted, found)


@pytest.mark.parametrize("size", [2, 3])
def test_a_mean_that_fits_though_the_sum_does_not(size: int) -> None:
    def program(axis: weft.Axis) -> list[float]:
        weight = nn.Parameter(torch.ones(6, device="sim"))
        optimizer = optim.ShardedAdamW([weight], lr=0.1, betas=(0.5, 0.5), weight_decay=0.0, group=axis)
        weight.grad = torch.full_like(weight, 3e38)
        optimizer.step()
        return optimizer.state[weight]["exp_avg"].tolist()

    for found in world(size, "sim").run(program).results:
        assert found == pytest.approx([1.5e38] * (6 // size))


# Failures.


def infinite(parameters: list[nn.Parameter], rank: int) -> None:
    if rank == 1:
        parameters[2].grad[0, 0] = math.inf


def missing(parameters: list[nn.Parameter], rank: int) -> None:
    if rank == 1:
        parameters[2].grad = None


FAULTS = {
    "infinite": (infinite, "is not finite on rank 1 of 3"),
    "missing": (missing, "has no gradient on rank 1 of 3"),
}
BEFORE_STEP = ["ShardedAdamW, clip", "REKLS exact", "REKLS stable", "OverlappedStep, clip"]


def state_of(optimizer: Any) -> list[Tensor]:
    found = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    return [value.detach().cpu().clone() for value in found]


@cache
def undisturbed(kind: str) -> list[list[Tensor]]:
    """The weights of three ranks after training without a fault."""
    return [weights for weights, _, _ in train(STEPS[kind], 3, "sim", steps=3)]


def run_with_fault(
    kind: str, make_fault: Callable[[list[nn.Parameter], int], Any], around: Callable[[bool], None] = lambda on: None
) -> tuple[list[str], list[bool], bool]:
    """What the ranks raise in the second step, whether nothing changed by it, and whether all goes on as without it."""

    def program(axis: weft.Axis) -> tuple[str, bool, list[Tensor]]:
        parameters = parameters_on("sim")
        optimizer, words, kept = STEPS[kind](parameters, axis), "", True
        for step in range(3):
            backward(parameters, step, axis.rank)
            if step == 1:
                make_fault(parameters, axis.rank)
                before = [*move([p.detach() for p in parameters], "cpu"), *state_of(optimizer)]
                around(True)
                try:
                    optimizer.step()
                except (RuntimeError, ValueError) as error:
                    words = f"{type(error).__name__}: {error}"
                around(False)
                kept = same(before, [*move([p.detach() for p in parameters], "cpu"), *state_of(optimizer)])
                optimizer.zero_grad()
                backward(parameters, step, axis.rank)
            optimizer.step()
            optimizer.zero_grad()
        return words, kept, move([p.detach() for p in parameters], "cpu")

    wanted = undisturbed(kind)
    found = world(3, "sim").run(program).results
    goes_on = all(same(one, other[2]) for one, other in zip(wanted, found, strict=True))
    return [words for words, _, _ in found], [kept for _, kept, _ in found], goes_on


@pytest.mark.parametrize(("kind", "fault"), by_turns(BEFORE_STEP, FAULTS))
def test_what_one_rank_has_wrong_changes_nothing_on_any(kind: str, fault: str) -> None:
    make_fault, expected = FAULTS[fault]
    words, kept, goes_on = run_with_fault(kind, make_fault)
    assert len(set(words)) == 1 and expected in words[0], words
    assert all(kept) and goes_on


@pytest.mark.parametrize("kind", ["OverlappedStep, clip, overlap_backward", "OverlappedStep, clip"])
def test_a_gradient_that_is_infinite_since_the_backward(kind: str) -> None:
    def program(axis: weft.Axis) -> tuple[str, bool]:
        parameters = parameters_on("sim")
        optimizer = STEPS[kind](parameters, axis)
        before = move([p.detach() for p in parameters], "cpu")
        backward(parameters, 0, axis.rank, math.inf if axis.rank == 1 else 1.0)
        words = ""
        try:
            optimizer.step()
        except RuntimeError as error:
            words = str(error)
        return words, same(before, move([p.detach() for p in parameters], "cpu"))

    for words, kept in world(3, "sim").run(program).results:
        assert "is not finite on rank 1 of 3; weights and state are as before" in words and kept


@pytest.mark.parametrize("kind", ["ShardedAdamW", "OverlappedStep, clip"])
def test_work_that_raises_on_one_rank(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    armed, adamw = [], weft.optim.slices.adamw.adamw

    def raises(*args: Any, **options: Any) -> None:
        if armed and weft.Axis.of(None).rank == 1:
            raise torch.OutOfMemoryError("no memory for 3 GB")
        adamw(*args, **options)

    monkeypatch.setattr(weft.optim.slices.adamw, "adamw", raises)
    words, kept, goes_on = run_with_fault(
        kind, lambda parameters, rank: None, lambda on: armed.append(1) if on else armed.clear()
    )
    assert len(set(words)) == 1 and "raised OutOfMemoryError: no memory for 3 GB (rank 1)" in words[0], words
    assert all(kept) and goes_on


def test_an_update_that_is_not_finite_is_found_by_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[int] = []

    def broken(*args: Any) -> Advancing:
        new, update = yield from STABLE.advance(*args)
        return new, update * math.nan if armed and update.shape == (7, 3) else update

    monkeypatch.setitem(VARIANTS, "stable", replace(STABLE, advance=broken))
    words, kept, goes_on = run_with_fault(
        "REKLS stable", lambda parameters, rank: None, lambda on: armed.append(1) if on else armed.clear()
    )
    assert len(set(words)) == 1 and "the update of parameter 2 of group 0 could not be computed" in words[0], words
    assert all(kept) and goes_on


@pytest.mark.parametrize("kind", ["ShardedAdamW", "REKLS stable", "OverlappedStep, clip, overlap_backward"])
def test_other_weights_on_one_rank_are_found_in_the_first_step(kind: str) -> None:
    def program(axis: weft.Axis) -> str:
        parameters = parameters_on("sim")
        with torch.no_grad():
            parameters[1][2] += float(axis.rank == 1)
        optimizer = STEPS[kind](parameters, axis)
        backward(parameters, 0, axis.rank)
        with pytest.raises(ValueError, match="other weights") as caught:
            optimizer.step()
        return str(caught.value)

    for words in world(3, "sim").run(program).results:
        assert "has other weights on rank 1 of 3 than on rank 0" in words


# Checkpoints, and what stands beside a step.


@pytest.mark.parametrize(
    ("kind", "size"), by_turns(["ShardedAdamW", "REKLS exact", "OverlappedStep, clip", "REKLS stable"], [2, 1])
)
def test_a_state_that_was_saved_goes_on_to_the_bit(kind: str, size: int) -> None:
    def program(axis: weft.Axis, saves: bool) -> list[Tensor]:
        parameters = parameters_on("sim")
        optimizer = STEPS[kind](parameters, axis)
        for step in range(3):
            if saves and step == 1:
                saved = optimizer.state_dict()
                moments = saved["state"][0]["exp_avg"]
                assert moments.device.type == "sim" and saved["state"][0]["step"].device.type == "cpu"
                parameters = [nn.Parameter(p.detach().clone()) for p in parameters]
                optimizer = STEPS[kind](parameters, axis)
                optimizer.load_state_dict(saved)
            backward(parameters, step, axis.rank)
            optimizer.step()
            optimizer.zero_grad()
        return move([p.detach() for p in parameters], "cpu")

    one, other = (world(size, "sim").run(lambda axis, s=saves: program(axis, s)).results for saves in (False, True))
    assert all(same(*pair) for pair in zip(one, other, strict=True))


RATES: dict[str, Callable[[list[nn.Parameter], weft.Axis, Tensor], Any]] = {
    "ShardedAdamW": lambda p, axis, lr: optim.ShardedAdamW(p, lr=lr, group=axis),
    "REKLS": lambda p, axis, lr: optim.REKLS(p, lr=lr, group=axis.subset([axis.rank]), data_group=axis),
}


@pytest.mark.parametrize("kind", RATES)
def test_a_rate_is_a_tensor_of_the_host(kind: str) -> None:
    """Such a one costs no wait; one on the device would be read at every use, and is refused on every rank."""
    rates = 0.02, torch.tensor(0.02)
    wanted, found = (train(lambda p, axis, lr=lr: RATES[kind](p, axis, lr), 2, "sim") for lr in rates)  # type: ignore[misc]
    assert all(same(one[0], other[0]) and one[2] == other[2] for one, other in zip(wanted, found, strict=True))

    def program(axis: weft.Axis) -> str:
        parameters = parameters_on("sim")
        optimizer = RATES[kind](parameters, axis, torch.tensor(0.02))
        backward(parameters, 0, axis.rank)
        if axis.rank == 1:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.02, device="sim")
        with pytest.raises(ValueError, match="lr must be a number") as caught:
            optimizer.step()
        return str(caught.value)

    words = "lr must be a number or a tensor on the CPU, got one on sim:0, which the host would wait for (rank 1)"
    assert world(2, "sim").run(program).results == [f"{kind}: {words}"] * 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcasting_does_not_make_the_host_wait(simulated: Any, size: int) -> None:
    def program(axis: weft.Axis) -> list[Tensor]:
        parameters = parameters_on("sim")
        with torch.no_grad():
            for parameter in parameters:
                parameter += axis.rank
        with simulated.no_host_sync():
            weft.broadcast_parameters(parameters, group=axis, source=size - 1)
        return move([p.detach() for p in parameters], "cpu")

    wanted = [p.detach() + (size - 1) for p in parameters_on("cpu")]
    assert all(same(found, wanted) for found in world(size, "sim").run(program).results)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_clipping_gradients_does_not_make_the_host_wait(sim: Any, simulated: Any, norm_type: float) -> None:
    ours, theirs = parameters_on("sim")[:-1], parameters_on("cpu")[:-1]  # no largest of nothing
    for parameters in (ours, theirs):
        backward(parameters, 0, 0, 10.0)
    with simulated.no_host_sync():
        norm = optim.clip_grad_norm_(ours, 0.5, norm_type)
    assert norm.device.type == "sim"
    assert float(norm) == float(torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type))
    assert same([p.grad.cpu() for p in ours], [p.grad for p in theirs])
    there = torch.tensor(0.5, device="sim")
    with simulated.no_host_sync(), pytest.raises(ValueError, match="max_norm must be a number or a tensor on the CPU"):
        optim.clip_grad_norm_(ours, there, norm_type)


# Streams: gradients that leave in a backward, from wherever they were made.


@pytest.mark.parametrize("size", [1, 2])
def test_a_backward_on_a_side_stream_whose_gradients_leave_early(simulated: Any, size: int) -> None:
    """The step is on the main stream, which waits for the backward; the side stream never waits for the main one."""

    def program(axis: weft.Axis) -> list[Tensor]:
        parameters = parameters_on("sim")
        optimizer = STEPS["OverlappedStep, clip, overlap_backward"](parameters, axis)
        side, main = simulated.Stream("sim"), simulated.current_stream()
        for step in range(2):
            side.wait_event(main.record_event())
            with side:
                backward(parameters, step, axis.rank)
                more = [torch.zeros(30, device="sim") for _ in range(8)]
            main.wait_stream(side)
            optimizer.step()
            with side:
                more += [torch.zeros(size, device="sim") for size in range(1, 40)]  # memory of the step's messages
            del more
            optimizer.zero_grad()
        return move([p.detach() for p in parameters], "cpu")

    wanted = train(STEPS["OverlappedStep, clip, overlap_backward"], size, "cpu")
    for found, (weights, _, _) in zip(world(size, "sim").run(program).results, wanted, strict=True):
        assert same(found, weights)


@pytest.mark.parametrize("size", [1, 2])
def test_a_unit_leaves_after_gradients_of_other_streams(simulated: Any, size: int) -> None:
    """Hooks are called as torch calls them where parameters were first used on different streams."""

    def program(axis: weft.Axis) -> list[Tensor]:
        one, two = parameters = [nn.Parameter(torch.ones(4, device="sim")) for _ in range(2)]
        optimizer = optim.OverlappedStep([optim.ShardedAdamW(parameters, lr=0.1, group=axis)], overlap_backward=True)
        with simulated.Stream("sim"):
            one.grad = torch.full_like(one, 3.0)
            optimizer._early._arrived(one)
        two.grad = torch.full_like(two, 2.0)
        optimizer._early._arrived(two)
        optimizer.step()
        return move([p.detach() for p in parameters], "cpu")

    for found in world(size, "sim").run(program).results:
        assert all((weight < 1.0).all() for weight in found)
