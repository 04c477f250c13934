from __future__ import annotations

import itertools
import json
import math
import os
import threading

import pytest
import torch

import weft
from weft.errors import DeadlockError, DisagreementError


def test_results_by_rank_and_world_is_none_inside() -> None:
    run = weft.world.VirtualWorld(5).run(
        lambda axis: (axis.rank, weft.Axis.of(None) is axis, weft.Axis.of(axis) is axis)
    )
    assert run.results == [(rank, True, True) for rank in range(5)]
    assert run.elapsed is None


def test_a_message_costs_its_link_and_its_delay() -> None:
    def program(axis: weft.Axis) -> None:
        if axis.rank == 0:
            messages = [axis.send(torch.zeros(10), 1) for _ in range(3)]
            for one in messages:
                one.wait()
        else:
            for _ in range(3):
                axis.receive(torch.zeros(10), 0).wait()

    assert weft.world.VirtualWorld(2, weft.world.Machine(5.0, 40.0)).run(program).elapsed == 3 * 1.0 + 5.0


def test_messages_meet_in_the_order_they_were_asked_for() -> None:
    def program(axis: weft.Axis) -> list[float]:
        if axis.rank == 0:
            for value in (1.0, 2.0):
                axis.send(torch.full((1,), value), 1).wait()
            return []
        buffers = [torch.zeros(1), torch.zeros(1)]
        pending = [axis.receive(buffer, 0) for buffer in buffers]
        for one in reversed(pending):  # waited for in the other order
            one.wait()
        return [buffer.item() for buffer in buffers]

    assert weft.world.VirtualWorld(2).run(program).results[1] == [1.0, 2.0]


def test_operators_cost_flops_or_bytes() -> None:
    def program(axis: weft.Axis) -> None:
        a = torch.empty(10, 10, device="meta")
        a @ a
        a + a

    flops = weft.world.VirtualWorld(1, weft.world.Machine(0, math.inf, flops=2000.0)).run(program)
    assert flops.elapsed == 1.0
    memory = weft.world.VirtualWorld(1, weft.world.Machine(0, math.inf, memory_bandwidth=1200.0)).run(program)
    assert memory.elapsed == 2.0
    assert [event.operation for event in memory.timeline.events] == ["mm", "add"]


def test_what_is_made_like_another_does_not_read_it() -> None:
    def program(axis: weft.Axis) -> None:
        a = torch.empty(10, 10, device="meta")
        torch.zeros_like(a)
        a.new_zeros(2)

    run = weft.world.VirtualWorld(1, weft.world.Machine(0, math.inf, memory_bandwidth=1.0)).run(program)
    assert run.elapsed == 400 + 8


