"""Documents on at most two ranks: the second one waits for its state, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from test_delta_rule import GATES, check
from test_linear_attention import Case
from worlds import virtual_world

import weft
from weft.ops.delta_rule import two_ranks
from weft.ops.delta_rule.backward import ChunkBackward
from weft.ops.scan import METHODS
from weft.ops.scan.state_scan import most_places, plan_sequence

CASES = {
    "plain": Case((9, 12)),
    "one token": Case((20, 1)),
    "empty first": Case((0, 11)),
    "empty second": Case((11, 0)),
    "packed": Case((9, 12), (0, 3, 3, 15, 21)),
    "a document each": Case((9, 12), (0, 9, 21)),
    "five ranks": Case((6, 7, 5, 8, 6), (0, 4, 9, 9, 16, 20, 27, 32)),
    "five ranks, some empty": Case((6, 0, 5, 0, 6), (0, 4, 9, 17)),
}
pytestmark = pytest.mark.usefixtures("every_network")


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each run that waited in a forward, and of each in a backward."""
    found: list[int] = []
    for name in ("WaitingForward", "WaitingBackward"):
        kind = getattr(two_ranks, name)
        start = kind.__init__

        def begin(self, inputs, *args, start=start) -> None:
            found.append(inputs.q.shape[1])
            start(self, inputs, *args)

        monkeypatch.setattr(kind, "__init__", begin)
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gate", GATES)
def test_waiting_ranks_have_the_same_outputs_and_gradients(gate: str, name: str, waiting: list[int]) -> None:
    case = CASES[name]
    check(gate, case, "contiguous", "auto", has_final=False, has_sequence=True)
    assert bool(waiting) == (name != "a document each")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_serves(method: str, waiting: list[int]) -> None:
    check("scalar", CASES["plain"], "contiguous", method, has_final=False)
    assert waiting
    check("vector", CASES["five ranks"], "contiguous", method, has_final=False, has_sequence=True)


@pytest.mark.parametrize(("case", "layout", "has_final", "has_sequence"), [
    (CASES["plain"], "contiguous", True, True),  # the map of the last run gives the final state
    (CASES["plain"], "zigzag", False, True),  # three runs
    (CASES["packed"], "contiguous", False, False),  # lengths are not known when the work begins
    (Case((9, 12, 3)), "contiguous", False, True),
    (Case((6, 7, 5), (0, 2, 14, 18)), "contiguous", False, True),
])  # fmt: skip
def test_elsewhere_nobody_waits(
    case: Case, layout: str, has_final: bool, has_sequence: bool, waiting: list[int]
) -> None:
    check("scalar", case, layout, "auto", has_final=has_final, has_sequence=has_sequence)
    assert not waiting


@pytest.mark.parametrize(("lengths", "bounds"), [
    ((5, 6, 7), None), ((5, 0, 7), None), ((5, 6, 7), (0, 5, 11, 18)), ((5, 6, 7), (0, 4, 12, 18)),
    ((5, 6, 7), (0, 0, 18, 18)), ((5, 0, 0, 7), (0, 4, 12)), ((4,), (0, 4)),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_longest_path(lengths: tuple[int, ...], bounds: tuple[int, ...] | None, layout: str) -> None:
    def program(axis: weft.Axis) -> tuple[int, int]:
        sequence = weft.sequence(lengths[axis.rank], layout=layout, cu_seqlens=bounds, group=axis)
        segments = [one for run in plan_sequence(sequence).runs for one in run.segments]
        return most_places(sequence), max((one.path.size for one in segments), default=1)

    found = virtual_world(len(lengths)).run(program).results
    assert {said for said, _ in found} == {max(path for _, path in found)}


def test_all_groups_begin_before_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank first solves the chunks of all, the first one does all that needs no gradient of a state."""
    steps: list[str] = []

    def note(kind: type, name: str) -> None:
        work = getattr(kind, name)

        def noted(self, *args):
            if type(self) is kind:
                steps.append(f"{kind.__name__}.{name}")
            return work(self, *args)

        monkeypatch.setattr(kind, name, noted)

    note(two_ranks.WaitingForward, "__init__")
    note(two_ranks.WaitingForward, "finish")
    note(ChunkBackward, "intra")
    note(ChunkBackward, "finish")

    def program(axis: weft.Axis) -> int:
        q = torch.randn(1, 9, 4, 3, requires_grad=True)
        with weft.record() as ledger:
            weft.delta_rule(q, q, q, torch.rand(1, 9, 4), group=axis)[0].sum().backward()
        return sum(event.operation == "delta_rule.metadata" for event in ledger.events)

    assert virtual_world(2).run(program).results == [1, 1]  # lengths are gathered once, not for each group
    forward = [step for step in steps if step.startswith("Waiting")][:4]
    assert forward == ["WaitingForward.__init__"] * 2 + ["WaitingForward.finish"] * 2
    backward = [step for step in steps if step.startswith("Chunk")][:4]
    assert backward == ["ChunkBackward.intra"] * 2 + ["ChunkBackward.finish"] * 2


@pytest.mark.parametrize(("heads", "value_heads"), [(1, 1), (1, 3), (5, 10), (8, 8)])
def test_any_number_of_heads_is_cut_into_groups(heads: int, value_heads: int, waiting: list[int]) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 13, heads, 4, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, 13, value_heads, 3, dtype=torch.float64)
    beta, g = torch.rand(2, 13, value_heads).double(), -torch.rand(2, 13, value_heads).double()
    alone, _ = weft.delta_rule(q, k, v, beta, g)

    def program(axis: weft.Axis) -> torch.Tensor:
        mine = [weft.shard(x, 1, group=axis) for x in (q, k, v, beta, g)]
        return weft.unshard(weft.delta_rule(*mine, group=axis)[0], 1, group=axis)

    for out in virtual_world(2).run(program).results:
        torch.testing.assert_close(out, alone, rtol=1e-12, atol=1e-12)
    groups = min(heads, two_ranks.HEAD_GROUPS)
    assert len(waiting) in (groups, 2 * groups)  # by NCCL's rules programs run twice
