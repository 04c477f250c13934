"""What a call offers, on virtual ranks: gathering, all to all, summing in rank order, and the round of integers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import virtual_world

import weft
from weft.comm.call import exchange_coalesced
from weft.comm.rounds import FAN_OUT, gather_bytes, gather_text
from weft.errors import DisagreementError

pytestmark = pytest.mark.usefixtures("every_network")


@dataclass(frozen=True)
class Options:
    shape: tuple[int, ...]
    name: str = "same"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_everybody_gets_everybodys_rows(rows: list[int]) -> None:
    def program(axis: weft.Axis) -> list[list[float]]:
        call = axis.begin("gather", Options((2,)), metadata=(rows[axis.rank],))
        gathered = [count for (count,) in call.metadata.wait()]
        assert gathered == rows
        mine = torch.full((rows[axis.rank], 2), float(axis.rank))
        return [part.flatten().tolist() for part in call.all_gather(mine, gathered).wait()]

    wanted = [[float(rank)] * 2 * count for rank, count in enumerate(rows)]
    assert virtual_world(len(rows)).run(program).results == [wanted] * len(rows)


@given(st.integers(1, 5), st.data())
def test_uneven_all_to_all(size: int, data: st.DataObject) -> None:
    counts = [[data.draw(st.integers(0, 3)) for _ in range(size)] for _ in range(size)]  # from row to column

    def program(axis: weft.Axis) -> list[list[int]]:
        call = axis.begin("all_to_all")
        outgoing = [torch.full((counts[axis.rank][to],), 10 * axis.rank + to) for to in range(size)]
        coming = call.all_to_all(outgoing, [counts[source][axis.rank] for source in range(size)])
        return [part.float().tolist() for part in coming.wait()]

    results = virtual_world(size).run(program).results
    for rank, got in enumerate(results):
        assert got == [[10.0 * source + rank] * counts[source][rank] for source in range(size)]


def test_sums_are_in_rank_order_and_wide() -> None:
    """1 + 2^-9 - 1 in bf16 is 0 in any other order or width."""
    values = [1.0, 2.0**-9, -1.0]

    def program(axis: weft.Axis) -> torch.Tensor:
        part = torch.full((2,), values[axis.rank], dtype=torch.bfloat16)
        return axis.begin("sum").sum_to_owners([part] * 3).wait()

    for total in virtual_world(3).run(program).results:
        assert total.dtype == torch.float32 and total.tolist() == [2.0**-9] * 2


def test_what_a_rank_sends_to_itself_is_copied() -> None:
    def program(axis: weft.Axis) -> float:
        call, buffer = axis.begin("self"), torch.zeros(1)
        call.exchange([(axis.rank, torch.ones(1) + axis.rank)], [(axis.rank, buffer)]).wait()
        return buffer.item()

    assert virtual_world(2).run(program).results == [1.0, 2.0]


@pytest.mark.parametrize("size", [1, 2, 5, FAN_OUT, FAN_OUT + 1, 23])
def test_integers_reach_everybody(size: int) -> None:
    """On few ranks in one round, on many in log2(P)."""

    def program(axis: weft.Axis) -> tuple[list[tuple[int, ...]], int]:
        with weft.record() as ledger:
            gathered = axis.begin("gather", metadata=(axis.rank, axis.rank**2)).metadata.wait()
        return gathered, ledger.bytes_received

    for gathered, received in virtual_world(size).run(program).results:
        assert gathered == [(rank, rank**2) for rank in range(size)]
        assert received == 32 * (size - 1)


@pytest.mark.parametrize("size", [3, FAN_OUT + 2])
def test_options_that_differ_are_found_in_the_round(size: int) -> None:
    def program(axis: weft.Axis) -> list[str]:
        words = []
        for step in range(4):
            odd = axis.rank == 1 and step == 2
            try:
                axis.begin("work", Options((4,), "odd" if odd else "same"), metadata=(step,)).metadata.wait()
                words.append("")
            except DisagreementError as error:
                words.append(str(error))
        return words

    results = virtual_world(size).run(program).results
    assert all(words == results[0] for words in results) and results[0][:2] == ["", ""] and results[0][3] == ""
    assert "rank 1 called work(name=odd)" in results[0][2] and "at call 3" in results[0][2]


@pytest.mark.parametrize("kind", [ValueError, TypeError, NotImplementedError])
@pytest.mark.parametrize("gathers", [True, False])
def test_a_fault_of_two_ranks(kind: type[Exception], gathers: bool) -> None:
    """Those that found one raise their own, the others the first one's; type and text are the same at any call."""

    def program(axis: weft.Axis) -> list[tuple[str, str]]:
        raised = []
        for _ in range(2 if gathers else 1):
            fault = kind(f"not this (rank {axis.rank})") if axis.rank in (1, 3) else None
            try:
                axis.begin(
                    "work", None if fault else Options((4,)), metadata=(1,) if gathers else None, fault=fault
                ).metadata.wait()
            except (ValueError, TypeError, NotImplementedError) as error:
                raised.append((type(error).__name__, str(error)))
        return raised

    results = virtual_world(4).run(program).results
    for rank, first in enumerate([1, 1, 1, 3]):
        assert results[rank] == [(kind.__name__, f"not this (rank {first})")] * (2 if gathers else 1)


@pytest.mark.parametrize("size", [1, 3, FAN_OUT + 4])
def test_metadata_for_each_rank_alone(size: int) -> None:
    def program(axis: weft.Axis) -> list[tuple[int, ...]]:
        each = [(100 * axis.rank + other, -other) for other in range(size)]
        return axis.begin("gather", Options((1,)), metadata=(axis.rank,), metadata_each=each).metadata.wait()

    for rank, gathered in enumerate(virtual_world(size).run(program).results):
        assert gathered == [(other, 100 * other + rank, -rank) for other in range(size)]


def test_one_element_travels_whatever_its_stride() -> None:
    """Such a tensor is contiguous for torch; alone and coalesced with others."""

    def program(axis: weft.Axis) -> list[float]:
        odd = torch.full((1, 4), 5.0)[:, :1].mT  # strides 1 and 4
        buffers = [torch.zeros(1, 1), torch.zeros(2), torch.zeros(1)]
        other = 1 - axis.rank
        exchange_coalesced(axis.begin("coalesced"), [(other, [odd, torch.ones(2)])], [(other, buffers[:2])]).wait()
        exchange_coalesced(axis.begin("coalesced"), [(other, [odd])], [(other, buffers[2:])]).wait()
        return torch.cat([buffer.flatten() for buffer in buffers]).tolist()

    assert virtual_world(2).run(program).results == [[5.0, 1.0, 1.0, 5.0]] * 2


@pytest.mark.parametrize("size", [1, 3, FAN_OUT + 4])
def test_text_of_any_length_reaches_everybody_in_few_messages(size: int) -> None:
    """Also bytes. On many ranks a rank sends log2(P) messages in each of the two rounds, and not P - 1."""
    texts = ["" if rank % 3 == 0 else "ä" * rank for rank in range(size)]

    def program(axis: weft.Axis) -> tuple[list[str], list[bytes], int]:
        with weft.record() as ledger:
            gathered = gather_text(axis, "greet", texts[axis.rank])
        return gathered, gather_bytes(axis, "count", bytes([axis.rank])), sum(len(e.sends) for e in ledger.events)

    rounds = size - 1 if size <= FAN_OUT else math.ceil(math.log2(size))
    for gathered, data, messages in virtual_world(size).run(program).results:
        assert gathered == texts and data == [bytes([rank]) for rank in range(size)]
        assert messages <= 2 * rounds