@pytest.mark.parametrize(
    ("causal", "left", "right"),
    [(True, None, None), (False, None, None), (False, 2, 0), (False, 0, 1), (False, -1, 1), (False, 3, -1)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_flash_operators_cost_the_pairs_that_they_compute(
    packed: bool, causal: bool, left: int | None, right: int | None
) -> None:
    """Two products of each pair in the forward and five in the backward, on the lower right diagonal."""
    sizes = [(3, 7), (5, 4), (4, 4)] if packed else [(5, 7)] * 2
    low, high = -1 if left is None else left, 0 if causal else -1 if right is None else right
    pairs = sum(
        (low < 0 or j - i - (keys - queries) >= -low) and (high < 0 or j - i - (keys - queries) <= high)
        for queries, keys in sizes
        for i in range(queries)
        for j in range(keys)
    )
    ends = [torch.tensor([0, *itertools.accumulate(each)], dtype=torch.int32) for each in zip(*sizes, strict=True)]

    def program(axis: weft.Axis) -> None:
        shapes = [(int(one[-1]), 4, 8) for one in ends] if packed else [(2, each, 4, 8) for each in sizes[0]]
        q, k = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
        window = {} if left is None else {"window_size_left": left, "window_size_right": right}
        how = (*(ends if packed else (None, None)), 5, 7, 0.0, causal)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, k, *how, False, **window)
        unused = torch.empty(0, dtype=torch.int64, device="meta")
        torch.ops.aten._flash_attention_backward(q, q, k, k, out, lse, *how, unused, unused, **window)

    run = weft.world.VirtualWorld(1, weft.world.Machine(0, math.inf, flops=1.0)).run(program)
    assert run.elapsed == (2 + 5) * 2 * pairs * 4 * 8


@pytest.mark.parametrize("scan_rounds", [6, 14])
def test_a_lane_runs_beside_the_computation(scan_rounds: int) -> None:
    def program(axis: weft.Axis) -> torch.Tensor:
        state = torch.ones(1, 1)
        pending = axis.start(lambda lane: weft.exclusive_scan(state, method="ring", group=lane))
        a = torch.empty(10, 10, device="meta")
        for _ in range(10):
            a = a @ a
        return pending.wait()

    run = weft.world.VirtualWorld(scan_rounds + 1, weft.world.Machine(1.0, math.inf, flops=2000.0)).run(program)
    assert run.elapsed == max(10, scan_rounds)
    assert [out.item() for out in run.results] == list(range(scan_rounds + 1))


def test_a_simulation_leaves_no_trace_in_torch() -> None:
    def program(axis: weft.Axis) -> None:
        weft.exclusive_scan(torch.empty(4, 4, device="meta"), log_decay=torch.empty(4, device="meta"))

    weft.world.VirtualWorld(5, weft.world.Machine(1.0, 1.0, flops=1.0)).run(program)
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()


def test_two_lanes_and_the_main_line_do_not_mix_their_messages() -> None:
    def program(axis: weft.Axis) -> list[float]:
        def scan(value: float):
            return lambda lane: weft.exclusive_scan(torch.full((1, 1), value), method="ring", group=lane)

        lanes = [axis.start(scan(10.0)), axis.start(scan(100.0))]
        middle = weft.exclusive_scan(torch.ones(1, 1), method="ring", group=axis)
        return [middle.item(), lanes[1].wait().item(), lanes[0].wait().item()]

    results = weft.world.VirtualWorld(4, weft.world.Machine(1.0, 8.0)).run(program).results
    assert results == [[rank * 1.0, rank * 100.0, rank * 10.0] for rank in range(4)]


def test_a_deadlock_says_who_waits_for_whom() -> None:
    def program(axis: weft.Axis) -> None:
        axis.receive(torch.zeros(1), (axis.rank + 1) % 3).wait()

    with pytest.raises(DeadlockError, match=r"rank 0 waits for a message from rank 1.*rank 2 waits .* from rank 0"):
        weft.world.VirtualWorld(3).run(program)
    assert threading.active_count() < 20


def test_a_rank_that_leaves_early_is_a_deadlock_for_the_others() -> None:
    def program(axis: weft.Axis) -> None:
        if axis.rank != 1:
            weft.exclusive_scan(torch.ones(1, 1), group=axis)

    with pytest.raises(DeadlockError, match=r"rank 0 waits for rank 1 to make call 1, exclusive_scan"):
        weft.world.VirtualWorld(3).run(program)


def test_an_exception_ends_the_run_with_its_rank() -> None:
    def program(axis: weft.Axis) -> None:
        if axis.rank == 2:
            raise KeyError("lost")
        axis.receive(torch.zeros(1), 2).wait()

    with pytest.raises(KeyError, match="lost") as caught:
        weft.world.VirtualWorld(4).run(program)
    assert caught.value.__notes__ == ["raised on rank 2 of 4"]


def test_ranks_that_disagree_at_the_first_call_raise_the_same_error() -> None:
    verdicts: list[str] = []

    def program(axis: weft.Axis) -> None:
        try:
            weft.exclusive_scan(torch.ones(2, 3 + (axis.rank == 1)), method="ring", group=axis)
        except DisagreementError as error:
            verdicts.append(str(error))

    weft.world.VirtualWorld(4).run(program)
    assert len(verdicts) == 4 and len(set(verdicts)) == 1
    assert "ranks 0, 2, 3 called exclusive_scan(state=[2, 3])" in verdicts[0]
    assert "rank 1 called exclusive_scan(state=[2, 4])" in verdicts[0]


@pytest.mark.parametrize("change", [{"method": "tree"}, {"reverse": True}])
def test_a_later_disagreement_is_told_by_what_was_called(change: dict[str, object]) -> None:
    def program(axis: weft.Axis) -> None:
        for step in range(5):
            options = {"method": "doubling", **(change if (step, axis.rank) == (3, 2) else {})}
            weft.exclusive_scan(torch.ones(2, 3), group=axis, **options)

    with pytest.raises(DisagreementError, match="rank 2 called exclusive_scan") as caught:
        weft.world.VirtualWorld(4).run(program)
    assert next(iter(change)) in str(caught.value)


def test_a_fault_on_one_rank_is_raised_on_every_rank() -> None:
    caught: list[str] = []

    def program(axis: weft.Axis) -> None:
        log = torch.zeros(5 if axis.rank == 1 else 2)
        try:
            weft.exclusive_scan(torch.ones(2, 3, 4), log_decay=log, group=axis)
        except ValueError as error:
            caught.append(str(error))

    weft.world.VirtualWorld(3).run(program)
    assert len(caught) == 3 and len(set(caught)) == 1
    assert "log_decay [5] fits neither" in caught[0] and caught[0].endswith("(rank 1)")


def test_always_checking_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "WEFT_CHECK", "always")
    seen: list[int] = []

    def program(axis: weft.Axis) -> None:
        for step in range(4):
            try:
                weft.exclusive_scan(
                    torch.ones(2, 3), group=axis, method="tree" if (step, axis.rank) == (2, 0) else "ring"
                )
            except DisagreementError:
                seen.append(step)

    weft.world.VirtualWorld(3).run(program)
    assert seen == [2, 2, 2]
    monkeypatch.setitem(os.environ, "WEFT_CHECK", "sometimes")
    with pytest.raises(ValueError, match="'sometimes' is not known"):
        weft.world.VirtualWorld(2).run(lambda axis: weft.exclusive_scan(torch.ones(1, 1)))


