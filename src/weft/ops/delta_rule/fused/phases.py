"""`ChunkForward` and `ChunkBackward` with Triton kernels: the same phases, arguments and results.

| phase           | kernels                                   | reads                    | writes                  |
|-----------------|-------------------------------------------|--------------------------|-------------------------|
| forward         | decay_keys, key_pairs, invert_pairs,      | k, v, beta, g            | W, U, states, N, `maps` |
|                 | apply_inverse, delta_states               |                          |                         |
| forward.intra   | output_intra, output_inter                | q, k, g, states, N       | o so far, `left`        |
| forward.finish  | add_entering                              | o so far, `left`         | o                       |
| backward        | (a product of torch)                      | `left`, do               | `maps`                  |
| backward.intra  | those of forward, query_grads, key_grads, | q, k, v, beta, g, do     | dq, what do alone gives |
|                 | output_intra, chunk_states                |                          | to dk, dg, dN and dS    |
| backward.finish | delta_state_grads, apply_inverse,         | k, v, beta, g, W, states | dk, dv, dbeta, dg       |
|                 | query_grads, key_grads, join_key_grads,   | N and all of that        |                         |
|                 | key_finish                                |                          |                         |

Outputs are those of linear attention with N in place of v, so its kernels are used; what N is read from the states is
linear attention again, with the keys as queries. Inputs are read where they lie, packed or strided.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.delta_rule.chunk import Inputs
from weft.ops.delta_rule.fused.operators import operators
from weft.ops.fused.tiling import cut_chunks
from weft.ops.fused.tokens import Tokens, gate_grad, readable, sum_group
from weft.ops.scan.grid import Grid


class _Chunks(Tokens):
    """The inputs of a run, and what its chunks do to any state: the inverse [B, T, HV, BC], W, U and decayed keys."""

    def __init__(self, inputs: Inputs, scale: float, lengths: list[int], chunk_size: int) -> None:
        grid = Grid(inputs.q, inputs.v, lengths, chunk_size)
        super().__init__(inputs.q, inputs.k, inputs.v, inputs.g, scale, grid, cut_chunks(grid))
        self.beta, self.exact = inputs.beta.detach(), inputs.q.dtype == torch.float32
        self.run_tables = [*self.tables[:2], self.pieces.segment_first, self.pieces.segment_last]

    def factor(self) -> None:
        """Compute them."""
        width = max(16, self.grid.chunk)
        self.inverse, self.w, self.u = (self.empty(dim) for dim in (width, self.grid.key_dim, self.grid.value_dim))
        self.ended, self.whole = self.k, None
        if self.g is not None:
            logs = (self.grid.key_dim,) if self.g.dim() == 4 else ()
            self.ended, self.whole = self.empty(self.grid.key_dim), self.empty_states(self.pieces.chunks, *logs)
        if self.pieces.chunks:
            run, tables, chunk, pairs = operators(), self.tables[:2], self.grid.chunk, self.empty(width)
            if self.g is not None:
                run.decay_keys(self.k, self.g, tables, self.ended, self.whole, chunk)
            run.key_pairs(self.k, self.g, tables, pairs, chunk)
            run.invert_pairs(pairs, self.beta, tables, self.inverse, chunk)
            for x, g, out in ((self.k, self.g, self.w), (self.v, None, self.u)):
                run.apply_inverse(self.inverse, x, self.beta, g, tables, out, None, chunk, self.exact, False)


class _States:
    """The recurrence over chunks: states that enter them [M, B, HV, K, V], N [B, T, HV, V], the state that leaves.

    ``mapped`` are the same three with K columns, from the identity, if asked for.
    """

    def __init__(self, x: _Chunks, start: Tensor | None, with_map: bool) -> None:
        grid = x.grid
        self.states, self.values, self.final = found = self._empty(x, grid.value_dim)
        self.mapped = self._empty(x, grid.key_dim) if with_map else None
        if grid.lengths:
            start = None if start is None else start.detach().float().contiguous()
            mapped = self.mapped or (None, None, None)
            operators().delta_states(x.ended, x.whole, x.w, x.u, start, x.run_tables, *found, *mapped, grid.chunk)

    @staticmethod
    def _empty(x: _Chunks, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        grid, keys = x.grid, x.grid.key_dim
        shape = grid.batch * len(grid.lengths), grid.value_heads, keys, columns
        final = x.q.new_empty(shape, dtype=torch.float32)
        return x.empty_states(x.pieces.chunks, keys, columns), x.empty(columns), final


class FusedForward:
    """`ChunkForward` with Triton kernels."""

    def __init__(
        self, inputs: Inputs, scale: float, lengths: list[int], chunk_size: int, start: Tensor | None, enters: bool,
        waits: bool,
    ) -> None:  # fmt: skip
        self._in = _Chunks(inputs, scale, lengths, chunk_size)
        self._in.factor()
        self._states: _States | None = _States(self._in, start, enters)
        mapped = self._states.mapped
        self.maps = None if mapped is None else mapped[2], self._states.final
        if not waits:
            self.intra()

    def intra(self) -> None:
        """Outputs as far as they are known, and what the entering state will be multiplied by."""
        if self._states is None:  # done already
            return
        found, mapped = self._states, self._states.mapped
        self._o = self._read(found.states, found.values, self._in.v.dtype if mapped is None else torch.float32)
        self.left = None if mapped is None else self._read(mapped[0], mapped[1], torch.float32)  # [B, T, HV, K]
        self._states = None  # its memory is free

    def _read(self, states: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
        """scale (q e^G) S + scale tril(q k^T) N."""
        x, columns = self._in, values.shape[-1]
        partial, out = x.empty(columns), x.empty(columns, dtype)
        if x.pieces.chunks:
            run, chunk = operators(), x.grid.chunk
            run.output_intra(x.q, x.k, values, x.g, x.tables[:2], partial, x.scale, chunk, False)
            run.output_inter(x.q, x.g, x.tables, states, None, None, partial, out, x.scale, chunk, False)
        return out

    def finish(self, entering: Tensor | None) -> Tensor:
        """o [B, T, HV, V], with what the state that entered [B, HV, K, V] adds."""
        x = self._in
        if self.left is None or entering is None:
            return self._o.to(x.v.dtype)
        o = x.empty(x.grid.value_dim, x.v.dtype)
        if x.pieces.chunks:
            entering = entering.detach().float().contiguous()
            operators().add_entering(self.left, entering, self._o, x.tables[:2], o, x.grid.chunk, x.exact)
        return o


class FusedBackward:
    """`ChunkBackward` with Triton kernels."""

    def __init__(
        self, inputs: Inputs, scale: float, lengths: list[int], chunk_size: int, entering: Tensor | None, do: Tensor,
        left: Tensor | None, transition: Tensor | None,
    ) -> None:  # fmt: skip
        self._in = x = _Chunks(inputs, scale, lengths, chunk_size)
        self._entering, self._do = entering, readable(do)
        self.maps: tuple[Tensor | None, Tensor] = None, x.grid.join_states(x.grid.zero_states())
        if left is not None and transition is not None:
            self.maps = transition.mT, left.permute(0, 2, 3, 1) @ self._do.float().transpose(1, 2)

    def intra(self) -> None:
        """All that needs no gradient of the leaving states: the forward again, and what do alone gives."""
        x, do = self._in, self._do
        x.factor()
        self._states = s = _States(x, self._entering, False)
        keys, values = x.grid.key_dim, x.grid.value_dim
        self._dq = x.empty(keys, x.q.dtype if x.grid.group == 1 else torch.float32)
        self._dk, self._dn, self._ds = x.empty(keys), x.empty(values), x.empty_states(x.pieces.chunks, keys, values)
        self._row, self._col = x.empty_gate_parts(1), x.empty_gate_parts(1)
        if x.pieces.chunks:
            run, chunk, n = operators(), x.grid.chunk, s.values
            one_each = [*x.tables[:2], x.pieces.first, x.pieces.last]
            run.chunk_states(x.q, do, x.g, one_each, None, None, self._ds, None, x.scale, chunk, True)
            run.output_intra(x.q, x.k, do, x.g, x.tables[:2], self._dn, x.scale, chunk, True)
            run.query_grads(
                x.q, x.k, n, x.g, do, x.tables, s.states, None, None, self._dq, self._row, x.scale, chunk, False
            )
            run.key_grads(x.q, x.k, n, x.g, do, x.tables[:2], self._dk, self._col, x.scale, chunk, False)

    def finish(self, grad_leaving: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """dq, dk, dv, dbeta, dg (None without decay) and the gradient of the entering states."""
        x, run, chunk, s = self._in, operators(), self._in.grid.chunk, self._states
        keys, values = x.grid.key_dim, x.grid.value_dim
        grad_states, entering = torch.empty_like(s.states), torch.empty_like(s.final)
        dn, y, dv = (x.empty(values) for _ in range(3))
        as_query, as_key, dk = x.empty(keys), x.empty(keys), x.empty(keys, self._dq.dtype)
        dbeta, dg = x.empty(1).squeeze(-1), x.empty_gate_grad()
        if x.grid.lengths:
            came = None if grad_leaving is None else grad_leaving.detach().float().contiguous()
            run.delta_state_grads(
                x.ended, x.whole, x.w, self._ds, self._dn, came, x.run_tables, grad_states, dn, entering, chunk
            )
        if x.pieces.chunks:
            tables, n = x.tables[:2], s.values
            run.apply_inverse(x.inverse, dn, x.beta, None, tables, y, dv, chunk, x.exact, True)
            run.query_grads(x.k, x.k, n, x.g, y, x.tables, s.states, None, None, as_query, None, -1.0, chunk, True)
            run.key_grads(x.k, x.k, n, x.g, dv, tables, as_key, None, -1.0, chunk, True)
            vector = x.g is not None and x.g.dim() == 4
            run.join_key_grads(
                x.k, x.v, x.beta, y, as_query, as_key, tables, self._dk, self._row, self._col, dbeta, chunk, vector
            )
            states = None if x.g is None else s.states
            run.key_finish(
                x.k, n, x.g, x.tables, states, None, None, grad_states, None, None, self._dk, self._row, self._col,
                dk, dg, chunk,
            )  # fmt: skip
        dq, dk = (sum_group(d, x.grid.heads).to(like.dtype) for d, like in ((self._dq, x.q), (dk, x.k)))
        given = None if dg is None else gate_grad(dg, x.g)
        return dq, dk, dv.to(x.v.dtype), dbeta.to(x.beta.dtype), given, entering
