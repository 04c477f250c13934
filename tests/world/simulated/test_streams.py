"""Every kind of race and of memory freed too early is reported, with both places; what is right is clean."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from weft.world import simulated
from weft.world.simulated import Communicator, Event, Rank, SimulatedDeviceError, Stream, current_stream

pytestmark = pytest.mark.usefixtures("sim")


def beside() -> Stream:
    """A second stream, after what was issued so far."""
    stream = Stream()
    stream.wait_stream(current_stream())
    return stream


def ones(count: int = 100) -> torch.Tensor:
    return torch.ones(count, device="sim")


def read_after_write() -> None:
    x, side = ones(), Stream()
    with side:
        x + 1


def write_after_write() -> None:
    x, side = ones(), Stream()
    with side:
        x.zero_()


def write_after_read() -> None:
    x = ones()
    with beside():
        x * 2
    x.zero_()


def result_not_waited_for() -> None:
    x = ones()
    with beside():
        y = x + 1
    y.sum()


def columns_that_overlap() -> None:
    x = torch.zeros(4, 4, device="sim")
    with beside():
        x[:, :3].add_(1)
    x[:, 2:].add_(1)


def out_argument() -> None:
    x, out = ones(), ones()
    with beside():
        torch.add(x, 1, out=out)
    out.sum()


def event_recorded_too_early() -> None:
    x, side = ones(), beside()
    done = side.record_event()
    with side:
        x.add_(1)
    done.wait()
    x.sum()


def received_not_waited_for() -> None:
    sent, received = ones(), ones()
    work = Communicator().issue([sent], [received])
    received.sum()
    work.wait()


def sent_overwritten() -> None:
    sent, received = ones(), ones()
    work = Communicator().issue([sent], [received])
    sent.zero_()
    work.wait()


def wait_on_another_stream() -> None:
    sent, received = ones(), ones()
    work = Communicator().issue([sent], [received])
    with Stream():
        work.wait()
    received.sum()


def gradient_not_waited_for() -> None:
    """Only the stream on which a backward was called waits for what it made."""
    x = ones().requires_grad_()
    y = (x * 2).sum()
    with beside():
        (grad,) = torch.autograd.grad(y, x)
    with Stream():
        grad.sum()


RACES = [
    read_after_write, write_after_write, write_after_read, result_not_waited_for, columns_that_overlap, out_argument,
    event_recorded_too_early, received_not_waited_for, sent_overwritten, wait_on_another_stream,
    gradient_not_waited_for,
]  # fmt: skip


@pytest.mark.parametrize("program", RACES, ids=lambda program: program.__name__)
def test_races_are_found(program: Callable[[], None]) -> None:
    with pytest.raises(SimulatedDeviceError, match=r"^race: \w+ (reads|writes) \[") as found:
        program()
    places = re.findall(rf"test_streams.py:\d+ {program.__name__}", str(found.value))
    assert len(places) >= 3  # here, there, and where it was allocated


def freed_while_read_beside() -> None:
    x = ones()
    with beside():
        y = x + 1
    del x
    ones()
    del y


def freed_while_written_beside() -> None:
    x = ones()
    with beside():
        x.add_(1)
    del x
    torch.empty(3, device="sim")


def made_beside_and_dropped() -> None:
    side = beside()
    with side:
        y = ones()
    current_stream().wait_stream(side)
    y.sum()
    del y
    with side:
        ones()


def received_on_a_stream_and_dropped() -> None:
    """The message holds its buffers until the wait; after it, whoever reads on another stream must hold them."""
    received, side = ones(), Stream()
    work = Communicator().issue([], [received])
    with side:
        work.wait()
        received * 2
    del received
    ones()


EARLY = [freed_while_read_beside, freed_while_written_beside, made_beside_and_dropped, received_on_a_stream_and_dropped]


@pytest.mark.parametrize("program", EARLY, ids=lambda program: program.__name__)
def test_memory_freed_too_early_is_found(program: Callable[[], None]) -> None:
    with pytest.raises(SimulatedDeviceError, match=r"^freed too early: memory allocated on stream") as found:
        program()
    assert len(re.findall(rf"test_streams.py:\d+ {program.__name__}", str(found.value))) >= 2


def waits_both_ways() -> None:
    x, side = ones(), beside()
    with side:
        y = x + 1
    current_stream().wait_stream(side)
    y.record_stream(current_stream())
    y.sum()


def events() -> None:
    x, side, ready = ones(), Stream(), Event()
    ready.record()
    side.wait_event(ready)
    with side:
        x.add_(1)
        done = side.record_event()
    done.wait()
    x.add_(1)


def reads_beside_one_another() -> None:
    x, side = ones(), beside()
    with side:
        y = x + 1
    x.sum()
    y.record_stream(side)
    x.record_stream(side)


def columns_apart() -> None:
    x, side = torch.zeros(4, 4, device="sim"), beside()
    with side:
        x[:, :2].add_(1)
    x[:, 2:].add_(1)
    x.record_stream(side)


def recorded_and_freed() -> None:
    x, side = ones(), beside()
    with side:
        x + 1
    x.record_stream(side)
    del x
    ones()


def ordered_before_it_is_handed_out() -> None:
    x, side = ones(), beside()
    with side:
        x + 1
    del x
    current_stream().wait_stream(side)
    ones()


def host_waited() -> None:
    x, side = ones(), beside()
    with side:
        x + 1
    side.synchronize()
    del x
    ones()


def item_waits_for_its_stream() -> None:
    x, side = ones(), beside()
    with side:
        x.add_(1).sum().item()
    x.add_(1)


def whole_device() -> None:
    x, side = ones(), beside()
    with side:
        x.add_(1)
    torch.get_device_module("sim").synchronize()
    x.add_(1)


def messages() -> None:
    sent, received, line = ones(), ones(), Communicator()
    work = line.issue([sent], [received])
    work.wait()
    received.sum()
    sent.zero_()


def dropped_message() -> None:
    sent = ones()
    Communicator().issue([sent], [])
    del sent
    ones()


CLEAN = [
    waits_both_ways, events, reads_beside_one_another, columns_apart, recorded_and_freed, whole_device, messages,
    ordered_before_it_is_handed_out, host_waited, item_waits_for_its_stream, dropped_message,
]  # fmt: skip


@pytest.mark.parametrize("program", CLEAN, ids=lambda program: program.__name__)
def test_what_is_right_is_clean(program: Callable[[], None]) -> None:
    with simulated.collect_reports() as found:
        program()
        ones()
    assert not found


def test_reports_can_be_collected() -> None:
    with simulated.collect_reports() as found:
        sent_overwritten()
        freed_while_read_beside()
    assert [text.partition(":")[0] for text in found] == ["race", "freed too early"]
    with pytest.raises(SimulatedDeviceError):
        write_after_write()


class Where(torch.autograd.Function):
    """Notes where its backward runs."""

    seen: tuple[int, threading.Thread] | None = None

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        Where.seen = (torch.get_device_module("sim").current_stream().stream_id, threading.get_ident())
        return grad * 2


@pytest.mark.parametrize("own_thread", [True, False])
def test_a_backward_runs_on_the_stream_of_its_forward(own_thread: bool) -> None:
    """In a rank that was entered, in its thread too; elsewhere in the engine's thread of the device, as on CUDA."""
    if not own_thread:
        simulated.enter_rank(None)
    x, side = ones().requires_grad_(), beside()
    with side:
        y = Where.apply(x)
    current_stream().wait_stream(side)
    y.sum().backward()
    assert Where.seen is not None and Where.seen[0] == side.stream_id
    assert (Where.seen[1] == threading.get_ident()) is own_thread
    x.grad.sum()  # who called backward may use what it made
    Where.apply(x).sum().backward()
    assert Where.seen[0] == current_stream().stream_id
    torch.testing.assert_close(x.grad.cpu(), torch.full((100,), 4.0))


