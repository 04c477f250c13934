"""Text of any length from every rank to every rank, over the side of the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.comm.axis import Axis


@dataclass(frozen=True)
class _Options:
    """What the ranks must have in common: each tells as many integers."""

    integers: int


def share_text(axis: Axis, operation: str, mine: str) -> list[str]:
    """Every rank's text, by rank. All ranks must call it.

    >>> share_text(Axis.of(None), "greet", "hello")
    ['hello']
    """
    data = mine.encode()
    sizes = [size for (size,) in axis.begin(f"{operation}.size", metadata=[len(data)]).metadata.wait()]
    longest = -(-max(sizes) // 8)
    padded = data.ljust(8 * longest, b"\0")
    told = axis.begin(f"{operation}.text", _Options(longest), metadata=_integers(padded)).metadata.wait()
    return [_bytes(row)[:size].decode() for row, size in zip(told, sizes, strict=True)]


def _integers(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)]


def _bytes(numbers: Sequence[int]) -> bytes:
    return b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
