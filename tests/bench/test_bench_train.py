"""`weft bench train`: the plain pieces compute what the trainer computes, and what they send is counted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from worlds import virtual_world

import weft
from weft.bench.timing import line_up, sent_bytes
from weft.bench.train.plain import METHODS, PlainTrainer, count_plain_bytes, gather_then_attend, lasp2
from weft.bench.train.replay import LIVE, RECORD, REPLAY, ReplayTrainer
from weft.cli import main
from weft.comm import Axis, record
from weft.parallel.mesh import make_mesh
from weft.train.config import TrainConfig
from weft.train.metrics import FAMILIES
from weft.train.model import attend_linear, attend_softmax
from weft.train.trainer import Trainer
from weft.world.launch import ProcessWorld

TINY = TrainConfig(
    steps=100, dtype="fp64", dp=2, cp=2, length=48, batch=6, width=16, layers=2, heads=2, kv_heads=1, hidden=24,
    table_rows=211, warmup=1, lr=0.02, lr_adamw=0.01, lr_rows=0.05, weight_decay=0.1, clip=0.5, timeline_step=0,
)  # fmt: skip
STEPS = 6
# Documents that begin and end within a rank, at its edges, and that go through several ranks.
DOCUMENTS = [(0, 24), (0, 8, 16, 24), (0, 3, 24), (0, 5, 7, 17, 24), (0, 1, 2, 23, 24), (0, 6, 12, 18, 24)]


def draw(heads: tuple[int, ...], seed: int) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    found = [torch.randn(1, 24, number, 4, generator=make, dtype=torch.float64) for number in heads]
    return [*found, -torch.rand(1, 24, heads[0], generator=make, dtype=torch.float64)]


@pytest.mark.parametrize("bounds", DOCUMENTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["linear", "softmax"])
def test_plain_attention_is_weft_s_with_every_gradient(kind: str, size: int, bounds: tuple[int, ...]) -> None:
    heads = (2, 2, 2) if kind == "linear" else (4, 2, 2)
    whole = draw(heads, len(bounds))[: 4 if kind == "linear" else 3]
    grad = torch.randn(whole[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, plain = (attend_linear, lasp2) if kind == "linear" else (attend_softmax, gather_then_attend)

    def program(axis: Axis) -> list[Tensor]:
        found = []
        for attend in (ours, plain):
            mine = [weft.shard(part, 1, group=axis).clone().requires_grad_() for part in whole]
            where = weft.sequence(mine[0].shape[1], cu_seqlens=bounds, group=axis)
            out = attend(*mine, where)  # type: ignore[operator]
            found.append([out, *torch.autograd.grad(out, mine, weft.shard(grad, 1, group=axis))])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
        return [part.detach() for part in found[1]]

    for parts in virtual_world(size).run(program).results:
        assert all(part.abs().sum() > 0 for part in parts)


def follow(axis: Axis, kind: type[Trainer], config: TrainConfig) -> list[tuple[float, float]]:
    assert config.dp is not None
    trainer = kind(config, make_mesh((config.dp, config.cp, 1)))
    try:
        return [(result.loss, result.norm) for result in (trainer.take_step() for _ in range(STEPS))]
    finally:
        trainer.close()


@pytest.mark.processes
def test_the_losses_of_plain_pieces_follow_the_trainer_s(four: ProcessWorld) -> None:
    ours, *others = four.run(follow, Trainer, TINY)
    plain = four.run(follow, PlainTrainer, TINY)
    assert all(rank == ours for rank in others)
    losses = [loss for loss, _ in ours]
    assert losses[-1] < losses[0] - 0.3  # it learns, so that a step that does nothing would be seen
    for rank in plain:
        torch.testing.assert_close(torch.tensor(rank), torch.tensor(ours), rtol=1e-6, atol=0)


def count_both_ways(axis: Axis, config: TrainConfig) -> tuple[dict[str, int], int, dict[str, object]]:
    """(by family, by the kernel, of all ranks) for a step of one rank."""
    trainer = PlainTrainer(config, make_mesh((2, 2, 1)))
    trainer.take_step()
    line_up(axis)
    before = sent_bytes() or 0
    with record() as ledger:
        trainer.take_step()
    line_up(axis)
    after = sent_bytes() or 0
    trainer.close()
    return trainer.sent_bytes(ledger), after - before, count_plain_bytes(axis, config)


@pytest.mark.processes
def test_what_plain_pieces_send_is_what_the_kernel_counts(four: ProcessWorld) -> None:
    config = replace(TINY, dtype="fp32", table_rows=4001)
    found = four.run(count_both_ways, config)
    counted = found[0][2]
    assert counted["ranks"] == 4 and counted["methods"] == METHODS
    total = {name: sum(rank[0][name] for rank in found) for name in FAMILIES}
    assert counted["bytes"] == {name: total[name] for name in METHODS} and set(METHODS) == set(FAMILIES) - {"agreeing"}
    assert all(size > 0 for size in counted["bytes"].values())
    # One layer of each kind. Keys and values of 72 tokens, twice, and their gradients; maps of 2 heads, twice.
    assert counted["bytes"]["softmax attention"] == 4 * 3 * 72 * 2 * 8 * 4
    assert counted["bytes"]["linear attention"] == 4 * 2 * 2 * (8 * 8 + 1) * 4
    # Each of 4 ranks sends three quarters of the table's gradient twice.
    assert counted["bytes"]["embedding rows"] == 4 * (2 * 3 * 4001 * 16 * 4 // 4)
    if sent_bytes() is not None:
        kernel = sum(rank[1] for rank in found)
        assert sum(total.values()) <= kernel < 1.1 * sum(total.values()) + 4 * 20_000


def replay(axis: Axis, config: TrainConfig) -> list[tuple[str, float, int, list[tuple[str, int]]]]:
    """(mode, loss, bytes by the kernel, what the ledger has) of steps on one batch whose rates are zero."""
    trainer, found = ReplayTrainer(config, make_mesh((2, 2, 1))), []

    def take_step() -> float:
        """With the rows of the next batch: else what is fetched ahead falls into this step or into the next."""
        loss = trainer.take_step().loss
        if trainer.model.bigrams._prefetch is not None:
            trainer.model.bigrams._prefetch._lane.wait()
        return loss

    for _ in range(2):
        take_step()
    for mode in (RECORD, LIVE, REPLAY, REPLAY, LIVE, REPLAY, LIVE):
        line_up(axis)
        trainer.recording.begin_step(mode)
        before = sent_bytes() or 0
        with record() as ledger:
            loss = take_step()
        line_up(axis)
        events = sorted((event.operation, event.bytes_received) for event in ledger.events)
        found.append((mode, loss, (sent_bytes() or 0) - before, events))
    trainer.close()
    return found


@pytest.mark.processes
def test_a_replayed_step_computes_the_same_and_sends_nothing(four: ProcessWorld) -> None:
    still = replace(TINY, lr=0.0, lr_adamw=0.0, lr_rows=0.0, weight_decay=0.0, length=96, batch=2)
    for steps in four.run(replay, still):
        _, loss, sent, events = steps[0]
        # Messages, not only integers, come from other ranks in every family.
        assert {name.partition(".")[0] for name, size in events if size > 100} >= {
            "attention", "linear_attention", "embedding", "REKLS", "ShardedAdamW"
        }  # fmt: skip
        for mode, same, bytes_sent, received in steps[1:]:
            assert same == loss and received == events
            if sent_bytes() is not None:
                assert bytes_sent < 2000 if mode == REPLAY else bytes_sent > 0.9 * sent


def play_another(axis: Axis, config: TrainConfig) -> str:
    """What a step says that receives what was not recorded."""
    trainer = ReplayTrainer(config, make_mesh((2, 2, 1)))
    for mode in (LIVE, RECORD, LIVE):
        trainer.recording.begin_step(mode)
        trainer.take_step()
    trainer.recording.begin_step(REPLAY)
    other = torch.zeros(8) if axis.rank else torch.zeros(9)
    try:
        trainer.mesh.world.begin("train.metrics").all_gather(other)
    except RuntimeError as error:
        return str(error)
    finally:
        trainer.close()
    return ""


@pytest.mark.processes
def test_a_message_that_was_not_recorded_is_refused(four: ProcessWorld) -> None:
    for rank, words in enumerate(four.run(play_another, TINY)):
        wanted = f"receives {36 - 4 * (rank > 0)} bytes from rank {int(rank == 0)} 1 times, 0 times"
        assert words.startswith(f"replay: train.metrics {wanted}"), words


@pytest.mark.slow
@pytest.mark.processes
def test_bench_train_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.json"
    words = ["weft", "bench", "train", "--length", "64", "--width", "16", "--layers", "2", "--rows", "20000"]
    words += ["--repeats", "2", "--warm-steps", "2", "--json", str(kept)]
    monkeypatch.setattr(sys, "argv", words)
    main()
    shown, content = capsys.readouterr().out, json.loads(kept.read_text())
    assert content["header"]["length"] == 64 and content["header"]["rows"] == 20_000
    rows = {(row["table"], row["case"]): row for row in content["rows"]}
    assert len(rows) == 9 and all(case in shown for _, case in rows)
    for (table, _), row in rows.items():
        if table != "families":
            assert row["milliseconds"] > 0 and row["cpu_milliseconds"] > 0 and row["samples"] == 2
    assert rows["two ranks", "one process, 2 threads"]["megabytes"] == 0 and rows["two ranks", "cp 2"]["ratio"] > 0
    assert rows["two ranks", "one process, 1 thread"]["to_thread"] == 1
    assert rows["exposed", "as it runs"]["percent"] < 100 and rows["exposed", "as it runs"]["wait_percent"] > 0
    ours, plain = rows["plain", "weft"], rows["plain", "plain pieces"]
    assert ours["ratio"] == ours["more"] == 1 and plain["more"] == plain["megabytes"] / ours["megabytes"] > 5
    for case, row in (("weft", ours), ("plain pieces", plain)):
        assert sum(rows["families", case][name] for name in FAMILIES) == pytest.approx(row["megabytes"])
        if row["kernel_megabytes"] is not None:
            assert row["megabytes"] <= row["kernel_megabytes"] < 1.1 * row["megabytes"] + 0.1
    assert rows["families", "weft"]["softmax attention"] < rows["families", "plain pieces"]["softmax attention"]
    assert rows["families", "plain pieces"]["embedding rows"] == 6 * 20_000 * 16 * 4 / 1e6


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "said"),
    [(["--warm-steps", "0"], "at least 1 of warm_steps, not 0"), (["--batch", "3"], "--batch 3 must be a multiple")],
)
def test_bench_train_refuses_what_it_cannot_measure(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "bench", "train", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_plain_pieces_refuse_what_they_do_not_have() -> None:
    mesh = make_mesh((1, 1, 1))
    with pytest.raises(ValueError, match="plain pieces take whole weights, so --tp 1, not 2"):
        PlainTrainer(TINY, replace(mesh, tensor=Axis(mesh.tensor.wire, (0, 1), 0, mesh.tensor.counter)))
    with pytest.raises(ValueError, match="plain pieces for blocks l and s, not d: --pattern lsd"):
        PlainTrainer(replace(TINY, pattern="lsd", layers=3), mesh)
