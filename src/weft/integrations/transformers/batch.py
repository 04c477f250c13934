"""Batches of token ids: what is in a whole one, and one rank's part of it. Nothing is sent.

Who sees whom is read from the batch as transformers reads it for SDPA: documents begin where ``position_ids`` do not
rise by one, and padding is what ``attention_mask`` says. A batch that would be read wrongly in parts is refused here,
where every rank has the same in hand and comes to the same verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, DistributedSampler

from weft.comm import Axis
from weft.ops.sequence import Sequence
from weft.ops.sequence.deal import Bounds
from weft.ops.sequence.layout import shard_runs
from weft.ops.sequence.runs import Runs, deal_runs, lengths_of

KEY = "weft"  # where a shard of a batch carries what it must know about the whole
IGNORED = -100  # the label of a token that is nobody's target
TOKENS = ("input_ids", "labels", "shift_labels")
FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
KNOWN = (*TOKENS, "attention_mask", "position_ids", *FLATTENED, "num_items_in_batch")


@dataclass(frozen=True)
class WholeBatch:
    """What a shard knows about the whole batch.

    documents: where those of each row begin and end, None where every row is one document. digest: of everything in
    the batch; ranks of one context group must have the same. rank: whose part it is, of ``size``. longest: the largest
    of all its positions. ends: how many tokens of each row are real. from_zero: whether every packed document begins at
    position 0.
    """

    rows: int
    length: int
    documents: tuple[Bounds, ...] | None
    digest: int
    layout: str
    rank: int
    size: int
    longest: int
    ends: tuple[int, ...]
    from_zero: bool

    def to(self, *_: Any, **__: Any) -> WholeBatch:
        """Itself: loops move every value of a batch to a device, and this is for the host."""
        return self

    @property
    def runs(self) -> Runs:
        """Those of all ranks, the same for every row: balanced by the documents of all of them together."""
        if self.layout == "balanced":
            return deal_runs(self.length, self.size, None, self.documents or (), None)
        return shard_runs(self.length, self.layout, self.size)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each rank."""
        return lengths_of(self.runs, self.size)

    def sequences(self, axis: Axis) -> list[Sequence]:
        """Where its tokens lie on the ranks: one for all rows where their documents are the same, else one for each."""
        rows = self.documents or (None,)
        return [
            Sequence(axis, self.layout, self.lengths, bounds, self.runs)
            for bounds in (rows if len(set(rows)) > 1 else rows[:1])
        ]

    def find_fault(self, layout: str, axis: Axis) -> Exception | None:
        """What is wrong if this is not the part that this rank of ``axis`` cuts."""
        where = f"(rank {axis.rank})"
        if (self.layout, self.size) != (layout, axis.size):
            return ValueError(
                f"ContextParallel: the batch was cut {self.layout} for {self.size} ranks, but the model is enabled "
                f"{layout} on {axis.size} {where}; use one ContextParallel for both"
            )
        if self.rank != axis.rank:
            return ValueError(
                f"ContextParallel: this is the part of rank {self.rank} {where}; every rank must cut the whole batch "
                f"by itself: nothing may hand one rank's parts to others (accelerate: dispatch_batches=False)"
            )
        return None


