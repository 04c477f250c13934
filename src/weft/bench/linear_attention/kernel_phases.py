"""The second table of `weft kernels`: what each phase moves and computes, beside the least there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.bench.report import Column, Report

if TYPE_CHECKING:
    from weft.ops.linear_attention.fused.ahead import Shape

COLUMNS = (
    Column("decay", "decay", "{}"),
    Column("shape", "K=V, chunk, dtype", "{}"),
    Column("phase", "phase", "{}"),
    Column("launches", "launches", "{:d}"),
    Column("bytes", "bytes", "{:,.0f}"),
    Column("least_bytes", "least", "{:,.0f}"),
    Column("least_with_states", "with states", "{:,.0f}"),
    Column("kiloflops", "kFLOP", "{:,.0f}"),
    Column("least_kiloflops", "least", "{:,.0f}"),
)


def run(report: Report, todo: Sequence[tuple[Shape, str]]) -> None:
    """Count the phases of every shape, and their sums forward and backward. Nothing is compiled for it."""
    from weft.ops.linear_attention.fused.ahead import phases

    for shape, label in todo:
        rows: dict[str, dict[str, Any]] = {}
        for phase, launches in phases(shape).items():
            way = phase.split(".")[0]
            total = rows.setdefault(f"{way}, all", {"launches": 0, "bytes": 0.0, "kiloflops": 0.0, **least(shape, way)})
            share = shape.tokens * shape.heads
            rows[phase] = {
                "launches": len(launches),
                "bytes": sum(one.size for one in launches) / share,
                "kiloflops": sum(one.flops for one in launches) / share / 1e3,
            }
            for key, value in rows[phase].items():
                total[key] += value
        for phase, row in rows.items():
            report.add("phases", {"decay": shape.gate, "shape": label, "phase": phase, **row})


def least(shape: Shape, way: str) -> dict[str, float]:
    """The least that a ``way`` ("forward", "backward") must move and compute for one token and head.

    Bytes: inputs read once and results written once; with states also one in fp32 written and read at each chunk.
    FLOPs: the products of the chunked form, each once, of token pairs the causal half.
    """
    keys, values, state = shape.keys, shape.values, shape.keys * shape.values
    item, gate_item = shape.dtype.itemsize, shape.gate_dtype.itemsize
    gates = {"none": 0, "constant": 0, "scalar": 1, "vector": keys}[shape.gate]
    if way == "forward":  # q, k, v, g -> o; scores and o, states and what they give to o
        size = item * (2 * keys + 2 * values) + gate_item * gates
        flops = shape.chunk * (keys + values) + 2 * 2 * state
    else:  # q, k, v, g, do -> dq, dk, dv, dg; scores, their gradient, dq, dk, dv; dstates, and states to dq, dk, dv
        size = item * (4 * keys + 3 * values) + 2 * gate_item * gates
        flops = shape.chunk * (3 * keys + 2 * values) + 4 * 2 * state
    return {
        "least_bytes": size,
        "least_with_states": size + 2 * 4 * state / shape.chunk,
        "least_kiloflops": flops / 1e3,
    }
