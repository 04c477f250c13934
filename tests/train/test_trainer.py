"""`Trainer`: rates, what is counted, validation, and a step that cannot be made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_run import SMALL, virtual_mesh
from torch.nn import functional as F
from worlds import virtual_world

import weft
from weft.parallel.mesh import make_mesh
from weft.train.batches import IGNORED, validation_batches
from weft.train.metrics import FAMILIES, StepResult, family_of, gather_step, spans_of
from weft.train.model import Place, rate_at
from weft.train.trainer import Trainer


def alone(**changes: Any) -> Trainer:
    return Trainer(replace(SMALL, **changes), make_mesh((1, 1, 1)))


@pytest.mark.parametrize("wrap", ["weft", "ddp"])
def test_rates_of_all_parts(wrap: Any) -> None:
    """A rise, then a cosine; REKLS, AdamW and rows have their own."""
    trainer = alone(lr=0.4, lr_adamw=0.2, lr_rows=0.1, warmup=2, lr_end=0.25, steps=6, wrap=wrap)
    for step, factor in enumerate([0.5, 1.0, 1.0, 0.25 + 0.75 * (1 + 0.5**0.5) / 2]):
        trainer.take_step()
        assert rate_at(trainer.config, step) == pytest.approx(factor)
        rates = {
            name: sorted({group["lr"] for group in part.param_groups}) for name, part in trainer.step.parts.items()
        }
        wanted = {
            "weft": {"REKLS": [0.4], "ShardedAdamW": [0.2], "RowAdam": [0.1]},
            "ddp": {"REKLS": [0.2, 0.4], "RowAdam": [0.1]},
        }
        assert rates == {name: pytest.approx([factor * one for one in some]) for name, some in wanted[wrap].items()}
    trainer.close()
    named = [name for group in trainer.step.param_groups for name in group["param_names"]]
    assert sorted(named) == sorted(name for name, _ in trainer.model.named_parameters())


def test_what_a_step_sends_is_counted_by_family() -> None:
    """The sum over ranks of what their ledgers hold."""

    def program(axis: weft.Axis) -> tuple[dict[str, int], dict[str, int], float]:
        trainer = Trainer(replace(SMALL, dp=2, cp=2), virtual_mesh(axis, 2, 2))
        trainer.take_step()
        with weft.record() as ledger:
            result = trainer.take_step()
        trainer.close()
        mine = dict.fromkeys(FAMILIES, 0)
        for event in ledger.events:
            mine[family_of(event.operation)] += event.bytes_sent * (not event.operation.startswith("train.metrics"))
        return result.bytes, mine, result.exposed_share

    found = virtual_world(4).run(program).results
    for counted, _, share in found:
        assert counted == {name: sum(mine[name] for _, mine, _ in found) for name in FAMILIES}
        assert all(counted[name] > 0 for name in FAMILIES) and 0 <= share < 1


def test_figures_of_a_step_reach_all_of_many_ranks_in_few_messages() -> None:
    """Loss, traffic and signals of 40 ranks: one gather of log2(P) messages of each, not one for each other rank."""
    size = 40

    def program(axis: weft.Axis) -> tuple[list[float], StepResult, int]:
        with weft.record() as nothing:
            pass
        nothing.stood.append(("attention", 0.0, float(axis.rank)))
        with weft.record() as ledger:
            losses, figures = gather_step(axis, nothing, 100.0 + axis.rank, axis.rank % 3, axis.rank / 3)
        result = StepResult(1, 0.0, 0.0, 1, **figures)
        return losses.tolist(), result, sum(len(event.sends) for event in ledger.events)

    for losses, result, messages in virtual_world(size).run(program).results:
        assert losses == [rank / 3 for rank in range(size)]  # to the bit
        assert result.exposed["softmax attention"] == (size - 1) / 2
        assert (result.seconds, result.signal, result.exposed_share) == (100.0 + size - 1, 2, 19.5 / 139)
        assert messages == 6  # log2(40), rounded up


def test_a_timeline_is_work_and_waits_one_after_the_other() -> None:
    with weft.record() as ledger:
        pass
    ledger.stood += [("attention", 1.2, 1.5), ("attention", 1.4, 1.6), ("REKLS.to_owners", 1.9, 2.0)]
    spans = spans_of(ledger, 1.0, 2.5)
    line = [(span["kind"], round(span["start"], 6), round(span["end"], 6)) for span in spans]
    assert line == [
        ("work", 0.0, 0.2), ("exposed", 0.2, 0.5), ("work", 0.5, 0.5), ("exposed", 0.5, 0.6), ("work", 0.6, 0.9),
        ("exposed", 0.9, 1.0), ("work", 1.0, 1.5),
    ]  # fmt: skip
    assert [span["family"] for span in spans if span["kind"] == "exposed"] == ["softmax attention"] * 2 + ["REKLS"]


def test_the_validation_loss_is_a_mean_over_held_out_tokens() -> None:
    """The same on a mesh that the sequences do not divide by."""
    trainer = alone(validate_batches=3, held_out=0.012)  # 13 or so sequences in batches of 6
    found = trainer.validation_loss()
    losses: list[float] = []
    with validation_batches(trainer._held_out, batch=1, at_most=18, **trainer._where) as batches:
        for batch in batches:
            place = Place(weft.sequence(batch.tokens.shape[1], cu_seqlens=batch.cu_seqlens), batch.positions)
            logits = trainer.model(batch.tokens, batch.rows, place)
            assert (batch.targets != IGNORED).all()
            losses += F.cross_entropy(logits[0], batch.targets[0], reduction="none").tolist()
    trainer.close()
    assert (
        len(losses) % (6 * 31) and len(losses) > 6 * 31 and found == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    )

    def program(axis: weft.Axis) -> float | None:
        one = Trainer(replace(trainer.config, dp=2, cp=2), virtual_mesh(axis, 2, 2))
        one.close()
        return one.validation_loss()

    assert virtual_world(4).run(program).results == pytest.approx([found] * 4, rel=1e-12)
    assert alone(held_out=0.0).validation_loss() is None


def test_a_step_that_cannot_be_made() -> None:
    """A weight that is not finite: every rank raises the same, and weights are as they were."""

    def program(axis: weft.Axis) -> tuple[str, bool]:
        trainer = Trainer(replace(SMALL, dp=1, cp=2), virtual_mesh(axis, 1, 2))
        trainer.take_step()
        with torch.no_grad():
            trainer.model.head.weight[3, 3] = float("inf")
        before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        words = ""
        try:
            trainer.take_step()
        except RuntimeError as error:
            words = str(error)
        trainer.close()
        return words, all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))

    found = virtual_world(2).run(program).results
    assert all(kept for _, kept in found)
    for words, _ in found:
        assert "weights and state are as before" in words and ("not finite" in words or "norm" in words), words
