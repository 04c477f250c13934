"""Operations in compiled models: one graph with them in it, and numbers, calls and errors as without a compiler."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from every_operation import OPERATIONS, tokens, weights_like
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint
from worlds import virtual_world

import weft
from weft.comm.graph_call import Kept
from weft.world.launch import ProcessWorld

NAMES = ("attention", "linear_attention", "delta_rule", "short_conv", "zigzag_ring_flash_attn")
OFTEN = ("attention gather", "attention ulysses", "linear_attention vector", "delta_rule scalar", "short_conv zigzag")
TRACEABLE = [
    pytest.param(name, marks=[] if name in OFTEN else [pytest.mark.slow])
    for name in OPERATIONS
    if name.split()[0] in NAMES
]
DIM, HEADS = 16, 2


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing was compiled before. Ranks that are threads mix up what torch notes of modes: off afterwards."""
    torch._dynamo.reset()
    yield
    kinds = "torch_dispatch_mode", "non_infra_torch_dispatch_mode", "any_mode_without_ignore_compile_internals"
    for kind in kinds:
        setattr(torch.utils._python_dispatch, f"_is_in_{kind}", False)


def step(run: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    """The result, and the gradients of the leaves."""
    own = [x.detach().clone().requires_grad_() for x in leaves]
    out = run(*own)
    return [out.detach(), *torch.autograd.grad((weights_like(out) * out.square()).sum(), own)]


def whole(model: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    """Compiled without a graph break, or it fails."""
    return torch.compile(model, backend=backend, fullgraph=True, **options)


def relative(got: list[Tensor], wanted: list[Tensor]) -> float:
    pairs = zip(got, wanted, strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs)


@pytest.mark.parametrize("name", TRACEABLE)
def test_every_operation_is_part_of_one_graph(name: str) -> None:
    axis, run = weft.Axis.of(None), OPERATIONS[name]

    def model(x: Tensor) -> Tensor:
        return torch.cos(run(axis, torch.sin(x)))

    x = tokens(0, torch.float64)
    assert relative(step(whole(model), x), step(model, x)) < 1e-12


class Block(nn.Module):
    """Softmax attention, then linear attention, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.first(x).chunk(3, -1))
        x = x + self.out(weft.attention(q, k, v, causal=True, **how).flatten(2))
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in self.second(x).chunk(3, -1))
        x = x + weft.linear_attention(q, k.tanh(), v, -v[..., 0].sigmoid(), **how)[0].flatten(2)
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **how) if self.checkpointed else block(x, **how)
        return x


def gradients(model: nn.Module, run: Callable[..., Tensor], x: Tensor, **how: Any) -> list[Tensor]:
    """The output, and the gradients of all parameters."""
    model.zero_grad()
    out = run(x, **how)
    out.float().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def random(length: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, length, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_another_sequence_in_every_step_needs_no_other_graph() -> None:
    model, graphs = Model(), CompileCounterWithBackend("aot_eager")
    compiled = whole(model, graphs)
    for number in range(1, 5):
        sequence = weft.sequence(12, cu_seqlens=[*range(number), 12], layout="zigzag")
        got, wanted = (gradients(model, run, random(12, number), sequence=sequence) for run in (compiled, model))
        assert relative(got, wanted) < 1e-5
    assert graphs.frame_count == 1


def test_lengths_may_change() -> None:
    model, graphs = Model(), CompileCounterWithBackend("aot_eager")
    compiled, counts = whole(model, graphs, dynamic=True), []
    for length in (7, 12, 30):
        got, wanted = (gradients(model, run, random(length, 1)) for run in (compiled, model))
        assert relative(got, wanted) < 1e-5
        counts.append(graphs.frame_count)
    assert counts == counts[:1] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_the_dtype_of_the_inputs_decides(dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    got, wanted = (gradients(model, run, random(9, 0, dtype)) for run in (whole(model), model))
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, wanted, strict=True))


def test_under_autocast() -> None:
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = (gradients(model, run, random(9, 0)) for run in (whole(model), model))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, pytest.param(torch.inference_mode, marks=pytest.mark.slow)])
def test_without_gradients_and_with_some(mode: Callable[[], Any]) -> None:
    model = Model()
    compiled = whole(model)
    with mode():
        assert torch.equal(compiled(random(9, 0)), model(random(9, 0)))
    model.blocks[0].first.requires_grad_(False)
    got, wanted = (gradients(model, run, random(9, 0)) for run in (compiled, model))
    assert relative(got, wanted) < 1e-5


@pytest.mark.parametrize("where", ["inside", "around"])
def test_activation_checkpointing(where: str) -> None:
    """Inside a compiled model the operations are not called again for it."""
    model, axis = Model(checkpointed=where == "inside"), weft.Axis.of(None)
    compiled = whole(model)
    run = compiled if where == "inside" else lambda x, group: checkpoint(compiled, x, group=group, use_reentrant=False)
    got = gradients(model, run, random(9, 0), group=axis)
    assert axis.counter.calls == (4 if where == "inside" else 6)
    assert relative(got, gradients(model, model, random(9, 0))) < 1e-5


def test_two_forwards_before_their_backwards() -> None:
    model = Model()

    def both(run: Callable[..., Tensor]) -> list[Tensor]:
        model.zero_grad()
        losses = [run(random(9, seed)).square().mean() * (1 + seed) for seed in range(3)]
        for loss in losses[:2]:  # the third one's is never asked for
            loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    assert relative(both(whole(model)), both(model)) < 1e-5


def test_nothing_is_held_after_the_backward_or_the_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made: weakref.WeakSet[Kept] = weakref.WeakSet()
    trim = Kept.trim

    def watched(kept: Kept, *rest: Any) -> None:
        made.add(kept)
        trim(kept, *rest)

    def held() -> int:
        """How many forwards hold something for their backward."""
        gc.collect(1)
        return sum(kept._ctx is not None for kept in made)

    monkeypatch.setattr(Kept, "trim", watched)
    model = Model()
    compiled = whole(model)
    loss = compiled(random(9, 0)).square().mean()
    assert held() == 2
    loss.backward()
    assert held() == 0
    loss = compiled(random(9, 0)).square().mean()
    assert held() == 2
    del loss
    assert held() == 0
    with torch.no_grad():
        out = compiled(random(9, 0))
    assert held() == 0 and out.shape == (1, 9, DIM)


def test_heads_may_lie_before_tokens_in_memory() -> None:
    """As transformers has them. The compiler expects outputs and gradients to lie so."""

    def model(x: Tensor) -> Tensor:
        q = (x.transpose(1, 2).contiguous() * 2).transpose(1, 2)
        return weft.attention(q, q, q, causal=True).flatten(2) * weft.linear_attention(q, q, q)[0].flatten(2)

    x = tokens(0, torch.float64)
    assert relative(step(whole(model), x), step(model, x)) < 1e-12


def test_a_call_whose_result_nobody_uses_is_made() -> None:
    """As without a compiler: the other ranks make it, too."""
    axis = weft.Axis.of(None)

    def model(x: Tensor) -> Tensor:
        weft.attention(x, x, x, causal=True, group=axis)
        return x * 2

    whole(model)(tokens(0))
    assert axis.counter.calls == 1


@pytest.mark.parametrize("operation", ["attention", "linear_attention"])
def test_the_compiler_may_write_over_inputs_and_outputs(operation: str) -> None:
    """And hand copies to the backward, as one that computes them anew does."""
    how = {"causal": True} if operation == "attention" else {}
    leaves = [tokens(seed, torch.float64) for seed in range(3)]
    out = getattr(weft, operation)(*leaves, **how)
    out = out if operation == "attention" else out[0]
    weight = weights_like(out)
    wanted = torch.autograd.grad(out, leaves, weight)
    with torch.no_grad():
        given, words = [x.detach().clone() for x in leaves], "tensors[0], tensors[1], tensors[2]"
        words += ", causal=True" if operation == "attention" else ""
        shape = [*out.shape], [4], [out.dtype]
        outs, kept = torch.ops.weft.call(operation, words, given, [], [], [], [True] * 3, *shape)
        copies = [x.clone() for x in (*given, *outs)]
        for x in (*given, *outs):
            x.fill_(torch.nan)
        got = torch.ops.weft.call_backward(kept, [weight], copies[: 4 if operation == "attention" else 3], [True] * 3)
    assert relative(list(got), list(wanted)) < 1e-12


def test_saved_tensors_may_be_moved() -> None:
    """What a forward leaves is no tensor, so hooks that copy those do not lose it."""
    model = Model()
    with torch.autograd.graph.save_on_cpu():
        got = gradients(model, whole(model), random(9, 0))
    assert relative(got, gradients(model, model, random(9, 0))) < 1e-5


def test_second_derivatives_are_refused() -> None:
    """By weft where nothing but the tracing is done, by torch where the backward is compiled, too."""
    x = tokens(0)
    for backend, words in (
        ("eager", "attention: second derivatives are not supported"),
        ("aot_eager", "double backward"),
    ):
        model = whole(lambda x: weft.attention(x, x, x, causal=True).square().sum(), backend)
        (first,) = torch.autograd.grad(model(x), x, create_graph=True)
        assert words in words_of(lambda first=first: first.square().sum().backward())  # type: ignore[misc]


def test_lse_and_final_states() -> None:
    sequence = weft.sequence(6, cu_seqlens=[0, 2, 2, 6])

    def model(x: Tensor) -> Tensor:
        out, lse = weft.attention(x, x, x, causal=True, return_lse=True, sequence=sequence)
        o, state = weft.linear_attention(x, x, x, output_final_state=True, cu_seqlens=torch.tensor([0, 4, 6]))
        y, last = weft.short_conv(x.flatten(2), x.new_ones(32, 3), output_final_state=True, sequence=sequence)
        assert state is not None and last is not None and state.shape[0] == 2 and last.shape[0] == 3
        return torch.cat(
            [out.flatten(), lse.detach().flatten(), o.flatten(), state.flatten(), y.flatten(), last.flatten()]
        )

    x = tokens(0, torch.float64)
    assert relative(step(whole(model), x), step(model, x)) < 1e-12


def words_of(run: Callable[[], object]) -> str:
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


WRONG: dict[str, Callable[[Tensor], object]] = {
    "causal": lambda x: weft.attention(x, x, x),
    "heads": lambda x: weft.attention(x, x[:, :, :3], x[:, :, :3], causal=True),
    "dims": lambda x: weft.attention(x[0], x[0], x[0], causal=True),
    "window": lambda x: weft.attention(x, x, x, causal=True, window=(1, 2, 3)),
    "method": lambda x: weft.linear_attention(x, x, x, method="fastest"),
    "gate": lambda x: weft.linear_attention(x, x, x, x.abs()[..., 0] + 1),
    "state": lambda x: weft.delta_rule(x, x, x, x[..., 0], initial_state=x, output_final_state=True),
    "sequence": lambda x: weft.short_conv(x.flatten(2), x[0, 0, 0], sequence=weft.sequence(3)),
    "keyword": lambda x: weft.attention(x, x, x, casual=True),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_the_same_words(name: str) -> None:
    run, x = WRONG[name], tokens(0)
    wanted = words_of(lambda: run(x))
    got = words_of(lambda: torch.compile(run, backend="aot_eager", fullgraph=name != "sequence")(x))
    assert got == wanted != "nothing"


def test_arguments_that_cannot_be_written_break_the_graph() -> None:
    """They are read as without a compiler, and so said in the same words."""
    x = tokens(0)
    for given in (object(), {1: 2}):
        wanted = words_of(lambda g=given: weft.attention(x, x, x, causal=g))  # type: ignore[misc]
        model = torch.compile(lambda x, g=given: weft.attention(x, x, x, causal=g), backend="aot_eager")
        assert words_of(lambda m=model: m(x)).split(" object at")[0] == wanted.split(" object at")[0] != "nothing"  # type: ignore[misc]


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    "method", ["gather", pytest.param("ring", marks=pytest.mark.slow), pytest.param("ulysses", marks=pytest.mark.slow)]
)
def test_on_virtual_ranks(method: str) -> None:
    """Ranks of other lengths; one process traces for all of them."""

    def model(x: Tensor, axis: weft.Axis) -> Tensor:
        out = weft.attention(x, x, torch.sin(x), causal=True, method=method, group=axis)
        return torch.cos(weft.linear_attention(out, x, out, group=axis)[0])

    compiled = whole(model)

    def program(axis: weft.Axis) -> float:
        x = tokens(axis.rank, torch.float64)[:, : 6 - axis.rank]
        return relative(step(lambda x: compiled(x, axis), x), step(lambda x: model(x, axis), x))

    assert max(virtual_world(4).run(program).results) < 1e-12


@pytest.mark.usefixtures("network")
def test_two_levels_over_a_balanced_sequence() -> None:
    sizes, bounds = (1, 23, HEADS, DIM), [0, 9, 10, 23]
    whole_x = torch.randn(*sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def model(x: Tensor, group: Any, sequence: weft.Sequence) -> Tensor:
        out = weft.attention(
            x, x, torch.sin(x), causal=True, method=("ulysses", "gather"), group=group, sequence=sequence
        )
        return torch.cos(weft.linear_attention(out, x, out, sequence=sequence)[0])

    compiled = whole(model)

    def program(axis: weft.Axis) -> float:
        inner = axis.rank // 2 * 2
        how = (
            (axis, axis.subset([inner, inner + 1])),
            weft.sequence(total=23, layout="balanced", cu_seqlens=bounds, group=axis),
        )
        x = weft.shard(whole_x, 1, sequence=how[1])
        return relative(step(lambda x: compiled(x, *how), x), step(lambda x: model(x, *how), x))

    assert max(virtual_world(4).run(program).results) < 1e-12


def test_a_second_rank_that_waits_is_compiled_too() -> None:
    """The delta rule on two ranks: heads in groups, in one call of the graph."""

    def model(x: Tensor, axis: weft.Axis) -> Tensor:
        return weft.delta_rule(x, x, x, x[..., 0].sigmoid(), group=axis)[0]

    compiled = whole(model)

    def program(axis: weft.Axis) -> float:
        x = tokens(axis.rank, torch.float64)
        return relative(step(lambda x: compiled(x, axis), x), step(lambda x: model(x, axis), x))

    assert max(virtual_world(2).run(program).results) < 1e-12


def test_mamba2_by_its_mapping_is_part_of_one_graph() -> None:
    """As the docs say: the call itself is a graph break, linear attention of the same mapping is none."""
    rates = -torch.linspace(0.1, 0.5, 4, dtype=torch.float64)

    def by_mapping(x: Tensor) -> Tensor:
        steps = nn.functional.softplus(x[..., 0])
        return weft.linear_attention(x[:, :, ::2], x[:, :, 1::2], x * steps[..., None], rates * steps, scale=1.0)[0]

    def by_name(x: Tensor) -> Tensor:
        return weft.mamba2(x, x[..., 0], rates, x[:, :, 1::2], x[:, :, ::2], dt_softplus=True)[0]

    x = tokens(0, torch.float64)
    assert relative(step(whole(by_mapping), x), step(by_name, x)) < 1e-12
    with pytest.raises(torch._dynamo.exc.Unsupported):
        whole(by_name)(x)


def test_masks_sinks_and_a_gradient_of_lse_are_part_of_the_graph() -> None:
    def model(q: Tensor, sinks: Tensor, mask: weft.Mask) -> Tensor:
        out, lse = weft.attention(q, q, q, mask=mask, sinks=sinks, return_lse=True)
        return out + lse.square().unsqueeze(-1)

    counter = CompileCounterWithBackend("aot_eager")
    compiled, q = whole(model, counter), random(12, 0).unflatten(-1, (HEADS, -1))
    for mask in (weft.Mask.tree([-1, 0, 0], [4, 4, 4]), weft.Mask.chunks(5, 12)):
        inputs = q, torch.tensor([0.5, -1.0])
        got = step(lambda q, sinks, mask=mask: compiled(q, sinks, mask), *inputs)
        assert relative(got, step(lambda q, sinks, mask=mask: model(q, sinks, mask), *inputs)) < 1e-5
    assert counter.frame_count == 1  # another mask needs no other graph


def train(axis: weft.Axis, backend: str, kind: str) -> list[tuple[float, float]]:
    """Losses of a few steps, compiled and not. The gradients are those of all ranks."""
    group = dist.new_group(range(2))
    if axis.rank >= 2:
        return []
    found = []
    for compile_it in (True, False):
        torch._dynamo.reset()
        model = Model()
        run = whole(model, backend) if compile_it else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for number in range(4):
            length = 9 + axis.rank if number % 2 else 10
            how = {"sequence": weft.sequence(length, group=group)} if kind == "sequence" else {"group": group}
            loss = (run(random(length, 10 * (number % 2) + axis.rank), **how) - 1).square().mean()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append(losses)
    return list(zip(*found, strict=True))


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("aot_eager", "sequence"),
        pytest.param("aot_eager", "group", marks=pytest.mark.slow),
        pytest.param("inductor", "sequence", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_trains_on_gloo(pool: ProcessWorld, backend: str, kind: str) -> None:
    for losses in pool.run(train, backend, kind)[:2]:
        assert len(losses) == 4 and losses[3][0] < losses[1][0]
        assert all(abs(a - b) < 1e-5 for a, b in losses)


def refused(axis: weft.Axis) -> str:
    group = dist.new_group(range(2))
    if axis.rank >= 2:
        return ""
    torch._dynamo.reset()
    scale = 0.5 if axis.rank == 0 else float("nan")
    mesh = DeviceMesh.from_group(group, "cpu")
    model = whole(lambda x: weft.attention(x, x, x, causal=True, scale=scale, group=mesh))
    return words_of(lambda: model(tokens(0)))


def test_a_fault_of_one_rank_is_raised_on_all(pool: ProcessWorld) -> None:
    assert set(pool.run(refused)[:2]) == {"ValueError: attention: scale must be a finite number, got nan (rank 1)"}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_with_generated_kernels(checkpointed: bool) -> None:
    """Memory of inputs and outputs is used again between forward and backward, and inputs are computed anew."""
    model = Model(checkpointed, blocks=2)
    compiled = whole(model, "inductor")
    for seed in range(3):
        got, wanted = (gradients(model, run, random(64, seed)) for run in (compiled, model))
        assert relative(got, wanted) < 1e-4
