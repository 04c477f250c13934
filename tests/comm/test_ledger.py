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

    run = weft.VirtualWorld(3, weft.Machine(1e-6, 1e9, flops=1e9)).run(program)
    run.timeline.save_trace(tmp_path / "trace.json")
    rows = rows_of(tmp_path / "trace.json")
    lanes = {"world lane: linear_attention", "world lane: linear_attention.backward"}
    assert set(rows) == {"world", "compute"} | lanes
    assert rows["world lane: linear_attention"] == {0, 1, 2}


def test_blocks_of_a_row_do_not_overlap(tmp_path) -> None:
    def program(axis: weft.Axis) -> None:
        q = torch.empty(1, 64, 8, 8, device="meta")
        weft.attention(q, q, q, method="gather", strides=(2, 2, 2, 2), group=axis)

    run = weft.VirtualWorld(3, weft.Machine(1e-6, 1e6, flops=1e9)).run(program)
    run.timeline.save_trace(tmp_path / "trace.json")
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) > 20
    ends: dict[tuple[int, int], float] = {}
    for event in sorted(events, key=lambda event: event["ts"]):
        row = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(row, 0.0) - 1e-6
        ends[row] = event["ts"] + event["dur"]
