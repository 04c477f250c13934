from __future__ import annotations

import json

import torch

import weft


def rows_of(path) -> dict[str, set[int]]:
    events = json.loads(path.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    rows: dict[str, set[int]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault(names[event["pid"], event["tid"]], set()).add(event["pid"])
    return rows


def test_lanes_of_one_operation_share_a_row(tmp_path) -> None:
    """However many calls there were: three rows of messages and one of operators."""

    def program(axis: weft.Axis) -> None:
        q = torch.empty(1, 8, 2, 4, device="meta").requires_grad_()
        for _ in range(20):
            weft.linear_attention(q, q, q, group=axis)[0].backward(torch.empty(1, 8, 2, 4, device="meta"))

    run = weft.world.VirtualWorld(3, weft.world.Machine(1e-6, 1e9, flops=1e9)).run(program)
    run.timeline.save_trace(tmp_path / "trace.json")
    rows = rows_of(tmp_path / "trace.json")
    lanes = {"world lane: linear_attention", "world lane: linear_attention.backward"}
    assert set(rows) == {"world", "compute"} | lanes
    assert rows["world lane: linear_attention"] == {0, 1, 2}


def test_blocks_of_a_row_do_not_overlap(tmp_path) -> None:
    def program(axis: weft.Axis) -> None:
        q = torch.empty(1, 64, 8, 8, device="meta")
        weft.attention(q, q, q, causal=False, method="gather", strides=(2, 2, 2, 2), group=axis)

    run = weft.world.VirtualWorld(3, weft.world.Machine(1e-6, 1e6, flops=1e9)).run(program)
    run.timeline.save_trace(tmp_path / "trace.json")
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) > 20
    ends: dict[tuple[int, int], float] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        row = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(row, 0.0) - 1e-6
        ends[row] = event["ts"] + event["dur"]


def test_what_is_exposed_is_what_the_main_line_waits_for() -> None:
    """Messages take a second. A rank that works half of it stands for the other half, whoever waits for the message."""

    def program(axis: weft.Axis) -> tuple[list[tuple[str, float]], ...]:
        def stood(work: float, in_lane: bool, early: bool) -> list[tuple[str, float]]:
            call = axis.begin("reshard")
            mine, theirs = torch.ones(1), [(1 - axis.rank, torch.empty(1))]
            with weft.record() as ledger:
                send = lambda one: one.exchange([(1 - axis.rank, mine)], theirs)  # noqa: E731
                if not in_lane:
                    pending = send(call)
                elif early:  # started by the main line, waited for in the lane
                    begun = send(call)
                    pending = call.start(lambda lane: begun.wait())
                else:
                    pending = call.start(lambda lane: send(lane).wait())
                axis.wire.spend("work", work)
                pending.wait()
            return [(operation, round(end - start, 6)) for operation, start, end in ledger.exposed if end > start]

        return stood(0.5, False, False), stood(0.5, True, False), stood(0.5, True, True), stood(2.0, True, True)

    for found in weft.world.VirtualWorld(2, weft.world.Machine(latency=1.0, bandwidth=1e12)).run(program).results:
        assert found == ([("reshard", 0.5)], [("reshard", 0.5)], [("reshard", 0.5)], [])
