"""When messages leave and arrive under each of the rules, in virtual time."""

from __future__ import annotations

import math

import pytest
import torch

import weft
from weft.ops.attention.distributed import METHODS as ATTENTION
from weft.ops.scan import METHODS

MACHINE = weft.world.Machine(latency=5.0, bandwidth=40.0)


def elapsed(program, rules: str, size: int = 2, machine: weft.world.Machine = MACHINE) -> float:
    return weft.world.VirtualWorld(size, machine, rules=rules).run(program).elapsed


def test_on_gloo_a_message_waits_for_the_word_that_its_receive_is_posted() -> None:
    def together(axis: weft.Axis) -> None:
        buffer = torch.zeros(10)
        other = 1 - axis.rank
        axis.exchange([(other, torch.ones(10))], [(other, buffer)]).wait()

    assert elapsed(together, "ideal") == 1 + 5
    assert elapsed(together, "gloo") == 5 + 1 + 5
    assert elapsed(together, "nccl") == 1 + 5


def test_a_receive_posted_early_costs_one_delay() -> None:
    def early(axis: weft.Axis) -> None:
        call, buffer, other = axis.begin("early"), torch.zeros(10), 1 - axis.rank
        coming = call.expect([(other, buffer)])
        a = torch.empty(10, 10, device="meta")
        for _ in range(5):
            a = a @ a  # five seconds of work, while the word travels
        call.exchange([(other, torch.ones(10))], coming).wait()

    machine = weft.world.Machine(5.0, 40.0, flops=2000.0)
    assert elapsed(early, "ideal", machine=machine) == 5 + 1 + 5
    assert elapsed(early, "gloo", machine=machine) == 5 + 1 + 5


def test_on_gloo_messages_share_a_link() -> None:
    """Rank 2 is ready after 5 s and has the link for itself for one; then both have half until the first is through."""

    def program(axis: weft.Axis) -> float:
        call, buffer = axis.begin("links"), torch.zeros(10)
        if axis.rank == 0:
            call.exchange([(1, torch.ones(10)), (2, torch.ones(10))]).wait()
        elif axis.rank == 1:
            a = torch.empty(10, 10, device="meta")
            a @ a  # ready a second later than rank 2
            call.receive(buffer, 0).wait()
        else:
            call.receive(buffer, 0).wait()
        return axis.wire.clock()

    run = weft.world.VirtualWorld(3, weft.world.Machine(5.0, 10.0, flops=2000.0), rules="gloo").run(program)
    assert run.results == [6, 13 + 5, 12 + 5]  # a send is over when it leaves


@pytest.mark.parametrize("method", METHODS)
def test_a_scan_pays_the_word_once(method: str) -> None:
    """Every receive of a schedule is posted at its start, so at most the first round waits for a second delay."""

    def scan(axis: weft.Axis) -> None:
        weft.exclusive_scan(torch.empty(2, 8, 8, device="meta"), method=method, group=axis)

    latency = weft.world.Machine(1.0, math.inf)
    for size in (2, 5, 6, 8):
        ideal, gloo = (elapsed(scan, rules, size, latency) for rules in ("ideal", "gloo"))
        assert gloo <= ideal + 1
        if method in ("ring", "pipeline", "gather"):
            assert gloo == ideal + 1


@pytest.mark.parametrize("method", METHODS)
def test_inside_linear_attention_the_word_is_hidden_under_the_local_work(method: str) -> None:
    """With local work of a few delays before the scan, Gloo's network costs what an ideal one does."""

    def layer(axis: weft.Axis) -> None:
        q = torch.empty(1, 512, 4, 32, device="meta").requires_grad_()
        g = torch.empty(1, 512, 4, device="meta").requires_grad_()
        o, _ = weft.linear_attention(q, q, q, g, group=axis, method=method)
        o.backward(torch.empty_like(o))

    local = elapsed(layer, "ideal", 6, weft.world.Machine(0.0, math.inf, flops=1e9))
    machine = weft.world.Machine(local / 100, math.inf, flops=1e9)
    assert elapsed(layer, "gloo", 6, machine) <= 1.001 * elapsed(layer, "ideal", 6, machine)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("packed", [False, True])
