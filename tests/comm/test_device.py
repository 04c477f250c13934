"""Streams and memory of a lane on the simulated device: what `comm/device.py` orders, holds and notes, one by one."""

from __future__ import annotations

import threading
import types

import pytest
import torch

import weft
from weft.comm.call import exchange_coalesced
from weft.comm.device import (
    StreamLane,
    Written,
    choose_device,
    copy_to_device,
    own_device,
    runs_behind,
    start_copy_to_host,
)

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


def test_the_accelerator_is_that_of_a_simulated_rank_only_within_it() -> None:
    found: list[torch.device] = []
    thread = threading.Thread(target=lambda: found.append(own_device()))
    thread.start()
    thread.join(10)
    assert own_device() == torch.device(SIM) and found == [torch.device("cpu")]


def test_the_device_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated one has to be named; an accelerator is taken where each rank of the machine has one."""
    assert choose_device() == choose_device("cpu") == torch.device("cpu")
    assert choose_device("sim") == choose_device("sim:0") == torch.device("sim", 0)
    for name, words in {
        "gpu": "'gpu' is no device", "cuda": "only cpu and sim", "sim:1": "sim:1 is wanted, but this machine has 1",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            choose_device(name)
    with pytest.raises(ValueError, match="sim:3 is wanted"):
        choose_device("sim", 3, 4)
    module, current = (
        types.SimpleNamespace(device_count=lambda: 2, set_device=lambda device: current.append(device)),
        [],
    )
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert choose_device("auto", 1, 2) == torch.device("cuda", 1) and current == [torch.device("cuda", 1)]
    assert choose_device("auto", 1, 3) == torch.device("cpu")
    assert choose_device("cuda:0", 1, 2) == torch.device("cuda", 0)


def test_a_copy_that_is_known_to_be_over_is_not_waited_for(sim) -> None:
    x = torch.arange(3, device=SIM)
    early, late = start_copy_to_host(x), start_copy_to_host(x + 1)
    late.wait()
    assert early.wait().tolist() == [0, 1, 2] and sim.host_syncs.total() == 1


def test_a_reader_on_another_stream_comes_after_the_writing_and_keeps_the_memory() -> None:
    module = torch.get_device_module(SIM)
    side = module.Stream(SIM)
    with side:
        tensor = ones()
        written = Written(tensor)
    written.read_here()
    total = tensor.sum()
    del tensor, written
    with side:  # which does not wait for the reader
        others = [ones() for _ in range(4)]
    assert float(total) == 64.0 and others


@pytest.mark.parametrize("kept", [True, False])
def test_messages_that_leave_on_one_stream_and_are_waited_for_on_another(kept: bool) -> None:
    """What travels is packed into memory of the first stream; the second one unpacks it."""

    def program(axis: weft.Axis) -> float:
        side = torch.get_device_module(SIM).Stream(SIM)
        other = 1 - axis.rank
        with side:
            filled = [torch.empty(64, device=SIM), torch.empty(32, device=SIM)]
            call = axis.begin("pair", None)
            pending = exchange_coalesced(call, [(other, [ones(), ones()[:32]])], [(other, filled)])
        pending.wait()
        total = torch.cat(filled).sum()
        del pending
        if not kept:
            filled.clear()
        with side:
            more = [torch.zeros(size, device=SIM) for size in (96, 96, 96, 64, 64, 32, 32)]
        return float(total) * len(more)

    assert weft.world.VirtualWorld(2, rules="nccl", device="sim").run(program).results == [96.0 * 7] * 2