def shard_batch(batch: Mapping[str, Any], layout: str, rank: int, size: int) -> dict[str, Any]:
    """This rank's part of a whole batch, for ``model(**part)``: see `ContextParallel.shard`."""
    if KEY in batch:
        raise ValueError(f"ContextParallel.shard: this batch has been sharded already (rank {rank})")
    unknown = sorted(set(batch) - set(KNOWN))
    if unknown:
        raise NotImplementedError(
            f"ContextParallel.shard: the batch has {', '.join(unknown)}, and how to cut that is not known "
            f"(rank {rank}); known are {', '.join(KNOWN)}"
        )
    ids = _tokens_of(batch, "input_ids", None, rank)
    if ids is None:
        raise ValueError(f"ContextParallel.shard: the batch has no input_ids (rank {rank})")
    shape = (ids.shape[0], ids.shape[1])
    ends = _read_padding(batch.get("attention_mask"), shape, rank)
    positions, documents = _read_positions(batch, shape, ends, ids.device, rank)
    targets = _tokens_of(batch, "shift_labels", shape, rank)
    labels = _tokens_of(batch, "labels", shape, rank)
    if targets is None and labels is not None:
        targets = pad(labels[:, 1:], (0, 1), value=IGNORED)
    if targets is not None and ends is not None:
        _check_padded_targets(targets, ends, rank)
    longest = int(positions.max()) if positions.numel() else 0
    real = (shape[1],) * shape[0] if ends is None else tuple(ends.tolist())
    rows = enumerate(documents or ())
    from_zero = not any(bool(positions[row, list(bounds[:-1])].any()) for row, bounds in rows)
    missing = max(0, size - ids.shape[1])  # every rank gets a token: models do not take empty ones
    if missing:
        ids, positions = pad(ids, (0, missing)), pad(positions, (0, missing))
        targets = None if targets is None else pad(targets, (0, missing), value=IGNORED)
        if documents is not None:
            documents = tuple((*bounds, bounds[-1] + missing) for bounds in documents)
    digest = _digest(ids, positions, torch.tensor(real), *(() if targets is None else (targets,)))
    whole = WholeBatch(ids.shape[0], ids.shape[1], documents, digest, layout, rank, size, longest, real, from_zero)
    mine = [run for run in whole.runs if run.rank == rank]
    places = torch.cat([torch.arange(run.offset, run.offset + run.length, device=ids.device) for run in mine])
    part: dict[str, Any] = {"input_ids": ids[:, places], "position_ids": positions[:, places]}
    if targets is not None:
        # transformers computes a loss only where there are labels, and takes shift_labels as they are.
        part["labels"] = part["shift_labels"] = targets[:, places]
        part["num_items_in_batch"] = (targets != IGNORED).sum().clamp(min=1)
    if batch.get("num_items_in_batch") is not None:
        part["num_items_in_batch"] = torch.as_tensor(batch["num_items_in_batch"])
    part[KEY] = whole
    return part


def _tokens_of(batch: Mapping[str, Any], name: str, shape: tuple[int, int] | None, rank: int) -> Tensor | None:
    value = batch.get(name)
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.ndim != 2 or value.is_floating_point():
        kind = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"ContextParallel.shard: {name} must be integers [B, S], got {kind} (rank {rank})")
    if shape is not None and value.shape != shape:
        raise ValueError(
            f"ContextParallel.shard: {name} {list(value.shape)} must have the shape of input_ids {list(shape)} "
            f"(rank {rank}); pass the whole batch, before anything is cut"
        )
    return value


def _read_padding(mask: Any, shape: tuple[int, int], rank: int) -> Tensor | None:
    """How many tokens of each row are real ``[B]``, None where all are. Only padding on the right needs no mask.

    A causal query sees nothing after itself, so no real token sees what is padded on the right.
    """
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or tuple(mask.shape) != shape:
        shown = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise NotImplementedError(
            f"ContextParallel.shard: attention_mask must be [B, S] = {list(shape)} of zeros and ones, got {shown} "
            f"(rank {rank}); other masks are not supported"
        )
    ones = mask != 0
    if not bool((mask == ones).all()):
        raise NotImplementedError(
            f"ContextParallel.shard: attention_mask has values other than 0 and 1 (rank {rank}); for packed documents "
            f"leave it out and pass position_ids that begin again with each"
        )
    ends = ones.sum(1)
    if not bool((ones == (torch.arange(shape[1], device=mask.device) < ends[:, None])).all()):
        raise NotImplementedError(
            f"ContextParallel.shard: attention_mask has zeros before ones, on the left or inside (rank {rank}); "
            f"pad on the right (tokenizer.padding_side = 'right')"
        )
    return ends


