"""transpose: ranks exchange slices, each scans one slice of everybody's map, and the prefixes go back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from weft.comm.rounds import Expect, Path, Round, Schedule
from weft.ops.scan.affine import Affine, Form


def transpose(path: Path, form: Form) -> Schedule[Tensor | None]:
    """Two rounds, at most about two maps sent per rank whatever P is.

    Maps that do not mix rows are sliced by elements, each slice with the logs it needs; dense maps are sliced
    by leading index. The last rank's map is needed by nobody, the first rank's prefix is zero: neither travels.
    """
    rank, size = path.rank, path.size
    slices = [_Slice.of(form, size, owner) for owner in range(size)]
    mine, others = slices[rank], [peer for peer in range(size) if peer != rank]
    maps = form.new_empty(size - 1, mine.length)
    entering = form.new_empty(form.state_elements)
    local: Affine = yield Expect(
        [(0, peer, maps[peer]) for peer in others if peer < size - 1]
        + [(1, peer, entering[slices[peer].start : slices[peer].stop]) for peer in others if rank > 0],
        memory=[maps, entering],
    )
    if rank < size - 1:
        maps[rank] = mine.take(local)
    yield Round(0, [(peer, slices[peer].take(local)) for peer in others if rank < size - 1])

    prefixes = mine.scan(maps, form)  # row i: the slice of what enters rank i+1
    if rank > 0:
        entering[mine.start : mine.stop] = prefixes[rank - 1]
    yield Round(1, [(peer, prefixes[peer - 1]) for peer in others if peer > 0])
    return entering.view(form.shape) if rank > 0 else None


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
    def of(form: Form, size: int, owner: int) -> _Slice:
        keys, values = form.shape[-2:]
        share = {"none": 1, "scalar": keys * values, "vector": values, "dense": keys * values}[form.kind]
        unit = share if form.kind == "dense" else 1
        units = form.state_elements // unit if unit else 0
        # The last owners get the larger slices: the first rank already sends one prefix more than the others.
        start, stop = units * owner // size * unit, units * (owner + 1) // size * unit
        if form.kind == "none" or start == stop:
            return _Slice(start, stop, 0, 0, share)
        width = keys * keys if form.kind == "dense" else 1
        return _Slice(start, stop, start // share * width, -(-stop // share) * width, share)

    @property
    def length(self) -> int:
        return self.stop - self.start + self.end - self.first

    def take(self, local: Affine) -> Tensor:
        """The slice of a map, as a message."""
        state = local.state_flat[self.start : self.stop]
        if local.decay is None:
            return state
        packed = state.new_empty(self.length)
        packed[: len(state)] = state
        packed[len(state) :] = local.decay.reshape(-1)[self.first : self.end]
        return packed

    def scan(self, maps: Tensor, like: Form) -> Tensor:
        """Prefixes ``[R, n]`` of the slices ``maps`` ``[R, length]`` of R ranks: row i is what leaves rank i."""
        count = self.stop - self.start
        prefixes = maps.new_empty(len(maps), count)
        if count == 0:
            return prefixes
        states, decays = maps[:, :count], maps[:, count:]
        if like.kind == "dense":
            keys, values = like.shape[-2:]
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
