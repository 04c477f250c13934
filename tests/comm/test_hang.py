"""Ranks that disagree, cannot make a call, or die, on real Gloo processes: the others are told, and soon."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import weft
from weft.comm import Call
from weft.errors import CommError, DisagreementError, RankError
from weft.world.launch import ProcessWorld


def disagree_at_once(axis: weft.Axis, how: str) -> str:
    group = dist.new_group(range(4))
    if axis.rank >= 4:
        return ""
    odd = axis.rank == 2
    state = torch.ones(
        2, 3 + (odd and how == "shape"), dtype=torch.float64 if odd and how == "dtype" else torch.float32
    )
    method = "tree" if odd and how == "method" else "ring"
    try:
        weft.exclusive_scan(state, group=group, method=method)
    except ValueError as error:
        # The group is still good: nothing was sent.
        out = weft.exclusive_scan(torch.ones(1, 1), group=group, method="ring")
        assert out.item() == axis.rank
        return str(error)
    return "no error"


@pytest.mark.parametrize("how", ["shape", "dtype", "method"])
def test_a_disagreement_at_the_first_call_is_the_same_error_everywhere(pool: ProcessWorld, how: str) -> None:
    errors = pool.run(disagree_at_once, how)[:4]
    assert len(set(errors)) == 1
    assert "ranks 0, 1, 3 called exclusive_scan" in errors[0] and "rank 2 called exclusive_scan" in errors[0]
    assert {"shape": "[2, 4]", "dtype": "float64", "method": "tree"}[how] in errors[0]


def disagree_later(axis: weft.Axis, how: str, method: str, odd_rank: int) -> tuple[str, float, int]:
    group = dist.new_group(range(4), timeout=timedelta(seconds=40))
    if axis.rank >= 4:
        return "", 0.0, 0
    start, done = time.monotonic(), 0
    try:
        for step in range(600):
            if step == 10:
                start = time.monotonic()
            if step > 10:
                time.sleep(0.01)  # a rank that only sends goes on until it is told
            odd = axis.rank == odd_rank and step == 10
            # "swap" has as many bytes: nothing but the tag tells the messages apart.
            shape = (3, 2) if odd and how == "swap" else (2, 2) if odd and how == "smaller" else (2, 3)
            log = torch.ones(3) if odd and how == "fault" else torch.zeros(shape[0])
            if odd and how == "other":
                weft.unshard(torch.ones(3), 0, group=group)  # never called before: it asks the others first
            out = weft.exclusive_scan(torch.ones(shape), log_decay=log, group=group, method=method)
            assert out.eq(axis.rank).all()
            done += 1
    except ValueError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start, done
    return "no error", 0.0, done


@pytest.mark.parametrize(
    ("how", "method", "odd_rank"),
    [
        ("swap", "doubling", 2),
        ("smaller", "ring", 3),
        ("swap", "gather", 0),
        ("fault", "transpose", 1),
        ("other", "tree", 1),
    ],
)
def test_a_later_disagreement_ends_in_an_error_everywhere(
    pool: ProcessWorld, how: str, method: str, odd_rank: int
) -> None:
    results = pool.run(disagree_later, how, method, odd_rank)[:4]
    for rank, (words, seconds, done) in enumerate(results):
        assert seconds < 5, (rank, words)
        assert done == 10 or (done < 600 and rank < odd_rank), (rank, done)  # earlier ranks may be ahead, and right
        wanted = {"fault": "log_decay [3] fits neither", "other": f"rank {odd_rank} called unshard("}
        assert wanted.get(how, f"rank {odd_rank} called exclusive_scan(state=") in words, (rank, words)


def catch_together(axis: weft.Axis, operation: str) -> tuple[str, float]:
    """All ranks pass the same bad argument, again and again, and catch the error; then one of them is slow."""
    group = dist.new_group(range(3), timeout=timedelta(seconds=40))
    if axis.rank >= 3:
        return "", 0.0
    q = torch.ones(1, 4, 3, 2)

    def call(bad: bool) -> torch.Tensor:
        if operation == "exclusive_scan":
            return weft.exclusive_scan(torch.ones(2, 2), method="bush" if bad else "ring", group=group)
        return weft.attention(q, q, q, causal=False, strides=(2, 2) if bad else None, method="gather", group=group)

    call(False)
    words = ""
    for _ in range(3):
        try:
            call(True)
        except ValueError as error:
            words = str(error)
    start = time.monotonic()
    for slow in (0, 2):
        if axis.rank == slow:
            time.sleep(2.2)  # longer than anybody's patience
        call(False)
    return words, time.monotonic() - start


@pytest.mark.parametrize("operation", ["exclusive_scan", "attention"])
def test_an_error_that_all_ranks_caught_leaves_the_group_good(pool: ProcessWorld, operation: str) -> None:
    for rank, (words, seconds) in enumerate(pool.run(catch_together, operation)[:3]):
        assert f"(rank {rank})" in words
        assert seconds > 2


def disagree_and_go_on(axis: weft.Axis) -> str:
    """A disagreement found at a first call, and then a slow rank: the old call is nobody's business any more."""
    group = dist.new_group(range(3), timeout=timedelta(seconds=40))
    if axis.rank >= 3:
        return ""
    try:
        weft.exclusive_scan(torch.ones(2, 2 + axis.rank), group=group)
    except DisagreementError as error:
        words = str(error)
    if axis.rank == 1:
        time.sleep(2.2)
    assert weft.exclusive_scan(torch.ones(2, 2), group=group).eq(axis.rank).all()
    if axis.rank == 2:
        time.sleep(2.2)
    assert weft.exclusive_scan(torch.ones(2, 2), group=group, method="ring").eq(axis.rank).all()
    return words


