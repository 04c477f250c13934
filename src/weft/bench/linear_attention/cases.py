"""`weft bench linear-attention`: the local kernel against a matmul, and the ranks against what people use today."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.bench.linear_attention import gpu
from weft.bench.linear_attention.baselines import Baseline, fla
from weft.bench.ranks import RankPool, by_case, take_samples
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, examine, take_turns
from weft.comm import Axis, Ledger
from weft.comm.wire import SoloWire
from weft.ops.linear_attention import linear_attention
from weft.ops.scan import METHODS, Form
from weft.world import Machine, VirtualWorld
from weft.world.machine import PRESETS

HEADS, DIM, CHUNK = 8, 64, 64
PRODUCTS = 14  # of chunk x chunk x dim in forward and backward: see `flops`

KERNEL_COLUMNS = (
    Column("case", "one process, one thread", "{}"),
    Column("milliseconds", "ms", "{:.1f}"),
    Column("percent_of_matmul", "% of matmul rate", "{:.0f}"),
    Column("times_faster", "x faster than fla naive", "{:.1f}"),
)
RANK_COLUMNS = (
    Column("case", "ranks", "{}"),
    Column("milliseconds", "ms", "{:.1f}"),
    Column("to_local", "x local work", "{:.3f}"),
    Column("to_weft", "x weft", "{:.3f}"),
    Column("bytes_sent", "bytes sent", "{:,}"),
    Column("rounds", "rounds", "{}"),
    Column("peak_megabytes", "peak MB", "{:.0f}"),
)


VIRTUAL_TOKENS = 1024
H100_TOKENS, H100_HEADS, H100_DIM = 4096, 16, 128
MACHINE = Machine(latency=10e-6, bandwidth=25e9, flops=100e12, memory_bandwidth=1.5e12)
VIRTUAL_COLUMNS = (
    Column("case", "virtual ranks", "{}"),
    Column("microseconds", "virtual us", "{:.0f}"),
    Column("to_local", "x local work", "{:.2f}"),
    Column("to_weft", "x weft", "{:.2f}"),
    Column("bytes_sent", "bytes sent", "{:,}"),
    Column("rounds", "rounds", "{}"),
)


def layouts(ranks: int, tokens: int, virtual_ranks: int, h100_ranks: Sequence[int]) -> dict[str, Layout]:
    """The tables of this benchmark."""
    fused = f"T{H100_TOKENS} H{H100_HEADS} K=V={H100_DIM} bf16, scalar gate, in virtual time with the Triton kernels"
    shape = f"H{HEADS} K=V={DIM} fp32, forward + backward"
    return (
        {
            "kernel": Layout(f"the chunked kernel, B1 T{2 * tokens} {shape}", KERNEL_COLUMNS),
            "ranks": Layout(f"{ranks} ranks of T{tokens}, scalar gate, {shape}", RANK_COLUMNS),
            "virtual": Layout(
                f"{virtual_ranks} ranks of T{VIRTUAL_TOKENS} in virtual time: 10 us, 25 GB/s, 100 TFLOP/s, 1.5 TB/s",
                VIRTUAL_COLUMNS,
            ),
        }
        | {
            f"h100, {count} ranks": Layout(
                f"{count} H100 of {fused}: 10 us, 50 GB/s, 495 TFLOP/s, 3.35 TB/s", VIRTUAL_COLUMNS
            )
            for count in h100_ranks
        }
        | {"gpu": gpu.layout()}
    )


def flops(tokens: int) -> int:
    """Of the algorithm at chunk 64: 4 products for each chunk and head forward, 10 backward (two of them again)."""
    return PRODUCTS * 2 * CHUNK * CHUNK * DIM * (tokens // CHUNK) * HEADS


def run(
    pool: RankPool, report: Report, repeats: int, tokens: int, virtual_ranks: int, h100_ranks: Sequence[int]
) -> None:
    """Measure both tables; a table's rows are kept as far as they were measured."""
    with report.progress(2 * repeats, "linear attention") as advance:
        for table, measure, rows in (
            ("kernel", sample_kernel, _kernel_rows),
            ("ranks", sample_ranks, _rank_rows),
        ):
            samples: list[dict[str, float]] = []
            facts = pool.run(inspect, tokens) if table == "ranks" else []
            try:
                for seconds in take_samples(pool, measure, [tokens], repeats, advance):
                    samples.append(seconds)
            finally:
                for row in rows(by_case(samples), facts, tokens) if samples else ():
                    report.add(table, row)
    if pool.reports:
        simulate(report, "virtual", virtual_ranks, MACHINE, lambda axis: _rank_cases(axis, VIRTUAL_TOKENS, "meta"))
        for count in h100_ranks:
            simulate(report, f"h100, {count} ranks", count, PRESETS["h100"], _h100_cases)
        gpu.run(report, repeats)


def _h100_cases(axis: Axis) -> dict[str, Case]:
    """As on a GPU: Triton's kernels, which meta tensors only count."""
    return _rank_cases(axis, H100_TOKENS, "meta", H100_HEADS, H100_DIM, torch.bfloat16, "triton")


def simulate(
    report: Report, table: str, ranks: int, machine: Machine, cases: Callable[[Axis], dict[str, Case]]
) -> None:
    """The same cases on many ranks in virtual time, where the length of a chain shows."""
    results = {}
    methods = {f"weft {method}" for method in METHODS}
    for name in (name for name in cases(Axis.over(SoloWire())) if name not in methods):

        def program(axis: Axis, name: str = name) -> None:
            cases(axis)[name]()

        results[name] = VirtualWorld(ranks, machine).run(program)
    elapsed = {name: result.elapsed or 0.0 for name, result in results.items()}
    for name, result in results.items():
        report.add(table, {
            "case": name,
            "microseconds": elapsed[name] * 1e6,
            "to_local": elapsed[name] / elapsed["no communication"],
            "to_weft": elapsed[name] / elapsed["weft auto"],
            "bytes_sent": max(ledger.bytes_sent for ledger in result.ledgers),
            "rounds": Ledger.merge(result.ledgers).rounds,
        })  # fmt: skip


