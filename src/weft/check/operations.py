"""Cases of operations over a sequence: scans, linear attention and its relatives, attention; and around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import weft
from weft.check.case import Case, Work, call_name, draw, dtype_name, leaves, with_gradients
from weft.comm import Axis
from weft.comm.device import runs_behind
from weft.ops.attention.distributed import METHODS as ATTENTION_METHODS
from weft.ops.scan import METHODS as SCANS
from weft.ops.scan.arguments import choose_backend

TOKENS, DIM = 96, 32  # of a rank; of a head
GATES = ("none", "constant", "scalar", "vector")
LAYOUTS = ("contiguous", "zigzag")


def scan_cases() -> Iterator[Case]:
    """Every schedule, with a decay for each channel and with dense transitions."""
    for method, decay in product(SCANS, ("vector", "dense")):
        yield Case("scan", call_name("exclusive_scan", method, decay), partial(_scan, method, decay), torch.float32)


def _scan(method: str, decay: str, axis: Axis, device: torch.device) -> Work:
    state = draw(axis.rank, 8, DIM, 16)
    map_ = draw(50 + axis.rank, 8, DIM, DIM) / (2 * DIM) if decay == "dense" else -draw(50 + axis.rank, 8, DIM).abs()
    given = leaves([state.float(), map_.float()], device)
    weight = draw(9, 8, DIM, 16).float().to(device)
    options: dict[str, Any] = {"transition" if decay == "dense" else "log_decay": given[1], "method": method}
    return lambda: with_gradients(lambda: weft.exclusive_scan(given[0], group=axis, **options), given, weight)


def linear_attention_cases(device: torch.device) -> Iterator[Case]:
    """Every gate, on the kernels that ``device`` has; packed documents in zigzag."""
    backends, dtypes = _backends_on(device), (torch.float32, torch.bfloat16)
    for gate, backend, dtype in product(GATES, backends, dtypes):
        name = call_name("linear_attention", gate, backend, dtype_name(dtype))
        yield Case("linear-attention", name, partial(_linear_attention, gate, backend, dtype), dtype, local=True)
    for backend, dtype in product(backends, dtypes):
        name = call_name("mamba2", backend, dtype_name(dtype))
        yield Case("linear-attention", name, partial(_mamba2, backend, dtype), dtype, local=True)
    yield Case("linear-attention", call_name("selective_scan", "fp32"), _selective_scan, torch.float32, local=True)


def _backends_on(device: torch.device) -> tuple[str, ...]:
    q, _, v, g = (x.to(device) for x in _gated(1, "vector", torch.float32))
    return ("torch", "triton") if choose_backend("auto", q, v, {"g": g}, 64) == "triton" else ("torch",)


def delta_rule_cases(device: torch.device) -> Iterator[Case]:
    """Every gate, and convolutions; packed documents in zigzag."""
    dtypes = (torch.float32, torch.bfloat16)
    for gate, backend, dtype in product(("none", "scalar", "vector"), _backends_on(device), dtypes):
        name = call_name("delta_rule", gate, backend, dtype_name(dtype))
        yield Case("delta-rule", name, partial(_delta_rule, gate, backend, dtype), dtype)
    for dtype in dtypes:
        yield Case("delta-rule", call_name("short_conv", dtype_name(dtype)), partial(_short_conv, dtype), dtype)


def _packed(whole: Sequence[Tensor], axis: Axis, device: torch.device) -> tuple[list[Tensor], Tensor, weft.Sequence]:
    """This rank's part of tensors with tokens, a weight for what is like the third, and two documents in zigzag."""
    cut = [weft.shard(x, 1, layout="zigzag", group=axis) if x.ndim > 1 else x for x in whole]
    weight = draw(9, *whole[2].shape, dtype=whole[2].dtype)
    bounds = [0, TOKENS * axis.size // 3, TOKENS * axis.size]
    where = weft.sequence(cut[2].shape[1], layout="zigzag", cu_seqlens=bounds, group=axis)
    return leaves(cut, device), weft.shard(weight, 1, layout="zigzag", group=axis).to(device), where


def _linear_attention(gate: str, backend: str, dtype: torch.dtype, axis: Axis, device: torch.device) -> Work:
    given, weight, where = _packed(_gated(axis.size, gate, dtype), axis, device)
    used = backend if runs_behind(device) else "torch"
    return lambda: with_gradients(lambda: weft.linear_attention(*given, sequence=where, backend=used)[0], given, weight)


def _delta_rule(gate: str, backend: str, dtype: torch.dtype, axis: Axis, device: torch.device) -> Work:
    q, k, v, *g = _gated(axis.size, gate, dtype)
    k, beta = torch.nn.functional.normalize(k, dim=-1), draw(5, *k.shape[:3], dtype=dtype).sigmoid()
    given, weight, where = _packed([q, k, v, beta, *g], axis, device)
    used = backend if runs_behind(device) else "torch"
    return lambda: with_gradients(lambda: weft.delta_rule(*given, sequence=where, backend=used)[0], given, weight)


def _short_conv(dtype: torch.dtype, axis: Axis, device: torch.device) -> Work:
    x = _gated(axis.size, "none", dtype)[2].flatten(2)
    (x, _, _), weight, where = _packed([x, x, x], axis, device)
    (taps,) = leaves([draw(6, x.shape[2], 4, dtype=dtype)], device)
    return lambda: with_gradients(
        lambda: weft.short_conv(x, taps, activation="silu", sequence=where)[0], [x, taps], weight
    )


def _selective_scan(axis: Axis, device: torch.device) -> Work:
    q, k, v, _ = (x.float() for x in _gated(axis.size, "scalar", torch.float32))
    (B, C, u, d), weight, where = _packed([k[:, :, 0], q[:, :, 0], v.flatten(2), v.flatten(2).abs() / 20], axis, device)
    given = [u, d, *leaves([-draw(5, u.shape[2], DIM).abs().float()], device), B, C]
    return lambda: with_gradients(lambda: weft.selective_scan(*given, sequence=where)[0], given, weight)


def _mamba2(backend: str, dtype: torch.dtype, axis: Axis, device: torch.device) -> Work:
    q, k, v, g = _gated(axis.size, "scalar", dtype)
    x, dt, weight = v.repeat(1, 1, 2, 1), -g.repeat(1, 1, 2), draw(9, *v.shape, dtype=dtype).repeat(1, 1, 2, 1)
    x, dt, B, C, z, weight = (weft.shard(one, 1, group=axis) for one in (x, dt, k, q, x, weight))
    given = leaves([x, dt, -draw(5, 4).abs().float(), B, C, draw(6, 4).float(), z], device)
    where, used = weft.sequence(x.shape[1], group=axis), backend if runs_behind(device) else "torch"
    weight = weight.to(device)

    def work() -> Tensor:
        return weft.mamba2(*given[:5], D=given[5], z=given[6], dt_softplus=True, sequence=where, backend=used)[0]

    return lambda: with_gradients(work, given, weight)


def _gated(ranks: int, gate: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and g, if there is one, of all ranks' tokens."""
    shape = (1, TOKENS * ranks, 2, DIM)
    q, k, v = (draw(seed, *shape, dtype=dtype) / 2 for seed in (1, 2, 3))
    log = -draw(4, *shape, dtype=torch.float32).abs() / 20
    g = {"none": [], "constant": [log[0, 0, :, 0]], "scalar": [log[..., 0]], "vector": [log]}[gate]
    return [q, k, v, *g]


def attention_cases() -> Iterator[Case]:
    """Every method and layout; in fp16 and bf16 an accelerator takes its flash kernels."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for method, layout, dtype in product(ATTENTION_METHODS, LAYOUTS, dtypes):
        name = call_name("attention", method, layout, dtype_name(dtype))
        yield Case("attention", name, partial(_attention, method, layout, dtype), dtype)
    for kind, dtype in product(("documents", "window", "softcap"), (torch.float32, torch.bfloat16)):
        name = call_name("attention", kind, dtype_name(dtype))
        yield Case("attention", name, partial(_attention_of, kind, dtype), dtype)


def _attention(method: str, layout: str, dtype: torch.dtype, axis: Axis, device: torch.device) -> Work:
    total, heads = TOKENS * axis.size, 2 * axis.size  # Ulysses cuts heads
    shapes = [(1, total, count, DIM) for count in (heads, axis.size, axis.size, heads)]
    whole = [draw(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]
    *cut, weight = (weft.shard(x, 1, layout=layout, group=axis) for x in whole)
    given, weight = leaves(cut, device), weight.to(device)
    where = weft.sequence(cut[0].shape[1], layout=layout, group=axis)
    return lambda: with_gradients(
        lambda: weft.attention(*given, causal=True, method=method, sequence=where), given, weight
    )


def _attention_of(kind: str, dtype: torch.dtype, axis: Axis, device: torch.device) -> Work:
    """With sinks, values of another size than keys, and lse in the loss; in zigzag."""
    total = TOKENS * axis.size
    shapes = [(1, total, 4, DIM), (1, total, 2, DIM), (1, total, 2, DIM - 8), (1, total, 4, DIM - 7)]
    whole = [draw(seed, *shape, dtype=dtype) for seed, shape in enumerate(shapes)]
    *cut, weight = (weft.shard(x, 1, layout="zigzag", group=axis) for x in whole)
    given, weight = leaves([*cut, draw(9, 4, dtype=dtype)], device), weight.to(device)
    bounds = [0, total // 7, total // 3, total // 3 + 1, total] if kind == "documents" else None
    where = weft.sequence(cut[0].shape[1], layout="zigzag", cu_seqlens=bounds, group=axis)
    window, softcap = (TOKENS // 3, 0) if kind == "window" else None, 2.0 if kind == "softcap" else None

    def work() -> Tensor:
        q, k, v, sinks = given
        out, lse = weft.attention(
            q, k, v, causal=True, window=window, softcap=softcap, sinks=sinks, return_lse=True, sequence=where
        )
        return torch.cat([out, lse[..., None].to(dtype)], 3)

    return lambda: with_gradients(work, given, weight)


def sequence_cases() -> Iterator[Case]:
    """The whole of the parts in zigzag, and its parts again; the mean of a loss, with its count on either side."""
    yield Case("sequence", call_name("unshard", "and shard", "fp32"), _unshard, torch.float32)
    for place in ("host", "device"):
        name = call_name("mean_loss", f"{place} count")
        yield Case("sequence", name, partial(_mean_loss, place == "host"), torch.float32)


def _unshard(axis: Axis, device: torch.device) -> Work:
    whole, weight = (draw(seed, 1, TOKENS * axis.size, DIM, dtype=torch.float32) for seed in (1, 2))
    part, weight = (weft.shard(x, 1, layout="zigzag", group=axis) for x in (whole, weight))
    (given,), weight = leaves([part], device), weight.to(device)

    def work() -> Tensor:
        whole = weft.unshard(given, 1, layout="zigzag", group=axis)
        return weft.shard(whole.cumsum(1), 1, layout="zigzag", group=axis)

    return lambda: with_gradients(work, [given], weight)


def _mean_loss(on_host: bool, axis: Axis, device: torch.device) -> Work:
    (losses,) = leaves([draw(axis.rank, TOKENS, dtype=torch.float32)], device)
    count = TOKENS - axis.rank if on_host else torch.tensor(TOKENS - axis.rank).to(device)
    weight = torch.ones((), device=device)
    return lambda: with_gradients(lambda: weft.mean_loss(losses.square().sum(), count, group=axis), [losses], weight)
