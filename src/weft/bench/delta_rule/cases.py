"""`weft bench delta-rule`: the local kernel against a matmul and fla, and ranks against what people use today."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from weft.bench.delta_rule.account import COLUMNS, account, count_work, describe_work
from weft.bench.delta_rule.baselines import by_gather, by_heads, with_nothing_sent
from weft.bench.linear_attention.baselines import fla
from weft.bench.linear_attention.cases import LOCAL, MATMUL, OURS, RANK_COLUMNS, VIRTUAL_COLUMNS, simulate
from weft.bench.ranks import RankPool, describe_cases, fill_table
from weft.bench.report import Column, Layout, Report
from weft.bench.timing import Case, Sample, examine, forward_and_backward, take_turns, use_threads
from weft.comm import Axis
from weft.comm.wire import SoloWire
from weft.ops.delta_rule import delta_rule
from weft.ops.scan import METHODS
from weft.world.machine import PRESETS

CHUNK = 64  # of the count of FLOPs, not of the kernels
DIMS = (128, 64)
H100_TOKENS, H100_HEADS = 2048, 32
MODELS = {"gated delta net": "scalar", "DeltaNet": "none", "KDA": "vector"}
PASSES = ("forward", "forward + backward")
ALL_TOKENS, UNSENT = "one process, all tokens", "weft's work, nothing sent"
GATHER, HEADS_ALIKE = "fla's recipe: blocking all-gather", "all-to-all over heads"
NAIVE = ", fla naive chunk"


def kernel_columns(tokens: int, heads: int) -> tuple[Column, ...]:
    """Those of the kernel; the FLOPs of a product of 1024 x 1024 matrices are the measure."""

    def percent(m: Any) -> float | None:
        faster = m.faster_than(MATMUL)
        dim, both = next(dim for dim in DIMS if f"K=V={dim}," in m.case), m.case.endswith(PASSES[1])
        return None if faster is None else 100 * faster * flops(tokens, heads, dim, both) / (2 * 1024**3)

    return (
        Column("case", "one process, one thread"),
        Column("milliseconds", "ms", "{:.1f}"),
        Column("percent_of_matmul", "% of matmul rate", "{:.0f}", percent),
        Column("times_faster", "x faster than fla naive", "{:.1f}", lambda m: m.faster_than(m.case + NAIVE)),
        Column("naive_percent", "fla's own %", "{:.0f}", lambda m: _share(percent(m), m.faster_than(m.case + NAIVE))),
    )


def _share(percent: float | None, faster: float | None) -> float | None:
    return None if percent is None or faster is None else percent / faster


def flops(tokens: int, heads: int, dim: int, both: bool) -> float:
    """Of the algorithm at chunk 64 and K = V = ``dim``; of a triangle its half.

    Forward 5 products of C x C x K and 3 of C x K x V for each chunk and head (4.50 M multiply-adds at K = V = 128),
    backward 12 and 8 (4 and 2 of them again), and each time a triangular inverse.
    """
    triangles, squares, inverses = (17, 11, 2) if both else (5, 3, 1)
    adds = triangles * CHUNK * CHUNK * dim / 2 + squares * CHUNK * dim * dim + inverses * CHUNK**3 / 6
    return 2 * adds * heads * tokens / CHUNK


RANKS = (
    *RANK_COLUMNS[:3],
    Column("to_unsent", "x its work", "{:.3f}", lambda m: m.times(UNSENT)),
    RANK_COLUMNS[3],
    Column("to_one_process", "x faster than one process", "{:.2f}", lambda m: m.faster_than(ALL_TOKENS)),
    *RANK_COLUMNS[4:],
    Column("gflop", "GFLOP of a rank", "{:.2f}"),
    Column("calls", "calls of operators", "{:,}"),
)


def run(pool: RankPool, report: Report, repeats: int, tokens: int, heads: int, h100_ranks: Sequence[int]) -> None:
    """Measure the kernel and the ranks; a table's rows are kept as far as they were measured. Then simulate."""
    if tokens % CHUNK or tokens % pool.size:
        where = f"{CHUNK} (fla's naive operations take whole chunks) and of the {pool.size} ranks"
        raise ValueError(f"bench delta-rule: --tokens {tokens} must be a multiple of {where}")
    if pool.reports and _naive("scalar") is None:
        print("fla-core is not installed: no rows of its naive operations", file=sys.stderr)
    shape = f"B1 H{heads} fp32"
    report.tables["kernel"] = Layout(f"the chunked kernel, {shape} T{tokens}", kernel_columns(tokens, heads))
    with report.progress((1 + len(DIMS)) * repeats, "delta rule") as advance:
        rows: dict[str, dict[str, Any]] = {
            name: {} for name in kernel_cases(tokens, heads, "meta") if name != MATMUL and not name.endswith(NAIVE)
        }
        fill_table(report, "kernel", partial(pool.run, sample_kernel, tokens, heads), repeats, advance, rows)
        for dim in DIMS:
            table = f"ranks, {dim}"
            title = f"{pool.size} ranks of T{tokens // pool.size}, one thread each, gated delta net, {shape} K=V={dim}"
            report.tables[table] = Layout(f"{title}, forward + backward", RANKS)
            args = [tokens // pool.size, heads, dim]
            facts = describe_cases(pool.run(examine, make_cases, *args))
            work = describe_work(pool.run(count_work, make_cases, *args))
            facts = {case: {**found, **work[case]} for case, found in facts.items()}
            fill_table(report, table, partial(pool.run, sample_ranks, args), repeats, advance, facts)
    if pool.reports:
        report.tables["operators"] = Layout(f"where the time of KDA's kernel goes, {shape} T{tokens} K=V=64", COLUMNS)
        with use_threads(1):
            for row in (row for way in PASSES for row in _account(tokens, heads, way)):
                report.add("operators", row)
        for count in h100_ranks:
            shape = f"T{H100_TOKENS} H{H100_HEADS} K=V=128 bf16, gated delta net"
            title = f"{count} H100 of {shape}, in virtual time: 10 us, 50 GB/s, 495 TFLOP/s, 3.35 TB/s"
            report.tables[f"h100, {count} ranks"] = Layout(title, VIRTUAL_COLUMNS)
            simulate(report, f"h100, {count} ranks", count, PRESETS["h100"], _h100_cases(count))


def _account(tokens: int, heads: int, way: str) -> list[dict[str, Any]]:
    case = kernel_cases(tokens, heads)[f"KDA, K=V=64, {way}"]
    return account(way, case, flops(tokens, heads, 64, way == PASSES[1]))


def _h100_cases(ranks: int) -> Callable[[Axis], dict[str, Case]]:
    def cases(axis: Axis) -> dict[str, Case]:
        made = make_cases(axis, H100_TOKENS, H100_HEADS, 128, "meta", torch.bfloat16)
        # Heads that cannot be dealt to so many ranks have no row; nor has what is one process's.
        absent = {ALL_TOKENS} | ({HEADS_ALIKE} if H100_HEADS % ranks else set())
        return {name: case for name, case in made.items() if name not in absent}

    return cases


def make_inputs(
    tokens: int, seed: int, gate: str, heads: int, dim: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """q, k, v in ``dtype``, k of length 1; beta and, if there is one, the gate in fp32."""
    make = None if device == "meta" else torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, tokens, heads, dim, generator=make, device=device) for _ in range(3))
    beta = torch.rand(1, tokens, heads, generator=make, device=device)
    given = [normalize(q, dim=-1).to(dtype), normalize(k, dim=-1).to(dtype), v.to(dtype), beta]
    if gate != "none":
        shape = (1, tokens, heads, dim)[: 3 if gate == "scalar" else 4]
        given.append(-0.05 * torch.rand(shape, generator=make, device=device))
    return [x.requires_grad_() for x in given]