def _kernel_rows(samples: dict[str, list[float]], facts: list[Any], tokens: int) -> list[dict[str, Any]]:
    rate = [2 * 1024**3 / seconds for seconds in samples["matmul"]]
    rows = []
    for name in (name for name in samples if name != "matmul"):
        shares = [flops(2 * tokens) / s / r for s, r in zip(samples[name], rate, strict=True)]
        row = {"case": name, "milliseconds": statistics.median(samples[name]) * 1e3,
               "percent_of_matmul": 100 * statistics.median(shares)}  # fmt: skip
        if "fla naive chunk" in samples:
            naive = zip(samples["fla naive chunk"], samples[name], strict=True)
            row["times_faster"] = statistics.median(theirs / ours for theirs, ours in naive)
        rows.append(row)
    return rows


def _rank_rows(samples: dict[str, list[float]], facts: list[Any], tokens: int) -> list[dict[str, Any]]:
    def ratio(name: str, base: str) -> float:
        return statistics.median(a / b for a, b in zip(samples[name], samples[base], strict=True))

    rows = []
    for name in samples:
        ledgers = [fact[name][0] for fact in facts]
        peaks = [fact[name][1] for fact in facts if fact[name][1] is not None]
        rows.append({
            "case": name,
            "milliseconds": statistics.median(samples[name]) * 1e3,
            "to_local": ratio(name, "no communication"),
            "to_weft": ratio(name, "weft auto"),
            "bytes_sent": max(ledger.bytes_sent for ledger in ledgers),
            "rounds": Ledger.merge(ledgers).rounds,
            "peak_megabytes": max(peaks) / 1e6 if peaks else None,
        })  # fmt: skip
    return rows


def _inputs(
    tokens: int, seed: int, device: str = "cpu", heads: int = HEADS, dim: int = DIM, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v in ``dtype`` and a scalar gate in fp32."""
    make = None if device == "meta" else torch.Generator().manual_seed(seed)
    tensors = [torch.randn(1, tokens, heads, dim, generator=make, device=device).to(dtype) for _ in range(3)]
    gate = -0.05 * torch.rand(1, tokens, heads, generator=make, device=device)
    return [t.requires_grad_() for t in [*tensors, gate]]


def _step(attend: Callable[..., Tensor], inputs: list[Tensor]) -> Case:
    """Forward and backward of every input."""
    grad = torch.ones_like(inputs[2])
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad)


def sample_kernel(axis: Axis, tokens: int, turn: int) -> dict[str, float]:
    """On rank 0, alone: the kernel by decay class, fla's naive chunked op if it is installed, and a matmul."""
    if axis.rank > 0:
        return {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = Axis.over(SoloWire())
    inputs = _inputs(2 * tokens, seed=0)
    q, k, v = inputs[:3]

    def attend(*tensors: Tensor) -> Tensor:
        return linear_attention(*tensors, group=alone)[0]

    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    constant = torch.full((HEADS,), -0.05).requires_grad_()
    cases: dict[str, Case] = {
        "matmul": lambda: a @ b,
        "weft, no decay": _step(attend, [q, k, v]),
        "weft, constant decay": _step(attend, [q, k, v, constant]),
        "weft, scalar gate": _step(attend, inputs),
    }
    # Of fla's chunked ops the one in plain PyTorch runs on a CPU.
    if naive := fla("fla.ops.simple_gla.naive", "naive_chunk_simple_gla"):
        cases["fla naive chunk"] = _step(lambda *t: naive(*t)[0], inputs)
    try:
        return take_turns(alone, cases, turn=turn)
    finally:
        torch.set_num_threads(threads)


def _rank_cases(
    axis: Axis, tokens: int, device: str = "cpu", heads: int = HEADS, dim: int = DIM,
    dtype: torch.dtype = torch.float32, backend: str = "torch",
) -> dict[str, Case]:  # fmt: skip
    inputs = _inputs(tokens, axis.rank, device, heads, dim, dtype)
    alone = Axis.over(SoloWire())
    blocks = max(2, Form.of(torch.empty(heads, dim, dim, device="meta")).default_blocks)

    def weft_by(method: str, group: Axis) -> Case:
        return _step(lambda *t: linear_attention(*t, method=method, backend=backend, group=group)[0], inputs)

    cases = {"no communication": weft_by("auto", alone), "weft auto": weft_by("auto", axis)}
    cases |= {f"weft {method}": weft_by(method, axis) for method in METHODS}
    for name, schedule in (
        ("LASP: ring, receive first", "lasp"),
        ("LASP-2: blocking all-gather", "lasp2"),
        ("ZeCO: chain in blocks", "zeco"),
    ):
        cases[name] = _step(lambda *t, s=schedule: Baseline.apply(*t, axis, s, blocks, backend), inputs)
    return cases


def inspect(axis: Axis, tokens: int) -> dict[str, tuple[Ledger, int | None]]:
    """What each case sends, and its memory."""
    return examine(_rank_cases(axis, tokens))


def sample_ranks(axis: Axis, tokens: int, turn: int) -> dict[str, float]:
    """One interleaved sample of weft's methods, the baselines and the same work without communication."""
    return take_turns(axis, _rank_cases(axis, tokens), turn=turn)
