"""Streams and memory of a lane on the simulated device: what `comm/device.py` orders, holds and notes, one by one."""

from __future__ import annotations

import pytest
import torch

from weft.comm.device import StreamLane, copy_to_device, runs_behind, start_copy_to_host

pytestmark = pytest.mark.usefixtures("sim")

SIM = "sim:0"  # a torch.device once it is installed


def ones() -> torch.Tensor:
    return torch.ones(64, device=SIM)


def test_a_lane_comes_after_what_the_caller_has_issued_and_the_reader_after_the_lane(sim) -> None:
    lane = StreamLane(torch.device(SIM))
    source = ones()
    pending = lane.start(lambda: source + 1, [source])
    total = pending.wait() + source
    assert not sim.host_syncs
    assert total.cpu().tolist() == [3.0] * 64


def test_a_lane_owns_its_buffers_until_its_reader_is_ordered_after_it() -> None:
    lane = StreamLane(torch.device(SIM))
    buffer = torch.empty(64, device=SIM)
    pending = lane.start(lambda buffer=buffer: buffer.fill_(3.0).sum(), [buffer])
    del buffer
    others = [ones() for _ in range(4)]  # would be given the buffer's memory
    assert float(pending.wait()) == 192.0
    assert others


def test_buffers_of_a_lane_that_nobody_waits_for_are_safe_too() -> None:
    lane = StreamLane(torch.device(SIM))
    buffer = torch.empty(64, device=SIM)
    pending = lane.start(lambda buffer=buffer: buffer.fill_(3.0).sum(), [buffer])
    del buffer, pending  # as after an error
    assert float(ones().sum()) == 64.0


def test_buffers_of_a_lane_that_failed_are_safe_too() -> None:
    lane = StreamLane(torch.device(SIM))
    buffer = torch.empty(64, device=SIM)

    def fail(buffer: torch.Tensor = buffer) -> None:
        buffer.fill_(3.0)
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        lane.start(fail, [buffer])
    del buffer, fail
    assert float(ones().sum()) == 64.0


def test_what_a_lane_made_is_not_handed_out_while_its_reader_uses_it() -> None:
    from weft.world.simulated import Stream

    lane, reader = StreamLane(torch.device(SIM)), Stream(SIM)
    source = ones()
    pending = lane.start(lambda: source * 2, [source])
    with reader:
        made = pending.wait()
        read = made + 1
    del made, pending
    # From a stream that knows nothing of the reader: the lane must not be given the reader's memory.
    again = lane.start(lambda: source * 3, [source])
    assert again.wait().cpu().tolist() == [3.0] * 64
    torch.get_device_module(SIM).current_stream().wait_stream(reader)
    assert read.cpu().tolist() == [3.0] * 64


def test_lists_of_results_are_noted_as_single_ones_are() -> None:
    from weft.world.simulated import Stream

    lane, reader = StreamLane(torch.device(SIM)), Stream(SIM)
    source = ones()
    pending = lane.start(lambda: [None, (source * 2,), 5], [source])
    with reader:
        made = pending.wait()[1][0]
        read = made + 1
    del made, pending
    assert lane.start(lambda: source * 3, [source]).wait().cpu().tolist() == [3.0] * 64
    torch.get_device_module(SIM).current_stream().wait_stream(reader)
    assert read.cpu().tolist() == [3.0] * 64


def test_a_copy_to_the_host_is_one_synchronisation_and_only_when_it_is_read(sim) -> None:
    pending = start_copy_to_host(ones() * 3)
    assert not sim.host_syncs
    ones().sum()  # issued after it, and not waited for
    assert pending.wait().tolist() == [3.0] * 64
    assert sum(sim.host_syncs.values()) == 1
    assert pending.wait().tolist() == [3.0] * 64 and sum(sim.host_syncs.values()) == 1


def test_a_copy_to_the_device_does_not_hold_up_the_host(sim) -> None:
    host = torch.arange(64.0)
    there = copy_to_device(host, torch.device(SIM))
    host.zero_()  # a loader fills its memory anew
    assert not sim.host_syncs
    assert there.cpu().tolist() == list(range(64))


def test_on_a_cpu_nothing_is_copied() -> None:
    host = torch.arange(3)
    assert start_copy_to_host(host).wait() is host and copy_to_device(host, torch.device("cpu")) is host
    assert not runs_behind(host.device) and runs_behind(torch.device(SIM))
