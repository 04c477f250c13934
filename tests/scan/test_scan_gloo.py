"""The same operations on real Gloo processes: a pool of seven, of which each test takes a subgroup."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from serial import KINDS, as_arguments, random_maps, relative_error, serial_scan
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.world.launch import ProcessWorld
from weft.errors import CommError, DisagreementError
from weft.scan import METHODS

SHAPE = (2, 3, 4)


def scan_on(group: object, kind: str, method: str, reverse: bool, seed: int) -> float:
    """The largest error of this rank's result and gradients against serial autograd."""
    axis = weft.Axis.of(group)
    states, decays = random_maps(kind, axis.size, SHAPE, "slow", seed)
    make = torch.Generator().manual_seed(seed)
    weights = [torch.randn(SHAPE, generator=make, dtype=torch.float64) for _ in states]
    wanted = serial_scan(kind, states, decays, reverse)
    leaves = [states[axis.rank]] + ([decays[axis.rank]] if kind != "none" else [])
    loss = sum((w * out).sum() for w, out in zip(weights, wanted, strict=True))
    true = torch.autograd.grad(loss, leaves, allow_unused=True)
    out = weft.exclusive_scan(
        leaves[0], **as_arguments(kind, decays[axis.rank]), group=group, method=method, reverse=reverse
    )
    got = torch.autograd.grad((weights[axis.rank] * out).sum(), leaves)
    errors = [relative_error(out.detach(), wanted[axis.rank].detach())]
    for grad, reference in zip(got, true, strict=True):
        errors.append(relative_error(grad, torch.zeros_like(grad) if reference is None else reference))
    return max(errors)


def all_methods(axis: weft.Axis, size: int) -> float:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return 0.0
    return max(
        scan_on(group, kind, method, reverse, seed=size)
        for kind in KINDS
        for method in METHODS
        for reverse in (False, True)
    )


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_method_and_its_gradients(pool: ProcessWorld, size: int) -> None:
    assert max(pool.run(all_methods, size)) <= 1e-12


