"""`NcclSide`, the class that real ranks use, on virtual ranks with a simulated device, by NCCL's rules."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from worlds import on_simulated_device

import weft
from weft.comm import Axis
from weft.comm.hang import HangDetector
from weft.comm.nccl import NcclSide
from weft.comm.wire import CallRecord
from weft.errors import CommError, NcclRuleError


def world(size: int) -> weft.world.VirtualWorld:
    return weft.world.VirtualWorld(size, rules="nccl", device="sim")


def here(axis: Axis, count: int = 8) -> torch.Tensor:
    return torch.full((count,), float(axis.rank), device="sim")


@on_simulated_device
def test_messages_arrive_and_the_host_waits_for_none() -> None:
    from weft.world.simulated import current_rank

    def program(axis: Axis) -> tuple[list[float], int]:
        mine, received = here(axis), torch.empty(8, device="sim")
        after, before = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
        pending = axis.exchange([(after, mine)], [(before, received)])
        pending.wait()
        doubled = received * 2
        return doubled.cpu().tolist(), sum(current_rank().host_syncs.values()) - 1  # the copy to the host

    for rank, (values, syncs) in enumerate(world(3).run(program).results):
        assert values == [2.0 * ((rank - 1) % 3)] * 8 and syncs == 0


@on_simulated_device
def test_what_is_read_without_a_wait_is_a_race() -> None:
    from weft.world.simulated import SimulatedDeviceError

    def program(axis: Axis) -> None:
        received = torch.empty(8, device="sim")
        pending = axis.exchange([(1 - axis.rank, here(axis))], [(1 - axis.rank, received)])
        received.sum()
        pending.wait()

    with pytest.raises(SimulatedDeviceError, match="race: sum reads"):
        world(2).run(program)


@on_simulated_device
def test_what_is_sent_must_not_be_changed_before_the_wait() -> None:
    from weft.world.simulated import SimulatedDeviceError

    def program(axis: Axis) -> None:
        mine = here(axis)
        pending = axis.exchange([(1 - axis.rank, mine)], [(1 - axis.rank, torch.empty_like(mine))])
        mine.zero_()
        pending.wait()

    with pytest.raises((SimulatedDeviceError, NcclRuleError), match=r"race: zero_ writes|changed what it sends"):
        world(2).run(program)


@on_simulated_device
@pytest.mark.parametrize("wrong", ["twice", "strided"])
def test_what_nccl_does_not_take_is_refused_before_a_group_is_open(wrong: str) -> None:
    def program(axis: Axis) -> list[float]:
        peer = 1 - axis.rank
        wide = torch.ones(8, 2, device="sim")
        sends = [(peer, here(axis)), (peer, here(axis))] if wrong == "twice" else [(peer, wide[:, 0])]
        with pytest.raises(CommError, match="NCCL takes one contiguous message on sim:0 for each peer and direction"):
            axis.exchange(sends)
        received = torch.empty(8, device="sim")  # and the line is as good as before
        axis.exchange([(peer, here(axis))], [(peer, received)]).wait()
        return received.cpu().tolist()

    assert world(2).run(program).results == [[1.0] * 8, [0.0] * 8]


@on_simulated_device
def test_a_receive_is_not_waited_for_before_its_exchange() -> None:
    def program(axis: Axis) -> None:
        call = axis.begin("a test")
        expected = call.expect([(1 - axis.rank, torch.empty(8, device="sim"))])
        with pytest.raises(CommError, match="waited for before the exchange that posts it"):
            expected.wait()

    world(2).run(program)


@on_simulated_device
def test_who_waits_for_a_receive_alone_comes_after_it() -> None:
    """As a schedule does, whose sends of the same exchange may still be under way."""

    def program(axis: Axis) -> list[float]:
        call, received = axis.begin("a test"), torch.empty(8, device="sim")
        expected = call.expect([(1 - axis.rank, received)])
        pending = call.exchange([(1 - axis.rank, here(axis))], expected)
        expected.wait()
        doubled = received * 2
        pending.wait()
        return doubled.cpu().tolist()

    assert world(2).run(program).results == [[2.0] * 8, [0.0] * 8]


@on_simulated_device
def test_messages_of_a_second_thread_are_refused() -> None:
    """Between those of two threads there is no order, and NCCL takes messages in order."""

    def program(axis: Axis) -> list[str]:
        call, mine, received, words = axis.begin("a test"), here(axis), torch.empty(8, device="sim"), []

        def issue() -> None:
            try:
                call.exchange([(1 - axis.rank, mine)], [(1 - axis.rank, received)])
            except NcclRuleError as error:
                words.append(str(error))

        thread = threading.Thread(target=issue)
        thread.start()
        thread.join(30)
        return words

    for rank, words in enumerate(world(2).run(program).results):
        assert words == [f"NCCL: rank {rank} issues messages from a second thread: no order among them"]


@on_simulated_device
def test_two_ranks_of_three_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only because the communicator is made before: else the first exchange needs all ranks."""

    def program(axis: Axis) -> None:
        if axis.rank < 2:
            received = torch.empty(8, device="sim")
            axis.exchange([(1 - axis.rank, here(axis))], [(1 - axis.rank, received)]).wait()

    world(3).run(program)
    from weft.world.emulated_nccl import EmulatedNccl

    monkeypatch.setattr(EmulatedNccl, "eager_connect_single_device", lambda self, device: None)
    with pytest.raises(NcclRuleError, match="NCCL rule 4"):
        world(3).run(program)