def _read_positions(
    batch: Mapping[str, Any], shape: tuple[int, int], ends: Tensor | None, device: torch.device, rank: int
) -> tuple[Tensor, tuple[Bounds, ...] | None]:
    """Global position_ids ``[B, S]`` and the documents of each row, or None where every row is one."""
    rows, length = shape
    given = batch.get("position_ids")
    if given is None:
        positions = torch.arange(length, device=device).expand(rows, -1)
    elif isinstance(given, Tensor) and given.shape in ((1, length), shape) and not given.is_floating_point():
        positions = given.expand(rows, -1)
    else:
        shown = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise ValueError(
            f"ContextParallel.shard: position_ids must be integers [B, S] = {list(shape)} of the whole batch, got "
            f"{shown} (rank {rank})"
        )
    begins = positions[:, 1:] - positions[:, :-1] != 1
    if ends is not None:
        begins = begins & (torch.arange(1, length, device=begins.device) < ends[:, None])
        if bool(begins.any()):
            raise ValueError(
                f"ContextParallel.shard: position_ids begin again inside a row, and there is an attention_mask, with "
                f"which transformers would let documents see one another (rank {rank}); leave attention_mask out"
            )
    flattened = _read_flattened(batch, shape, rank)
    documents, first = None, (0, length)
    if bool(begins.any()):
        documents = tuple((0, *(torch.nonzero(row).flatten() + 1).tolist(), length) for row in begins)
        first = documents[0]
    if flattened is not None and flattened != first:
        raise ValueError(
            f"ContextParallel.shard: cu_seq_lens_q say {list(flattened[:8])}, but position_ids begin again at "
            f"{list(first[:8])} (rank {rank}); both must tell the same documents"
        )
    return positions, documents


def _read_flattened(batch: Mapping[str, Any], shape: tuple[int, int], rank: int) -> Bounds | None:
    """The boundaries that `DataCollatorWithFlattening` gives beside position_ids; documents without tokens left out."""
    found: list[Bounds] = []
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if batch.get(name) is not None:
            bounds = torch.as_tensor(batch[name]).flatten().tolist()
            found.append(tuple(bounds[:1] + [b for a, b in pairwise(bounds) if a != b]))
    if not found:
        return None
    if shape[0] != 1 or found[0] != found[-1] or found[0][-1] != shape[1]:
        raise ValueError(
            f"ContextParallel.shard: cu_seq_lens_q and cu_seq_lens_k must be alike, end at {shape[1]} and come with "
            f"one row, got {[list(one[:8]) for one in found]} and {shape[0]} rows (rank {rank})"
        )
    return found[0]


def _check_padded_targets(targets: Tensor, ends: Tensor, rank: int) -> None:
    padded = torch.arange(targets.shape[1], device=targets.device) >= ends.to(targets.device)[:, None]
    wrong = (padded & (targets != IGNORED)).any(1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"ContextParallel.shard: row {row} has labels where attention_mask is 0 (rank {rank}); label padded tokens "
            f"{IGNORED}"
        )


def _digest(*tensors: Tensor) -> int:
    """A number of 62 bits that depends on every value and its place. The same on every device."""
    total = 0
    for number, tensor in enumerate(tensors):
        values = tensor.to(torch.int64).flatten()
        mixed = values + torch.arange(1, len(values) + 1, device=values.device) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            mixed = (mixed ^ (mixed >> shift)) * factor
        total = (total * 31 + number + int(mixed.sum())) & (2**62 - 1)
    return total


@dataclass(frozen=True)
class ShardingCollator:
    """``inner`` makes a whole batch of samples, and this rank's part of it is passed on. Works in loader processes."""

    inner: Callable[[Any], Any]
    layout: str
    rank: int
    size: int

    def __call__(self, samples: Any) -> dict[str, Any]:
        return shard_batch(self.inner(samples), self.layout, self.rank, self.size)


class DataRankLoader(DataLoader[Any]):
    """A DataLoader that hands the epoch on to its sampler, as Trainer asks of a loader."""

    def set_epoch(self, epoch: int) -> None:
        if isinstance(self.sampler, DistributedSampler):
            self.sampler.set_epoch(epoch)
