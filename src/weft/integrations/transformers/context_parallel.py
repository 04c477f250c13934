"""`ContextParallel`: what a user holds. Models are enabled, batches are cut, data is read by data rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DistributedSampler

from weft.comm import Axis
from weft.comm.arguments import find_choice_fault
from weft.integrations.transformers.attention import attend, make_mask
from weft.integrations.transformers.batch import KEY, DataRankLoader, ShardingCollator, WholeBatch, shard_batch
from weft.integrations.transformers.model import Enabled
from weft.integrations.transformers.refusals import find_model_fault
from weft.ops.attention.distributed import METHODS
from weft.ops.sequence import Sequence
from weft.ops.sequence.layout import find_layout_fault

VERSIONS = "4.57 to 5"
# Every model that is context-parallel now, of whichever ContextParallel.
_enabled: weakref.WeakKeyDictionary[Any, Enabled] = weakref.WeakKeyDictionary()


class ContextParallel:
    """Causal transformers models whose sequences lie on the ranks of ``group``.

    ``group`` is a ``ProcessGroup``, a 1-D ``DeviceMesh`` (``mesh["cp"]``), an ``Axis`` or None (WORLD); ``layout``
    "zigzag", which balances causal attention, "balanced", which does so for packed documents too, or "contiguous";
    ``method`` as in `weft.attention`; ``name`` what the attention is called in ``model.config``, one for each object
    that is in use at a time.

        cp = ContextParallel(mesh["cp"])
        cp.enable(model)
        share = model(**cp.shard(batch)).loss     # this rank's share of the mean
        weft.mean_loss(share, group=mesh["cp"]).backward()     # gradients are then averaged over the ranks

    >>> import torch
    >>> part = ContextParallel().shard({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})
    >>> part["shift_labels"], part["num_items_in_batch"]
    (tensor([[   6,    7, -100]]), tensor(2))
    """

    def __init__(self, group: Any = None, *, layout: str = "zigzag", method: str = "auto", name: str = "weft") -> None:
        self.axis = Axis.of(group)
        self.layout, self.method, self.name = layout, method, name
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        rank = self.axis.rank
        if fault := find_layout_fault("ContextParallel", layout, rank):
            raise fault
        if fault := find_choice_fault("ContextParallel", "method", method, rank, ("auto", *METHODS)):
            raise fault
        if not isinstance(name, str):
            raise TypeError(f"ContextParallel: name must be a string, got {type(name).__name__} (rank {rank})")
        if not name or any(word in name for word in ("sdpa", "flash", "flex", "eager", "paged", "|", "/")):
            raise ValueError(
                f"ContextParallel: name {name!r} would mean another attention to transformers (rank {rank}); choose "
                f"one without sdpa, flash, flex, eager, paged, '|' and '/'"
            )

    @property
    def size(self) -> int:
        """Ranks of the context group: by how much DDP and FSDP divide too much, see the docs."""
        return self.axis.size

    def enable(self, model: Any) -> None:
        """Make ``model`` context-parallel from now on, or raise why that would be wrong: the same on every rank.

        Every rank of the group calls it, with the model itself, before it is wrapped by DDP, FSDP or others.
        """
        rank = self.axis.rank
        fault = _find_version_fault(rank) or self._find_fault(model) or _register(self.name, rank)
        options = None if fault else _Options(type(model).__name__, _sizes_of(model), self.layout, self.method)
        self.axis.begin("ContextParallel.enable", options, metadata=(), fault=fault).metadata.wait()
        enabled = Enabled(model, self.axis, self.layout, self.method, self.name)
        enabled.resume()
        _enabled[model] = enabled
        self._models.add(model)

    def _find_fault(self, model: Any) -> Exception | None:
        import transformers

        where = f"(rank {self.axis.rank})"
        if not isinstance(model, transformers.PreTrainedModel):
            return TypeError(
                f"ContextParallel.enable: model must be a transformers PreTrainedModel, got {type(model).__name__} "
                f"{where}; enable it before it is wrapped"
            )
        if model in _enabled:
            return ValueError(
                f"ContextParallel.enable: this {type(model).__name__} is enabled already, as {_enabled[model].name!r} "
                f"{where}; disable it first"
            )
        return find_model_fault(model, self.axis.rank)

    def disable(self, model: Any) -> None:
        """Leave ``model`` as it was before `enable`. Sends nothing."""
        if model not in self._models:
            raise ValueError(
                f"ContextParallel.disable: this {type(model).__name__} is not enabled here (rank {self.axis.rank})"
            )
        enabled = _enabled.pop(model)
        self._models.discard(model)
        if enabled.active:
            enabled.pause()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the models of this object work alone on this rank: ``generate()``, or a batch that is not cut.

        Nothing is sent, so one rank may do it by itself.
        """
        models = [model for model in self._models if _enabled[model].active]
        for model in models:
            _enabled[model].pause()
        try:
            yield
        finally:
            for model in models:
                if model in self._models:  # not disabled meanwhile
                    _enabled[model].resume()

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of ``batch``, for ``model(**part)``. Every rank passes the whole; nothing crosses ranks.

        | in the batch                      | in the part                                                             |
        |-----------------------------------|-------------------------------------------------------------------------|
        | `input_ids` ``[B, S]``            | this rank's tokens ``[B, s]``                                           |
        | `position_ids`, if any            | the same positions, of these tokens; packed documents begin where they  |
        |                                   | do not rise by one (``cu_seq_lens_q`` must say the same)                |
        | `labels` or `shift_labels`        | `shift_labels`: shifted in the whole, then cut; `labels`, the same      |
        | `num_items_in_batch`, if any      | as given, else the targets of the whole batch                           |
        | `attention_mask`, padding right   | nothing: no real token sees padding on the right                        |
        """
        return shard_batch(batch, self.layout, self.axis.rank, self.axis.size)

    def sequence(self, part: Mapping[str, Any]) -> Sequence:
        """Where the tokens of a part lie, for ``sequence=`` of `weft.attention` and `weft.linear_attention`."""
        whole = part.get(KEY)
        if not isinstance(whole, WholeBatch):
            raise ValueError(f"ContextParallel.sequence: this is no part from cp.shard (rank {self.axis.rank})")
        if fault := whole.find_fault(self.layout, self.axis):
            raise fault
        sequences = whole.sequences(self.axis)
        if len(sequences) > 1 or (sequences[0].bounds is not None and whole.rows > 1):
            raise ValueError(
                f"ContextParallel.sequence: {whole.rows} rows with packed documents have no one sequence (rank "
                f"{self.axis.rank}); pack into one row"
            )
        return sequences[0]

    def collator(self, inner: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
        """A collator for DataLoader or Trainer: ``inner`` makes the whole batch, this rank's part is passed on."""
        return ShardingCollator(inner, self.layout, self.axis.rank, self.axis.size)

    def sampler(
        self, dataset: Sized, *, data: Any = None, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """The samples of this rank's context group. ``data`` is the group or mesh of the data ranks (``mesh["dp"]``).

        Samplers that go by rank give each rank of a context group other samples. Every data rank gets as many; what is
        left over is filled up with the first, or with ``drop_last`` dropped. Call ``set_epoch`` before each epoch.
        """
        world = Axis.of(None)
        if data is None and world.size != self.axis.size:
            raise ValueError(
                f"ContextParallel.sampler: of {world.size} ranks {self.axis.size} are one context group, so there are "
                f"several data ranks (rank {world.rank}); pass data=mesh['dp'], the group across them"
            )
        rank, size = (0, 1) if data is None else (Axis.of(data).rank, Axis.of(data).size)
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"ContextParallel.sampler: a {type(dataset).__name__} has no length, so its samples cannot be dealt to "
                f"data ranks (rank {world.rank}); read the same ones on every rank of a context group, and cut with "
                f"cp.collator"
            )
        if len(dataset) < (size if drop_last else 1):
            raise ValueError(
                f"ContextParallel.sampler: {len(dataset)} samples are too few for {size} data ranks (data rank {rank})"
            )
        return DistributedSampler(dataset, size, rank, shuffle=shuffle, seed=seed, drop_last=drop_last)  # type: ignore[arg-type]

    def loader(
        self, dataset: Any, batch_size: int, collate_fn: Callable[[Any], Any], *, data: Any = None,
        shuffle: bool = True, seed: int = 0, drop_last: bool = False, **options: Any,
    ) -> DataRankLoader:  # fmt: skip
        """A DataLoader with `sampler`, for ``Trainer.get_train_dataloader`` and ``get_eval_dataloader``.

        ``collate_fn`` is what `collator` returned; Trainer has it as ``self.data_collator``. ``options`` are
        DataLoader's.
        """
        if not isinstance(collate_fn, ShardingCollator):
            raise TypeError(
                f"ContextParallel.loader: collate_fn must be what cp.collator(inner) returns, got "
                f"{type(collate_fn).__name__} (rank {self.axis.rank}); whole batches would reach the model"
            )
        sampler = self.sampler(dataset, data=data, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return DataRankLoader(
            dataset, batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last, **options
        )


def _find_version_fault(rank: int) -> Exception | None:
    """What is wrong if transformers is not there, or of a version nobody has tried."""
    try:
        import transformers
    except ImportError:
        install = "pip install 'weft-torch[transformers]'"
        return ImportError(f"ContextParallel.enable needs transformers {VERSIONS}: {install} (rank {rank})")
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    if (4, 57) <= (major, minor) < (6, 0):
        return None
    return ImportError(
        f"ContextParallel.enable: transformers {transformers.__version__} is not one of {VERSIONS} (rank {rank})"
    )


def _register(name: str, rank: int) -> Exception | None:
    """With transformers, for the whole process: what it calls under ``name``."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if AttentionInterface().get(name, attend) is not attend:
        return ValueError(
            f"ContextParallel: transformers knows another attention as {name!r} (rank {rank}); pass another name="
        )
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    return None


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common when they enable a model."""

    model: str
    sizes: str
    layout: str
    method: str


def _sizes_of(model: Any) -> str:
    """To find ranks that loaded another model."""
    config = model.config
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "sliding_window")  # fmt: skip
    return " ".join(f"{name}={getattr(config, name, None)}" for name in names)