def test_a_stream_within_a_backward() -> None:
    side, main = Stream(), current_stream()
    seen = []

    def note(grad: torch.Tensor) -> None:
        seen.append(current_stream())
        with side:
            seen.append(current_stream())
        seen.append(current_stream())

    y = ones().requires_grad_() * 2
    with beside() as other:
        z = y * 2
    main.wait_stream(other)
    y.register_hook(note)
    z.register_hook(note)
    z.sum().backward()
    assert seen == [other, side, other, main, side, main] and current_stream() is main


@torch.enable_grad()  # also within a backward
def _register(where: str, hook: Callable[[torch.Tensor], None]) -> torch.Tensor:
    x = ones().requires_grad_()
    y = x * 2
    {
        "leaf": x.register_hook,
        "between": y.register_hook,
        "accumulated": x.register_post_accumulate_grad_hook,
        "before a node": lambda hook: y.grad_fn.register_prehook(lambda grads: hook(*grads)),
        "after a node": lambda hook: y.grad_fn.register_hook(lambda into, grads: hook(*grads)),
    }[where](hook)
    return y.sum()


@pytest.mark.parametrize("own_thread", [True, False])
@pytest.mark.parametrize("where", ["leaf", "between", "accumulated", "before a node", "after a node"])
def test_errors_in_hooks_come_out_of_the_backward(where: str, own_thread: bool) -> None:
    """With their own words and place, also those of the device; the next backward is as any other."""
    if not own_thread:
        simulated.enter_rank(None)

    def wrong(grad: torch.Tensor) -> None:
        raise KeyError("in a hook")

    def race(grad: torch.Tensor) -> None:
        with Stream():
            grad + 1

    with pytest.raises(KeyError, match="in a hook") as found:
        _register(where, wrong).backward()
    assert found.traceback[-1].name == "wrong"
    with pytest.raises(SimulatedDeviceError, match=r"^race: add reads \[100\] .* test_streams.py:\d+ race"):
        _register(where, race).backward()
    with pytest.raises(KeyError, match="in a hook"):  # in a backward within a backward
        _register(where, lambda grad: _register(where, wrong).backward()).backward()
    seen: list[torch.Tensor] = []
    _register(where, seen.append).backward()
    assert len(seen) == 1


