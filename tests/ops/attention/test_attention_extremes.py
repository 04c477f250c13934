"""Attention at its edges, against dense softmax: rows that see nothing, no tokens, odd memory, extreme numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import virtual_world

import weft
from weft.ops.attention.distributed import METHODS

NAMES = ("q", "k", "v", "sinks")
SCALE = 0.7


def softmax(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, seen: Tensor, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of the whole; 0 and -inf, without a gradient, where a row has no score at all."""
    shared = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scores = SCALE * torch.einsum("bshd,bthd->bhst", q, k)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    shares = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)[..., : len(seen)]
    lse = scores.masked_fill(empty, 0.0).logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)
    return torch.einsum("bhst,bthd->bshd", shares, v), lse.transpose(1, 2)


@dataclass
class Problem:
    """Whole inputs in fp64 with gradients of out and lse, and who sees whom."""

    tensors: dict[str, Tensor]
    grad: Tensor
    grad_lse: Tensor
    seen: Tensor
    softcap: float | None = None


def draw(seen: Tensor, sinks: bool = False, softcap: float | None = None, heads: int = 4, size: int = 3) -> Problem:
    """``size``: of values; keys have 4 numbers."""
    make = torch.Generator().manual_seed(len(seen))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64)

    total = len(seen)
    tensors = {"q": random(1, total, heads, 4), "k": random(1, total, 2, 4), "v": random(1, total, 2, size)}
    if sinks:
        tensors["sinks"] = random(heads)
    return Problem(tensors, random(1, total, heads, size), random(1, total, heads), seen, softcap)


def gradients(out: Tensor, lse: Tensor, problem: Problem, leaves: dict[str, Tensor], of_lse: bool) -> dict[str, Tensor]:
    loss = (out * problem.grad).sum()
    if of_lse:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * problem.grad_lse).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(leaves, found, strict=True))}


def worst(problem: Problem, lengths: tuple[int, ...], of_lse: bool = False, **options: Any) -> float:
    """The largest difference of any rank from the whole; infinite where something is not a number."""
    leaves = {name: x.clone().requires_grad_() for name, x in problem.tensors.items()}
    whole = softmax(*(leaves.get(name) for name in NAMES), problem.seen, problem.softcap)
    wanted = gradients(*whole, problem, leaves, of_lse)

    def program(axis: weft.Axis) -> dict[str, Tensor]:
        def mine(x: Tensor) -> Tensor:
            return x.split(lengths, 1)[axis.rank].clone()

        local = {name: x.clone() if name == "sinks" else mine(x) for name, x in problem.tensors.items()}
        part = Problem(local, mine(problem.grad), mine(problem.grad_lse), problem.seen)
        leaves = {name: x.requires_grad_() for name, x in local.items()}
        out, lse = weft.attention(
            **leaves, scale=SCALE, softcap=problem.softcap, return_lse=True, group=axis, **options
        )
        return gradients(out, lse, part, leaves, of_lse)

    ranks = virtual_world(len(lengths)).run(program).results
    found = {name: torch.cat([rank[name] for rank in ranks], 1) for name in wanted if name != "sinks"}
    if "sinks" in wanted:
        found["sinks"] = torch.stack([rank["sinks"] for rank in ranks]).sum(0)
    return max(difference(found[name], wanted[name]) for name in wanted)


def difference(got: Tensor, wanted: Tensor) -> float:
    if got.shape != wanted.shape or bool(got.isnan().any()) or not torch.equal(got.isinf(), wanted.isinf()):
        return float("inf")
    finite = wanted.isfinite()
    return (got[finite] - wanted[finite]).abs().max().item() if finite.any() else 0.0


def causal(total: int) -> Tensor:
    return torch.ones(total, total, dtype=torch.bool).tril()


SHOWN = weft.Mask([(2, 4, 0, 3), (6, 11, 5, 9, None, 0)], 11)  # queries 0, 1, 4 and 5 see nothing


