"""The rows of `weft bench linear-attention` that need a GPU: Triton's kernels beside torch's and fla's."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.bench.linear_attention.baselines import fla
from weft.bench.report import Column, Layout, Report
from weft.comm import Axis
from weft.comm.wire import SoloWire
from weft.ops.linear_attention import linear_attention

TOKENS, HEADS, DIM = 16384, 16, 128
COLUMNS = (
    Column("case", "one GPU", "{}"),
    Column("milliseconds", "ms", "{:.3f}"),
    Column("to_triton", "x weft triton", "{:.2f}"),
)
# flash-linear-attention's chunked op for each decay, and what it calls the decay.
FLA = {
    "none": ("fla.ops.simple_gla", "chunk_simple_gla", "g"),
    "constant": ("fla.ops.simple_gla", "chunk_simple_gla", "g_gamma"),
    "scalar": ("fla.ops.simple_gla", "chunk_simple_gla", "g"),
    "vector": ("fla.ops.gla", "chunk_gla", "g"),
}


def layout() -> Layout:
    """The table of these rows."""
    return Layout(f"B1 T{TOKENS} H{HEADS} K=V={DIM} bf16, forward + backward on a GPU", COLUMNS)


def run(report: Report, repeats: int) -> None:
    """Measure where there is a GPU; say so where there is none."""
    if not torch.cuda.is_available():
        print("no CUDA device: the rows of the Triton kernels on a GPU are left out", file=sys.stderr)
        return
    for decay in FLA:
        seconds = _measure(cases(decay, "cuda"), repeats)
        for name, sample in seconds.items():
            report.add("gpu", {
                "case": f"{name}, {decay} decay",
                "milliseconds": sample * 1e3,
                "to_triton": sample / seconds["weft triton"],
            })  # fmt: skip


def cases(decay: str, device: str) -> dict[str, Callable[[], Any]]:
    """Forward and backward by weft's backends, and by fla if it is installed."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, HEADS, DIM, generator=make).bfloat16().to(device) for _ in range(3))
    shape = {"constant": (HEADS,), "scalar": (1, TOKENS, HEADS), "vector": (1, TOKENS, HEADS, DIM)}.get(decay)
    g = None if shape is None else (-0.05 * torch.rand(shape, generator=make)).to(device)
    inputs = [x.requires_grad_() for x in (q, k, v, g) if x is not None]
    grad, alone = torch.ones_like(v), Axis.over(SoloWire())

    def step(attend: Callable[[], Tensor], wanted: list[Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attend(), wanted, grad)

    def weft_by(backend: str) -> Callable[[], Any]:
        return step(lambda: linear_attention(q, k, v, g, backend=backend, group=alone)[0], inputs)

    found = {f"weft {backend}": weft_by(backend) for backend in ("triton", "torch")}
    module, name, word = FLA[decay]
    if (theirs := fla(module, name)) is not None:
        # Their constant decay has no gradient.
        wanted = inputs[:3] if decay == "constant" else inputs
        found["fla"] = step(lambda: theirs(q, k, v, **{word: g})[0], wanted)
    return found


def _measure(cases: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Seconds of each case, the median of ``repeats``; they take turns, and the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, case in cases.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            case()
            end.record()
            end.synchronize()
            if turn:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    return {name: statistics.median(samples) for name, samples in seconds.items()}
