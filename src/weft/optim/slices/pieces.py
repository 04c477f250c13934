"""Pieces of flattened parameters, and the buckets in which they travel to their owners and back."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from weft.optim.owners import Held, Route, Transfer
from weft.optim.slices.layout import Range, flat_of


@dataclass(frozen=True)
class Piece:
    """A range of a flattened parameter and the rank that owns it."""

    parameter: Tensor
    where: Range
    route: Route

    def own(self) -> Tensor:
        """The elements as they are."""
        return flat_of(self.parameter)[slice(*self.where)]


@dataclass
class Bucket:
    """Pieces that travel together, in the step under way. ``states``: what owned pieces' states will be."""

    pieces: list[Piece]
    gradients: Transfer | None = None
    arrived: Held | None = None
    weights: Transfer | None = None
    states: list[tuple[Piece, dict[str, Tensor]]] = field(default_factory=list)

    @property
    def routes(self) -> list[Route]:
        return [piece.route for piece in self.pieces]
