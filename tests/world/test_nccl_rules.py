"""Each of NCCL's rules broken on purpose: it is found, with the ranks, the call and the rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import weft
from weft.errors import DisagreementError, NcclRuleError
from weft.world.virtual import WorldState


def broken(program: Callable[[weft.Axis], object], size: int = 2) -> str:
    """What the world says; on an ideal network the program is fine."""
    weft.world.VirtualWorld(size).run(program)
    with pytest.raises(NcclRuleError) as caught:
        weft.world.VirtualWorld(size, rules="nccl").run(program)
    return str(caught.value)


def test_rule_1_groups_in_a_line_deadlock_in_opposite_orders() -> None:
    """Two exchanges between three ranks, waited for at the end, in orders that no line can serve."""

    def program(axis: weft.Axis) -> None:
        call, buffer = axis.begin("crossed"), torch.zeros(1)
        first, second = (axis.rank + 1) % 3, (axis.rank - 1) % 3
        pending = [call.exchange(receives=[(second, buffer)]), call.exchange(sends=[(first, torch.ones(1))])]
        for one in pending:
            one.wait()

    words = broken(program, 3)
    assert "NCCL rule 1" in words and "rank 0 waits for a group from rank 2 in call 1, crossed" in words


def test_rule_1_two_lanes_that_wait_for_each_other() -> None:
    """What zigzag linear attention did before its runs advanced together."""

    def program(axis: weft.Axis) -> None:
        call = axis.begin("lanes")

        def hand_over(to: int, come_from: int) -> Callable[[weft.comm.Call], None]:
            def lane(call: weft.comm.Call) -> None:
                buffer = torch.zeros(1)
                if axis.rank == come_from:
                    call.send(torch.ones(1), to).wait()
                else:
                    call.receive(buffer, come_from).wait()

            return lane

        there, back = hand_over(1, 0), hand_over(0, 1)
        order = [there, back] if axis.rank == 0 else [back, there]
        for pending in [call.start(lane) for lane in order]:
            pending.wait()

    # The same tag on both lanes of a real network would mix them up, too: there each has its own direction.
    assert "does not mirror" in broken(program) or "rule 1" in broken(program)


def test_rule_2_messages_match_in_order_whatever_their_tags() -> None:
    def program(axis: weft.Axis) -> None:
        calls, buffers = [axis.begin("one"), axis.begin("two")], [torch.zeros(1), torch.zeros(1)]
        if axis.rank == 0:
            pending = [call.send(torch.ones(1), 1) for call in calls]
        else:
            pending = [call.receive(buffer, 0) for call, buffer in zip(calls[::-1], buffers, strict=True)]
        for one in pending:
            one.wait()

    words = broken(program)
    assert "NCCL rule 2: rank 1, in call 2, two, would receive what rank 0 sent in call 1, one" in words


def test_rule_2_sizes_and_dtypes_must_agree() -> None:
    def program(axis: weft.Axis) -> None:
        call = axis.begin("sizes")
        if axis.rank == 0:
            call.send(torch.ones(3), 1).wait()
        else:
            call.receive(torch.zeros(4), 0).wait()

    with pytest.raises(NcclRuleError, match=r"rule 2: call 1, sizes: rank 0 sent 3 x torch.float32, rank 1 expects 4"):
        weft.world.VirtualWorld(2, rules="nccl").run(program)


def test_rule_3_both_ends_group_alike() -> None:
    def program(axis: weft.Axis) -> None:
        call, buffer, other = axis.begin("shapes"), torch.zeros(1), 1 - axis.rank
        if axis.rank == 0:
            call.exchange([(other, torch.ones(1))], [(other, buffer)]).wait()
        else:
            sent, got = call.send(torch.ones(1), other), call.receive(buffer, other)
            sent.wait()
            got.wait()

    words = broken(program)
    assert "NCCL rule 3: group 1 between ranks " in words and "does not mirror" in words and "call 1, shapes" in words
    assert "rank 0 (sends and receives)" in words and "rank 1 (sends)" in words


def test_rule_3_one_message_for_each_peer_and_direction() -> None:
    def program(axis: weft.Axis) -> None:
        call = axis.begin("twice")
        if axis.rank == 0:
            call.exchange([(1, torch.ones(1)), (1, torch.ones(2))]).wait()
        else:
            call.exchange([], [(0, torch.zeros(1)), (0, torch.zeros(2))]).wait()

    assert "NCCL rule 3: call 1, twice: rank " in (words := broken(program))
    assert "has more than one message in one direction for rank" in words


def test_rule_4_without_a_connection_the_first_exchange_needs_everybody() -> None:
    def program(axis: weft.Axis) -> None:
        call = axis.begin("some")
        if axis.rank < 2:
            call.exchange([(1 - axis.rank, torch.ones(1))], [(1 - axis.rank, torch.zeros(1))]).wait()

    world = weft.world.VirtualWorld(3, rules="nccl")
    world.run(program)  # connected before, as `Axis.of` does
    with pytest.raises(NcclRuleError, match=r"rank 0 waits for all ranks to join .* call 1, some \(NCCL rule 4\)"):
        WorldState(world, connected=False).run(program)


def test_rule_5_a_host_that_blocks_at_issue() -> None:
    """Sends before receives are fine while the host is free, and a deadlock at the first contact of two ranks."""

    def program(axis: weft.Axis) -> None:
        call, other = axis.begin("contact"), (axis.rank + 1) % 3
        sent = call.send(torch.ones(1), other)
        call.receive(torch.zeros(1), (axis.rank - 1) % 3).wait()
        sent.wait()

    world = weft.world.VirtualWorld(3, rules="nccl")
    with pytest.raises(NcclRuleError, match="contact"):
        WorldState(world, host_blocks=True).run(program)


def test_rule_6_a_message_that_is_overwritten_before_it_has_left() -> None:
    def program(axis: weft.Axis) -> None:
        call, buffer, other = axis.begin("early"), torch.zeros(4), 1 - axis.rank
        tensor = torch.ones(4)
        pending = call.exchange([(other, tensor)], [(other, buffer)])
        tensor += 1
        pending.wait()

    world = weft.world.VirtualWorld(2, rules="nccl")
    with pytest.raises(NcclRuleError, match=r"rule 6: call 1, early: rank \d changed what it sends to rank \d"):
        WorldState(world).run(program)


def test_rule_6_a_received_tensor_holds_nothing_until_it_was_waited_for() -> None:
    def program(axis: weft.Axis) -> tuple[float, float]:
        call, buffer, other = axis.begin("peek"), torch.zeros(1), 1 - axis.rank
        pending = call.exchange([(other, torch.ones(1))], [(other, buffer)])
        early = buffer.item()
        pending.wait()
        return early, buffer.item()

    for early, late in weft.world.VirtualWorld(2, rules="nccl").run(program).results:
        assert early != early and late == 1.0


def test_rule_7_everything_is_waited_for() -> None:
    def program(axis: weft.Axis) -> None:
        call, buffer, other = axis.begin("left"), torch.zeros(1), 1 - axis.rank
        call.exchange([(other, torch.ones(1))], [(other, buffer)])

    assert "NCCL rule 7: rank 0 never waited for a group to rank 1 and from rank 1 in call 1, left" in broken(program)


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__, torch.Tensor.__bool__])
def test_rule_8_the_host_does_not_read_received_integers(read: Callable[[torch.Tensor], object]) -> None:
    def program(axis: weft.Axis) -> None:
        call, buffer, other = axis.begin("counts"), torch.zeros(1, dtype=torch.int64), 1 - axis.rank
        call.exchange([(other, torch.ones(1, dtype=torch.int64))], [(other, buffer)]).wait()
        read(buffer)

    assert "NCCL rule 8: rank 0 reads received integers [1] on the host" in broken(program)


def test_ranks_that_disagree_are_told_so_and_not_of_a_rule() -> None:
    def program(axis: weft.Axis) -> None:
        for step in range(3):
            weft.exclusive_scan(
                torch.ones(2, 3), method="tree" if (step, axis.rank) == (2, 1) else "gather", group=axis
            )

    with pytest.raises(DisagreementError, match="rank 1 called exclusive_scan"):
        weft.world.VirtualWorld(3, rules="nccl").run(program)
