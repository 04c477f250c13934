"""`weft kernels`: the Triton kernels compiled for GPUs that need not be there, and what a roofline says of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weft.bench.report import Column, Layout, Report
from weft.world.machine import PRESETS

if TYPE_CHECKING:
    from weft.ops.fused.ahead import Compiled, Counted, Shape

COLUMNS = (
    Column("decay", "decay"),
    Column("kernel", "kernel"),
    Column("target", "sm"),
    Column("shape", "K=V, chunk, dtype"),
    Column("registers", "regs", "{:d}"),
    Column("spilled", "spill", "{:d}"),
    Column("shared_kilobytes", "smem KB", "{:.0f}"),
    Column("matrix", "mma", "{:d}"),
    Column("resident", "per SM", "{:d}"),
    Column("intensity", "FLOP/byte", "{:.1f}"),
    Column("percent_of_peak", "% of peak", "{:.0f}"),
    Column("percent_of_roof", "% of roof", "{:.0f}"),
)
PHASE_COLUMNS = (
    Column("decay", "decay"),
    Column("shape", "K=V, chunk, dtype"),
    Column("phase", "phase"),
    Column("launches", "launches", "{:d}"),
    Column("bytes", "bytes", "{:,.0f}"),
    Column("least_bytes", "least", "{:,.0f}"),
    Column("least_with_states", "with states", "{:,.0f}"),
    Column("kiloflops", "kFLOP", "{:,.0f}"),
    Column("least_kiloflops", "least", "{:,.0f}"),
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DECAYS = ("none", "constant", "scalar", "vector")


@dataclass(frozen=True)
class Gpu:
    """What limits how many programs a multiprocessor holds; shared memory is in bytes."""

    preset: str
    processors: int
    shared: int
    shared_of_program: int
    registers: int = 65536
    warps: int = 64
    programs: int = 32

    def resident(self, registers: int, shared: int, warps: int) -> int:
        """Programs a multiprocessor holds at once; it hands out registers by 8 for each thread, shared memory by KB."""
        by_registers = self.registers // (-(-registers // 8) * 8 * 32 * warps)
        by_shared = self.shared // (-(-shared // 1024) * 1024 + 1024)
        return min(by_registers, by_shared, self.warps // warps, self.programs)


GPUS = {
    80: Gpu("a100", 108, 164 * 1024, 163 * 1024),
    90: Gpu("h100", 132, 228 * 1024, 227 * 1024),
    100: Gpu("b200", 148, 228 * 1024, 227 * 1024),
}


def layouts(tokens: int, heads: int) -> dict[str, Layout]:
    """The tables of this command."""
    return {
        "kernels": Layout(f"kernels of linear attention, two stages, B1 T{tokens} H{heads}", COLUMNS),
        "phases": Layout(f"phases, for one token and head of B1 T{tokens} H{heads}", PHASE_COLUMNS),
    }


def shapes(
    decays: Sequence[str], dims: Sequence[int], chunks: Sequence[int], dtypes: Sequence[str], tokens: int, heads: int
) -> list[Shape]:
    """The classes of inputs; gates are fp32, as models keep them."""
    from weft.ops.fused.ahead import Shape

    for word, given, known in (("decay", decays, DECAYS), ("dtype", dtypes, tuple(DTYPES))):
        for name in given:
            if name not in known:
                raise ValueError(f"{word} {name!r} is not one of {', '.join(known)}")
    return [
        Shape(decay, dim, dim, chunk, DTYPES[dtype], heads=heads, tokens=tokens)
        for decay, dim, chunk, dtype in itertools.product(decays, dims, chunks, dtypes)
    ]


def run(report: Report, todo: Sequence[Shape], capabilities: Sequence[int]) -> list[str]:
    """Compile everything and fill the tables; returns what is wrong, a sentence for each kernel."""
    from weft.ops.fused.ahead import compile_for
    from weft.ops.linear_attention.fused.ahead import launches

    for capability in capabilities:
        if capability not in GPUS:
            raise ValueError(f"compute capability {capability} is not one of {', '.join(map(str, GPUS))}")
    count_phases(report, todo)
    faults = []
    counted = [(shape, one) for shape in todo for one in launches(shape)]
    with report.progress(len(counted) * len(capabilities), "compiling") as advance:
        for shape, one in counted:
            for capability in capabilities:
                row = describe(shape, one, compile_for(one.launch, capability), capability)
                report.add("kernels", row)
                where = f"{row['kernel']}, {row['decay']} decay, {row['shape']}, sm_{capability}"
                if row["spilled"]:
                    faults.append(f"{where}: {row['spilled']} bytes of registers are spilled")
                if row["shared_kilobytes"] * 1024 > GPUS[capability].shared_of_program:
                    faults.append(f"{where}: {row['shared_kilobytes']:.0f} KB of shared memory are too many")
                advance()
    return faults


def describe_shape(shape: Shape) -> str:
    """K (= V), chunk and dtype."""
    return f"{shape.keys}, {shape.chunk}, {next(name for name, dtype in DTYPES.items() if dtype == shape.dtype)}"


def describe(shape: Shape, one: Counted, compiled: Compiled, capability: int) -> dict[str, Any]:
    """A row: what the compiler made, and the prediction.

    "% of peak" is the rate of tf32 products that memory allows at this intensity; "% of roof" is how much of that is
    left when the last wave of programs does not fill all multiprocessors.
    """
    gpu = GPUS[capability]
    machine = PRESETS[gpu.preset]
    programs = math.prod(one.launch.grid)
    resident = gpu.resident(compiled.registers, compiled.shared, one.launch.warps)
    at_once = max(1, resident * gpu.processors)
    back = {"chunk_states": " (q, do)", "scan_pieces": " (back)", "output_intra": " (dv)", "output_inter": " (dv)"}
    return {
        "decay": shape.gate,
        "kernel": one.name + (back[one.name] if one.launch.constants.get("REVERSE") else ""),
        "target": str(capability),
        "shape": describe_shape(shape),
        "registers": compiled.registers,
        "spilled": compiled.spilled,
        "shared_kilobytes": compiled.shared / 1024,
        "matrix": compiled.matrix,
        "resident": resident,
        "intensity": one.flops / one.size,
        "percent_of_peak": 100 * min(1.0, one.flops / one.size * machine.memory_bandwidth / machine.flops),
        "percent_of_roof": 100 * programs / (-(-programs // at_once) * at_once),
    }


def count_phases(report: Report, todo: Sequence[Shape]) -> None:
    """Count the phases of every shape, and their sums forward and backward. Nothing is compiled for it."""
    from weft.ops.linear_attention.fused.ahead import phases

    for shape in todo:
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
            report.add("phases", {"decay": shape.gate, "shape": describe_shape(shape), "phase": phase, **row})


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
