"""What is set around a call (inference, fake tensors, autocast, defaults) changes neither it nor later ones.

Nor does how its input lies in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from every_operation import OPERATIONS, REFUSED, Operation, tokens, weights_like
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint
from worlds import place, virtual_world

import weft
from weft.comm.function import keep_tensors
from weft.world.launch import ProcessWorld

SIZES = [1, 2]
DTYPES = (torch.float64, torch.bfloat16)
NO_STATE: dict[str, Operation] = {
    "delta_rule": lambda axis, x: weft.delta_rule(x, x / 3, x, x[..., 0].sigmoid(), layout="zigzag", group=axis)[0],
    "short_conv": lambda axis, x: weft.short_conv(x.flatten(2), x.new_ones(32, 3), layout="zigzag", group=axis)[0],
}  # where what comes before a document is zero


def training_step(run: Operation, axis: weft.Axis, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The result and the gradient."""
    x = tokens(axis.rank, dtype)
    out = run(axis, x)
    (weights_like(out) * out.square()).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def validate(run: Operation, axis: weft.Axis, mode: Callable[[], object]) -> Tensor:
    with mode():  # type: ignore[attr-defined]
        return run(axis, tokens(axis.rank).detach() * 1).clone()


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b, strict=True))


def alone(program: Callable[[], object]) -> object:
    """In a thread of its own, where nothing is kept from earlier calls."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(program()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_validation_before_and_after_training(name: str, size: int, mode: Callable[[], object]) -> None:
    run = OPERATIONS[name]

    def program(axis: weft.Axis) -> bool:
        first = validate(run, axis, mode)  # in a fresh thread: what it keeps, the step uses
        step = training_step(run, axis)
        again = validate(run, axis, mode)
        return same(step, training_step(run, axis)) and same((first, first), (again, step[0]))

    assert all(virtual_world(size).run(program).results)


def validate_then_train(axis: weft.Axis) -> list[str]:
    return [
        name for name, run in OPERATIONS.items()
        if not same((validate(run, axis, torch.inference_mode),), training_step(run, axis)[:1])
    ]  # fmt: skip


@pytest.mark.processes
def test_validation_before_training_on_gloo(two: ProcessWorld) -> None:
    assert two.run(validate_then_train) == [[], []]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if not name.startswith("llama3")])
def test_a_call_with_fake_tensors_leaves_nothing_behind(name: str, backward: bool) -> None:
    """Before a real one and after it; llama3 reads its boundaries, which fake tensors do not have."""
    run, axis = OPERATIONS[name], weft.Axis.of(None)

    def fake() -> bool:
        real = tokens(0).detach()
        with FakeTensorMode() as mode:
            x = mode.from_tensor(real).requires_grad_()
            out = run(axis, x)
            if backward:
                out.square().sum().backward()
        return isinstance(out, FakeTensor) and out.shape == run(axis, tokens(0)).shape

    def program() -> bool:
        if not fake():
            return False
        step = training_step(run, axis)
        return fake() and same(step, training_step(run, axis))

    assert alone(program)


def test_meta_tensors_leave_nothing_behind() -> None:
    def program() -> bool:
        axis = weft.Axis.of(None)
        for run in OPERATIONS.values():
            meta = torch.zeros(1, 6, 4, 8, device="meta")
            if run(axis, meta).device.type != "meta" or not training_step(run, axis)[1].isfinite().all():
                return False
        return True

    assert alone(program)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_follows_the_default_dtype(name: str, dtype: torch.dtype) -> None:
    run = OPERATIONS[name]
    for of_inputs in (torch.float32, torch.bfloat16):
        wanted = virtual_world(2).run(lambda axis, d=of_inputs: training_step(run, axis, d)).results
        with default_dtype(dtype):
            got = virtual_world(2).run(lambda axis, d=of_inputs: training_step(run, axis, d)).results
        assert all(same(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_is_outside_autocast(name: str, size: int) -> None:
    """The input's dtype decides, in the forward and in the backward, wherever autocast is on."""
    run = OPERATIONS[name]
    # Decays that are themselves computed under autocast would differ: here they come from outside it.
    dense = name.startswith("exclusive_scan dense")

    def program(axis: weft.Axis) -> bool:
        wanted = step(axis, "neither")
        return all(same(step(axis, where), wanted) for where in ("forward", "backward", "both"))

    def step(axis: weft.Axis, where: str) -> tuple[Tensor, ...]:
        x = tokens(axis.rank)
        if dense:
            state, decay = x.detach()[0, 0].mT.contiguous(), x.detach()[0, 1].mT @ x.detach()[0, 2] / 8
            leaves = [state.requires_grad_(), decay.requires_grad_()]
        else:
            leaves = [x]
        with torch.autocast("cpu", torch.bfloat16, enabled=where in ("forward", "both")):
            if dense:
                out = weft.exclusive_scan(leaves[0], transition=leaves[1], group=axis, reverse="reverse" in name)
            else:
                out = run(axis, x)
        with torch.autocast("cpu", torch.bfloat16, enabled=where in ("backward", "both")):
            (weights_like(out) * out.square()).sum().backward()
        return out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)

    assert all(virtual_world(size).run(program).results)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, id=name) for name, run in OPERATIONS.items() if not name.startswith("llama3")]
    + [pytest.param(run, id=f"{name}, no state") for name, run in NO_STATE.items()],
)
def test_memory_that_was_never_written_is_not_read(run: Operation) -> None:
    """torch fills it with NaN here; nor does a default device move anything (llama3 is given boundaries made there)."""
    wanted = virtual_world(2).run(lambda axis: training_step(run, axis)).results

    def program(axis: weft.Axis) -> tuple[Tensor, Tensor]:
        x = tokens(axis.rank)
        with torch.device("meta"):
            out = run(axis, x)
            loss = (weights_like(out) * out.square()).sum()
            loss.backward()
        assert x.grad is not None
        return out.detach(), x.grad

    torch.use_deterministic_algorithms(True)
    try:
        found = virtual_world(2).run(program).results
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("name", OPERATIONS)
def test_how_the_input_lies_in_memory_changes_nothing(name: str) -> None:
    """Other strides, and tokens that are one row in memory; and the backward can be asked twice."""
    run = OPERATIONS[name]

    def program(axis: weft.Axis) -> bool:
        found = []
        for lay in (Tensor.contiguous, lambda x: x.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)):
            leaf = tokens(axis.rank, torch.float64)
            out = run(axis, lay(leaf))
            weight = lay(weights_like(out)) if out.ndim == 4 else weights_like(out)
            twice = [torch.autograd.grad(out, leaf, weight, retain_graph=True)[0] for _ in range(2)]
            assert torch.equal(*twice)
            found.append((out.detach(), twice[0]))
        for lay in (Tensor.contiguous, lambda x: x):
            row = tokens(axis.rank, torch.float64)[:, :1].detach().requires_grad_()
            out = run(axis, lay(row.expand(1, 6, 4, 8)))
            found.append((out.detach(), torch.autograd.grad(out, row, weights_like(out))[0]))
        pairs = [*zip(*found[:2], strict=True), *zip(*found[2:], strict=True)]
        return all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs)

    assert all(virtual_world(2).run(program).results)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("name", REFUSED)
