"""Parameters in buckets, and buckets in flat slices of equal size, one for each rank, whatever the shapes.

And what `ShardedAdamW` refuses of parameters and groups.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from weft.comm import Axis
from weft.ops.embedding import RowTable
from weft.optim.owners import Averaged, Bucket, Route
from weft.optim.step.compare import join_faults
from weft.optim.step.part import find_adam_fault, find_listed_twice, first_group_fault
from weft.parallel.dtensor import is_dtensor

Range = tuple[int, int]  # of a flattened tensor: start, stop


@dataclass(frozen=True)
class Piece:
    """A range of a flattened parameter; its route names the rank that owns it."""

    parameter: Tensor
    where: Range
    route: Route

    def of(self, tensor: Tensor) -> Tensor:
        """The elements of the parameter, or of its gradient: in the same memory if that is contiguous."""
        return tensor.detach().reshape(-1)[slice(*self.where)]

    def write(self, values: Tensor) -> None:
        """Put values into the parameter, however it lies in memory."""
        flat = self.parameter.detach().reshape(-1)
        flat[slice(*self.where)] = values
        if not self.parameter.is_contiguous():
            self.parameter.copy_(flat.view(self.parameter.shape))


@dataclass
class PieceBucket(Bucket):
    """Pieces that travel together. ``states``: what owned pieces' states will be."""

    pieces: list[Piece] = field(default_factory=list)
    states: list[tuple[Piece, dict[str, Tensor]]] = field(default_factory=list)

    @property
    def routes(self) -> list[Route]:
        return [piece.route for piece in self.pieces]


def cut_pieces(parameter: Tensor, ranges: Sequence[Range], axes: Sequence[Axis]) -> list[Piece]:
    """The pieces of a parameter of which rank r owns ``ranges[r]``; ``axes`` are one, or none in a world of one."""
    return [
        Piece(parameter, (start, stop), Route(
            (stop - start,), (Averaged(),) * len(axes), (owner,) * len(axes), parameter.dtype, parameter.device
        ))
        for owner, (start, stop) in enumerate(ranges) if stop > start
    ]  # fmt: skip


def fill_buckets(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Indices of neighbours whose sizes are together at most ``most``; what is larger stands alone.

    >>> fill_buckets([3, 3, 9, 1], 6)
    [[0, 1], [2], [3]]
    """
    buckets: list[list[int]] = []
    left = 0
    for index, size in enumerate(sizes):
        if not buckets or size > left:
            buckets.append([])
            left = most
        buckets[-1].append(index)
        left -= size
    return buckets


def cut_bucket(lengths: Sequence[int], ranks: int) -> list[list[Range]]:
    """For each tensor of a bucket, of ``lengths`` elements, the range that each rank owns.

    The tensors stand one after the other, and rank r owns the r-th slice of all of them.

    >>> cut_bucket([5, 3], 2)
    [[(0, 4), (4, 5)], [(0, 0), (0, 3)]]
    """
    each = -(-sum(lengths) // ranks)
    ranges, start = [], 0
    for length in lengths:
        bounds = [min(max(0, rank * each - start), length) for rank in range(ranks + 1)]
        ranges.append(list(itertools.pairwise(bounds)))
        start += length
    return ranges


def row_ranges(shape: torch.Size | tuple[int, ...], ranks: int) -> list[Range]:
    """The range of each rank when rows are cut as torch cuts them: ceil(rows / ranks) as far as they go."""
    rows, length = (shape[0], torch.Size(shape[1:]).numel()) if shape else (1, 1)
    each = -(-rows // ranks)
    bounds = [min(rank * each, rows) * length for rank in range(ranks + 1)]
    return list(itertools.pairwise(bounds))


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common when parameters are added."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[str, ...]  # their types
    bucket_bytes: int


def read_parameters(
    groups: Sequence[dict[str, Any]], parameters: Sequence[Tensor], bucket_bytes: int, rank: int
) -> _Options | Exception:
    """Of parameters that are added to the last of ``groups``: what the ranks must share, or all that is wrong."""
    fault = join_faults([
        first_group_fault("ShardedAdamW", groups, partial(find_adam_fault, "ShardedAdamW"), rank),
        *(find_listed_twice("ShardedAdamW", group["params"], rank) for group in groups),
        *(_find_parameter_fault(number, parameter, rank) for number, parameter in enumerate(parameters)),
    ])  # fmt: skip
    return fault or _Options(
        tuple(tuple(parameter.shape) for parameter in parameters),
        tuple(parameter.dtype for parameter in parameters),
        tuple(parameter.device.type for parameter in parameters),
        bucket_bytes,
    )


def _find_parameter_fault(number: int, parameter: Tensor, rank: int) -> Exception | None:
    """What is wrong with a parameter, if anything."""
    if is_dtensor(parameter):
        return TypeError(
            f"ShardedAdamW: parameter {number} is a DTensor (FSDP2, tensor parallel): its state is sharded as it "
            f"is; use torch.optim.AdamW, or weft.optim.REKLS with algorithm='adamw' (rank {rank})"
        )
    if isinstance(getattr(parameter, "row_table", None), RowTable):
        return TypeError(
            f"ShardedAdamW: parameter {number} is the table of a weft.ShardedEmbedding; step it with "
            f"weft.optim.RowAdam (rank {rank})"
        )
    if parameter.layout != torch.strided:
        return TypeError(f"ShardedAdamW: parameter {number} is {parameter.layout}, not dense (rank {rank})")
    if not parameter.is_floating_point():
        return TypeError(f"ShardedAdamW: parameter {number} is {parameter.dtype}, not floating point (rank {rank})")
    return None


def find_wrapper_fault(names: Mapping[Tensor, str], rank: int) -> Exception | None:
    """Whether a DistributedDataParallel averages the gradients of one of the parameters.

    Its reducer holds them and their gradient accumulators, which torch shows only as a count. An unfinished graph may
    be the holder, too: only where something holds a parameter are the wrappers that there are looked for and asked.
    """
    held = {parameter for parameter in names if _is_held(parameter)}
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)] if held else []
    for wrapper in wrappers:
        for name, parameter in wrapper.module.named_parameters():
            if parameter in held and name not in wrapper.parameters_to_ignore:
                return ValueError(
                    f"ShardedAdamW: {names[parameter]} is in a DistributedDataParallel, which averages its "
                    f"gradients already; leave the wrapper out (rank {rank})"
                )
    return None


def _is_held(parameter: Tensor) -> bool:
    """Whether torch holds a parameter besides the Python object and the gradient accumulator, of which there is one."""
    if not parameter.requires_grad:
        return False
    accumulator = get_gradient_edge(parameter).node
    return accumulator is not None and parameter._use_count() > 2  # type: ignore[attr-defined]
