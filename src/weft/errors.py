"""The words of every error a user can meet, and the test whether ranks agree.

A message says what was wrong, the values, the ranks and the fix. Everything here is pure: who asks the
other ranks, and when, is decided in ``comm``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class DisagreementError(ValueError):
    """Ranks called different operations, or the same one with different shapes, dtypes or options."""


class CommError(RuntimeError):
    """A peer was lost or did not answer within the group's timeout."""


class DeadlockError(RuntimeError):
    """Every rank of a virtual world waits and nobody can go on."""


class RankError(RuntimeError):
    """A rank failed with an error that could not be brought here as it was."""


REFUSED = "refused"  # the fact of a call that a rank could not make, with the reason as its value


@dataclass(frozen=True)
class Call:
    """One call of an operation on an axis: what every rank of the axis must have in common.

    ``number`` counts the calls on ``space`` (an axis, or one lane of it); ``facts`` are the shapes, dtypes
    and options, as text. ``tag`` goes on the wire with every message of the call, so that messages of
    different calls never meet.
    """

    space: str
    number: int
    operation: str
    facts: tuple[tuple[str, str], ...]
    tag: int

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(f'{name}={value}' for name, value in self.facts)})"

    def agrees_with(self, other: Call) -> bool:
        return self.operation == other.operation and self.facts == other.facts


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``; a long list is cut."""
    listed = sorted(ranks)
    shown = ", ".join(str(rank) for rank in listed[:16]) + (", ..." if len(listed) > 16 else "")
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}"


def describe_disagreement(calls: Mapping[int, Call], size: int) -> str | None:
    """The message for ranks that called different things, or None where all of ``calls`` agree.

    ``calls`` maps a rank to its call; a rank that has not been heard of is absent.
    """
    distinct: list[tuple[Call, list[int]]] = []
    for rank in sorted(calls):
        for call, ranks in distinct:
            if call.agrees_with(calls[rank]):
                ranks.append(rank)
                break
        else:
            distinct.append((calls[rank], [rank]))
    if len(distinct) < 2:
        return None
    refused = [(dict(call.facts)[REFUSED], ranks) for call, ranks in distinct if REFUSED in dict(call.facts)]
    if refused:
        return (
            f"{refused[0][0]}; raised on every rank because of {name_ranks(r for _, ranks in refused for r in ranks)}"
        )
    first = distinct[0][0]
    same_operation = all(call.operation == first.operation for call, _ in distinct)
    shown = []
    for call, ranks in distinct:
        facts = [
            (name, value)
            for name, value in call.facts
            if not same_operation or any(dict(other.facts).get(name) != value for other, _ in distinct)
        ]
        words = ", ".join(f"{name}={value}" for name, value in facts)
        shown.append(f"{name_ranks(ranks)} called {call.operation}({words})")
    silent = [rank for rank in range(size) if rank not in calls]
    missing = f"; no word from {name_ranks(silent)}" if silent else ""
    return (
        f"{first.operation}: the ranks disagree at call {first.number}: {'; '.join(shown)}{missing}; "
        f"every rank must make the same call with the same shapes, dtypes and options"
    )


def name_failing_rank(error: BaseException, rank: int, size: int) -> BaseException:
    """The same exception, whose traceback now also says which rank raised it."""
    error.add_note(f"raised on rank {rank} of {size}")
    return error