def shown() -> Tensor:
    seen = torch.zeros(11, 11, dtype=torch.bool)
    seen[2:4, :3] = True
    seen[6:, 5:9] = causal(11)[6:, 5:9]
    return seen


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("softcap", [None, 1.3])
@pytest.mark.parametrize("sinks", ["none", "finite", "some -inf"])
def test_rows_that_see_nothing(sinks: str, softcap: float | None, method: str) -> None:
    """out 0, lse -inf (or the sink), and gradients 0: not NaN, also where a loss is of lse."""
    problem = draw(shown(), sinks != "none", softcap)
    if sinks == "some -inf":
        problem.tensors["sinks"][:2] = -torch.inf
    for of_lse in (False, True):
        assert worst(problem, (4, 0, 7), of_lse, mask=SHOWN, method=method) < 1e-10
    nothing = draw(torch.zeros(11, 11, dtype=torch.bool), sinks != "none", softcap)
    assert worst(nothing, (4, 3, 4), True, mask=weft.Mask([], 11), method=method) < 1e-10


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 1, 0), (1, 0, 1), (0, 0, 2)])
def test_fewer_tokens_than_ranks(lengths: tuple[int, ...], method: str) -> None:
    for softcap in (None, 2.0):
        problem = draw(causal(sum(lengths)), True, softcap)
        assert worst(problem, lengths, True, causal=True, method=method) < 1e-10


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bounds", [[0, 0, 3, 3, 3, 4, 11, 11], [0, 1, 11], list(range(12))])
def test_documents_without_tokens_and_of_one(bounds: list[int], method: str) -> None:
    document = torch.searchsorted(torch.tensor(bounds), torch.arange(11), right=True)
    problem = draw(causal(11) & (document == document[:, None]), True)
    options = {"causal": True, "cu_seqlens": torch.tensor(bounds), "method": method}
    assert worst(problem, (4, 3, 4), True, **options) < 1e-10


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("window", [(2**63 - 1, 2**63 - 1), (2**62, 0), (1, 2**60), (0, 0)])
def test_windows_wider_than_any_sequence(window: tuple[int, int], method: str) -> None:
    ahead = torch.arange(11) - torch.arange(11)[:, None]
    problem = draw((ahead >= -window[0]) & (ahead <= window[1]))
    for kind in ({"causal": False}, {"mask": weft.Mask.full(11)}):
        assert worst(problem, (4, 3, 4), True, window=window, method=method, **kind) < 1e-10


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-50])
def test_scales_that_are_not_positive(scale: float, dtype: torch.dtype, method: str) -> None:
    """Fused operators mask before they scale: -inf would become NaN or +inf."""
    whole = [x.to(dtype).double() for x in draw(causal(9), size=4).tensors.values()]
    wanted, wanted_lse = softmax(whole[0] * (scale / SCALE), *whole[1:], None, causal(9))

    def program(axis: weft.Axis) -> tuple[Tensor, Tensor, bool]:
        leaves = [x.split(3, 1)[axis.rank].to(dtype).requires_grad_() for x in whole]
        options = {"scale": scale, "method": method, "return_lse": True, "group": axis}
        out, lse = weft.attention(*leaves, causal=True, **options)
        grads = torch.autograd.grad(out.sum(), leaves)
        return out.detach(), lse.detach(), all(bool(grad.isfinite().all()) for grad in grads)

    ranks = virtual_world(3).run(program).results
    assert all(finite for _, _, finite in ranks)
    limit = 1e-10 if dtype == torch.float64 else 1e-5 if dtype == torch.float32 else 3e-2
    assert difference(torch.cat([out for out, _, _ in ranks], 1).double(), wanted) < limit
    assert difference(torch.cat([lse for _, lse, _ in ranks], 1).double(), wanted_lse) < limit


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("softcap", [1e-300, 1e300])
def test_caps_at_the_ends_of_fp64(softcap: float) -> None:
    assert worst(draw(causal(11), softcap=softcap), (4, 3, 4), True, causal=True) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [1e39, 1e300, 1e-39])
def test_caps_that_scores_cannot_have_are_refused(softcap: float, dtype: torch.dtype) -> None:
    """In fp32 they would be infinite or zero, and scores NaN."""

    def program(axis: weft.Axis) -> str:
        q = torch.ones(1, 4, 2, 4, dtype=dtype)
        with pytest.raises(ValueError, match=r"softcap must be a number of float32, 1\.2e-38 to 3\.4e") as caught:
            weft.attention(q, q, q, causal=True, softcap=softcap if axis.rank == 1 else 2.0, group=axis)
        return str(caught.value)

    words = virtual_world(3).run(program).results
    assert len(set(words)) == 1 and "(rank 1)" in words[0]


@pytest.mark.parametrize("method", METHODS)
def test_an_input_that_is_overwritten_before_the_backward(method: str) -> None:
    """torch says so where the tensor itself was kept; where its heads went elsewhere, gradients are as they were."""

    def program(axis: weft.Axis) -> tuple[str, Tensor | None, Tensor]:
        found: list[Tensor] = []
        for overwrite in (False, True):
            x = torch.randn(1, 4, 2, 4, generator=torch.Generator().manual_seed(axis.rank)).requires_grad_()
            y = x * 1.0
            out = weft.attention(y, y, y, causal=True, method=method, group=axis)
            if overwrite:
                y.detach().mul_(2.0)
            try:
                found += torch.autograd.grad(out.square().sum(), x)
            except RuntimeError as error:
                return str(error), None, found[0]
        return "", found[1], found[0]

    for words, again, wanted in virtual_world(3).run(program).results:
        if method == "ulysses":
            assert again is not None and torch.equal(again, wanted)
        else:
            assert "modified by an inplace operation" in words


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_some_arguments_only(method: str) -> None:
    problem = draw(causal(11), True)

    def program(axis: weft.Axis) -> bool:
        def run(wanted: tuple[str, ...]) -> dict[str, Tensor]:
            local = {
                name: x.clone() if name == "sinks" else x.split((4, 3, 4), 1)[axis.rank].clone()
                for name, x in problem.tensors.items()
            }
            leaves = {name: local[name].requires_grad_() for name in wanted}
            out = weft.attention(**local, causal=True, method=method, group=axis)
            return dict(zip(wanted, torch.autograd.grad(out.square().sum(), list(leaves.values())), strict=True))

        whole = run(NAMES)
        subsets = [("q",), ("k",), ("v",), ("sinks",), ("q", "v"), ("k", "sinks")]
        return all(torch.equal(grad, whole[name]) for names in subsets for name, grad in run(names).items())

    assert all(virtual_world(3).run(program).results)


@pytest.mark.slow
def test_ten_thousand_documents_of_one_token() -> None:
    """A token that sees itself alone: out is v."""

    def program(axis: weft.Axis) -> bool:
        for layout in ("contiguous", "balanced"):
            sequence = weft.sequence(total=10_000, layout=layout, cu_seqlens=range(10_001), group=axis)
            q = torch.randn(1, sequence.length, 2, 4, requires_grad=True)
            out = weft.attention(q, q, q, causal=True, sequence=sequence)
            (grad,) = torch.autograd.grad(out.sum(), q)
            if not torch.equal(out, q) or not torch.equal(grad, torch.ones_like(grad)):
                return False
        return True

    assert all(virtual_world(3).run(program).results)
