"""The slow, obvious attention that the others are judged by, and the proof that it is SDPA."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from layouts import runs_of
from torch import Tensor

DIM = 4


@dataclass(frozen=True)
class Case:
    """A whole sequence and what its queries see."""

    total: int
    heads: int = 4
    kv_heads: int = 2
    batch: int = 2
    causal: bool = False
    window: tuple[int, int] | None = None
    bounds: tuple[int, ...] | None = None
    dim: int = DIM

    @property
    def options(self) -> dict[str, object]:
        cu = None if self.bounds is None else torch.tensor(self.bounds)
        return {"causal": self.causal, "window": self.window, "cu_seqlens": cu, "scale": 0.7}


def visible(case: Case) -> Tensor:
    """Which keys (columns) each query (row) sees."""
    places = torch.arange(case.total)
    ahead = places - places[:, None]
    seen = torch.ones(case.total, case.total, dtype=torch.bool)
    left, right = case.window or (-1, -1)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    if case.causal:
        seen &= ahead <= 0
    if case.bounds is not None:
        document = torch.searchsorted(torch.tensor(case.bounds), places, right=True)
        seen &= document == document[:, None]
    return seen


def plain(q: Tensor, k: Tensor, v: Tensor, case: Case, scale: float = 0.7) -> tuple[Tensor, Tensor]:
    """out [B, S, H, D] and lse [B, S, H]."""
    shared = case.heads // case.kv_heads
    k, v = k.repeat_interleave(shared, 2), v.repeat_interleave(shared, 2)
    scores = scale * torch.einsum("bshd,bthd->bhst", q, k)
    scores = scores.masked_fill(~visible(case), -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v), scores.logsumexp(-1).transpose(1, 2)


@functools.lru_cache(maxsize=1024)
def problem(case: Case, seed: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """(q, k, v, gradient of out) and (out, lse, dq, dk, dv), all fp64."""
    make = torch.Generator().manual_seed(seed + case.total)
    batch = 1 if case.bounds is not None else case.batch

    def draw(heads: int) -> Tensor:
        return torch.randn(batch, case.total, heads, case.dim, generator=make, dtype=torch.float64)

    q, k, v, grad = draw(case.heads), draw(case.kv_heads), draw(case.kv_heads), draw(case.heads)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = plain(*leaves, case)
    return (q, k, v, grad), (out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad))


def slice_of(
    x: Tensor, lengths: tuple[int, ...], layout: str, rank: int, bounds: tuple[int, ...] | None = None
) -> Tensor:
    runs = [run for run in runs_of(lengths, layout, bounds) if run.rank == rank]
    return torch.cat([x[:, run.offset : run.offset + run.length] for run in runs], dim=1)


def distance(got: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value (at least 1e-3 of a unit)."""
    if got.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    return ((got.double() - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3)).nan_to_num(torch.inf).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_reference_is_sdpa(causal: bool, kv_heads: int) -> None:
    case = replace(Case(9), causal=causal, kv_heads=kv_heads)
    (q, k, v, grad), (out, _, *grads) = problem(case)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    turned = [x.transpose(1, 2) for x in leaves]
    true = F.scaled_dot_product_attention(*turned, is_causal=causal, scale=0.7, enable_gqa=True).transpose(1, 2)
    for got, wanted in zip((true, *torch.autograd.grad(true, leaves, grad)), (out, *grads), strict=True):
        assert distance(got, wanted) < 1e-12
