"""The subcommands of ``weft bench``. A benchmark, and torch with it, is imported when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.bench.flags import Json, RankCount, Ranks, Repeats, check_at_least


def bench_scan(ranks: Ranks = None, json: Json = None, repeats: Repeats = 15, calls: int = 20) -> None:
    """Every scan schedule at several state sizes on real processes, beside its hand-written version.

    A time is the median over repeats of the slowest rank. "x by hand" compares with the same rounds and bytes
    written straight on Gloo. Bytes (of the rank that sends most) and rounds are counted by the ledger. The error
    is against a serial fold in fp64. Ctrl-C keeps what was measured; under torchrun its ranks are used.

    Args:
        calls: Calls in one sample.
    """
    check_at_least(1, repeats=repeats, calls=calls)
    from weft.bench.ranks import run_on_ranks
    from weft.bench.scan.cases import run

    run_on_ranks("scan", ranks, json, {"repeats": repeats, "calls": calls}, run, repeats, calls)


def bench_linear_attention(
    ranks: RankCount = 2, tokens: int = 4096, virtual_ranks: int = 64, h100_ranks: tuple[int, ...] = (64, 256),
    json: Json = None, repeats: Repeats = 7,
) -> None:  # fmt: skip
    """Linear attention: the local kernel beside a matmul, and ranks beside LASP, LASP-2 and ZeCO.

    The first table counts the FLOPs of the algorithm at chunk 64 on one thread. The second compares with the same
    local work without communication, on as many processes. The baselines use weft's own kernels and differ in what
    they send and when they wait. Peak memory is what a forward and backward add to the resident set. With a GPU the
    last table has the Triton kernels on it, beside those of flash-linear-attention if that is installed.

    Args:
        tokens: Tokens a rank holds; the kernel is measured on twice as many.
        virtual_ranks: Ranks of the table in virtual time.
        h100_ranks: Ranks of the tables in virtual time of H100s with the Triton kernels, one table for each.
    """
    check_at_least(1, tokens=tokens, virtual_ranks=virtual_ranks, h100_ranks=h100_ranks, repeats=repeats)
    from weft.bench.linear_attention.cases import run
    from weft.bench.ranks import run_on_ranks

    facts = {"tokens": tokens, "repeats": repeats}
    run_on_ranks("linear-attention", ranks, json, facts, run, repeats, tokens, virtual_ranks, h100_ranks)


def bench_delta_rule(
    ranks: RankCount = 2, tokens: int = 4096, heads: int = 8, h100_ranks: tuple[int, ...] = (8, 64, 256),
    json: Json = None, repeats: Repeats = 7,
) -> None:  # fmt: skip
    """The delta rule: the local kernel beside a matmul and fla's naive operations, and ranks beside two recipes.

    The first table counts the FLOPs of the algorithm at chunk 64, of triangles the half, on one thread. The next two
    compare with the same local work without communication, on as many processes, and with all tokens in one. The
    recipes are flash-linear-attention's (maps by a recurrence of their own, one blocking all-gather, the recurrence
    again) and an all-to-all over heads; they use weft's own kernels. Then the same in virtual time of H100s.

    Args:
        tokens: Tokens of the kernel's table, and of all ranks together.
        heads: Of keys and of values.
        h100_ranks: Ranks of the tables in virtual time, one table for each.
    """
    check_at_least(1, tokens=tokens, heads=heads, h100_ranks=h100_ranks, repeats=repeats)
    from weft.bench.delta_rule.cases import run
    from weft.bench.ranks import run_on_ranks

    facts = {"tokens": tokens, "heads": heads, "repeats": repeats}
    run_on_ranks("delta-rule", ranks, json, facts, run, repeats, tokens, heads, h100_ranks)


def bench_attention(
    ranks: RankCount = 2, tokens: int | None = None, json: Json = None, repeats: Repeats = 7, packed: bool = False,
    h100_ranks: tuple[int, ...] = (8, 64), h100_tokens: int = 16384, h100_batches: int = 7,
) -> None:  # fmt: skip
    """Context-parallel softmax attention beside one process, a strided all-gather, rings and Ulysses.

    "x one process" compares with the whole sequence in one process that has a thread for every rank, "x its own work"
    with the same layout when all keys are already there. The baselines use weft's own block kernels and differ in what
    they send and when they wait. Peak memory is what a forward and backward add to the resident set.

    Args:
        tokens: Tokens of the whole sequence; 4096 if left out, 8192 with --packed.
        packed: Documents of lognormal lengths in every layout, in place of all that. "x its share" compares with the
            P-th part of the time that one process takes, "work" are the scores that a rank computes.
        h100_ranks: With --packed, ranks of the tables in virtual time of H100s.
        h100_tokens: Tokens of each of those ranks.
        h100_batches: Batches there; a row has their medians.
    """
    check_at_least(1, tokens=tokens, repeats=repeats)
    check_at_least(1, h100_ranks=h100_ranks, h100_tokens=h100_tokens, h100_batches=h100_batches)
    from weft.bench.attention import cases
    from weft.bench.attention import packed as packed_batches
    from weft.bench.ranks import run_on_ranks

    count = tokens or (8192 if packed else 4096)
    facts = {"tokens": count, "repeats": repeats}
    if packed:
        run, virtual = packed_batches.run, (h100_ranks, h100_tokens, h100_batches)
        run_on_ranks("attention", ranks, json, facts, run, repeats, count, *virtual)
    else:
        run_on_ranks("attention", ranks, json, facts, cases.run, repeats, count)


def bench_rows(
    ranks: Ranks = None, json: Json = None, repeats: Repeats = 5, warm_steps: int = 30, smaller: int = 1
) -> None:
    """Training steps of large embedding tables: weft's rows beside dense and sparse data parallelism.

    A step is lookup, backward and Adam. CPU time is summed over the ranks; "x push" compares it, sample by sample, with
    the best a user has today: touched rows to owners, dense Adam there, and all rows back. Bytes (of the rank that
    sends most) are counted by the ledger; density is the share of all rows that a rank needs. Every method uses the
    same fused Adam. "Dense steps" are those of "auto", made to step whole shards where most rows are touched.

    Args:
        warm_steps: Steps that weft's tables are trained before: rows left alone must be caught up, as in a long run.
        smaller: Divide tables and ids by this, for machines with less than 24 GB of memory.
    """
    check_at_least(1, repeats=repeats, smaller=smaller)
    check_at_least(0, warm_steps=warm_steps)
    from weft.bench.ranks import run_on_ranks
    from weft.bench.rows.cases import run

    run_on_ranks("rows", ranks, json, {"repeats": repeats, "warm_steps": warm_steps}, run, repeats, warm_steps, smaller)


def bench_network(
    latency: float, bandwidth: float, ranks: Ranks = None, tokens: int = 1024, json: Json = None,
    repeats: Repeats = 5,
) -> None:  # fmt: skip
    """Scans and both attentions on links of a known delay and rate, beside their virtual time on such links.

    "x gloo" is the measured time over the virtual time with Gloo's rule that a message waits for the word that its
    receive is posted, "x ideal" over that of a network without it. All ranks must be on one host, whose clock they
    share. Local work is measured without communication.

    Args:
        latency: Seconds a message is on its way, one way.
        bandwidth: Bytes per second of a rank's link.
        tokens: Tokens a rank holds of linear attention; a quarter of it of softmax attention.
    """
    check_at_least(1, tokens=tokens, repeats=repeats)
    from weft.bench.ranks import run_on_ranks
    from weft.bench.scan.network import run
    from weft.world import Machine

    facts = {"latency": latency, "bandwidth": bandwidth, "tokens": tokens}
    run_on_ranks("network", ranks, json, facts, run, Machine(latency, bandwidth), repeats, tokens)


def bench_matrix(
    ranks: Ranks = None, json: Json = None, repeats: int | None = None, warm_steps: int | None = None,
    widths: tuple[int, ...] | None = None, blocks: int | None = None, h100_ranks: tuple[int, ...] | None = None,
    quality: bool = False, seeds: int | None = None, steps: int | None = None, methods: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """One step of each matrix optimizer on transformer blocks, beside the replicated tensor-parallel REKLS.

    CPU time is summed over the ranks; "x less CPU" compares it, sample by sample: of exact and of "stable, every step"
    (roots made at every step) with the replicated algorithm on as many ranks (every rank gathers and computes all), of
    stable (roots in turn, every fifth step) with "stable, every step", of data x tensor with two replicas that average
    gradients first. The columns with threads compare the time of the slowest rank with one process. Bytes (of the rank
    that sends most) are counted by the ledger; state is that of the rank that keeps most, with bases and roots. "eigh"
    is its share of the CPU time, "busiest" the busiest rank's eigh over the mean. The last table is of H100s in virtual
    time: a step beside the longer of its busiest rank's work and its busiest link. No order of the work takes less.

    With --quality instead: validation losses of AdamW and all others on two small tasks, and their conditioning.

    Args:
        repeats: Samples of each case (7 if left out).
        warm_steps: Steps before the first sample (4 if left out): factors have their full rank only after a few.
        widths: h of a block (128 and 256 if left out): qkv [3h, h], projection [h, h], up [4h, h], down [h, 4h].
        blocks: How many blocks (2 if left out).
        h100_ranks: Ranks of the tables in virtual time, one for each (8 if left out).
        quality: Train instead, one run on each rank at a time: the runs share nothing.
        seeds: With --quality: runs for each rate (5 if left out); the median counts.
        steps: With --quality: steps of a run (300 if left out).
        methods: Only those whose names begin so, for example stable.
    """
    speed = {
        "repeats": repeats, "warm_steps": warm_steps, "widths": widths, "blocks": blocks, "h100_ranks": h100_ranks,
    }  # fmt: skip
    training = {"seeds": seeds, "steps": steps}
    given, ignored = (training, speed) if quality else (speed, training)
    for name in [name for name, value in ignored.items() if value is not None]:
        word = "cannot be combined with" if quality else "needs"
        raise ValueError(f"--{name.replace('_', '-')} {word} --quality")
    check_at_least(1, repeats=repeats, widths=widths, blocks=blocks, h100_ranks=h100_ranks, seeds=seeds, steps=steps)
    check_at_least(0, warm_steps=warm_steps)
    from weft.bench.matrix import cases as matrix
    from weft.bench.matrix import quality as quality_of
    from weft.bench.ranks import run_on_ranks

    defaults = {
        "repeats": 7, "warm_steps": 4, "widths": (128, 256), "blocks": 2, "h100_ranks": (8,), "seeds": 5, "steps": 300,
    }  # fmt: skip
    options: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in given.items()}
    if quality:
        run_on_ranks("matrix --quality", ranks, json, options, quality_of.run, methods=methods, **options)
    else:
        facts = {name: options[name] for name in ("repeats", "warm_steps", "blocks")}
        run_on_ranks("matrix", ranks, json, facts, matrix.run, methods=methods, **options)


def bench_step(
    ranks: int | None = None, json: Json = None, repeats: Repeats = 7, warm_steps: int = 4, width: int = 256,
    blocks: int = 2, rows: int = 250_000, vocabulary: int = 4096, tokens: int = 8192, methods: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """One optimizer step with the exchange of its gradients: overlapped, in sequence, DDP and ZeRO.

    A step looks the table's rows up, takes gradients in, and ends with new weights on every rank; the computation of
    the blocks, the same for all, is left out. "REKLS" steps matrices with it and the rest with AdamW. The time is that
    of the slowest rank; "x sequence" and "x ZeRO" say, sample by sample, how many times faster a step is than the same
    parts one after the other, and than ZeroRedundancyOptimizer. CPU time is summed over the ranks. Bytes (of the rank
    that sends most) are counted by the kernel for all methods, and by the ledger for weft's. "Exposed" are the waits of
    the rank that waits most. Peak memory is all that a rank needs for the model and three steps.

    Args:
        ranks: Local processes to start (4 if left out); steps are measured on 2 and on 4. Leave it out under torchrun.
        warm_steps: Steps before the first sample.
        width: h of a block: qkv [3h, h], projection [h, h], up [4h, h], down [h, 4h], two norms.
        blocks: How many blocks.
        rows: Rows of the bigram table, each of h elements.
        vocabulary: Rows of the dense token embeddings.
        tokens: Bigrams that a rank looks up in a step.
        methods: Only those whose names begin so, for example REKLS.
    """
    check_at_least(1, repeats=repeats, width=width, blocks=blocks, rows=rows, vocabulary=vocabulary, tokens=tokens)
    check_at_least(0, warm_steps=warm_steps)
    from weft.bench.ranks import run_on_ranks
    from weft.bench.step.cases import run
    from weft.bench.step.runs import Sizes

    sizes = Sizes(width, blocks, rows, vocabulary, tokens)
    facts = {"repeats": repeats, "warm_steps": warm_steps, **vars(sizes)}
    run_on_ranks("step", ranks, json, facts, run, repeats, warm_steps, sizes, methods)


def bench_train(
    json: Json = None, repeats: Repeats = 7, warm_steps: int = 4, length: int = 2048, batch: int = 2,
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
        warm_steps: Steps before the first sample.
        length: Tokens of a sequence.
        batch: Sequences of a step, over all ranks; a multiple of 2.
        width: Of the model.
        layers: Blocks of the model, linear and softmax attention in turn.
        rows: Rows of the bigram table beside plain pieces; 65,537 in the other tables.
    """
    check_at_least(1, repeats=repeats, length=length, batch=batch, width=width, layers=layers)
    check_at_least(2, rows=rows)
    from weft.bench.ranks import run_on_ranks
    from weft.bench.train.cases import run

    settings = {"length": length, "batch": batch, "width": width, "layers": layers}
    facts = {"repeats": repeats, "warm_steps": warm_steps, "rows": rows, **settings}
    run_on_ranks("train", None, json, facts, run, repeats, warm_steps, settings, rows)


BENCHES: dict[str, Callable[..., None]] = {
    "scan": bench_scan,
    "linear-attention": bench_linear_attention,
    "delta-rule": bench_delta_rule,
    "attention": bench_attention,
    "rows": bench_rows,
    "matrix": bench_matrix,
    "step": bench_step,
    "network": bench_network,
    "train": bench_train,
}
