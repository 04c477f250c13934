"""Sinks, capped scores, values of another size than keys and gradients of lse, against plain softmax."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from test_attention import bounds_of, lengths_of
from test_attention_reference import Case, distance, slice_of, visible
from torch import Tensor
from worlds import every, virtual_world

import weft
from weft.ops.attention import attention
from weft.ops.attention.blockwise import merge_into
from weft.ops.attention.distributed import METHODS
from weft.ops.sequence.layout import ANY_LENGTHS

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class Kind:
    """What is beside plain softmax: a sink for each head, capped scores, the size of values, a gradient of lse."""

    sinks: bool = False
    size: int = 4
    softcap: float | None = None
    of: str = "out"  # what the loss is of


KINDS = {
    "sinks": Kind(sinks=True), "short values": Kind(size=3), "long values": Kind(size=6, sinks=True),
    "lse": Kind(of="lse"), "out and lse": Kind(of="out, lse"), "all": Kind(True, 6, 1.2, "out, lse"),
    "lse, sinks, short values": Kind(True, 3, of="lse"), "lse, sinks": Kind(True, of="out, lse"),
    "softcap": Kind(softcap=1.5), "softcap, sinks, short values": Kind(softcap=0.8, sinks=True, size=3),
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("every_network")


def softmax(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, case: Case, kind: Kind) -> tuple[Tensor, Tensor]:
    """out and lse; a sink is one more column of scores, whose share of the row is lost."""
    shared = case.heads // case.kv_heads
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scores = 0.7 * torch.einsum("bshd,bthd->bhst", q, k)
    if kind.softcap is not None:
        scores = kind.softcap * (scores / kind.softcap).tanh()
    scores = scores.masked_fill(~visible(case), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    shares = scores.softmax(-1)[..., : case.total]
    return torch.einsum("bhst,bthd->bshd", shares, v), scores.logsumexp(-1).transpose(1, 2)


def loss_of(kind: Kind, out: Tensor, lse: Tensor, given: dict[str, Tensor]) -> Tensor:
    of_out, of_lse = (out * given["grad"]).sum(), (lse * given["grad_lse"].to(lse.dtype)).sum()
    return {"out": of_out, "lse": of_lse, "out, lse": of_out + of_lse}[kind.of]


@functools.lru_cache(maxsize=1024)
def problem(case: Case, kind: Kind) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Inputs with upstream gradients, and what is right, all fp64 and whole."""
    make = torch.Generator().manual_seed(case.total)
    batch = 1 if case.bounds is not None else case.batch

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    given = {
        "q": draw(batch, case.total, case.heads, case.dim),
        "k": draw(batch, case.total, case.kv_heads, case.dim),
        "v": draw(batch, case.total, case.kv_heads, kind.size),
        "sinks": draw(case.heads) if kind.sinks else None,
        "grad_lse": draw(batch, case.total, case.heads),
        "grad": draw(batch, case.total, case.heads, kind.size),
    }
    leaves = {
        name: given[name].clone().requires_grad_() for name in ("q", "k", "v", "sinks") if given[name] is not None
    }
    out, lse = softmax(leaves["q"], leaves["k"], leaves["v"], leaves.get("sinks"), case, kind)
    grads = torch.autograd.grad(loss_of(kind, out, lse, given), list(leaves.values()), materialize_grads=True)
    right = {"out": out.detach(), "lse": lse.detach()}
    return given, right | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def run(
    axis: weft.Axis,
    case: Case,
    kind: Kind,
    lengths: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    wide_sinks: bool = False,
    **options: object,
) -> dict[str, Tensor]:
    """What this rank gets."""
    given, _ = problem(case, kind)
    local = {
        name: x if x is None or name == "sinks" else slice_of(x, lengths, layout, axis.rank)
        for name, x in given.items()
    }  # fmt: skip
    local = {name: None if x is None else x.to(dtype, copy=True) for name, x in local.items()}
    if wide_sinks and local["sinks"] is not None:
        local["sinks"] = given["sinks"].float()
    leaves = {name: local[name].requires_grad_() for name in ("q", "k", "v", "sinks") if local[name] is not None}
    out, lse = attention(
        **leaves, **case.options, layout=layout, softcap=kind.softcap, return_lse=True, group=axis, **options
    )
    grads = torch.autograd.grad(loss_of(kind, out, lse, local), list(leaves.values()))
    assert all(grad.dtype == leaf.dtype for grad, leaf in zip(grads, leaves.values(), strict=True))
    return {"out": out.detach(), "lse": lse.detach()} | {
        f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def faults(
    case: Case,
    kind: Kind,
    lengths: tuple[int, ...],
    layout: str,
    results: list[dict[str, Tensor]],
    limit: float = 1e-10,
) -> list[str]:
    """What is wrong on any rank, in words. The parts of the sinks' gradient add up to the whole."""
    _, right = problem(case, kind)
    found = {
        f"{name} of rank {rank}": distance(got[name], slice_of(right[name], lengths, layout, rank))
        for rank, got in enumerate(results)
        for name in got
        if name != "dsinks"
    }
    if kind.sinks:
        found["dsinks"] = distance(torch.stack([got["dsinks"].double() for got in results]).sum(0), right["dsinks"])
    return [f"{case} {kind} {lengths} {layout} {name}: {far}" for name, far in found.items() if not far <= limit]


def cases(size: int, split: str, method: str) -> Iterator[Case]:
    total = sum(lengths_of(split, size))
    heads = [(4, 2), (2, 1)] if method != "ulysses" else [(2 * size, size)]
    for (queries, keys), causal, windowed, packed in itertools.product(heads, (False, True), (False, True), (0, 1)):
        window = ((3, -1) if causal else (2, 3)) if windowed else None
        yield Case(total, queries, keys, 2 if size < 4 else 1, causal, window, bounds_of(total) if packed else None)


def check(kind: Kind, size: int, method: str, splits: list[tuple[str, str]]) -> None:
    for split, layout in splits:
        lengths, chosen = lengths_of(split, size), list(every(cases(size, split, method)))

        def program(axis: weft.Axis) -> list[dict[str, Tensor]]:
            return [run(axis, case, kind, lengths, layout, torch.float64, method=method) for case in chosen]  # noqa: B023

        by_rank = virtual_world(size).run(program).results
        for number, case in enumerate(chosen):
            found = faults(case, kind, lengths, layout, [results[number] for results in by_rank])
            assert not found, "\n".join(found[:5])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_on_three_ranks(kind: str, method: str) -> None:
    split = [("uneven", "zigzag"), ("missing", "contiguous")][list(KINDS).index(kind) % 2]
    check(KINDS[kind], 3, method, [split])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_combination(kind: str, size: int, method: str) -> None:
    check(KINDS[kind], size, method, list(itertools.product(("even", "uneven", "missing"), ANY_LENGTHS)))


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("method", ["gather", "ring"])
def test_values_travel_without_padding(method: str, size: int) -> None:
    def program(axis: weft.Axis) -> tuple[int, int]:
        q, k = (torch.randn(1, 5, 2, 4, requires_grad=True) for _ in range(2))
        v = torch.randn(1, 5, 2, size, requires_grad=True)
        with weft.record() as forward:
            out = attention(q, k, v, causal=False, method=method, group=axis)
        with weft.record() as backward:
            out.sum().backward()
        return forward.bytes_received - 24, backward.bytes_received

    token = 2 * (4 + size) * 4  # bytes of k and v, and of their gradients
    assert virtual_world(2).run(program).results == [(5 * token, 10 * token)] * 2


def test_one_rank_alone_may_have_a_loss_of_lse() -> None:
    """The others' kernels then take no column, but with ulysses, where everybody has everybody's queries."""
    case, lengths = Case(11, 3, 3, 1, causal=True), (4, 3, 4)
    given, _ = problem(case, Kind())
    whole = [given[name].clone().requires_grad_() for name in "qkv"]
    out, lse = softmax(*whole, None, case, Kind())
    second = slice(4, 7)
    wanted = torch.autograd.grad(out[:, :4].sum() + lse[:, second].sum() + 0 * out.sum(), whole)
    for method in METHODS:

        def program(axis: weft.Axis) -> float:
            leaves = [
                slice_of(given[name], lengths, "contiguous", axis.rank).clone().requires_grad_() for name in "qkv"
            ]
            out, lse = attention(*leaves, **case.options, method=method, return_lse=True, group=axis)  # noqa: B023
            loss = (out.sum(), lse.sum(), 0 * out.sum())[axis.rank]
            grads = torch.autograd.grad(loss, leaves)
            right = (slice_of(x, lengths, "contiguous", axis.rank) for x in wanted)
            return max(distance(got, true) for got, true in zip(grads, right, strict=True))

        assert max(virtual_world(3).run(program).results) < 1e-10


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_second_derivatives_are_refused_through_sinks_and_lse(method: str) -> None:
    def program(axis: weft.Axis) -> list[str]:
        words = []
        for of in (0, 1):
            q, sinks = torch.randn(1, 3, 2, 4), torch.randn(2, requires_grad=True)
            found = attention(q, q, q, causal=True, sinks=sinks, method=method, return_lse=True, group=axis)
            (first,) = torch.autograd.grad(found[of].sum(), sinks, create_graph=True)
            with pytest.raises(NotImplementedError) as caught:
                first.square().sum().backward()
            words.append(str(caught.value))
        return words

    for words in virtual_world(2).run(program).results:
        assert all("attention: second derivatives are not supported" in word for word in words)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Kind(True, of="out, lse"), Kind(True, 3, 1.2, "out, lse"), Kind(size=6)])
