"""The rows of `weft bench linear-attention` that need a GPU: Triton's kernels beside torch's and fla's."""

from __future__ import annotations

import sys

import torch

from weft.bench.linear_attention.baselines import fla
from weft.bench.ranks import fill_table
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, Sample, forward_and_backward
from weft.comm import Axis
from weft.comm.device import milliseconds
from weft.comm.wire import SoloWire
from weft.ops.linear_attention import linear_attention

TOKENS, HEADS, DIM = 16384, 16, 128
COLUMNS = (
    Column("case", "one GPU"),
    Column("milliseconds", "ms", "{:.3f}"),
    Column("to_triton", "x weft triton", "{:.2f}", lambda m: m.times("weft triton")),
)
# flash-linear-attention's chunked op for each decay, and what it calls the decay.
FLA = {
    "none": ("fla.ops.simple_gla", "chunk_simple_gla", "g"),
    "constant": ("fla.ops.simple_gla", "chunk_simple_gla", "g_gamma"),
    "scalar": ("fla.ops.simple_gla", "chunk_simple_gla", "g"),
    "vector": ("fla.ops.gla", "chunk_gla", "g"),
}


def run(report: Report, repeats: int) -> None:
    """Measure where there is a GPU; say so where there is none."""
    if not torch.cuda.is_available():
        print("no CUDA device: the rows of the Triton kernels on a GPU are left out", file=sys.stderr)
        return
    report.tables["gpu"] = Layout(f"B1 T{TOKENS} H{HEADS} K=V={DIM} bf16, forward + backward on a GPU", COLUMNS)
    for decay in FLA:
        made = cases(decay, "cuda")
        facts = {name: {"case": f"{name}, {decay} decay"} for name in made}
        fill_table(report, "gpu", lambda turn, made=made: [_sample(made)], repeats, lambda: None, facts)  # type: ignore[misc]


def cases(decay: str, device: str) -> dict[str, Case]:
    """Forward and backward by weft's backends, and by fla if it is installed."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, TOKENS, HEADS, DIM, generator=make).bfloat16().to(device) for _ in range(3))
    shape = {"constant": (HEADS,), "scalar": (1, TOKENS, HEADS), "vector": (1, TOKENS, HEADS, DIM)}.get(decay)
    g = None if shape is None else (-0.05 * torch.rand(shape, generator=make)).to(device)
    inputs = [x.requires_grad_() for x in (q, k, v, g) if x is not None]
    alone = Axis.over(SoloWire())

    def weft_by(backend: str) -> Case:
        return forward_and_backward(lambda *_: linear_attention(q, k, v, g, backend=backend, group=alone)[0], inputs)

    found = {f"weft {backend}": weft_by(backend) for backend in ("triton", "torch")}
    module, name, word = FLA[decay]
    if (theirs := fla(module, name)) is not None:
        # Their constant decay has no gradient.
        wanted = inputs[:3] if decay == "constant" else inputs
        found["fla"] = forward_and_backward(lambda *_: theirs(q, k, v, **{word: g})[0], wanted)
    return found


def _sample(cases: dict[str, Case]) -> dict[str, Sample]:
    """One call of each, timed by the GPU."""
    return {name: Sample(milliseconds(torch.device("cuda"), case, 1) / 1e3) for name, case in cases.items()}
