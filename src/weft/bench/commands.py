"""The subcommands of ``weft bench``. A benchmark, and torch with it, is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from weft.bench.flags import check_at_least, check_file
from weft.bench.optimizer_commands import bench_rekls, bench_step, bench_step_orders, bench_train


def bench_scan(ranks: int | None = None, json: Path | None = None, repeats: int = 15, calls: int = 20) -> None:
    """Every scan schedule at several state sizes on real processes, beside its hand-written version.

    A time is the median over repeats of the slowest rank. "x by hand" compares with the same rounds and bytes
    written straight on Gloo. Bytes (of the rank that sends most) and rounds are counted by the ledger. The error
    is against a serial fold in fp64. Ctrl-C keeps what was measured; under torchrun its ranks are used.

    Args:
        ranks: Local processes to start (4 if left out). Leave it out under torchrun.
        json: Write the rows here, with a header of machine, versions and commit.
        repeats: Samples of each case.
        calls: Calls in one sample.
    """
    check_at_least(1, repeats=repeats, calls=calls)
    check_file("--json", json)
    from weft.bench.scan import cases as scan
    from weft.bench.suite import run_on_ranks

    facts = {"repeats": repeats, "calls": calls}
    run_on_ranks("scan", ranks, json, facts, scan.layouts, lambda w, report: scan.run(w, report, repeats, calls))


def bench_linear_attention(
    ranks: int = 2, tokens: int = 4096, virtual_ranks: int = 64, h100_ranks: tuple[int, ...] = (64, 256),
    json: Path | None = None, repeats: int = 7,
) -> None:  # fmt: skip
    """Linear attention: the local kernel beside a matmul, and ranks beside LASP, LASP-2 and ZeCO.

    The first table counts the FLOPs of the algorithm at chunk 64 on one thread. The second compares with the same
    local work without communication, on as many processes. The baselines use weft's own kernels and differ in what
    they send and when they wait. Peak memory is what a forward and backward add to the resident set. With a GPU the
    last table has the Triton kernels on it, beside those of flash-linear-attention if that is installed.

    Args:
        ranks: Local processes to start. Under torchrun, the number it started.
        tokens: Tokens a rank holds; the kernel is measured on twice as many.
        virtual_ranks: Ranks of the table in virtual time.
        h100_ranks: Ranks of the tables in virtual time of H100s with the Triton kernels, one table for each.
        json: Write the rows here, with a header of machine, versions and commit.
        repeats: Samples of each case.
    """
    check_at_least(1, tokens=tokens, virtual_ranks=virtual_ranks, h100_ranks=h100_ranks, repeats=repeats)
    check_file("--json", json)
    from weft.bench.linear_attention import cases as linear_attention
    from weft.bench.suite import run_on_ranks

    run_on_ranks(
        "linear-attention", ranks, json, {"tokens": tokens, "repeats": repeats},
        lambda size: linear_attention.layouts(size, tokens, virtual_ranks, h100_ranks),
        lambda world, report: linear_attention.run(world, report, repeats, tokens, virtual_ranks, h100_ranks),
    )  # fmt: skip


def bench_attention(ranks: int = 2, tokens: int = 4096, json: Path | None = None, repeats: int = 7) -> None:
    """Context-parallel softmax attention beside one process, a strided all-gather, rings and Ulysses.

    "x one process" compares with the whole sequence in one process that has a thread for every rank, "x its own work"
    with the same layout when all keys are already there. The baselines use weft's own block kernels and differ in what
    they send and when they wait. Peak memory is what a forward and backward add to the resident set.

    Args:
        ranks: Local processes to start. Under torchrun, the number it started.
        tokens: Tokens of the whole sequence.
        json: Write the rows here, with a header of machine, versions and commit.
        repeats: Samples of each case.
    """
    check_at_least(1, tokens=tokens, repeats=repeats)
    check_file("--json", json)
    from weft.bench.attention import cases as attention
    from weft.bench.suite import run_on_ranks

    run_on_ranks(
        "attention", ranks, json, {"tokens": tokens, "repeats": repeats}, lambda size: attention.layouts(size, tokens),
        lambda world, report: attention.run(world, report, repeats, tokens),
    )  # fmt: skip


def bench_rows(
    ranks: int | None = None, json: Path | None = None, repeats: int = 5, warm_steps: int = 30, smaller: int = 1
) -> None:
    """Training steps of large embedding tables: weft's rows beside dense and sparse data parallelism.

    A step is lookup, backward and Adam. CPU time is summed over the ranks; "x push" compares it, sample by sample, with
    the best a user has today: touched rows to owners, dense Adam there, and all rows back. Bytes (of the rank that
    sends most) are counted by the ledger; density is the share of all rows that a rank needs. Every method uses the
    same fused Adam. "Dense steps" are those of "auto", made to step whole shards where most rows are touched.

    Args:
        ranks: Local processes to start (4 if left out). Leave it out under torchrun.
        json: Write the rows here, with a header of machine, versions and commit.
        repeats: Samples of each case.
        warm_steps: Steps that weft's tables are trained before: rows left alone must be caught up, as in a long run.
        smaller: Divide tables and ids by this, for machines with less than 24 GB of memory.
    """
    check_at_least(1, repeats=repeats, smaller=smaller)
    check_at_least(0, warm_steps=warm_steps)
    check_file("--json", json)
    from weft.bench.rows import rows
    from weft.bench.suite import run_on_ranks

    run_on_ranks(
        "rows", ranks, json, {"repeats": repeats, "warm_steps": warm_steps}, rows.layouts,
        lambda world, report: rows.run(world, report, repeats, warm_steps, smaller),
    )  # fmt: skip


def bench_network(
    latency: float, bandwidth: float, ranks: int | None = None, tokens: int = 1024, json: Path | None = None,
    repeats: int = 5,
) -> None:  # fmt: skip
    """Scans and both attentions on links of a known delay and rate, beside their virtual time on such links.

    "x gloo" is the measured time over the virtual time with Gloo's rule that a message waits for the word that its
    receive is posted, "x ideal" over that of a network without it. All ranks must be on one host, whose clock they
    share. Local work is measured without communication.

    Args:
        latency: Seconds a message is on its way, one way.
        bandwidth: Bytes per second of a rank's link.
        ranks: Local processes to start (4 if left out). Leave it out under torchrun.
        tokens: Tokens a rank holds of linear attention; a quarter of it of softmax attention.
        json: Write the rows here, with a header of machine, versions and commit.
        repeats: Samples of each case.
    """
    check_at_least(1, tokens=tokens, repeats=repeats)
    check_file("--json", json)
    from weft.bench.scan import network
    from weft.bench.suite import run_on_ranks
    from weft.world import Machine

    machine = Machine(latency, bandwidth)
    run_on_ranks(
        "network", ranks, json, {"latency": latency, "bandwidth": bandwidth, "tokens": tokens},
        lambda size: network.layouts(size, machine),
        lambda world, report: network.run(world, report, machine, repeats, tokens),
    )  # fmt: skip


BENCHES: dict[str, Callable[..., None]] = {
    "scan": bench_scan,
    "linear-attention": bench_linear_attention,
    "attention": bench_attention,
    "rows": bench_rows,
    "rekls": bench_rekls,
    "step": bench_step,
    "step-orders": bench_step_orders,
    "network": bench_network,
    "train": bench_train,
}
