"""The subcommands of ``weft bench`` that step a model. A benchmark, and torch with it, is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.bench.flags import check_at_least, check_file


def bench_rekls(
    ranks: int | None = None, json: Path | None = None, repeats: int | None = None, warm_steps: int | None = None,
    widths: tuple[int, ...] | None = None, blocks: int | None = None, quality: bool = False, seeds: int | None = None,
    steps: int | None = None,
) -> None:  # fmt: skip
    """One step of REKLS for the matrices of transformer blocks, beside the replicated tensor-parallel algorithm.

    CPU time is summed over the ranks; "x less CPU" compares it, sample by sample, with the replicated algorithm on as
    many ranks (every rank gathers and computes all), or for data x tensor with two replicas that average gradients
    first. The columns with threads compare the time of the slowest rank with REKLS in one process. Bytes (of the rank
    that sends most) are counted by the ledger; state is that of the rank that keeps most, with bases and roots. "eigh"
    is its share of the CPU time, "busiest" the busiest rank's eigh over the mean.

    With --quality instead: validation losses of AdamW and both variants on two small tasks, and their conditioning.

    Args:
        ranks: Local processes to start (4 if left out). Leave it out under torchrun.
        json: Write the rows here, with a header of machine, versions and commit.
        repeats: Samples of each case (7 if left out).
        warm_steps: Steps before the first sample (4 if left out): factors have their full rank only after a few.
        widths: h of a block (128 and 256 if left out): qkv [3h, h], projection [h, h], up [4h, h], down [h, 4h].
        blocks: How many blocks (2 if left out).
        quality: Train instead, one run on each rank at a time: the runs share nothing.
        seeds: With --quality: runs for each rate (5 if left out); the median counts.
        steps: With --quality: steps of a run (300 if left out).
    """
    speed = {"repeats": repeats, "warm_steps": warm_steps, "widths": widths, "blocks": blocks}
    training = {"seeds": seeds, "steps": steps}
    mine, not_mine = (training, speed) if quality else (speed, training)
    for name in [name for name, value in not_mine.items() if value is not None]:
        word = "cannot be combined with" if quality else "needs"
        raise ValueError(f"--{name.replace('_', '-')} {word} --quality")
    check_at_least(1, repeats=repeats, widths=widths, blocks=blocks, seeds=seeds, steps=steps)
    check_at_least(0, warm_steps=warm_steps)
    check_file("--json", json)
    given: dict[str, Any] = {name: value for name, value in mine.items() if value is not None}
    (_rekls_quality if quality else _rekls_speed)(ranks, json, **given)


def _rekls_speed(
    ranks: int | None, json: Path | None, repeats: int = 7, warm_steps: int = 4, widths: tuple[int, ...] = (128, 256),
    blocks: int = 2,
) -> None:  # fmt: skip
    from weft.bench.matrix import bench
    from weft.bench.suite import run_on_ranks

    run_on_ranks(
        "rekls", ranks, json, {"repeats": repeats, "warm_steps": warm_steps, "blocks": blocks},
        lambda size: bench.layouts(size, blocks),
        lambda world, report: bench.run(world, report, repeats, warm_steps, widths, blocks),
    )  # fmt: skip


def _rekls_quality(ranks: int | None, json: Path | None, seeds: int = 5, steps: int = 300) -> None:
    from weft.bench.matrix import quality
    from weft.bench.suite import run_on_ranks

    run_on_ranks(
        "rekls --quality", ranks, json, {"seeds": seeds, "steps": steps},
        lambda size: quality.layouts(seeds, steps),
        lambda world, report: quality.run(world, report, seeds, steps),
    )  # fmt: skip


def bench_step(
    ranks: int | None = None, json: Path | None = None, repeats: int = 7, warm_steps: int = 4, width: int = 256,
    blocks: int = 2, rows: int = 250_000, vocabulary: int = 4096, tokens: int = 8192, methods: tuple[str, ...] = (),
    latency: float = 50e-6, bandwidth: float = 1.5e9,
) -> None:  # fmt: skip
    """One optimizer step with the exchange of its gradients: overlapped, tuned, in sequence, DDP and ZeRO.

    A step looks the table's rows up, takes gradients in, and ends with new weights on every rank; the computation of
    the blocks, the same for all, is left out. "REKLS" steps matrices with it and the rest with AdamW. The time is that
    of the slowest rank; "x sequence" and "x ZeRO" say, sample by sample, how many times faster a step is than the same
    parts one after the other, and than ZeroRedundancyOptimizer. CPU time is summed over the ranks. Bytes (of the rank
    that sends most) are counted by the kernel for all methods, and by the ledger for weft's. "Exposed" are the waits of
    the rank that waits most. Peak memory is all that a rank needs for the model and three steps.

    Args:
        ranks: Local processes to start (4 if left out); steps are measured on 2 and on 4. Leave it out under torchrun.
        json: Write the rows here, with a header of machine, versions and commit.
        repeats: Samples of each case.
        warm_steps: Steps before the first sample; in the last of them orders are tuned.
        width: h of a block: qkv [3h, h], projection [h, h], up [4h, h], down [h, 4h], two norms.
        blocks: How many blocks.
        rows: Rows of the bigram table, each of h elements.
        vocabulary: Rows of the dense token embeddings.
        tokens: Bigrams that a rank looks up in a step.
        methods: Only those whose names begin so, for example REKLS.
        latency: Seconds of a message on its way, for tuning; about what Gloo makes of a loopback device.
        bandwidth: Bytes/s of a rank's link, for tuning.
    """
    check_at_least(1, repeats=repeats, width=width, blocks=blocks, rows=rows, vocabulary=vocabulary, tokens=tokens)
    check_at_least(0, warm_steps=warm_steps)
    check_file("--json", json)
    from weft.bench.step import step
    from weft.bench.step.runs import Sizes
    from weft.bench.suite import run_on_ranks
    from weft.world import Machine

    sizes, link = Sizes(width, blocks, rows, vocabulary, tokens), Machine(latency, bandwidth)
    run_on_ranks(
        "step", ranks, json, {"repeats": repeats, "warm_steps": warm_steps, **vars(sizes)},
        lambda size: step.layouts(sizes),
        lambda world, report: step.run(world, report, repeats, warm_steps, sizes, methods, link),
    )  # fmt: skip


def bench_step_orders(tries: int = 64, json: Path | None = None) -> None:
    """Orders of one large overlapped step in virtual time: naive, published, default, tuned, and the bound.

    The step itself runs on 8 virtual ranks (matrices as meta tensors, whose operators only count, the table's rows are
    real); its messages and the time of its work are then replayed in other orders. "Exposed" is what a step takes
    beyond the busiest rank's work.

    Args:
        tries: Orders that are tried.
        json: Write the rows here, with a header of machine, versions and commit.
    """
    check_at_least(1, tries=tries)
    check_file("--json", json)
    from weft.bench.report import Report, describe_machine
    from weft.bench.step import orders
    from weft.bench.suite import measure

    report = Report(orders.layouts(), json, True, describe_machine(bench="step-orders", tries=tries))
    measure(report, lambda: orders.run(report, tries))


def bench_train(
    json: Path | None = None, repeats: int = 7, warm_steps: int = 4, length: int = 2048, batch: int = 2,
    width: int = 128, layers: int = 4, rows: int = 250_000,
) -> None:  # fmt: skip
    """Steps of `weft train`: 2 ranks beside one process, what communication costs 4 ranks, and plain pieces.

    The time is that of the slowest rank, the median over samples; ratios are taken sample by sample. CPU time and bytes
    are summed over the ranks. "Waits" is the part of a step in which a rank stands waiting, as `weft train` shows it,
    the mean over ranks: with more ranks than cores that is also the time in which other ranks have the cores, so
    "not used" says how much of the cores' time no rank used, and "others" how much other processes of the machine took:
    if that is not small, the figures are not those of a machine at rest. "Communication" is the part of a step that
    goes away if every message is there already: the step is taken again on the same batch, with what was received when
    it was recorded, and nothing is sent.

    "Plain pieces" are the same model with a dense table in DistributedDataParallel, REKLS on every rank, a blocking
    all-gather of keys and values on a contiguous layout, and LASP-2. What DistributedDataParallel sends is not in the
    ledger; the least that an all-reduce must send is counted, and beside it is what the kernel counts.

    Args:
        json: Write the rows here, with a header of machine, versions and commit.
        repeats: Samples of each case.
        warm_steps: Steps before the first sample.
        length: Tokens of a sequence.
        batch: Sequences of a step, over all ranks; a multiple of 2.
        width: Of the model.
        layers: Blocks of the model, linear and softmax attention in turn.
        rows: Rows of the bigram table beside plain pieces; 65,537 in the other tables.
    """
    check_at_least(1, repeats=repeats, length=length, batch=batch, width=width, layers=layers)
    check_at_least(2, rows=rows)
    check_file("--json", json)
    from weft.bench.suite import run_on_ranks
    from weft.bench.train import train

    settings = {"length": length, "batch": batch, "width": width, "layers": layers}
    run_on_ranks(
        "train", None, json, {"repeats": repeats, "warm_steps": warm_steps, "rows": rows, **settings},
        lambda size: train.layouts(settings, rows),
        lambda world, report: train.run(world, report, repeats, warm_steps, settings, rows),
    )  # fmt: skip
