"""`weft bench linear-attention`: the local kernel against a matmul, and the ranks against what people use today."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.bench.linear_attention import gpu
from weft.bench.linear_attention.baselines import Baseline, How, Segments, fla
from weft.bench.ranks import RankPool, describe_cases, describe_ledgers, fill_table
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, Sample, examine, forward_and_backward, take_turns, use_threads
from weft.comm import Axis
from weft.comm.wire import SoloWire
from weft.ops.linear_attention import linear_attention
from weft.ops.scan import METHODS, Form
from weft.world import Machine, VirtualWorld
from weft.world.machine import PRESETS

HEADS, DIM, CHUNK = 8, 64, 64
PRODUCTS = 14  # of chunk x chunk x dim in forward and backward: see `flops`
VIRTUAL_TOKENS = 1024
H100_TOKENS, H100_HEADS, H100_DIM = 4096, 16, 128
MACHINE = Machine(latency=10e-6, bandwidth=25e9, flops=100e12, memory_bandwidth=1.5e12)
KERNELS = ("weft, no decay", "weft, constant decay", "weft, scalar gate")
MATMUL, NAIVE, LOCAL, OURS = "matmul", "fla naive chunk", "no communication", "weft auto"

RANK_COLUMNS = (
    Column("case", "ranks"),
    Column("milliseconds", "ms", "{:.1f}"),
    Column("to_local", "x local work", "{:.3f}", lambda m: m.times(LOCAL)),
    Column("to_weft", "x weft", "{:.3f}", lambda m: m.times(OURS)),
    Column("bytes_sent", "bytes sent", "{:,}"),
    Column("rounds", "rounds"),
    Column("peak_megabytes", "peak MB", "{:.0f}"),
)
VIRTUAL_COLUMNS = (
    Column("case", "virtual ranks"),
    Column("microseconds", "virtual us", "{:.0f}", lambda m: 1e3 * m.milliseconds),
    Column("to_local", "x local work", "{:.2f}", lambda m: m.times(LOCAL)),
    Column("to_weft", "x weft", "{:.2f}", lambda m: m.times(OURS)),
    Column("bytes_sent", "bytes sent", "{:,}"),
    Column("rounds", "rounds"),
)


def kernel_columns(tokens: int) -> tuple[Column, ...]:
    """Those of the kernel on so many tokens; the FLOPs of a product of 1024 x 1024 matrices are the measure."""
    percent = 100 * flops(tokens) / (2 * 1024**3)
    return (
        Column("case", "one process, one thread"),
        Column("milliseconds", "ms", "{:.1f}"),
        Column("percent_of_matmul", "% of matmul rate", "{:.0f}", lambda m: percent * m.faster_than(MATMUL)),
        Column("times_faster", "x faster than fla naive", "{:.1f}", lambda m: m.faster_than(NAIVE)),
    )


def flops(tokens: int) -> int:
    """Of the algorithm at chunk 64: 4 products for each chunk and head forward, 10 backward (two of them again)."""
    return PRODUCTS * 2 * CHUNK * CHUNK * DIM * (tokens // CHUNK) * HEADS


def run(
    pool: RankPool, report: Report, repeats: int, tokens: int, virtual_ranks: int, h100_ranks: Sequence[int]
) -> None:
    """Measure the kernel and the ranks; a table's rows are kept as far as they were measured. Then simulate."""
    shape = f"H{HEADS} K=V={DIM} fp32, forward + backward"
    report.tables["kernel"] = Layout(f"the chunked kernel, B1 T{2 * tokens} {shape}", kernel_columns(2 * tokens))
    report.tables["ranks"] = Layout(f"{pool.size} ranks of T{tokens}, scalar gate, {shape}", RANK_COLUMNS)
    with report.progress(2 * repeats, "linear attention") as advance:
        take = partial(pool.run, sample_kernel, tokens)
        fill_table(report, "kernel", take, repeats, advance, {kernel: {} for kernel in (*KERNELS, NAIVE)})
        facts = describe_cases(pool.run(examine, make_cases, tokens))
        take = partial(pool.run, take_turns, make_cases, [tokens], 1)
        fill_table(report, "ranks", take, repeats, advance, facts)
    if pool.reports:
        title = f"{virtual_ranks} ranks of T{VIRTUAL_TOKENS} in virtual time: 10 us, 25 GB/s, 100 TFLOP/s, 1.5 TB/s"
        report.tables["virtual"] = Layout(title, VIRTUAL_COLUMNS)
        simulate(report, "virtual", virtual_ranks, MACHINE, lambda axis: make_cases(axis, VIRTUAL_TOKENS, "meta"))
        shape = f"T{H100_TOKENS} H{H100_HEADS} K=V={H100_DIM} bf16, scalar gate"
        where = "in virtual time with the Triton kernels"
        for count in h100_ranks:
            title = f"{count} H100 of {shape}, {where}: 10 us, 50 GB/s, 495 TFLOP/s, 3.35 TB/s"
            report.tables[f"h100, {count} ranks"] = Layout(title, VIRTUAL_COLUMNS)
            simulate(report, f"h100, {count} ranks", count, PRESETS["h100"], _h100_cases)
        gpu.run(report, repeats)


