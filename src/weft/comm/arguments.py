"""Reading one rank's arguments: whatever they are, reading does not raise here, it gives a fault for all ranks.

An operation hands what it does with its arguments before it talks to `read`. The finders below say in words what is
usually wrong. A finder returns the error or None; what is *raised* on the way comes from the argument itself (a tensor
subclass, an object whose ``__eq__`` fails) and becomes a worded fault too.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from weft.errors import as_fault

P = ParamSpec("P")
T = TypeVar("T")
_PLAIN = (Tensor, torch.nn.Parameter)
_SHOWN = 80  # characters of a value in a message


def read(operation: str, rank: int | None, reading: Callable[[], T | Exception]) -> T | Exception:
    """What ``reading()`` returns: a value, or the fault it found; a fault too where it raises."""
    try:
        return reading()
    except Exception as error:
        return as_fault(f"{operation}: the arguments cannot be read", error, at(rank))


def read_bounds(operation: str, cu_seqlens: Any, rank: int) -> tuple[int, ...] | Exception | None:
    """Where packed documents begin and end, as integers, or what is wrong with that.

    The host reads them: on a device it waits for that.
    """
    if cu_seqlens is None:
        return None
    if isinstance(cu_seqlens, DTensor):
        return TypeError(f"{operation}: cu_seqlens is a DTensor; pass the whole, on every rank (rank {rank})")
    given = read(operation, rank, lambda: torch.as_tensor(cu_seqlens))
    if isinstance(given, Exception) or given.is_meta or given.dtype.is_floating_point or given.dtype == torch.bool:
        return TypeError(f"{operation}: cu_seqlens must be integers, got {show(cu_seqlens)} (rank {rank})")
    bounds = tuple(given.reshape(-1).tolist())
    if len(bounds) > 1 and bounds[0] == 0 and all(a <= b for a, b in pairwise(bounds)):
        return bounds
    return ValueError(
        f"{operation}: cu_seqlens must be integers that rise from 0, got {list(bounds[:8])} (rank {rank})"
    )


def show(value: object) -> str:
    """A value in a message, cut if it is long; only its kind where it cannot be shown or would need many words."""
    if isinstance(value, Tensor):
        return f"a tensor of {_dtype(value)}"
    try:
        words = repr(value)
    except Exception:
        return f"a {type(value).__name__}"
    return words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."


def kind_of(value: object) -> str:
    """What a value is, where another kind was wanted."""
    return str(_dtype(value)) if isinstance(value, Tensor) else type(value).__name__


def _dtype(value: Tensor) -> object:
    with torch._C.DisableTorchFunctionSubclass():  # a subclass may raise
        return value.dtype


def at(rank: int | None) -> str:
    """Where an error was found; nothing is said of what is the same on every rank."""
    return "" if rank is None else f" (rank {rank})"


def _finder(find: Callable[P, Exception | None]) -> Callable[P, Exception | None]:
    """A finder of faults in one argument. If the argument itself raises, that is the fault, with its name."""

    @functools.wraps(find)
    def run(*args: P.args, **keywords: P.kwargs) -> Exception | None:
        try:
            return find(*args, **keywords)
        except Exception as error:
            operation, name, _, rank = args[:4]
            return as_fault(f"{operation}: {name} cannot be read", error, at(rank))  # type: ignore[arg-type]

    return run


@_finder
def find_tensor_fault(
    operation: str, name: str, value: object, rank: int | None, dtypes: Collection[torch.dtype] | None, words: str
) -> Exception | None:
    """What is wrong with an argument that must be a dense tensor of one of ``dtypes`` (None: of any).

    ``words``: what it must be, in a message.
    """
    if isinstance(value, DTensor):
        return TypeError(f"{operation}: {name} is a DTensor; pass {name}.to_local(), this rank's part{at(rank)}")
    if not isinstance(value, Tensor) or (dtypes is not None and value.dtype not in dtypes):
        return TypeError(f"{operation}: {name} must be {words}, got {kind_of(value)}{at(rank)}")
    if value.layout != torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        return TypeError(f"{operation}: {name} must be {words}, got a {kind} tensor{at(rank)}")
    if type(value) not in _PLAIN and value.numel():
        value.detach().reshape(-1)[:1].clone()  # a subclass that cannot do this cannot do more
    return None


def find_flag_fault(operation: str, name: str, value: object, rank: int | None) -> Exception | None:
    """What is wrong with an argument that must be True or False."""
    if isinstance(value, bool):
        return None
    return TypeError(f"{operation}: {name} must be True or False, got {show(value)}{at(rank)}")


@_finder
def find_integer_fault(
    operation: str, name: str, value: object, rank: int | None, least: int | None = None
) -> Exception | None:
    """What is wrong with an argument that must be an integer, and at least ``least``. True and False are none."""
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return TypeError(f"{operation}: {name} must be an integer, got {_with_kind(value)}{at(rank)}")
    if not -(2**63) <= int(value) < 2**63:
        return ValueError(f"{operation}: {name} must fit in 64 bits, got {show(value)}{at(rank)}")
    if least is not None and int(value) < least:
        words = "must not be negative" if least == 0 else f"must be at least {least}"
        return ValueError(f"{operation}: {name} {words}, got {int(value)}{at(rank)}")
    return None


@_finder
def find_number_fault(
    operation: str, name: str, value: object, rank: int | None, allow: str = "finite", tensor: bool = False
) -> Exception | None:
    """What is wrong with an argument that must be a number: ``allow`` a "finite", an "infinite" one too, or "any".

    ``tensor``: a tensor of one element on the host is a number, too. The host would have to wait for one on a device,
    whenever the number is needed.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if tensor and isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    if not is_number:
        return TypeError(f"{operation}: {name} must be a number, got {_with_kind(value)}{at(rank)}")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        words = f"must be a number or a tensor on the CPU, got one on {value.device}, which the host would wait for"
        return ValueError(f"{operation}: {name} {words}{at(rank)}")
    number, _ = float(value), str(value)  # type: ignore[arg-type]  # it is shown to the other ranks
    if allow != "any" and (math.isnan(number) or (allow == "finite" and math.isinf(number))):
        return ValueError(f"{operation}: {name} must be a {allow} number, got {number}{at(rank)}")
    return None


@_finder
def find_choice_fault(
    operation: str, name: str, value: object, rank: int | None, known: Collection[str]
) -> Exception | None:
    """What is wrong with an argument that must be one of some words."""
    if isinstance(value, str) and value in known:
        return None
    return ValueError(f"{operation}: {name} {show(value)} is not one of {', '.join(known)}{at(rank)}")


def the_choice(value: object, known: Iterable[T]) -> T:
    """The one that ``value`` is: a plain string, where it is an enumeration's or numpy's."""
    return next(word for word in known if word == value)


def _with_kind(value: object) -> str:
    """A short value with its kind; of others the kind."""
    plain = isinstance(value, str | float | complex | bool) or value is None
    return f"{show(value)} ({type(value).__name__})" if plain and value is not None else kind_of(value)