def test_activation_checkpointing_changes_nothing(name: str) -> None:
    def program(axis: weft.Axis) -> bool:
        wanted = training_step(REFUSED[name], axis)
        again = [training_step(partial(checkpoint, REFUSED[name], use_reentrant=how), axis) for how in (False, True)]
        return all(same(one, wanted) for one in again)

    assert all(virtual_world(2).run(program).results)


@pytest.mark.parametrize("name", ["delta_rule scalar", "delta_rule vector", "short_conv"])
def test_a_compiled_model_gives_the_same(name: str) -> None:
    axis = weft.Axis.of(None)

    def model(axis: weft.Axis, x: Tensor) -> Tensor:
        return torch.cos(OPERATIONS[name](axis, torch.sin(x)))

    compiled = training_step(torch.compile(model, backend="aot_eager", fullgraph=True), axis)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(compiled, training_step(model, axis), strict=True))


@pytest.mark.usefixtures("every_network")
def test_rows_are_summed_outside_autocast() -> None:
    def program(axis: weft.Axis) -> bool:
        found = []
        for enabled in (False, True):
            torch.manual_seed(0)
            table = place(weft.ShardedEmbedding(9, 4))
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                rows = table(place(torch.tensor([1, axis.rank, 1, 8])))
                (rows * weights_like(rows)).sum().backward()
                whole = table.full_weight()
                (whole * weights_like(whole)).sum().backward()
            found.append((rows.detach(), whole.detach(), table.weight.grad.to_dense()))
        return same(*found)

    assert all(virtual_world(2).run(program).results)


def test_what_is_kept_is_ordinary_whatever_mode_it_was_made_in() -> None:
    """Under inference mode it is made outside of it, and with fake tensors it is neither kept nor used."""
    made: list[int] = []

    @keep_tensors(maxsize=4)
    def ones(size: int) -> Tensor:
        made.append(size)
        return torch.ones(size)

    with torch.inference_mode():
        kept = ones(3)
    assert not kept.is_inference() and ones(3) is kept and made == [3]
    with FakeTensorMode():
        assert ones(3) is not kept and isinstance(ones(3), FakeTensor)
    assert ones(3) is kept and len(made) == 3