@on_simulated_device
def test_who_gives_up_closes_the_communicator() -> None:
    """As hang detection does; that it is closed already is no error, and messages are refused from then on."""

    def program(axis: Axis) -> str:
        received, peer = torch.empty(8, device="sim"), 1 - axis.rank
        axis.exchange([(peer, here(axis))], [(peer, received)]).wait()
        side = axis.wire._side
        side.close()
        side.close()
        with pytest.raises(RuntimeError, match="aborted") as caught:
            axis.exchange([(peer, here(axis))], [(peer, received)])
        return str(caught.value)

    assert world(2).run(program).results == ["NCCL communicator was aborted"] * 2


class Failing:
    """A backend whose communicator is not made, or gone."""

    def eager_connect_single_device(self, device: torch.device) -> None:
        pass

    def abort(self) -> None:
        raise RuntimeError("there is no communicator")


def test_closing_what_is_gone_is_no_error() -> None:
    NcclSide(Failing(), torch.device("cpu")).close()


@on_simulated_device
def test_cpu_tensors_take_the_other_side() -> None:
    def program(axis: Axis) -> list[float]:
        received = torch.empty(8)
        pending = axis.exchange([(1 - axis.rank, torch.full((8,), float(axis.rank)))], [(1 - axis.rank, received)])
        on_device = torch.empty(8, device="sim")
        axis.exchange([(1 - axis.rank, here(axis))], [(1 - axis.rank, on_device)]).wait()
        pending.wait()
        assert torch.equal(on_device.cpu(), received)
        return received.tolist()

    assert world(2).run(program).results == [[1.0] * 8, [0.0] * 8]


@on_simulated_device
@pytest.mark.parametrize("apart", [True, False])
def test_messages_in_another_order_need_a_line_of_their_own(apart: bool) -> None:
    def program(axis: Axis) -> list[float]:
        line = axis.apart("owners") if apart else axis
        first, second = torch.empty(8, device="sim"), torch.empty(4, device="sim")
        peer = 1 - axis.rank

        def one() -> weft.comm.Pending[None]:
            return axis.exchange([(peer, here(axis))], [(peer, first)])

        def two() -> weft.comm.Pending[None]:
            return line.exchange([(peer, here(axis, 4))], [(peer, second)])

        for pending in [one(), two()] if axis.rank == 0 else [two(), one()]:
            pending.wait()
        return [*first.cpu().tolist(), *second.cpu().tolist()]

    if apart:
        assert world(2).run(program).results == [[1.0] * 12, [0.0] * 12]
    else:
        with pytest.raises(NcclRuleError, match="NCCL rule"):
            world(2).run(program)


@on_simulated_device
def test_lanes_of_two_operations_do_not_wait_for_one_another() -> None:
    from weft.world.simulated import current_stream

    def program(axis: Axis) -> bool:
        streams = []
        for name in ("a scan", "a prefetch", "a scan"):
            call = axis.begin(name)
            call.start(lambda lane: streams.append(current_stream()), torch.device("sim", 0)).wait()
        assert streams[0] is streams[2]
        return streams[1].stream_id not in streams[0].clock

    assert all(world(2).run(program).results)


@on_simulated_device
@pytest.mark.parametrize("size", [3, 20])
def test_metadata_of_a_group_without_a_cpu_side(size: int) -> None:
    """It travels on the device, issued by the thread that computes: directly, beyond 16 ranks by doubling on a lane."""
    from weft.world.simulated import current_rank

    def program(axis: Axis) -> tuple[list[tuple[int, ...]], int]:
        axis.wire.host = torch.device("sim", 0)
        call = axis.begin("a test", metadata=[10 * axis.rank])
        here(axis).sum()
        found = call.metadata.wait()
        return found, sum(count for kind, count in current_rank().host_syncs.items() if kind != "copy to device")

    for found, syncs in world(size).run(program).results:
        assert found == [(10 * rank,) for rank in range(size)]
        assert syncs == 1  # the host reads the integers