def _h100_cases(axis: Axis) -> dict[str, Case]:
    """As on a GPU: Triton's kernels, which meta tensors only count."""
    return make_cases(axis, H100_TOKENS, "meta", H100_HEADS, H100_DIM, torch.bfloat16, "triton")


def simulate(
    report: Report, table: str, ranks: int, machine: Machine, cases: Callable[[Axis], dict[str, Case]]
) -> None:
    """The same cases on many ranks in virtual time, where the length of a chain shows."""
    methods = {f"weft {method}" for method in METHODS}
    names = [name for name in cases(Axis.over(SoloWire())) if name not in methods]
    world = VirtualWorld(ranks, machine)
    results = {name: world.run(lambda axis, name=name: cases(axis)[name]()) for name in names}  # type: ignore[misc]
    elapsed = {name: Sample(result.elapsed or 0.0) for name, result in results.items()}
    facts = {name: describe_ledgers(result.ledgers) for name, result in results.items()}
    fill_table(report, table, lambda turn: [elapsed], 1, lambda: None, facts, warm_ups=0)


def _inputs(
    tokens: int, seed: int, device: str = "cpu", heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v in ``dtype`` and a scalar gate in fp32."""
    make = None if device == "meta" else torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, tokens, heads, dim, generator=make, device=device).to(dtype) for _ in range(3)]
    gate = -0.05 * torch.rand(1, tokens, heads, generator=make, device=device)
    return [t.requires_grad_() for t in [*tensors, gate]]


def _kernel_cases(tokens: int) -> dict[str, Case]:
    """The kernel by decay class, fla's naive chunked op if it is installed, and a matmul."""
    alone = Axis.over(SoloWire())
    inputs = _inputs(2 * tokens, seed=0)
    constant = torch.full((HEADS,), -0.05).requires_grad_()
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    cases: dict[str, Case] = {MATMUL: lambda: a @ b}
    for name, tensors in zip(KERNELS, (inputs[:3], [*inputs[:3], constant], inputs), strict=True):
        cases[name] = forward_and_backward(lambda *t: linear_attention(*t, group=alone)[0], tensors)
    # Of fla's chunked ops the one in plain PyTorch runs on a CPU.
    if naive := fla("fla.ops.simple_gla.naive", "naive_chunk_simple_gla"):
        cases[NAIVE] = forward_and_backward(lambda *t: naive(*t)[0], inputs)
    return cases


def sample_kernel(axis: Axis, tokens: int, turn: int) -> dict[str, Sample]:
    """On rank 0, alone, with one thread."""
    if axis.rank > 0:
        return {}
    with use_threads(1):
        return take_turns(Axis.over(SoloWire()), lambda _: _kernel_cases(tokens), [], 1, turn)


def make_cases(
    axis: Axis, tokens: int, device: str = "cpu", heads: int = HEADS, dim: int = DIM,
    dtype: torch.dtype = torch.float32, backend: str = "torch",
) -> dict[str, Case]:  # fmt: skip
    """Weft's methods, the baselines and the same work without communication."""
    inputs = _inputs(tokens, axis.rank, device, heads, dim, dtype)
    alone = Axis.over(SoloWire())
    blocks = max(2, Form.of(torch.empty(heads, dim, dim, device="meta")).default_blocks)

    def weft_by(method: str, group: Axis) -> Case:
        attend = partial(linear_attention, method=method, backend=backend, group=group)
        return forward_and_backward(lambda *t: attend(*t)[0], inputs)

    cases = {LOCAL: weft_by("auto", alone), OURS: weft_by("auto", axis)}
    cases |= {f"weft {method}": weft_by(method, axis) for method in METHODS}
    here = Segments((tokens,), axis.rank > 0, axis.rank + 1 < axis.size)
    for name, schedule in (
        ("LASP: ring, receive first", "lasp"),
        ("LASP-2: blocking all-gather", "lasp2"),
        ("ZeCO: chain in blocks", "zeco"),
    ):
        how = How(schedule, here, dim**-0.5, backend, blocks)
        cases[name] = forward_and_backward(lambda *t, how=how: Baseline.apply(*t, axis, how), inputs)
    return cases
