"""`OwnedPart`: what `REKLS` and `ShardedAdamW` do alike with owners, and what travels together in their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.device import runs_behind
from weft.optim.owners import Held, Transfer
from weft.optim.step.part import StepPart


@dataclass
class Bucket:
    """What travels together in the step under way: gradients to their owners, then results from them."""

    gradients: Transfer | None = None
    arrived: Held | None = None
    results: Transfer | None = None

    def arrive(self) -> Held:
        """The gradients this rank owns, waited for, at least in fp32; None for others'."""
        if self.arrived is None:
            found = [] if self.gradients is None else self.gradients.wait()
            self.arrived, self.gradients = [
                None if one is None else one.to(torch.promote_types(one.dtype, torch.float32)).contiguous()
                for one in found
            ], None  # fmt: skip
        return self.arrived

    def drain(self) -> Held:
        """Wait for all that is under way: the results, if there are any."""
        if self.gradients is not None:
            self.gradients.wait()
        return [] if self.results is None else self.results.wait()


class OwnedPart(StepPart):
    """A part whose gradients go to owners and whose results come back."""

    _under_way: list[Any]  # buckets

    def _accept(self, one: Any, results: Held) -> None:
        """Change weights and state by what came back in a bucket."""
        raise NotImplementedError

    def _counts(self, one: Any, place: int) -> bool:
        """Whether a gradient that this rank owns counts in the norm here."""
        return True

    def advance(self, bucket: int) -> None:
        """Over data x tensor ranks gradients and results travel in two hops."""
        moving = self._under_way[bucket].results or self._under_way[bucket].gradients
        if moving is not None:
            moving.advance()

    def settle(self, bucket: int) -> None:
        """A message of one gradient carries the gradient itself."""
        moving = self._under_way[bucket].gradients
        if moving is not None:
            moving.settle()

    def squared_norm(self, bucket: int) -> Tensor:
        """Of the whole gradients this rank owns, each element once."""
        one = self._under_way[bucket]
        grads = [grad for at, grad in enumerate(one.arrive()) if grad is not None and self._counts(one, at)]
        if not grads:
            return torch.zeros((), dtype=torch.float64)
        squares = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64)).square_()
        return squares.sum() if runs_behind(squares.device) else squares.cumsum(0)[-1]  # in their order

    def commit(self, accepted: bool) -> None:
        """Take the results that come back."""
        under_way, self._under_way = self._under_way, []
        for one in under_way:
            results = one.drain()
            if accepted:
                self._accept(one, results)