def test_events_are_over_when_asked_twice() -> None:
    """So a first answer cannot be relied on, and a loop that asks comes to an end."""
    x, side = ones(), beside()
    assert Event().query()
    with side:
        x.add_(1)
    done = side.record_event()
    assert not done.query() and done.query() and done.query() and side.query()
    x.add_(1)  # the host has seen it, and issues this after it
    with side:
        ones()
    assert not side.query() and side.query()
    work = Communicator().issue([x], [])
    assert not work.is_completed() and work.is_completed()


def test_ranks_are_apart() -> None:
    """Threads that each enter a rank have streams, hosts and counts of their own; who takes results over follows."""
    ranks, made = [Rank() for _ in range(4)], {}

    def live(at: int) -> None:
        simulated.enter_rank(ranks[at])
        x = torch.full((50,), float(at), device="sim", requires_grad=True)
        for _ in range(20):
            (x * x).sum().backward()
        made[at] = x.grad
        assert x.sum().item() == 50 * at

    threads = [threading.Thread(target=live, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({rank.default_stream.stream_id for rank in ranks}) == 4
    assert [rank.host_syncs["item"] for rank in ranks] == [1] * 4
    with pytest.raises(SimulatedDeviceError, match="race"):
        made[1].sum()
    for at, rank in enumerate(ranks):
        simulated.current_rank().follow(rank)
        assert made[at].cpu().tolist() == [40.0 * at] * 50


def test_nothing_but_its_users_keeps_memory() -> None:
    """Otherwise it would be freed late, and freed too early would not be found."""
    allocated = torch.get_device_module("sim").memory_allocated
    gc.collect()
    gc.disable()
    try:
        layer, before = torch.nn.Linear(8, 8).to("sim"), allocated()
        for _ in range(2):
            x = torch.randn(3, 8, device="sim", requires_grad=True)
            with beside() as side:
                y = layer(x).softmax(-1)[:, 1:]
            current_stream().wait_stream(side)
            work = Communicator().issue([y.detach().contiguous()], [torch.empty(3, device="sim")])
            (y * y).sum().backward()
            work.wait()
            side.wait_stream(current_stream())
            del x, y, work
            layer.zero_grad()
            torch.get_device_module("sim").synchronize()
            assert allocated() == before
    finally:
        gc.enable()


def test_messages_are_contiguous_and_their_bytes_can_be_moved() -> None:
    x = torch.zeros(4, 4, device="sim")
    with pytest.raises(ValueError, match=r"contiguous, got sizes \[4, 2\]"):
        Communicator().issue([x[:, :2]], [])
    work = Communicator().issue([], [x])
    alias = simulated.host_alias(x)
    alias.copy_(torch.arange(16.0).view(4, 4))
    work.wait()
    assert alias.device.type == "cpu" and alias.data_ptr() == x.data_ptr()
    assert x[1].tolist() == [4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_recorded_stream_stands_for_what_it_came_after(ordered: bool) -> None:
    """Memory that waits for a stream waits for whatever that stream has waited for, and for nothing else."""
    x = torch.ones(8, device="sim")
    first, second = torch.sim.Stream(), torch.sim.Stream()
    first.wait_stream(torch.sim.current_stream())
    with first:
        x.add_(1)
    if ordered:
        second.wait_stream(first)
    x.record_stream(second)
    del x
    with nullcontext() if ordered else pytest.raises(SimulatedDeviceError, match="freed too early"):
        torch.ones(8, device="sim")


def test_nothing_is_asked_and_nobody_waits_while_a_graph_is_captured() -> None:
    x, side, errors = ones(), beside(), []
    with side:
        x.add_(1)
    done = side.record_event()

    def ask() -> None:
        try:
            done.query()
        except SimulatedDeviceError as error:
            errors.append(str(error))

    module = torch.get_device_module("sim")
    with simulated.capturing():
        assert module.is_current_stream_capturing()
        for question in (done.query, side.query):
            with pytest.raises(SimulatedDeviceError, match="asked whether work is over while a graph is captured"):
                question()
        with pytest.raises(SimulatedDeviceError, match="host synchronisation where it is forbidden"):
            done.synchronize()
        other = threading.Thread(target=ask)  # of this process, but not the one that captures
        other.start()
        other.join()
    assert len(errors) == 1 and not module.is_current_stream_capturing() and not done.query()
