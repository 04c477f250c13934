"""One verdict on every rank of several axes: small integers and faults, told along one axis after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from weft.comm import Axis
from weft.errors import CommError, DeadlockError, DisagreementError, NcclRuleError, RankError

Merge = Callable[[Axis, list[tuple[int, ...]]], list[int]]
_SHOWN = 8  # faults that are told in one error
_LOST = (CommError, DeadlockError, DisagreementError, NcclRuleError, RankError)


def is_lost(error: Exception) -> bool:
    """Whether an error tells of the group, so that nobody can be told of it any more."""
    return isinstance(error, _LOST)


def join_faults(faults: Iterable[Exception | None]) -> Exception | None:
    """All that is wrong as one error, of the kind of the first: nobody is sent from one refusal to the next.

    >>> join_faults([None, ValueError("REKLS: one"), TypeError("REKLS: two")])
    ValueError('REKLS: one; and two')
    """
    found = [fault for fault in faults if fault is not None]
    if not found:
        return None
    words = [str(found[0]), *(str(fault).partition(": ")[2] for fault in found[1:_SHOWN])]
    more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return type(found[0])("; and ".join([*words, *more]))


def gather_verdict(
    axes: Sequence[Axis],
    operation: str,
    options: object,
    numbers: Sequence[int],
    merge: Merge,
    fault: Exception | None = None,
) -> list[int]:
    """What all ranks make of ``numbers``; a fault of one of them is raised on all.

    ``merge(axis, told)`` makes one list, as long as ``numbers``, of what the ranks of an axis told, or raises. It is
    told along the next axis, so after the last one every rank of a mesh has heard of all. A fault travels in the same
    way: no rank raises while others go on to wait for it.
    """
    known = list(numbers)
    for axis in axes:
        try:
            call = axis.begin(operation, options, metadata=known, fault=fault)
            known, fault = merge(axis, call.metadata.wait()), None
        except (ValueError, TypeError, NotImplementedError) as error:
            fault = error
        except RuntimeError as error:
            if is_lost(error):
                raise
            fault = error
    if fault is not None:
        raise fault
    return known
