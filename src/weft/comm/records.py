"""Calls as the ranks compare them: their numbers on an axis, the signatures their options give, and who differs."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from weft.errors import Fault, fault_of, name_ranks

Signature = tuple[tuple[str, str], ...]


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


@dataclass
class CallCounter:
    """Counts the calls of an axis, or of one lane of it. The same on every rank that runs the same program."""

    name: str
    members: Sequence[int]  # ranks on the wire, in the order of the axis
    calls: int = 0
    lanes: int = 0
    agreed: set[str] = field(default_factory=set)
    subsets: dict[tuple[int, ...], CallCounter] = field(default_factory=dict)
    named: dict[str, CallCounter] = field(default_factory=dict)
    cache: dict[object, Any] = field(default_factory=dict)  # what an operation remembers about these ranks
    _signatures: dict[object, tuple[Signature, int]] = field(default_factory=dict)

    def next_record(
        self, operation: str, options: object, fault: Exception | None, integers: int = 0, of: int | None = None
    ) -> CallRecord:
        """Number a call. Its tag mixes number and options, so that ranks who disagree never exchange data.

        In a call that belongs to another one, as a backward to its forward, the number ``of`` that one takes its place:
        ranks may run equal backwards in different orders, but each only ever meets its own.
        """
        self.calls += 1
        key = (operation, options)
        if key not in self._signatures:
            words = () if options is None else tuple((name, _as_text(value)) for name, value in _items(options))
            if len(self._signatures) > 1024:
                self._signatures.clear()
            self._signatures[key] = words, zlib.crc32(repr((self.name, operation, words)).encode())
        words, digest = self._signatures[key]
        reason = None if fault is None else fault_of(fault)
        if of is None:
            return CallRecord(self.name, self.calls, operation, words, mix(digest, self.calls), reason, integers)
        words = (*words, ("of_call", str(of)))
        return CallRecord(self.name, self.calls, operation, words, mix(digest, of), reason, integers)

    def refused_record(self, operation: str, fault: Exception) -> CallRecord:
        """Of a call that is not made: it has the number of the next one, and is not counted."""
        return CallRecord(self.name, self.calls + 1, operation, (), 0, fault_of(fault))

    def lane(self) -> CallCounter:
        """The counter of a lane. What has been agreed on goes in here and comes back when the lane is waited for.

        Those moments have the same place in every rank's program, as a set shared between running threads would not.
        """
        self.lanes += 1
        return CallCounter(f"{self.name}/{self.lanes}", self.members, agreed=set(self.agreed))

    def must_compare(self, operation: str) -> bool:
        """Whether the ranks compare this call before it begins: the first of an operation, or WEFT_CHECK=always."""
        value = os.environ.get("WEFT_CHECK", "first")
        if value not in ("first", "always"):
            raise ValueError(f"WEFT_CHECK={value!r} is not known; use 'first' (the default) or 'always'")
        return value == "always" or operation not in self.agreed


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


def dump_records(records: Sequence[CallRecord]) -> str:
    """Records as text that other ranks can load."""
    return json.dumps([[r.counter, r.number, r.operation, r.signature, r.tag, r.fault, r.integers] for r in records])


def load_records(text: bytes | str) -> list[CallRecord]:
    """What `dump_records` has written."""
    return [
        CallRecord(
            counter, number, operation, tuple((k, v) for k, v in signature), tag, fault and tuple(fault), integers
        )
        for counter, number, operation, signature, tag, fault, integers in json.loads(text)
    ]


def mix(digest: int, number: int) -> int:
    """A tag of 31 bits for the ``number``-th use of ``digest``."""
    return (digest + 0x9E3779B1 * number) & 0x7FFFFFFF


def _items(options: object) -> list[tuple[str, object]]:
    """The fields of frozen options, which are what ranks must have in common."""
    assert is_dataclass(options), "options are a frozen dataclass"
    return [(one.name, getattr(options, one.name)) for one in fields(options) if one.compare]


def _as_text(value: object) -> str:
    if isinstance(value, torch.Size):
        return str(list(value))
    return str(value).removeprefix("torch.")
