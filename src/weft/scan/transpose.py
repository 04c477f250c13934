"""transpose: ranks trade slices, each scans one slice of everybody's map, and the prefixes go back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm import Axis
from weft.scan.affine import Affine


def transpose(axis: Axis, local: Affine, blocks: int | None) -> Tensor | None:
    """Two rounds, at most about two maps sent per rank whatever P is.

    Maps that do not mix rows are sliced by elements, each slice with the logs it needs; dense maps are sliced
    by leading index. The last rank's map is needed by nobody, the first rank's prefix is zero: neither travels.
    """
    rank, size = axis.rank, axis.size
    slices = [_Slice.of(local, size, owner) for owner in range(size)]
    mine = slices[rank]
    maps = local.state.new_empty(size - 1, mine.length)
    if rank < size - 1:
        maps[rank] = mine.take(local)
    axis.exchange(
        sends=[(peer, slices[peer].take(local)) for peer in range(size) if peer != rank and rank < size - 1],
        receives=[(peer, maps[peer]) for peer in range(size - 1) if peer != rank],
    ).wait()

    prefixes = mine.scan(maps, local)  # row i: the slice of what enters rank i+1
    entering = torch.empty_like(local.state_flat)
    if rank > 0:
        entering[mine.start : mine.stop] = prefixes[rank - 1]
    axis.exchange(
        sends=[(peer, prefixes[peer - 1]) for peer in range(1, size) if peer != rank],
        receives=[(peer, entering[slices[peer].start : slices[peer].stop])
                  for peer in range(size) if peer != rank and rank > 0],
    ).wait()  # fmt: skip
    return entering.view(local.state.shape) if rank > 0 else None


@dataclass(frozen=True)
class _Slice:
    """Elements ``start:stop`` of the state and entries ``first:end`` of the decay, scanned by one owner.

    ``share`` elements of the state stand under one entry of the decay (for dense maps: a whole matrix).
    """

    start: int
    stop: int
    first: int
    end: int
    share: int

    @staticmethod
    def of(local: Affine, size: int, owner: int) -> _Slice:
        keys, values = local.state.shape[-2:]
        share = {"none": 1, "scalar": keys * values, "vector": values, "dense": keys * values}[local.kind]
        unit = share if local.kind == "dense" else 1
        units = local.state.numel() // unit if unit else 0
        # The last owners get the larger slices: the first rank already sends one prefix more than the others.
        start, stop = units * owner // size * unit, units * (owner + 1) // size * unit
        if local.kind == "none" or start == stop:
            return _Slice(start, stop, 0, 0, share)
        width = keys * keys if local.kind == "dense" else 1
        return _Slice(start, stop, start // share * width, -(-stop // share) * width, share)

    @property
    def length(self) -> int:
        return self.stop - self.start + self.end - self.first

    def take(self, local: Affine) -> Tensor:
        """The slice of a map, as a message."""
        state = local.state_flat[self.start : self.stop]
        if local.decay is None:
            return state
        return torch.cat([state, local.decay.reshape(-1)[self.first : self.end]])

    def scan(self, maps: Tensor, like: Affine) -> Tensor:
        """Prefixes ``[R, n]`` of the slices ``maps`` ``[R, length]`` of R ranks: row i is what leaves rank i."""
        count = self.stop - self.start
        prefixes = maps.new_empty(len(maps), count)
        if count == 0:
            return prefixes
        states, decays = maps[:, :count], maps[:, count:]
        if like.kind == "dense":
            keys, values = like.state.shape[-2:]
            states, decays = states.unflatten(1, (-1, keys, values)), decays.unflatten(1, (-1, keys, keys))
        elif like.kind != "none":
            offset = self.start % self.share
            decays = decays.repeat_interleave(self.share, dim=1)[:, offset : offset + count]
            states = states.unsqueeze(-1)
        state: Tensor | None = None
        for row in range(len(maps)):
            kind = "vector" if like.kind == "scalar" else like.kind
            state = Affine(kind, states[row], None if kind == "none" else decays[row]).apply(state)
            prefixes[row] = state.reshape(-1)
        return prefixes