def test_a_disagreement_that_was_caught_leaves_the_group_good(pool: ProcessWorld) -> None:
    assert len(set(pool.run(disagree_and_go_on)[:3])) == 1


FAULTS = {
    "linear_attention": {"g": torch.full((1, 4, 2), 1, dtype=torch.int64)},
    "attention": {"grad_dtype": torch.int8},
    "unshard": {"dim": 7},
    "sequence": {"length": "four"},
}


def fault_on_one(axis: weft.Axis, operation: str, calls: int) -> list[tuple[str, str]]:
    """Rank 1 cannot make some of the calls; what every rank raises, and right results in between."""
    group = dist.new_group(range(3), timeout=timedelta(seconds=40))
    if axis.rank >= 3:
        return []
    q = torch.ones(1, 4, 2, 2)
    raised = []
    for call in range(calls):
        odd = FAULTS[operation] if axis.rank == 1 and call % 2 == 0 else {}
        try:
            if operation == "linear_attention":
                weft.linear_attention(q, q, q, odd.get("g"), group=group)
            elif operation == "attention":
                weft.attention(q, q, q, causal=False, group=group, **odd)
            elif operation == "unshard":
                weft.unshard(q, odd.get("dim", 1), group=group)
            else:
                weft.sequence(odd.get("length", 4), group=group)
            raised.append(("", ""))
        except (ValueError, TypeError) as error:
            raised.append((type(error).__name__, str(error)))
    return raised


@pytest.mark.parametrize("operation", FAULTS)
def test_one_ranks_fault_is_the_same_error_everywhere_at_every_call(pool: ProcessWorld, operation: str) -> None:
    """The same type and text on all ranks, at the first call and later, and the group can be used in between."""
    results = pool.run(fault_on_one, operation, 6)[:3]
    assert results[0] == results[1] == results[2]
    assert results[0][1::2] == [("", "")] * 3
    kind, words = results[0][0]
    assert results[0][::2] == [(kind, words)] * 3 and words.startswith(f"{operation}: ") and "(rank 1)" in words
    assert kind == ("ValueError" if operation == "unshard" else "TypeError")


def test_alone_the_same_fault_is_the_same_error() -> None:
    q = torch.ones(1, 4, 2, 2)
    with pytest.raises(TypeError, match=r"grad_dtype must be fp32, fp64, bf16 or fp16, got torch.int8 \(rank 0\)"):
        weft.attention(q, q, q, causal=False, grad_dtype=torch.int8)


def differ_in_options(axis: weft.Axis) -> list[str]:
    """Options that differ later are found in the round of integers: nobody waits, and the group stays good."""
    group = dist.new_group(range(3), timeout=timedelta(seconds=40))
    if axis.rank >= 3:
        return []
    q = torch.ones(1, 4, 2, 2)
    words = []
    for call in range(4):
        try:
            weft.attention(q, q, q, causal=axis.rank == 2 and call == 2, group=group)
            words.append("")
        except DisagreementError as error:
            words.append(str(error))
    return words


