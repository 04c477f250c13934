"""`Affine`: what a rank's tokens do to the state that enters it, as one contiguous buffer ready to send."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["none", "scalar", "vector", "dense"]
BLOCK_BYTES = 256 * 1024  # below this a message costs more in overhead than its block saves in waiting
MOST_BLOCKS = 16


def _kind(state: Tensor, log_decay: Tensor | None, transition: Tensor | None) -> Kind:
    if log_decay is None or transition is not None:
        return "none" if transition is None else "dense"
    return "scalar" if log_decay.ndim == state.ndim - 2 else "vector"


@dataclass(frozen=True)
class Form:
    """What is known of a map before it is computed: enough to say what will be received."""

    kind: Kind
    shape: torch.Size  # of the state, [..., K, V]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(state: Tensor, log_decay: Tensor | None = None, transition: Tensor | None = None) -> Form:
        """The form of the map with this B and this decay, computed at least in fp32."""
        wide = torch.promote_types(state.dtype, torch.float32)
        return Form(_kind(state, log_decay, transition), state.shape, wide, state.device)

    @cached_property
    def state_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def state_bytes(self) -> int:
        return self.state_elements * self.dtype.itemsize

    @cached_property
    def decay_shape(self) -> tuple[int, ...]:
        """Of the decay; nobody asks where there is none."""
        if self.kind == "scalar":
            return tuple(self.shape[:-2])
        return tuple(self.shape[:-1]) if self.kind == "vector" else (*self.shape[:-1], self.shape[-2])

    @cached_property
    def map_elements(self) -> int:
        """Of the state and the decay."""
        return self.state_elements + (0 if self.kind == "none" else math.prod(self.decay_shape))

    def new_empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def empty(self) -> Affine:
        """A map to receive into."""
        return self.from_flat(self.new_empty(self.map_elements))

    def from_flat(self, flat: Tensor) -> Affine:
        """The map that ``flat`` holds: its state, then its decay."""
        if self.kind == "none":
            return Affine("none", flat.view(self.shape), None, flat, self)
        count = self.state_elements
        return Affine(self.kind, flat[:count].view(self.shape), flat[count:].view(self.decay_shape), flat, self)

    @property
    def default_blocks(self) -> int:
        """How many blocks to cut a state into when nobody says."""
        return min(MOST_BLOCKS, max(1, self.state_bytes // BLOCK_BYTES))

    def block_count(self, blocks: int | None) -> int:
        """In how many independent blocks a state can be cut, at most ``blocks``: by rows; dense maps by columns."""
        most = self.default_blocks if blocks is None else blocks
        return max(1, min(most, self.shape[-1 if self.kind == "dense" else -2]))

    def cut(self, state: Tensor, blocks: int) -> list[Tensor]:
        """Buffers for the blocks of a state, each contiguous: views of ``state``, or tensors of their own if dense."""
        if blocks == 1:
            return [state]
        if self.kind == "dense":
            return [torch.empty_like(part) for part in state.tensor_split(blocks, dim=-1)]
        return list(state.view(-1, self.shape[-1]).tensor_split(blocks))


class Affine:
    """The map S -> A S + B of a state ``[..., K, V]``.

    | kind   | decay held         | A                                    |
    |--------|--------------------|--------------------------------------|
    | none   | nothing            | 1                                    |
    | scalar | log, ``[...]``     | exp(log), one number per leading index |
    | vector | log, ``[..., K]``  | diag(exp(log)), scales the rows      |
    | dense  | ``[..., K, K]``    | the matrix itself                    |

    ``flat`` holds B and then the decay, so that a map is one message and its B alone is a prefix of it. It is
    packed when first asked for: schedules that send states only never pay for it.
    Logs are only ever added: nothing divides by a decay, and a log of -inf (decay 0) is exact.
    """

    __slots__ = ("_factor", "_flat", "_form", "decay", "kind", "state")

    def __init__(
        self, kind: Kind, state: Tensor, decay: Tensor | None, flat: Tensor | None = None, form: Form | None = None
    ) -> None:
        self.kind, self.state, self.decay, self._flat, self._form = kind, state, decay, flat, form
        self._factor: Tensor | None = None

    @property
    def form(self) -> Form:
        if self._form is None:
            self._form = Form(self.kind, self.state.shape, self.state.dtype, self.state.device)
        return self._form

    @staticmethod
    def of(state: Tensor, log_decay: Tensor | None = None, transition: Tensor | None = None) -> Affine:
        """The map with this B and this decay, in the dtype of ``state``."""
        decay = log_decay if transition is None else transition
        state, kind = state.detach().contiguous(), _kind(state, log_decay, transition)
        return Affine(kind, state, None if decay is None else decay.detach().to(state.dtype))

    @property
    def tensors(self) -> list[Tensor]:
        """Its memory."""
        return [self.state] if self.decay is None else [self.state, self.decay]

    @property
    def flat(self) -> Tensor:
        """B and the decay, as a message."""
        if self._flat is None and self.decay is None:
            self._flat = self.state.view(-1)
        elif self._flat is None:
            packed = self.form.empty()  # and two copies: torch.cat of meta tensors loads the compiler
            packed.state.copy_(self.state)
            assert packed.decay is not None and self.decay is not None
            packed.decay.copy_(self.decay)
            self._flat = packed.flat
        return self._flat

    @property
    def state_flat(self) -> Tensor:
        """B alone, as a message."""
        return self.state.view(-1)

    @property
    def factor(self) -> Tensor:
        """exp of the log decay, with the dimensions it lacks of the state; for a scalar or vector decay."""
        if self._factor is None:
            assert self.decay is not None
            missing = len(self.form.shape) - len(self.form.decay_shape)
            self._factor = self.decay.exp().view(*self.form.decay_shape, *(1,) * missing)
        return self._factor

    def apply(self, state: Tensor | None) -> Tensor:
        """A state + B, in a new tensor; None is the zero state (and gives B itself)."""
        if state is None:
            return self.state
        return self._apply_into(state, self.form.new_empty(*self.form.shape))

    def _apply_into(self, state: Tensor, out: Tensor) -> Tensor:
        if self.decay is None:
            return torch.add(self.state, state, out=out)
        if self.kind == "dense":
            return torch.matmul(self.decay, state, out=out).add_(self.state)
        return torch.addcmul(self.state, self.factor, state, out=out)

    def then(self, later: Affine) -> Affine:
        """First this map, then ``later``: (A2 A1, A2 B1 + B2). Associative; for dense maps not commutative."""
        both = later.form.empty()
        later._apply_into(self.state, both.state)
        if self.decay is not None and later.decay is not None and both.decay is not None:
            if self.kind == "dense":
                torch.matmul(later.decay, self.decay, out=both.decay)
            else:
                torch.add(self.decay, later.decay, out=both.decay)
        return both

    def cut(self, blocks: int) -> list[Affine]:
        """The map in independent pieces of about equal size, each contiguous.

        Rows do not mix unless the map is dense; then columns do not. Only columns are copied.
        """
        if blocks == 1:
            return [self]
        if self.kind == "dense":
            return [Affine.of(part, transition=self.decay) for part in self.state.tensor_split(blocks, dim=-1)]
        keys, values = self.state.shape[-2:]
        rows = self.state.view(-1, values).tensor_split(blocks)
        if self.decay is None:
            return [Affine("none", part, None) for part in rows]
        logs = self.decay.reshape(-1)
        logs = logs.repeat_interleave(keys) if self.kind == "scalar" else logs
        pieces = [Affine("vector", part, log) for part, log in zip(rows, logs.tensor_split(blocks), strict=True)]
        for piece, factor in zip(pieces, logs.exp().unsqueeze(-1).tensor_split(blocks), strict=True):
            piece._factor = factor
        return pieces
