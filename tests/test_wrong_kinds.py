"""Whatever one rank passes as an argument: the same worded error on every rank, and nothing sent or changed."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
from wrong_kinds import SUBJECTS, VALUES, Subject, every_case

import weft

ODD = 1  # the rank with the wrong argument
KINDS = ("ValueError", "TypeError", "NotImplementedError", "IndexError", "DisagreementError")
SLICES = 150  # `make test` takes one of so many cases, and at least one of each operation
OF_TORCH = {("ShardedEmbedding", "device"), ("ShardedEmbedding", "dtype"), ("BigramHashEmbedding", "device"),
            ("BigramHashEmbedding", "dtype"), ("StepPart", "params"), ("StepPart", "defaults"),
            ("RowAdam", "params")}  # fmt: skip
Outcome = tuple[str, str]  # the kind of an error and its words; two empty ones where there was none


def outcome_of(call: Any, changes: dict[str, Any]) -> Outcome:
    try:
        call(**changes)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def try_one(subject: Subject, argument: str, value: str, later: bool) -> tuple[list[Outcome], list[Any]]:
    """What each rank raises, and the results of the same call made rightly after it, by rank.

    ``later``: not at the first call, where all ranks are compared. Where nobody is told, a virtual world ends with the
    error that all who wait would raise.
    """

    def program(axis: weft.Axis) -> tuple[Outcome, Any]:
        call = subject.start(axis)
        if later:
            call()
        outcome = outcome_of(call, {argument: VALUES[value]()} if axis.rank == ODD else {})
        if not outcome[0] and subject.talks:
            return outcome, None
        if later and not subject.gathers and axis.rank == ODD:
            return outcome, None  # it does not go on: the others wait for it in this call, and find its reason
        return outcome, call()

    try:
        results = weft.world.VirtualWorld(3).run(program).results
    except Exception as error:
        return [(type(error).__name__, str(error))] * 3, []
    return [outcome for outcome, _ in results], [result for _, result in results]


def rightly(subject: Subject, later: bool) -> list[Any]:
    def program(axis: weft.Axis) -> Any:
        call = subject.start(axis)
        if later:
            call()
        return call()

    return weft.world.VirtualWorld(3).run(program).results


def find_wrong(name: str, argument: str, value: str, later: bool, right: list[Any]) -> str | None:
    """What is wrong with how a case ends; None if it ends as it should."""
    subject = SUBJECTS[name]
    outcomes, results = try_one(subject, argument, value, later)
    shown = [(kind, words[:160]) for kind, words in outcomes]
    case = f"{name}({argument}={value}), {'later' if later else 'at first'}: {shown}"
    if not any(kind for kind, _ in outcomes):
        return None  # it was as good as the right one
    odd, others = outcomes[ODD], [outcome for rank, outcome in enumerate(outcomes) if rank != ODD]
    if others != [odd] * 2 and (subject.talks or others != [("", "")] * 2):
        return f"not told: {case}"
    kind, words = odd
    if (name, argument) not in OF_TORCH:
        if kind not in KINDS:
            return f"not worded: {case}"
        if ": " not in words or (subject.talks and "rank 1" not in words):
            return f"names no rank: {case}"
    if results and not alike(results, right):
        return f"changed something: {case}"
    return None


def alike(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return bool(found == wanted)


def find_all_wrong(cases: list[tuple[str, str, str]], both: bool) -> list[str]:
    """``both``: each case at the first call and later; else one of the two."""
    right: dict[tuple[str, bool], list[Any]] = {}
    found = []
    for number, case in enumerate(cases):
        for later in (False, True) if both else (number % 2 == 1,):
            key = (case[0], later)
            if key not in right:
                right[key] = rightly(SUBJECTS[case[0]], later)
            if words := find_wrong(*case, later, right[key]):
                found.append(words)
    return found


def test_every_public_operation_is_tried() -> None:
    talk_to_nobody = {"Axis", "Sequence", "launch", "record", "optim", "world"}
    public = set(weft.__all__) | set(weft.optim.__all__)
    assert {name.partition(".")[0].partition(" ")[0] for name in SUBJECTS} == public - talk_to_nobody


def test_a_slice_of_all_wrong_kinds() -> None:
    some = []
    for name in SUBJECTS:
        cases = sorted(
            (case for case in every_case() if case[0] == name), key=lambda one: zlib.crc32(repr(one).encode())
        )
        some += cases[: 1 + len(cases) // SLICES]
    found = find_all_wrong(some, both=False)
    assert not found, f"{len(found)} of {len(some)}:\n" + "\n".join(found[:20])


@pytest.mark.slow
@pytest.mark.parametrize("name", SUBJECTS)
def test_all_wrong_kinds(name: str) -> None:
    found = find_all_wrong([case for case in every_case() if case[0] == name], both=True)
    assert not found, f"{len(found)}:\n" + "\n".join(found[:20])
