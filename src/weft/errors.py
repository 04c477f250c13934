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


class NcclRuleError(RuntimeError):
    """A virtual world with NCCL's rules saw something that would hang or go wrong on NCCL."""


class RankError(RuntimeError):
    """A rank failed with an error that could not be brought here as it was."""


# An error as it travels between ranks: the name of its class and its text.
Fault = tuple[str, str]
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, IndexError, NotImplementedError, RuntimeError, DisagreementError, CommError)
}


def fault_of(error: Exception) -> Fault:
    """What is sent of an error found in one rank's arguments."""
    kind = next((name for name, known in _KINDS.items() if type(error) is known), "ValueError")
    return kind, str(error)


def as_fault(what: str, error: Exception, where: str) -> Exception:
    """An error that came out of somebody else's code, as one that all ranks can raise: of the same kind if possible."""
    kind = type(error) if type(error) in (ValueError, NotImplementedError) else TypeError
    try:
        words = ": " + str(error).splitlines()[0]
    except Exception:  # it has no words, or cannot say them
        words = ""
    return kind(f"{what}: {type(error).__name__}{words}{where}")


def error_of(fault: Fault) -> Exception:
    """The same error again, on another rank."""
    return _KINDS[fault[0]](fault[1])


@dataclass(frozen=True)
class CallRecord:
    """One call of an operation on an axis: what every rank of the axis must have in common.

    ``number`` counts the calls on ``counter`` (an axis, or one lane of it); ``signature`` are the shapes, dtypes
    and options as text. ``tag`` goes on the wire with every message of the call, so that messages of different
    calls never meet. ``fault`` is the error this rank found in its arguments, if it could not make the call.
    ``integers``: how many of them the ranks gather as metadata at its beginning.
    """

    counter: str
    number: int
    operation: str
    signature: tuple[tuple[str, str], ...]
    tag: int
    fault: Fault | None = None
    integers: int = 0

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(f'{name}={value}' for name, value in self.signature)})"

    @property
    def place(self) -> str:
        """Where in a program it stands, for messages."""
        return f"call {self.number}, {self.operation}"

    def agrees_with(self, other: CallRecord) -> bool:
        return (self.operation, self.signature, self.fault) == (other.operation, other.signature, other.fault)


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``; a long list is cut."""
    listed = sorted(ranks)
    shown = ", ".join(str(rank) for rank in listed[:16]) + (", ..." if len(listed) > 16 else "")
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}"


def diagnose(records: Mapping[int, CallRecord], size: int) -> Fault | None:
    """What is wrong with the same call on several ranks: the first rank's fault, else a disagreement, else None.

    ``records`` maps a rank to its call; one that has not published any is absent.
    """
    for rank in sorted(records):
        if (fault := records[rank].fault) is not None:
            return fault
    distinct: list[tuple[CallRecord, list[int]]] = []
    for rank in sorted(records):
        for record, ranks in distinct:
            if record.agrees_with(records[rank]):
                ranks.append(rank)
                break
        else:
            distinct.append((records[rank], [rank]))
    if len(distinct) < 2:
        return None
    first = distinct[0][0]
    same_operation = all(record.operation == first.operation for record, _ in distinct)
    shown = []
    for record, ranks in distinct:
        words = ", ".join(
            f"{name}={value}"
            for name, value in record.signature
            if not same_operation or any(dict(other.signature).get(name) != value for other, _ in distinct)
        )
        shown.append(f"{name_ranks(ranks)} called {record.operation}({words})")
    silent = [rank for rank in range(size) if rank not in records]
    missing = f"; no word from {name_ranks(silent)}" if silent else ""
    return (
        "DisagreementError",
        f"{first.operation}: the ranks disagree at call {first.number}: {'; '.join(shown)}{missing}; "
        f"every rank must make the same call with the same shapes, dtypes and options",
    )


def name_failing_rank(error: BaseException, rank: int, size: int) -> BaseException:
    """The same exception, whose traceback now also says which rank raised it."""
    error.add_note(f"raised on rank {rank} of {size}")
    return error