def on_a_device_mesh(axis: weft.Axis) -> tuple[float, str]:
    worst, words = 0.0, ""
    for shape, names in (((2, 3), ("data", "sequence")), ((3, 2), ("sequence", "data"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for method in METHODS:
            worst = max(worst, scan_on(mesh["sequence"], "vector", method, True, seed=6))
            worst = max(worst, scan_on(mesh["data"], "dense", method, False, seed=7))
        try:
            weft.exclusive_scan(torch.ones(2, 2), group=mesh)
        except ValueError as error:
            words = str(error)
    return worst, words


def test_device_meshes_in_both_orders() -> None:
    with ProcessWorld(6, timeout=timedelta(seconds=60)) as world:
        results = world.run(on_a_device_mesh)
    assert max(worst for worst, _ in results) <= 1e-12
    assert all("the mesh has 2 dimensions" in words for _, words in results)


def repeat(axis: weft.Axis) -> bool:
    group = dist.new_group(range(4))
    if axis.rank >= 4:
        return True
    states, decays = random_maps("vector", 4, (4, 16, 16), "slow", seed=2, dtype=torch.float32)
    mine = (states[axis.rank].detach(), decays[axis.rank].detach())
    same = True
    for method in METHODS:
        outs = [weft.exclusive_scan(mine[0], log_decay=mine[1], group=group, method=method) for _ in range(5)]
        same = same and all(torch.equal(outs[0], out) for out in outs)
    return same


def test_same_inputs_same_bits(pool: ProcessWorld) -> None:
    assert all(pool.run(repeat))


def disagree_at_once(axis: weft.Axis, how: str) -> str:
    group = dist.new_group(range(4))
    if axis.rank >= 4:
        return ""
    odd = axis.rank == 2
    state = torch.ones(
        2, 3 + (odd and how == "shape"), dtype=torch.float64 if odd and how == "dtype" else torch.float32
    )
    method = "tree" if odd and how == "method" else "ring"
    try:
        weft.exclusive_scan(state, group=group, method=method)
    except ValueError as error:
        # The group is still good: nothing was sent.
        out = weft.exclusive_scan(torch.ones(1, 1), group=group, method="ring")
        assert out.item() == axis.rank
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["shape", "dtype", "method"])
def test_a_disagreement_at_the_first_call_is_the_same_error_everywhere(pool: ProcessWorld, how: str) -> None:
    errors = pool.run(disagree_at_once, how)[:4]
    assert len(set(errors)) == 1
    assert "ranks 0, 1, 3 called exclusive_scan" in errors[0] and "rank 2 called exclusive_scan" in errors[0]
    assert {"shape": "[2, 4]", "dtype": "float64", "method": "tree"}[how] in errors[0]


def disagree_later(axis: weft.Axis, how: str, method: str, odd_rank: int) -> tuple[str, float, int]:
    group = dist.new_group(range(4), timeout=timedelta(seconds=40))
    if axis.rank >= 4:
        return "", 0.0, 0
    start, done = time.monotonic(), 0
    try:
        for step in range(600):
            if step == 10:
                start = time.monotonic()
            if step > 10:
                time.sleep(0.01)  # a rank that only sends goes on until it is told
            odd = axis.rank == odd_rank and step == 10
            # "swap" has as many bytes: nothing but the tag tells the messages apart.
            shape = (3, 2) if odd and how == "swap" else (2, 2) if odd and how == "smaller" else (2, 3)
            log = torch.ones(3) if odd and how == "fault" else torch.zeros(shape[0])
            if odd and how == "other":
                weft.unshard(torch.ones(3), 0, group=group)  # never called before: it asks the others first
            out = weft.exclusive_scan(torch.ones(shape), log_decay=log, group=group, method=method)
            assert out.eq(axis.rank).all()
            done += 1
    except ValueError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start, done
    return "no error", 0.0, done


@pytest.mark.parametrize(
    ("how", "method", "odd_rank"),
    [
        ("swap", "doubling", 2),
        ("smaller", "ring", 3),
        ("swap", "gather", 0),
        ("fault", "transpose", 1),
        ("other", "tree", 1),
    ],
)
def test_a_later_disagreement_ends_in_an_error_everywhere(
    pool: ProcessWorld, how: str, method: str, odd_rank: int
) -> None:
    results = pool.run(disagree_later, how, method, odd_rank)[:4]
    for rank, (words, seconds, done) in enumerate(results):
        assert seconds < 5, (rank, words)
        assert done == 10 or (done < 600 and rank < odd_rank), (rank, done)  # earlier ranks may be ahead, and right
        wanted = {"fault": "log_decay [3] fits neither", "other": f"rank {odd_rank} called unshard("}
        assert wanted.get(how, f"rank {odd_rank} called exclusive_scan(state=") in words, (rank, words)


def die(axis: weft.Axis, victim: int) -> tuple[str, str, float]:
    group = dist.new_group(range(3), timeout=timedelta(seconds=20))
    weft.exclusive_scan(torch.ones(2, 3), group=group, method="ring")
    start = time.monotonic()
    if axis.rank == victim:
        os._exit(3)
    try:
        for _ in range(50):
            weft.exclusive_scan(torch.ones(2, 3), group=group, method="ring")
    except CommError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "no error", "", 0.0


def survivors(axis: weft.Axis, victim: int, path: str) -> None:
    result = die(axis, victim)
    with open(f"{path}/{axis.rank}", "w") as file:
        file.write(repr(result))
    raise SystemExit(0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_named_by_the_others(tmp_path, victim: int) -> None:
    from weft.errors import RankError

    with ProcessWorld(3, timeout=timedelta(seconds=20)) as world, pytest.raises((RankError, SystemExit)):
        world.run(survivors, victim, str(tmp_path))
    for rank in {0, 1, 2} - {victim}:
        kind, words, seconds = eval((tmp_path / str(rank)).read_text())
        assert kind == "CommError" and "exclusive_scan (call" in words, (rank, words)
        assert seconds < 20


def overlap(axis: weft.Axis) -> tuple[float, float, float]:
    """Seconds of a slow scan, of other work, and of both with the scan on a lane. The slow part is sleeping."""
    group = dist.new_group(range(2))
    if axis.rank >= 2:
        return 0.0, 0.0, 0.0
    line = weft.Axis.of(group)

    def slow_scan(lane: weft.Axis) -> torch.Tensor:
        out = torch.zeros(1, 1)
        for _ in range(10):
            time.sleep(0.02)
            out = out + weft.exclusive_scan(torch.ones(1, 1), group=lane, method="ring")
        return out

    def compute() -> None:
        end = time.perf_counter() + 0.2
        while time.perf_counter() < end:
            torch.randn(64, 64) @ torch.randn(64, 64)

    def timed(work) -> float:
        weft.exclusive_scan(torch.ones(1, 1), group=line)
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def both() -> None:
        pending = line.start(slow_scan)
        compute()
        assert pending.wait().item() == 10 * line.rank

    slow_scan(line)
    return timed(lambda: slow_scan(line)), timed(compute), timed(both)


def test_a_lane_overlaps_with_the_computation(pool: ProcessWorld) -> None:
    for scan, compute, both in pool.run(overlap)[:2]:
        assert both < 0.8 * (scan + compute), (scan, compute, both)


def lane_errors(axis: weft.Axis) -> str:
    group = dist.new_group(range(2))
    if axis.rank >= 2:
        return ""
    line = weft.Axis.of(group)
    pending = line.start(lambda lane: weft.exclusive_scan(torch.ones(2), group=lane))
    try:
        pending.wait()
    except ValueError as error:
        return str(error)
    return "no error"


def test_an_error_on_a_lane_is_raised_by_the_wait(pool: ProcessWorld) -> None:
    assert all("state must be [..., K, V]" in words for words in pool.run(lane_errors)[:2])


def count_bytes(axis: weft.Axis, method: str) -> weft.comm.Ledger:
    group = dist.new_group(range(5))
    with weft.record() as ledger:
        if axis.rank < 5:
            weft.exclusive_scan(torch.ones(2, 4, 4), log_decay=torch.zeros(2), group=group, method=method)
    return ledger


@pytest.mark.parametrize("method", METHODS)
def test_the_ledger_agrees_with_the_virtual_world(pool: ProcessWorld, method: str) -> None:
    real = pool.run(count_bytes, method)[:5]
    virtual = weft.VirtualWorld(5).run(
        lambda axis: weft.exclusive_scan(torch.ones(2, 4, 4), log_decay=torch.zeros(2), group=axis, method=method)
    )
    assert [one.bytes_sent for one in real] == [one.bytes_sent for one in virtual.ledgers]
    assert [one.bytes_received for one in real] == [one.bytes_received for one in virtual.ledgers]
    assert weft.comm.Ledger.merge(real).rounds == virtual.timeline.rounds


def fail_on_two(axis: weft.Axis) -> int:
    if axis.rank == 2:
        raise KeyError("the reason")
    return axis.rank * 10


def test_the_first_failing_rank_is_raised_with_its_traceback(pool: ProcessWorld) -> None:
    with pytest.raises(KeyError, match="the reason") as caught:
        pool.run(fail_on_two)
    assert caught.value.__notes__ == ["raised on rank 2 of 7"]
    assert "in fail_on_two" in str(caught.value.__cause__)


def plain(axis: weft.Axis, offset: int) -> int:
    return axis.rank + offset


def test_launch_gives_results_in_rank_order() -> None:
    assert weft.launch(plain, 3, 100) == [100, 101, 102]
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        weft.launch(plain, 0)


def test_disagreement_is_a_value_error() -> None:
    assert issubclass(DisagreementError, ValueError)


def many(axis: weft.Axis) -> float:
    return max(scan_on(None, "scalar", method, False, seed=1) for method in METHODS)


@pytest.mark.timeout(300)
def test_thirty_two_ranks_do_not_hang() -> None:
    with ProcessWorld(32, timeout=timedelta(seconds=120)) as world:
        assert max(world.run(many)) <= 1e-12
