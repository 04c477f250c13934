"""`TrainConfig`: every setting of a run, read from files and flags, checked, and saved with the run.

It does not import torch: the command line shows the flags without it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MODEL = ("width", "layers", "pattern", "heads", "kv_heads", "hidden", "table_rows", "dtype")  # fixed by weights
FORMER = ("tune",)  # settings that earlier versions had, and checkpoints name
MOST_STEPS = 99_999_999  # names of checkpoints have eight digits
LONGEST_WAIT = 1e7  # seconds


@dataclass(frozen=True)
class TrainConfig:
    """A run of `weft train`; what stands beside a setting is its help."""

    out: Path = Path("run")  # Folder of the run: config.json, metrics.jsonl, checkpoints.
    resume: Literal["auto"] | Path | None = None
    """Go on with the newest whole checkpoint of this run's folder (or with this checkpoint). auto: with that of --out,
    or begin there if it has none."""
    steps: int = 200  # Optimizer steps in all.
    seed: int = 0  # Of the weights at the start and of the order of the data.
    dtype: Literal["fp32", "fp64", "bf16"] = "fp32"  # bf16: fp32 weights, products in bf16 (autocast).

    device: str = "auto"
    """What a rank computes on: cpu, cuda, cuda:1. auto: an accelerator, if this machine has one for each of its ranks,
    else the CPU."""
    dp: int | None = None
    """Data-parallel ranks: they have other sequences. Left out: what --cp and --tp leave of the ranks."""
    cp: int = 1  # Context-parallel ranks: each sequence is cut over them.
    tp: int = 1  # Tensor-parallel ranks: heads and hidden units are cut over them.
    wrap: Literal["weft", "ddp", "fsdp2"] = "weft"
    """Who averages dense gradients: one overlapped step, DistributedDataParallel or FSDP2."""
    layout: Literal["zigzag", "contiguous", "balanced"] = "zigzag"
    """How a sequence is cut over the context-parallel ranks; balanced: the same attention work for its documents."""
    timeout: float = 600.0  # Seconds after which a rank that waits for another gives up.
    grace: float = 25.0
    """Seconds after SIGTERM or Ctrl-C in which the step is finished and saved; then the run ends without."""

    data: Path | None = None
    """Text file, folder of text, or token .bin. Left out: the source text of Python's standard library."""
    token_bytes: Literal[1, 2, 4] = 2  # Bytes of a token in a .bin.
    document_token: int | None = None  # The token that begins a document in a .bin.
    held_out: float = 0.02  # Part of the data that is kept for the validation loss.
    length: int = 1024  # Tokens of a sequence.
    batch: int = 4  # Sequences of a step, over all ranks.

    width: int = 128  # Of the residual stream.
    layers: int = 4  # Blocks of the model.
    pattern: str = "ls"
    """Kinds of blocks, repeated: l for linear attention, s for softmax attention, d for a gated delta net."""
    heads: int = 4  # Query heads.
    kv_heads: int = 2  # Key/value heads of softmax attention.
    hidden: int = 256  # Hidden units of each block's MLP.
    table_rows: int = 65_537  # Rows of the table of hashed bigrams.
    vocabulary: int | None = None  # Tokens there are. Left out: 256 for text, what a .bin needs.

    lr: float = 0.006  # Of REKLS, on the matrices of the blocks.
    variant: Literal["stable", "exact"] = "stable"  # Of REKLS. Only stable follows one process on any mesh.
    lr_adamw: float = 0.003  # Of AdamW, on embeddings, head, norms and other vectors.
    lr_rows: float = 0.003  # Of the exact Adam on the rows of the bigram table.
    weight_decay: float = 0.01  # Of matrices, embeddings and head.
    warmup: int = 20  # Steps until the full rates; then they fall along a cosine.
    lr_end: float = 0.1  # What is left of the rates at the end.
    clip: float = 1.0  # Largest norm of all gradients together.

    validate_every: int = 50  # Steps between validation losses (0: none).
    validate_batches: int = 4  # Batches of held-out data in a validation loss.
    checkpoint_every: int = 50  # Steps between checkpoints (0: only at the end).
    keep: int = 2  # Checkpoints to keep.
    timeline_step: int = 10  # The step whose timeline is written for the report (0: none).

    @property
    def kinds(self) -> str:
        """The kind of each block.

        >>> TrainConfig(layers=3, pattern="lls").kinds
        'lls'
        """
        return (self.pattern * self.layers)[: self.layers]

    def check(self) -> None:
        """Raise what is wrong with settings that need neither ranks nor data."""
        for fault in self._faults():
            raise ValueError(f"train: {fault}")

    def _faults(self) -> Iterator[str]:
        for name in ("steps", "length", "batch", "width", "layers", "heads", "kv_heads", "hidden", "keep"):
            if (value := getattr(self, name)) < 1:
                yield f"{flag(name)} must be at least 1, got {value}"
        for name in ("warmup", "validate_every", "validate_batches", "checkpoint_every", "timeline_step"):
            if (value := getattr(self, name)) < 0:
                yield f"{flag(name)} must not be negative, got {value}"
        for name in ("lr", "lr_adamw", "lr_rows", "weight_decay", "lr_end"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                yield f"{flag(name)} must be finite and not negative, got {value}"
        if self.steps > MOST_STEPS:
            yield f"--steps must be at most {MOST_STEPS:,}, got {self.steps}"
        if not -(2**63) <= self.seed < 2**63:
            yield f"--seed must be an integer of 64 bits, got {self.seed}"
        if not self.clip > 0:
            yield f"--clip must be > 0, got {self.clip}"
        for name in ("timeout", "grace"):
            if not 0 < (value := getattr(self, name)) <= LONGEST_WAIT:
                yield f"{flag(name)} must be > 0 and at most {LONGEST_WAIT:.0f} s, got {value}"
        if not 0 <= self.held_out < 1:
            yield f"--held-out must be in [0, 1), got {self.held_out}"
        if not self.pattern or set(self.pattern) - set("lsd"):
            yield f"--pattern must be made of l, s and d, got {self.pattern!r}"
        if self.table_rows < 2:
            yield f"--table-rows must be at least 2, one of them reserved, got {self.table_rows}"
        if self.width % (2 * self.heads):
            yield f"--width {self.width} must be a multiple of 2 x --heads {self.heads}"
        if self.heads % self.kv_heads:
            yield f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}"
        if self.tp > 1 and (self.kv_heads % self.tp or self.hidden % self.tp):
            yield f"--tp {self.tp} must divide --kv-heads {self.kv_heads} and --hidden {self.hidden}"
        if self.dp is not None and self.dp > 0 and self.batch % self.dp:
            yield f"--batch {self.batch} must be a multiple of --dp {self.dp}"

    def as_json(self) -> str:
        """As it is saved with a run."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in vars(self).items()}
        return json.dumps(values, indent=2) + "\n"


def flag(name: str) -> str:
    """The flag of a setting.

    >>> flag("lr_rows")
    '--lr-rows'
    """
    return "--" + name.replace("_", "-")


def fit_mesh(dp: int | None, cp: int, tp: int, ranks: int | None) -> tuple[int, int, int]:
    """The shape of a mesh over ``ranks`` (None: as many as it needs); ``dp`` None takes what the others leave.

    >>> fit_mesh(None, 2, 1, 4)
    (2, 2, 1)
    """
    if min(cp, tp, 1 if dp is None else dp) < 1:
        raise ValueError(f"train: --dp, --cp and --tp must be at least 1, got {dp}, {cp} and {tp}")
    if dp is None:
        if ranks is not None and ranks % (cp * tp):
            raise ValueError(
                f"train: --cp {cp} x --tp {tp} needs a multiple of {cp * tp} ranks, but there are {ranks}; change one "
                f"of them"
            )
        dp = 1 if ranks is None else ranks // (cp * tp)
    if ranks is not None and dp * cp * tp != ranks:
        raise ValueError(
            f"train: a mesh of --dp {dp} x --cp {cp} x --tp {tp} needs {dp * cp * tp} ranks, but there are {ranks}; "
            f"leave out --dp, or start {dp * cp * tp} ranks"
        )
    return dp, cp, tp


def read_config(path: Path, base: TrainConfig | None = None) -> TrainConfig:
    """Settings from a .json or .toml file, over those of ``base``. Nothing in the file is executed."""
    try:
        if path.exists() and not os.path.isfile(path):  # opening a pipe or a device may wait for ever
            raise ValueError(f"train: config {path} is not a file; give a .json or .toml file")
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"train: config {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"train: config {path} is not text; give a .json or .toml file") from None
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"train: config {path} is not {path.suffix.lstrip('.') or 'json'}: {error}") from None
    return take_settings(values, f"config {path}", base)


def take_settings(values: Any, source: str, base: TrainConfig | None = None) -> TrainConfig:
    """Settings from an object that was read from ``source``, over those of ``base``; `FORMER` ones are left out."""
    if not isinstance(values, dict):
        raise ValueError(f"train: {source} must be an object of settings, got {type(values).__name__}")
    hints = typing.get_type_hints(TrainConfig)
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    values = {name: value for name, value in values.items() if name not in FORMER}
    for name in values:
        if name not in known:
            raise ValueError(f"train: {source} has {name!r}, which is no setting; `weft train --help` lists them")
    taken = {name: _take(source, name, value, hints[name]) for name, value in values.items()}
    return dataclasses.replace(base or TrainConfig(), **taken)


def _take(source: str, name: str, value: Any, hint: Any) -> Any:
    """A value of a file as the setting's type, or an error that names it."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    choices = typing.get_args(hint) if union else (hint,)
    for kind in choices:
        if typing.get_origin(kind) is Literal:
            if any(value == one and type(value) is type(one) for one in typing.get_args(kind)):
                return value
        elif kind is Path and isinstance(value, str):
            return Path(value)
        elif kind is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            return float(value)
        elif isinstance(kind, type) and type(value) is kind:
            return value
    wanted = getattr(hint, "__name__", str(hint).replace("typing.", ""))
    raise ValueError(f"train: {source}: {name} must be {wanted}, got {value!r}")