@on_simulated_device
def test_metadata_that_nobody_waits_for_gives_no_memory_back_too_early() -> None:
    """As after an error between a call's begin and its wait."""

    def program(axis: Axis) -> float:
        axis.wire.host = torch.device("sim", 0)
        axis.begin("a test", metadata=[10 * axis.rank])
        gc.collect()  # the call knows its metadata, and they know the call
        return float(here(axis).sum())

    gc.freeze()  # each rank looks at what was made in here alone
    try:
        assert world(18).run(program).results == [8.0 * rank for rank in range(18)]
    finally:
        gc.unfreeze()


class Store:
    """One in which nobody else has left anything."""

    def __getattr__(self, name: str):
        return lambda *args: b"" if name == "get" else 0


def test_only_the_thread_that_issues_asks_whether_works_are_over() -> None:
    """A question from the watching thread would break the capture of a graph."""
    asked: list[str] = []

    class Work:
        def is_completed(self) -> bool:
            asked.append(threading.current_thread().name)
            return True

    detector = HangDetector(0, 1, Store(), None, lambda: None)  # type: ignore[arg-type]
    record = CallRecord("world", 1, "a test", (), 1)
    detector.follow(record, [Work()])
    watcher = threading.Thread(target=detector.inspect, name="the watcher")
    watcher.start()
    watcher.join(10)
    assert asked == []
    detector.follow(record, [Work()])
    assert asked == [threading.current_thread().name]
    assert len(detector._waits) == 1


@on_simulated_device
@pytest.mark.parametrize(("name", "in_line"), [("nccl", True), ("xccl", True), ("gloo", False), ("mpi", False)])
def test_backends_without_tags_stand_in_one_line(name: str, in_line: bool, sim: object) -> None:
    """Those of CUDA, ROCm and XPU, by torch's names for them."""
    from weft.comm import dist

    connected: list[torch.device] = []

    class Backend:
        def name(self) -> str:
            return name

        def eager_connect_single_device(self, device: torch.device) -> None:
            connected.append(device)

    class Group:
        def _get_backend(self, device: torch.device) -> Backend:
            return Backend()

    side = dist._nccl_side_of(Group())  # type: ignore[arg-type]
    assert (side is not None) is in_line and connected == [torch.device("sim:0")] * in_line


@on_simulated_device
def test_an_operation_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: the host waits for nothing on the device, and no thread asks whether messages are over."""
    from weft.world import simulated

    exchange, detectors = NcclSide.exchange, {}

    def followed(self, group, record, sends, expected) -> object:
        return exchange(self, group, record, sends, expected, detectors[group.rank()])

    def program(axis: Axis) -> tuple[int, list[BaseException]]:
        detector = detectors[axis.rank] = HangDetector(0, 1, Store(), None, lambda: None)  # type: ignore[arg-type]
        q, k, v = (torch.randn(1, 6, 2, 4, device="sim", requires_grad=True) for _ in range(3))
        errors: list[BaseException] = []

        def inspect() -> None:
            try:
                detector.inspect()
            except BaseException as error:
                errors.append(error)

        def step() -> None:
            weft.linear_attention(q, k, v, scale=1.0, group=axis)[0].sum().backward()

        step()
        before = len(detector._waits)
        with simulated.capturing():
            step()
            watcher = threading.Thread(target=inspect)
            watcher.start()
            watcher.join()
        step()
        return before, errors

    monkeypatch.setattr(NcclSide, "exchange", followed)
    assert all(before > 0 and not errors for before, errors in world(2).run(program).results)


def test_works_of_a_capture_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Calls:
        irecv = isend = "op"

        def P2POp(self, *args, **keywords):
            return args

        def batch_isend_irecv(self, operations):
            return [object()]

        def eager_connect_single_device(self, device) -> None:
            pass

        def rank(self) -> int:
            return 0

    followed: list[object] = []

    class Detector:
        def follow(self, record, works) -> None:
            followed.append(works)

    from weft.comm import nccl

    calls = Calls()
    side = NcclSide(calls, torch.device("cpu"), calls)
    record = CallRecord("world", 1, "a test", (), 1)
    for capturing in (True, False):
        monkeypatch.setattr(nccl, "is_capturing", lambda device, capturing=capturing: capturing)
        expected = nccl.PostedWithExchange(record, [])
        side.exchange(calls, record, [(1, 0, torch.ones(2))], expected, Detector())  # type: ignore[arg-type]
    assert len(followed) == 1