def test_a_trace_can_be_read_back(tmp_path) -> None:
    run = weft.world.VirtualWorld(4, weft.world.Machine(1.0, 8.0, flops=10.0)).run(
        lambda axis: weft.exclusive_scan(torch.ones(2, 2), transition=torch.eye(2), method="doubling")
    )
    run.timeline.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == {0, 1, 2, 3}
    assert {span["name"] for span in spans} >= {"exclusive_scan", "mm"} or "bmm" in {s["name"] for s in spans}
    assert sum(span["args"].get("bytes_sent", 0) for span in spans) == run.timeline.bytes_sent
    assert all(span["dur"] >= 0 for span in spans)


def test_record_inside_a_rank_sees_only_that_rank() -> None:
    def program(axis: weft.Axis) -> tuple[int, set[int]]:
        with weft.record() as ledger:
            weft.exclusive_scan(torch.ones(2, 2), method="gather", group=axis)
        return ledger.bytes_sent, {event.rank for event in ledger.events}

    with weft.record() as everybody:
        run = weft.world.VirtualWorld(3).run(program)
    assert run.results == [(32, {0}), (16, {1}), (0, {2})]
    assert everybody.bytes_sent == 48


@pytest.mark.parametrize(
    "numbers", [{"latency": -1}, {"latency": math.inf}, {"bandwidth": 0}, {"flops": -2}, {"memory_bandwidth": 0}]
)
def test_impossible_machines_are_refused(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(numbers))):
        weft.world.Machine(**{"latency": 0.0, "bandwidth": 1.0, **numbers})


def test_a_world_has_at_least_one_rank() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        weft.world.VirtualWorld(0)