def test_options_that_differ_are_found_at_once(pool: ProcessWorld) -> None:
    results = pool.run(differ_in_options)[:3]
    assert results[0] == results[1] == results[2] and results[0][:2] == ["", ""] and results[0][3] == ""
    assert "ranks 0, 1 called attention(causal=False); rank 2 called attention(causal=True)" in results[0][2]


def die(axis: weft.Axis, victim: int, operation: str, path: str) -> None:
    """Write down what this survivor raised, and when."""
    group = dist.new_group(range(4), timeout=timedelta(seconds=20))
    q = torch.ones(1, 2, 1, 2)

    def call() -> None:
        if operation == "attention":
            weft.attention(q, q, q, causal=False, group=group)
        else:
            weft.exclusive_scan(torch.ones(2, 3), group=group, method=operation)

    def call_often() -> None:
        for _ in range(50):
            call()
            time.sleep(0.01)  # a rank that only sends goes on until it is told

    call()
    if axis.rank == victim:
        os._exit(3)
    write_what_is_raised(axis, path, call_often)


def write_what_is_raised(axis: weft.Axis, path: str, act: Callable[[], None]) -> None:
    """(The words of a `CommError`, seconds until then) in a file of this rank; then its process ends."""
    start, words = time.monotonic(), "no error"
    try:
        act()
    except CommError as error:
        words = str(error)
    with open(f"{path}/{axis.rank}", "w") as file:
        file.write(repr((words, time.monotonic() - start)))
    raise SystemExit(0)


@pytest.mark.processes
@pytest.mark.parametrize(("victim", "operation"), [(0, "ring"), (1, "ring"), (2, "gather"), (3, "attention")])
def test_a_rank_that_dies_is_named_by_the_others(tmp_path, victim: int, operation: str) -> None:
    """And nobody else is: the ranks that stop because of it are not to blame."""
    with ProcessWorld(4, timeout=timedelta(seconds=20)) as world, pytest.raises((RankError, SystemExit)):
        world.run(die, victim, operation, str(tmp_path))
    for rank in {0, 1, 2, 3} - {victim}:
        words, seconds = eval((tmp_path / str(rank)).read_text())
        assert f"rank {victim} of 4 is gone: its process or its connection has ended" in words, (rank, words)
        assert seconds < 20


def be_killed(axis: weft.Axis, operation: str, when: str, path: str) -> None:
    """Rank 1 is killed within a forward or a backward, at its first message; rank 0 writes down what it raises."""
    x = torch.ones(1, 6, 2, 4).requires_grad_()

    def forward() -> torch.Tensor:
        if operation == "delta_rule":
            return weft.delta_rule(x, x / 4, x, x[..., 0] / 2)[0]
        return weft.attention(x, x, x, causal=False, method=operation)

    forward().sum().backward()
    out = forward() if when == "backward" else None
    if axis.rank == 1:
        Call.exchange = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    write_what_is_raised(axis, path, lambda: (forward() if out is None else out).sum().backward())


@pytest.mark.processes
@pytest.mark.parametrize("when", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize("operation", ["ring", pytest.param("ulysses", marks=pytest.mark.slow), "delta_rule"])
def test_a_rank_that_is_killed_within_an_operation(tmp_path, operation: str, when: str) -> None:
    with ProcessWorld(2, timeout=timedelta(seconds=20)) as world, pytest.raises((RankError, SystemExit)):
        world.run(be_killed, operation, when, str(tmp_path))
    words, seconds = eval((tmp_path / "0").read_text())
    assert "rank 1 of 2 is gone: its process or its connection has ended" in words, words
    assert seconds < 20 and not (tmp_path / "1").exists()


def stay_silent(axis: weft.Axis) -> str:
    group = dist.new_group(range(2), timeout=timedelta(seconds=3))
    if axis.rank >= 2:
        return ""
    weft.exclusive_scan(torch.ones(2, 3), group=group, method="ring")
    if axis.rank == 0:
        time.sleep(5)
        return ""
    try:
        weft.exclusive_scan(torch.ones(2, 3), group=group, method="ring")
    except CommError as error:
        return str(error)
    return "no error"


def test_of_a_silent_rank_it_is_said_that_nothing_can_be_told(pool: ProcessWorld) -> None:
    words = pool.run(stay_silent)[1]
    assert "heard nothing from rank 0 for 3 s" in words and "which rank failed cannot be told" in words


def test_disagreement_is_a_value_error() -> None:
    assert issubclass(DisagreementError, ValueError)