def kernel_cases(tokens: int, heads: int, device: str = "cpu") -> dict[str, Case]:
    """The kernel by model, size and pass, fla's naive chunk operation behind each, and a matmul."""
    alone = Axis.over(SoloWire())
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    cases: dict[str, Case] = {MATMUL: lambda: a @ b}
    for (model, gate), dim in itertools.product(MODELS.items(), DIMS):
        inputs, naive = make_inputs(tokens, 0, gate, heads, dim, device), _naive(gate)
        ours = {"": lambda *t: delta_rule(*t, group=alone)[0]}
        for suffix, attend in (ours if naive is None else {**ours, NAIVE: naive}).items():
            name = f"{model}, K=V={dim}, "
            cases[f"{name}{PASSES[0]}{suffix}"] = partial(_forward, attend, inputs)
            cases[f"{name}{PASSES[1]}{suffix}"] = forward_and_backward(attend, inputs)
    return cases


def _forward(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        attend(*inputs)


def _naive(gate: str) -> Callable[..., Tensor] | None:
    """fla's chunk operation in plain PyTorch at the chunk size it is called with there, on weft's arguments."""
    if gate == "none":
        chunkwise = fla("fla.ops.delta_rule.naive", "delta_rule_chunkwise")
        return chunkwise and (lambda *t: chunkwise(*(x.transpose(1, 2) for x in t))[0].transpose(1, 2))
    if gate == "scalar":
        gated = fla("fla.ops.gated_delta_rule.naive", "naive_chunk_gated_delta_rule")
        return gated and (lambda q, k, v, beta, g: gated(q, k, v, g, beta)[0])
    kda = fla("fla.ops.kda.naive", "naive_chunk_kda")
    return kda and (lambda q, k, v, beta, g: kda(q, k, v, g, beta)[0])


def sample_kernel(axis: Axis, tokens: int, heads: int, turn: int) -> dict[str, Sample]:
    """On rank 0, alone, with one thread."""
    if axis.rank > 0:
        return {}
    with use_threads(1):
        return take_turns(Axis.over(SoloWire()), lambda _: kernel_cases(tokens, heads), [], 1, turn)


def sample_ranks(axis: Axis, args: Sequence[Any], turn: int) -> dict[str, Sample]:
    """On all ranks, with one thread each."""
    with use_threads(1):
        return take_turns(axis, make_cases, args, 1, turn)


def make_cases(
    axis: Axis, tokens: int, heads: int, dim: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Case]:
    """Weft's methods, the recipes, its work and one rank's without communication, on rank 0 all ranks' tokens."""
    inputs = make_inputs(tokens, axis.rank, "scalar", heads, dim, device, dtype)
    alone = Axis.over(SoloWire())

    def weft_by(method: str, group: Axis, given: list[Tensor]) -> Case:
        return forward_and_backward(lambda *t: delta_rule(*t, method=method, group=group)[0], given)

    cases = {LOCAL: weft_by("auto", alone, inputs), OURS: weft_by("auto", axis, inputs)}
    cases[UNSENT] = forward_and_backward(partial(with_nothing_sent, axis), inputs)
    cases |= {f"weft {method}": weft_by(method, axis, inputs) for method in METHODS}
    cases[GATHER] = forward_and_backward(partial(by_gather, axis), inputs)
    if heads % axis.size == 0:
        cases[HEADS_ALIKE] = forward_and_backward(partial(by_heads, axis), inputs)
    whole = make_inputs(tokens * axis.size if device == "cpu" else 0, 0, "scalar", heads, dim, device, dtype)
    cases[ALL_TOKENS] = weft_by("auto", alone, whole) if axis.rank == 0 else lambda: None
    return cases
