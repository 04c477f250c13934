"""Something under way that fails: whoever asks again gets the same."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from worlds import virtual_world

import weft
from weft.comm import Pending
from weft.comm.wire import SoloWire, ThreadLanes
from weft.errors import CommError
from weft.world.launch import ProcessWorld


class Broken(RuntimeError):
    pass


def fail(*_: object) -> None:
    raise Broken("no")


def raised_twice(pending: Pending[None]) -> bool:
    """Whether both waits raise, and the same error."""
    raised = []
    for _ in range(2):
        try:
            pending.wait()
        except (Broken, CommError) as error:
            raised.append(error)
    return len(raised) == 2 and raised[0] is raised[1]


def test_a_failed_wait_raises_the_same_again() -> None:
    times = []

    def finish() -> None:
        times.append(1)
        fail()

    assert raised_twice(Pending(finish))
    assert len(times) == 1  # and it is not tried again


def test_so_do_lanes() -> None:
    assert raised_twice(ThreadLanes("a test").start(fail))
    assert raised_twice(SoloWire().start(lambda: Pending(fail), torch.device("cpu"), "a test", ()).wait())


def test_so_do_lanes_of_virtual_ranks() -> None:
    """By NCCL's rules a lane runs where it is started, and raises there."""

    def program(axis: weft.Axis) -> bool:
        call = axis.begin("failing")
        return raised_twice(call.start(fail)) and raised_twice(axis.start(fail))

    assert all(weft.world.VirtualWorld(2).run(program).results)


@pytest.mark.usefixtures("every_network")
def test_so_does_a_gather_of_metadata() -> None:
    def program(axis: weft.Axis) -> list[str]:
        axis.begin("gathering", metadata=(0,)).metadata.wait()
        gathered = None
        words = []
        try:
            gathered = axis.begin(
                "gathering", metadata=(0,), fault=ValueError("rank 1 cannot") if axis.rank == 1 else None
            ).metadata
        except ValueError as error:
            words += [str(error)] * 2
        for _ in range(2 if gathered is not None else 0):
            try:
                gathered.wait()
            except ValueError as error:
                words.append(str(error))
        return words

    assert virtual_world(3).run(program).results == [["rank 1 cannot"] * 2] * 3


def wait_for_the_silent(axis: weft.Axis) -> list[bool]:
    """A message, and an expected one, that never come."""
    call = axis.begin("waiting")
    if axis.rank == 1:
        return []
    expected = call.expect([(1, torch.empty(2))])
    pending = call.exchange([], expected)
    return [raised_twice(pending), raised_twice(expected)]  # type: ignore[arg-type]


@pytest.mark.processes
def test_so_do_messages_on_gloo() -> None:
    with ProcessWorld(2, timeout=timedelta(seconds=2)) as world:
        raised = world.run(wait_for_the_silent)
    assert raised == [[True, True], []]