def test_lengths_are_gathered_under_the_first_local_work(packed: bool, layout: str) -> None:
    """A layer that asks for lengths takes no longer than one that was given a sequence."""

    def program(axis: weft.Axis, attend, given: bool) -> float:
        q = torch.empty(1, 256, 6, 16, device="meta")
        bounds = [0, 100, 700, 256 * axis.size] if packed else None
        common = {"layout": layout, "cu_seqlens": bounds, "group": axis}
        sequence = weft.sequence(256, **common)
        start = axis.wire.clock()
        if attend is weft.attention:
            attend(q, q, q, causal=True, method="gather", **({"sequence": sequence} if given else common))
        else:
            attend(q, q, q, **({"sequence": sequence} if given else common))
        return axis.wire.clock() - start

    for attend in (weft.attention, weft.linear_attention):
        free = weft.world.Machine(0.0, math.inf, flops=1e9)
        work = max(weft.world.VirtualWorld(4, free).run(lambda axis: program(axis, attend, True)).results)  # noqa: B023
        machine = weft.world.Machine(work / 200, math.inf, flops=1e9)
        seconds = [
            max(weft.world.VirtualWorld(4, machine, "gloo").run(lambda axis: program(axis, attend, given)).results)  # noqa: B023
            for given in (True, False)
        ]
        assert seconds[1] <= 1.001 * seconds[0], attend


@pytest.mark.parametrize("method", ATTENTION)
def test_attention_takes_about_the_same_on_gloo(method: str) -> None:
    """Keys that travel under the computation do so whatever the handshake costs."""

    def layer(axis: weft.Axis) -> None:
        q, k, v = (torch.empty(1, 512, 8, 32, device="meta", requires_grad=True) for _ in "qkv")
        sequence = weft.sequence(512, layout="zigzag", group=axis)
        out = weft.attention(q, k, v, causal=True, sequence=sequence, method=method)
        out.backward(torch.empty_like(out))

    local = elapsed(layer, "ideal", 4, weft.world.Machine(0.0, math.inf, flops=1e9))
    machine = weft.world.Machine(local / 200, 4 * 512 * 8 * 32 * 40 / local, flops=1e9)
    assert elapsed(layer, "gloo", 4, machine) <= 1.06 * elapsed(layer, "ideal", 4, machine)


def test_a_pipeline_flows_on_a_line_of_groups() -> None:
    """NCCL's line holds up what stands behind: blocks still follow one another."""

    def scan(axis: weft.Axis) -> None:
        weft.exclusive_scan(torch.empty(1, 16, 4, device="meta"), method="pipeline", blocks=8, group=axis)

    bytes_only = weft.world.Machine(0.0, 1.0)
    assert elapsed(scan, "ideal", 5, bytes_only) == (5 + 8 - 2) * 256 / 8
    assert elapsed(scan, "nccl", 5, bytes_only) <= (5 + 8 - 1) * 256 / 8


def test_lanes_on_a_line_of_groups_still_run_beside_the_work() -> None:
    def layer(axis: weft.Axis) -> None:
        q = torch.empty(1, 512, 4, 32, device="meta")
        weft.linear_attention(q, q, q, group=axis, method="doubling")

    local = elapsed(layer, "nccl", 4, weft.world.Machine(0.0, math.inf, flops=1e9))
    assert elapsed(layer, "nccl", 4, weft.world.Machine(local / 20, math.inf, flops=1e9)) == pytest.approx(
        local, rel=1e-6
    )


def test_unknown_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="rules 'mpi' is not one of ideal, gloo, nccl"):
        weft.world.VirtualWorld(2, rules="mpi")
