"""The command line: weft train | demo | sample | report | bench SUITE | trace SCHEDULE | kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import tyro

from weft.bench import kernels, trace
from weft.bench.commands import BENCHES, measure
from weft.bench.demo import demo
from weft.bench.report import Report, describe_machine
from weft.train.command import make_command
from weft.train.report import show_report
from weft.train.sample import sample
from weft.world import Machine


def trace_scan(
    out: Path,
    method: str = "doubling",
    ranks: int = 8,
    heads: int = 16,
    keys: int = 128,
    values: int = 128,
    latency: float = 5e-6,
    bandwidth: float = 25e9,
    flops: float = float("inf"),
    memory_bandwidth: float = float("inf"),
) -> None:
    """Run one scan in virtual time and write its timeline for ui.perfetto.dev.

    Args:
        out: The trace file to write.
        method: A schedule; a name that is not known gets the list of them.
        ranks: Ranks of the virtual world.
        heads: States a rank holds, each keys x values in fp32.
        keys: K of the state.
        values: V of the state.
        latency: Seconds a message is on its way.
        bandwidth: Bytes per second of a rank's link.
        flops: FLOP per second of local products.
        memory_bandwidth: Bytes per second of local operators.
    """
    machine = Machine(latency, bandwidth, flops, memory_bandwidth)
    run = trace.trace_scan(machine, ranks, method, (heads, keys, values))
    run.timeline.save_trace(out)
    print(f"{method} on {ranks} ranks: {run.elapsed:.3e} virtual s, {run.timeline.rounds} rounds; written: {out}")


def show_kernels(
    decays: tuple[str, ...] = kernels.DECAYS,
    dims: tuple[int, ...] = (64, 128, 256),
    chunks: tuple[int, ...] = (64,),
    dtypes: tuple[str, ...] = ("bf16",),
    capabilities: tuple[int, ...] = tuple(kernels.GPUS),
    tokens: int = 8192,
    heads: int = 16,
    json: Path | None = None,
) -> None:
    """Compile the Triton kernels of linear attention ahead of time and say what they use. No GPU is needed.

    Spilled registers or too much shared memory for two stages end the command with code 1. FLOP/byte counts each tensor
    that a kernel reads or writes once. "% of peak" is the rate of tf32 products memory allows at that intensity on a
    preset machine (A100, H100, B200); "% of roof" is what is left of it when the last wave of programs is not full.
    A second table has the bytes and FLOPs of each phase beside the least there is.

    Args:
        decays: Classes of decay: none, constant, scalar, vector.
        dims: K = V.
        chunks: Tokens of a chunk.
        dtypes: Of q, k and v: bf16, fp16, fp32. Gates are fp32.
        capabilities: Compute capabilities: 80, 90, 100.
        tokens: Tokens of the sequence; grids, bytes and FLOPs are those of this length.
        heads: Heads.
        json: Write the rows here, with a header of machine, versions and commit.
    """
    todo = kernels.shapes(decays, dims, chunks, dtypes, tokens, heads)
    report = Report(kernels.layouts(tokens, heads), json, header=describe_machine(bench="kernels"))
    faults: list[str] = []
    measure(report, lambda: faults.extend(kernels.run(report, todo, capabilities)))
    for fault in faults:
        print(f"weft kernels: {fault}", file=sys.stderr)
    if faults:
        sys.exit(1)


def main() -> None:
    """Entry point of the ``weft`` command."""
    bench = tyro.extras.SubcommandApp()
    for name, command in BENCHES.items():
        bench.command(name=name)(command)
    traces = tyro.extras.SubcommandApp()
    traces.command(name="scan")(trace_scan)
    app = tyro.extras.SubcommandApp()
    app.command(name="train")(make_command(sys.argv[2:] if sys.argv[1:2] == ["train"] else []))
    app.command(name="demo")(demo)
    app.command(name="sample")(sample)
    app.command(name="report")(show_report)
    app.command(bench, name="bench", help="Measure weft beside what people use today.")
    app.command(traces, name="trace", help="Simulate an operation and write its timeline.")
    app.command(name="kernels")(show_kernels)
    try:
        app.cli(prog="weft", description="Distributed training operations, measured and simulated.")
    except (ValueError, TypeError) as error:
        print(f"weft: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped before anything was measured", file=sys.stderr)
        sys.exit(130)
