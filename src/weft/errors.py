"""The errors a user can meet, and how they travel between ranks.

A message says what was wrong, the values, the ranks and the fix. Everything here is pure: who asks the other ranks, and
when, is decided in ``comm``.
"""

from __future__ import annotations

from collections.abc import Iterable


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


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 1`` or ``ranks 0, 2``; a long list is cut."""
    listed = sorted(ranks)
    shown = ", ".join(str(rank) for rank in listed[:16]) + (", ..." if len(listed) > 16 else "")
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}"


def name_failing_rank(error: BaseException, rank: int, size: int) -> BaseException:
    """The same exception, whose traceback now also says which rank raised it."""
    error.add_note(f"raised on rank {rank} of {size}")
    return error