def test_half_precision(kind: Kind, dtype: torch.dtype, method: str) -> None:
    """Sinks in fp32, as parameters are under autocast; so is their gradient."""
    case, lengths = Case(24, 6, 3, 1, causal=True, window=(9, -1)), (7, 8, 9)

    def program(axis: weft.Axis) -> dict[str, Tensor]:
        return run(axis, case, kind, lengths, "zigzag", dtype, wide_sinks=True, method=method)

    found = faults(case, kind, lengths, "zigzag", virtual_world(3).run(program).results, 3e-2)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_autocast_changes_nothing(method: str, every_network: str) -> None:
    case, lengths, kind = Case(12, 4, 2, 1, causal=True), (5, 7), Kind(True, 3, 1.2, "out, lse")

    def program(axis: weft.Axis) -> bool:
        both = []
        for enabled in (False, True):
            with torch.autocast("sim" if every_network == "sim" else "cpu", torch.bfloat16, enabled=enabled):
                both.append(run(axis, case, kind, lengths, "zigzag", torch.float32, method=method))
        return all(torch.equal(both[0][name], both[1][name]) for name in NAMES)

    assert all(virtual_world(2).run(program).results)


def test_a_row_that_sees_nothing_has_its_sink() -> None:
    """lse is the sink and out is zero; the kernels are asked for no such row today, but the merge of its results is."""
    out, lse = torch.zeros(1, 2, 2, 3), torch.full((1, 2, 2), -torch.inf)
    sinks = torch.tensor([0.5, -2.0])
    merge_into(out, lse, out.new_zeros(1), sinks.expand_as(lse))
    assert torch.equal(lse, sinks.expand(1, 2, 2)) and not out.any()


@pytest.mark.parametrize("method", METHODS)
def test_sinks_without_a_gradient(method: str) -> None:
    case, lengths, kind = Case(12, 4, 2, 1, causal=True), (5, 7), Kind(True)
    given, right = problem(case, kind)

    def program(axis: weft.Axis) -> float:
        q, k, v, grad = (slice_of(given[name], lengths, "zigzag", axis.rank) for name in ("q", "k", "v", "grad"))
        q = q.clone().requires_grad_()
        options = {"causal": True, "scale": 0.7, "layout": "zigzag", "method": method, "group": axis}
        (dq,) = torch.autograd.grad(attention(q, k, v, sinks=given["sinks"], **options), q, grad)
        return distance(dq, slice_of(right["dq"], lengths, "zigzag", axis.rank))

    assert max(virtual_world(2).run(program).results) < 1e-10
