"""The local selective scan in phases: h_t = exp(A d_t) h_{t-1} + d_t u_t B_t^T, y_t = h_t C_t, for each channel.

All chunks advance together, token by token: as many steps as a chunk has tokens, whatever the length. The phases are
those of `weft.ops.linear_attention.chunk`: the constructor finds what the scan needs (`maps`), `intra` does what needs
no state, `finish` takes what arrived. Nothing of the size ``[B, T, D, N]`` is ever made.

Shapes: u, d ``[B, T, D]``, A ``[D, N]``, B, C ``[B, T, G, N]`` with D a multiple of G. `lengths` cuts T into segments
with states of their own (more than one needs a batch of 1); states are ``[B*S, D, N, 1]`` in fp32, fp64 for fp64.
Within, h is ``[B, chunks, G, D/G, N]``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.comm.device import copy_to_device
from weft.comm.function import keep_tensors

TILE_BYTES = 64 * 2**20  # of the states that a backward keeps at a time


class Chunks:
    """Segments cut into chunks of ``size`` tokens, the last of each filled up with tokens that change nothing."""

    def __init__(self, lengths: list[int], size: int, device: torch.device) -> None:
        self.size, self.counts = size, [max(1, -(-length // size)) for length in lengths]
        self._places, self._tokens = _indices(tuple(lengths), size, device)

    @property
    def chunks(self) -> int:
        return sum(self.counts)

    def lay(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, ...] as [size, B, chunks, ...], zero where there is no token."""
        padded = torch.cat([x.detach().to(dtype), x.new_zeros(x.shape[0], 1, *x.shape[2:], dtype=dtype)], dim=1)
        return padded.index_select(1, self._places).unflatten(1, (self.chunks, self.size)).movedim(2, 0)

    def restore(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[size, B, chunks, ...] as [B, T, ...]."""
        return x.movedim(0, 2).flatten(1, 2).index_select(1, self._tokens).to(dtype)

    def of_segments(self, reverse: bool = False) -> Iterator[tuple[int, range]]:
        """(segment, its chunks), in the order in which a state passes them."""
        start = 0
        for segment, count in enumerate(self.counts):
            places = range(start, start + count)
            yield segment, places[::-1] if reverse else places
            start += count


@keep_tensors(maxsize=64)
def _indices(lengths: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The token of each place of all chunks (T where there is none), and the place of each token."""
    places: list[int] = []
    tokens: list[int] = []
    total, start = sum(lengths), 0
    for length in lengths:
        filled = max(1, -(-length // size)) * size
        tokens += range(len(places), len(places) + length)
        places += [*range(start, start + length), *[total] * (filled - length)]
        start += length
    return tuple(copy_to_device(torch.tensor(one, dtype=torch.int64, device="cpu"), device) for one in (places, tokens))  # type: ignore[return-value]


class _Recurrence:
    """The tokens of one run, chunk beside chunk, and what they do to states."""

    def __init__(
        self, u: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, lengths: list[int], chunk_size: int
    ) -> None:
        self._dtype, wide = u.dtype, torch.promote_types(u.dtype, torch.float32)
        groups = B.shape[2]
        self._A = A.detach().to(wide).unflatten(0, (groups, -1))
        self.chunks = Chunks(lengths, chunk_size, u.device)
        lay = self.chunks.lay
        self._d = lay(d, wide).unflatten(-1, (groups, -1)).unsqueeze(-1)  # [size, B, chunks, G, D/G, 1]
        self._du = self._d * lay(u, wide).unflatten(-1, (groups, -1)).unsqueeze(-1)
        self._B, self._C = (lay(one, wide).unsqueeze(-2) for one in (B, C))  # [size, B, chunks, G, 1, N]
        self.log_decay = self._A * self._d.sum(0)  # of each chunk
        state = self.zeros()
        for t in range(self.chunks.size):
            state = self._step(t, state)
        self._ends = state
        starts, leaving = self.pass_chunks(self._ends, None)
        self._starts = starts
        decays = [self.log_decay[:, slice(p[0], p[-1] + 1)].sum(1) for _, p in self.chunks.of_segments()]
        self._map = torch.cat([state.new_zeros(0, *state.shape[2:]), *decays]).flatten(1, 2), leaving

    def zeros(self) -> Tensor:
        return self._du.new_zeros(*self._du.shape[1:-1], self._A.shape[-1])

    def _decay(self, t: int) -> Tensor:
        return (self._A * self._d[t]).exp()

    def _step(self, t: int, state: Tensor) -> Tensor:
        return (self._decay(t) * state).addcmul_(self._du[t], self._B[t])

    def pass_chunks(self, sums: Tensor, entering: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
        """What enters every chunk, and what leaves the segments; a chunk turns S into its decay times S + its sum."""
        decay, found, (batch, _, *shape) = self.log_decay.exp(), torch.empty_like(sums), sums.shape
        leaving = [sums.new_zeros(0, *shape)]  # a run may have no segments
        for segment, places in self.chunks.of_segments(reverse):
            state = sums.new_zeros(batch, *shape)
            if entering is not None:
                state = entering[segment * batch : (segment + 1) * batch].reshape(batch, *shape)
            for place in places:
                found[:, place] = state
                state = decay[:, place] * state + sums[:, place]
            leaving.append(state)
        return found, torch.cat(leaving).flatten(1, 2).unsqueeze(-1)


class SelectiveForward(_Recurrence):
    """Forward of one run. ``maps``: (log decay [B*S, D, N], leaving state from a zero start [B*S, D, N, 1])."""

    @property
    def maps(self) -> tuple[Tensor, Tensor]:
        return self._map

    def intra(self) -> None:
        """y as if nothing had entered the segments."""
        state, outs = self._starts, []
        for t in range(self.chunks.size):
            state = self._step(t, state)
            outs.append((state * self._C[t]).sum(-1))
        self._y = torch.stack(outs)

    def finish(self, entering: Tensor | None) -> Tensor:
        """y [B, T, D], with what the entering states give."""
        if entering is not None:
            state, _ = self.pass_chunks(torch.zeros_like(self._ends), entering)
            for t in range(self.chunks.size):
                state = self._decay(t) * state
                self._y[t] += (state * self._C[t]).sum(-1)
        return self.chunks.restore(self._y.flatten(-2), self._dtype)


class SelectiveBackward(_Recurrence):
    """Backward of one run, from what its forward had, the states that entered it and the gradient of y.

    ``maps``: (the log decay; gradient of the entering states if that of the leaving ones is zero).
    """

    def __init__(
        self, u: Tensor, d: Tensor, A: Tensor, B: Tensor, C: Tensor, lengths: list[int], chunk_size: int,
        entering: Tensor | None, dy: Tensor,
    ) -> None:  # fmt: skip
        super().__init__(u, d, A, B, C, lengths, chunk_size)
        wide, groups = self._du.dtype, B.shape[2]
        self._dtypes, self._entering = [x.dtype for x in (u, d, A, B, C)], entering
        self._u = self.chunks.lay(u, wide).unflatten(-1, (groups, -1))
        self._dy = self.chunks.lay(dy, wide).unflatten(-1, (groups, -1)).unsqueeze(-1)
        grad = self.zeros()
        for t in reversed(range(self.chunks.size)):
            grad = self._decay(t) * (grad + self._C[t] * self._dy[t])
        self._sums = grad
        self.maps = self._map[0], self.pass_chunks(grad, None, reverse=True)[1]

    def intra(self) -> None:
        """The states that entered every chunk."""
        self._starts, _ = self.pass_chunks(self._ends, self._entering)

    def finish(self, leaving: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """du, dd, dA, dB, dC and the gradient of the entering states, from that of the leaving ones."""
        ends, entering = self.pass_chunks(self._sums, leaving, reverse=True)
        size, chunks = self.chunks.size, self.chunks.chunks
        of_chunk = size * ends.shape[0] * self._A.numel() * ends.element_size()  # bytes of its tokens' states
        tile = max(1, TILE_BYTES // of_chunk)
        du, dd = torch.empty_like(self._u), torch.empty_like(self._u)
        dB, dC = (torch.empty_like(one.squeeze(-2)) for one in (self._B, self._C))
        dA = torch.zeros_like(self._A)
        for first in range(0, chunks, tile):
            self._finish_tile(slice(first, min(chunks, first + tile)), ends, du, dd, dA, dB, dC)
        restore = self.chunks.restore
        of_u, of_d, of_A, of_B, of_C = self._dtypes
        return (
            restore(du.flatten(-2), of_u), restore(dd.flatten(-2), of_d), dA.flatten(0, 1).to(of_A),
            restore(dB, of_B), restore(dC, of_C), entering,
        )  # fmt: skip

    def _finish_tile(
        self, tile: slice, ends: Tensor, du: Tensor, dd: Tensor, dA: Tensor, dB: Tensor, dC: Tensor
    ) -> None:
        """The gradients of some chunks: their states once more, and then back through them."""
        d, weighted, B, C, dy = (one[:, :, tile] for one in (self._d, self._du, self._B, self._C, self._dy))
        states = [self._starts[:, tile]]
        for t in range(self.chunks.size):
            states.append(((self._A * d[t]).exp() * states[-1]).addcmul_(weighted[t], B[t]))
        grad = ends[:, tile]  # of the state after a token
        for t in reversed(range(self.chunks.size)):
            dC[t, :, tile] = (dy[t] * states.pop()).sum(-2)
            grad = grad + C[t] * dy[t]
            dB[t, :, tile] = (grad * weighted[t]).sum(-2)
            written = (grad * B[t]).sum(-1)
            grad = (self._A * d[t]).exp() * grad
            of_log = grad * states[-1]  # of A d_t
            du[t, :, tile] = d[t].squeeze(-1) * written
            dd[t, :, tile] = self._u[t, :, tile] * written + (self._A * of_log).sum(-1)
            dA += (d[t] * of_log).sum((0, 1))
