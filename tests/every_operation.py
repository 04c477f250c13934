"""Every differentiable operation of weft as one call on a rank, for tests of what they must have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import weft
from weft.integrations.ring_flash_attn import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    ring_flash_attn_func,
    zigzag_ring_flash_attn_func,
)

TOKENS, HEADS, DIM = 6, 4, 8  # of a rank
Operation = Callable[[weft.Axis, Tensor], Tensor]


def linear(axis: weft.Axis, x: Tensor, gate: str | None = None, **options: object) -> Tensor:
    """``gate``: None, or how many dimensions the log decay has."""
    log = -x.abs()
    g = {None: None, "constant": log[0, 0, :, 0], "scalar": log[..., 0], "vector": log}[gate]
    if gate == "constant" and not x.shape[1]:
        g = None
    start = x.new_ones(1, HEADS, DIM, DIM) * x.sum()
    o, final = weft.linear_attention(x, x, x, g, initial_state=start, output_final_state=True, group=axis, **options)
    assert final is not None
    return o + final.sum().to(o.dtype)


def delta(axis: weft.Axis, x: Tensor, gate: str | None = None, **options: object) -> Tensor:
    log = -x.abs()
    g = {None: None, "scalar": log[..., 0], "vector": log}[gate]
    start = x.new_ones(1, HEADS, DIM, DIM) * x.sum()
    k = x / (1 + x.square().sum(-1, keepdim=True))
    o, final = weft.delta_rule(
        x, k, x, x[..., 0].sigmoid(), g, initial_state=start, output_final_state=True, group=axis, **options
    )
    assert final is not None
    return o + final.sum().to(o.dtype)


def mamba(axis: weft.Axis, x: Tensor, **options: object) -> Tensor:
    start = x.new_ones(1, HEADS, DIM, DIM) * x.sum()
    bias = x.new_ones(HEADS) * x.sum()
    y, final = weft.mamba2(
        x, x[..., 0], -bias.abs(), x[:, :, ::2], x[:, :, 1::2], D=bias, z=x, dt_bias=bias, dt_softplus=True,
        initial_states=start, return_final_states=True, group=axis, **options,
    )  # fmt: skip
    assert final is not None
    return y + final.sum().to(y.dtype)


def selective(axis: weft.Axis, x: Tensor, **options: object) -> Tensor:
    flat = x.flatten(2)
    rates = -(x.new_ones(HEADS * DIM, DIM) * x.sum()).abs() / 4
    y, last = weft.selective_scan(
        flat, flat, rates, x[:, :, ::2], x[:, :, 1::2], D=rates[:, 0], z=flat, delta_bias=rates[:, 1],
        delta_softplus=True, initial_state=rates[None], return_last_state=True, group=axis, **options,
    )  # fmt: skip
    assert last is not None
    return y.view_as(x) + last.sum().to(y.dtype)


def conv(axis: weft.Axis, x: Tensor, **options: object) -> Tensor:
    start = x.new_ones(1, HEADS * DIM, 2) * x.sum()
    weight = x.new_ones(HEADS * DIM, 3) + x.sum()
    y, final = weft.short_conv(
        x.flatten(2), weight, weight[:, 0], initial_state=start, output_final_state=True, group=axis, **options
    )
    assert final is not None
    return y.view_as(x) + final.sum()


def softmax(axis: weft.Axis, x: Tensor, **options: object) -> Tensor:
    return weft.attention(x, x[:, :, ::2], x[:, :, ::2], causal=True, group=axis, **options)


def llama3(axis: weft.Axis, x: Tensor) -> Tensor:
    total = TOKENS * axis.size
    known = llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, total // 3, total]), True, axis.rank, axis.size)
    return llama3_flash_attn_varlen_func(x[0], x[0], x[0], *known[:4], 1, known[4], causal=True, group=axis)


def scan(axis: weft.Axis, x: Tensor, kind: str, **options: object) -> Tensor:
    state = x[0, 0]  # [H, D]
    decay: dict[str, Tensor] = {}
    if kind == "dense":
        decay = {"transition": x[0, 1].mT @ x[0, 2] / DIM}
        state = state.mT  # [D, H]
    elif kind != "none":
        decay = {"log_decay": -x[0, 1, :, 0].abs() if kind == "vector" else -x[0, 1, 0, 0].abs()}
    return weft.exclusive_scan(state, **decay, group=axis, **options)


REFUSED: dict[str, Operation] = {
    **{f"linear_attention {gate}": partial(linear, gate=gate) for gate in (None, "constant", "scalar", "vector")},
    "linear_attention zigzag": partial(linear, gate="scalar", layout="zigzag"),
    **{f"delta_rule {gate}": partial(delta, gate=gate) for gate in (None, "scalar", "vector")},
    "delta_rule zigzag": partial(delta, gate="scalar", layout="zigzag", method="ring"),
    "mamba2": mamba,
    "mamba2 zigzag": partial(mamba, layout="zigzag", method="ring"),
    "selective_scan": selective,
    "selective_scan zigzag": partial(selective, layout="zigzag", method="ring"),
    "short_conv": partial(conv, activation="silu"),
    "short_conv zigzag": partial(conv, layout="zigzag"),
    **{f"attention {method}": partial(softmax, method=method) for method in ("gather", "ring", "ulysses")},
    "attention window": partial(softmax, window=(2, 0), layout="zigzag"),
    "ring_flash_attn": lambda axis, x: ring_flash_attn_func(x, x, x, causal=True, group=axis),
    "zigzag_ring_flash_attn": lambda axis, x: zigzag_ring_flash_attn_func(x, x, x, causal=True, group=axis),
    "llama3_flash_attn": llama3,
}  # operations whose gradients cannot be differentiated
ANY_ORDER: dict[str, Operation] = {
    **{f"exclusive_scan {kind}": partial(scan, kind=kind) for kind in ("none", "scalar", "vector", "dense")},
    "exclusive_scan dense reverse": partial(scan, kind="dense", reverse=True, method="gather"),
    "exclusive_scan vector gather": partial(scan, kind="vector", method="gather"),
    "unshard": lambda axis, x: weft.unshard(x, 1, group=axis),
    "unshard zigzag": lambda axis, x: weft.unshard(x, 1, layout="zigzag", group=axis),
}
OPERATIONS: dict[str, Operation] = {**REFUSED, **ANY_ORDER}


def tokens(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's input ``[1, TOKENS, HEADS, DIM]``, a leaf."""
    make = torch.Generator().manual_seed(rank)
    x = torch.randn(1, TOKENS, HEADS, DIM, generator=make, dtype=torch.float64) / 2
    return x.to(dtype).requires_grad_()


def weights_like(out: Tensor) -> Tensor:
    """Something to multiply a result with, so that its gradient is not the same everywhere."""
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape).to(out.dtype)
