"""Every setting that is given with --resume is applied, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import SMALL

from weft.parallel.mesh import make_mesh
from weft.train.config import TrainConfig, flag, take_settings
from weft.train.model import rate_at
from weft.train.trainer import Trainer

# Saved after step 3.
SAVED = replace(SMALL, steps=3, timeline_step=2, kv_heads=1)


@dataclass(frozen=True)
class Applied:
    """Another value, and what it must have changed in a trainer that has gone on."""

    value: Any
    seen: Callable[[Trainer], bool]


@dataclass(frozen=True)
class Refused:
    """Another value, and words of the refusal besides the flag."""

    value: Any
    words: str = "leave it as it was"


def options(trainer: Trainer, name: str, part: str) -> set[float]:
    return {group[name] for group in trainer.step.parts[part].param_groups}


def rates(trainer: Trainer, part: str, wanted: float) -> bool:
    """Of the step that was taken."""
    return options(trainer, "lr", part) == {wanted * rate_at(trainer.config, trainer.done - 1)}


OTHER_TEXT = Path(torch.__file__).parent / "functional.py"
FLAGS: dict[str, Applied | Refused] = {
    "steps": Applied(9, lambda trainer: trainer.done == 4),
    "seed": Refused(5),
    "dtype": Refused("fp32"),
    "device": Applied("auto", lambda trainer: trainer.config.device == "auto"),  # others: test_trainer_on_device.py
    "dp": Applied(None, lambda trainer: trainer.mesh.data.size == 1),  # other meshes: test_checkpoints.py
    "cp": Applied(1, lambda trainer: trainer.mesh.context.size == 1),
    "tp": Applied(1, lambda trainer: trainer.mesh.tensor.size == 1),
    "wrap": Applied("ddp", lambda trainer: set(trainer.step.parts) == {"REKLS", "RowAdam"}),
    "layout": Applied("contiguous", lambda trainer: trainer._where["shard"].layout == "contiguous"),
    "timeout": Applied(50.0, lambda trainer: trainer.config.timeout == 50.0),  # of the group: command.py
    "grace": Applied(5.0, lambda trainer: trainer.config.grace == 5.0),  # of the process: test_stopping.py
    "data": Applied(OTHER_TEXT, lambda trainer: str(OTHER_TEXT) in trainer.corpus.name),
    "token_bytes": Refused(1, "is for a token file"),
    "document_token": Refused(7, "is for a token file"),
    "held_out": Applied(0.2, lambda trainer: len(trainer._held_out.tokens) > 0.15 * len(trainer.corpus.tokens)),
    "length": Refused(30),
    "batch": Applied(4, lambda trainer: trainer._batches.position == 3 * 6 + 4),
    "width": Refused(32), "layers": Refused(3), "pattern": Refused("l"), "heads": Refused(1), "kv_heads": Refused(2),
    "hidden": Refused(16), "table_rows": Refused(300),
    "vocabulary": Refused(300, "vocabulary of 256"),
    "lr": Applied(0.5, lambda trainer: rates(trainer, "REKLS", 0.5)),
    "variant": Refused("exact"),
    "lr_adamw": Applied(0.5, lambda trainer: rates(trainer, "ShardedAdamW", 0.5)),
    "lr_rows": Applied(0.5, lambda trainer: rates(trainer, "RowAdam", 0.5)),
    "weight_decay": Applied(
        0.25,
        lambda trainer: options(trainer, "weight_decay", "REKLS") == {0.25}
        and options(trainer, "weight_decay", "ShardedAdamW") == {0.25, 0.0},
    ),
    "warmup": Applied(100, lambda trainer: rates(trainer, "REKLS", SAVED.lr) and rate_at(trainer.config, 3) == 0.04),
    "lr_end": Applied(0.7, lambda trainer: rate_at(trainer.config, 10**6) == 0.7),
    "clip": Applied(1e-3, lambda trainer: trainer.step._clip == 1e-3),
    "validate_every": Applied(4, lambda trainer: trainer.config.validate_every == 4),
    "validate_batches": Applied(1, lambda trainer: trainer.config.validate_batches == 1),
    "checkpoint_every": Applied(7, lambda trainer: trainer.config.checkpoint_every == 7),
    "keep": Applied(5, lambda trainer: trainer._saver._keep == 5),
    "timeline_step": Refused(3, "too late for --timeline-step 3"),
}  # fmt: skip


def test_every_setting_is_listed() -> None:
    assert set(FLAGS) == {field.name for field in fields(TrainConfig)} - {"out", "resume"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = replace(SAVED, out=tmp_path_factory.mktemp("saved"))
    for _ in Trainer(config, make_mesh((1, 1, 1))):
        pass
    return config


@pytest.mark.parametrize("name", FLAGS)
def test_another_value_is_applied_or_refused_by_name(saved: TrainConfig, tmp_path: Path, name: str) -> None:
    wanted = FLAGS[name]
    config = replace(saved, steps=40, resume=saved.out, out=tmp_path / "other")
    config = replace(config, **{name: wanted.value})
    if isinstance(wanted, Refused):
        with pytest.raises(ValueError, match=wanted.words) as refusal:
            Trainer(config, make_mesh((1, 1, 1)))
        assert flag(name) in str(refusal.value) and "\n" not in str(refusal.value)
        return
    trainer = Trainer(config, make_mesh((1, 1, 1)))
    trainer.take_step()
    trainer.close()
    assert wanted.seen(trainer)


def test_a_resumed_weight_decay_is_felt(saved: TrainConfig, tmp_path: Path) -> None:
    """The weights of the next step are those of a run with that decay."""
    found = []
    for decay in (0.0, 0.9):
        config = replace(saved, steps=40, resume=saved.out, out=tmp_path / "other", weight_decay=decay, lr_adamw=0.1)
        trainer = Trainer(config, make_mesh((1, 1, 1)))
        before = trainer.model.head.weight.detach().clone()
        trainer.take_step()
        trainer.close()
        rate = config.lr_adamw * rate_at(config, 3)
        found.append(trainer.model.head.weight.detach() + decay * rate * before)
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)


def test_steps_that_are_behind(saved: TrainConfig) -> None:
    with pytest.raises(ValueError, match="is after step 3: --steps 2 cannot be applied"):
        Trainer(replace(saved, resume=saved.out, steps=2), make_mesh((1, 1, 1)))


def test_settings_that_earlier_versions_had_are_left_out() -> None:
    assert take_settings({"tune": 3, "steps": 5}, "a checkpoint") == TrainConfig(steps=5)
    with pytest.raises(ValueError, match="a checkpoint has 'tuned', which is no setting"):
        take_settings({"tuned": 3}, "a checkpoint")
