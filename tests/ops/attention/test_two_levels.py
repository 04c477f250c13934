"""Ulysses among inner ranks, gather or ring among outer ones: the numbers, what travels, and what is refused."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import test_attention_masks as masks
import torch
from ranks import errors_of
from test_attention import NAMES, bounds_of, faults, lengths_of
from test_attention import run as attend
from test_attention_reference import Case, distance, problem, slice_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from worlds import every, virtual_world

import weft
from weft.ops.attention import attention
from weft.ops.attention.distributed import TWO_LEVELS
from weft.ops.attention.heads import deal_heads
from weft.ops.sequence.layout import ANY_LENGTHS, LAYOUTS
from weft.ops.sequence.runs import TokenRun
from weft.world.launch import ProcessWorld

MESHES = [(2, 2), (2, 3), (3, 2), (4, 2)]
HEADS = [(4, 2), (3, 1), (6, 3), (1, 1)]


def levels(axis: weft.Axis, inner: int) -> tuple[weft.Axis, weft.Axis]:
    begin = axis.rank // inner * inner
    return axis, axis.subset(range(begin, begin + inner))


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", TWO_LEVELS)
@pytest.mark.parametrize("mesh", [(1, 1), (1, 3), (3, 1), *MESHES])
@pytest.mark.parametrize(("kind", "layout"), [("even", "contiguous"), ("uneven", "zigzag"), ("missing", "zigzag")])
def test_every_combination(kind: str, layout: str, mesh: tuple[int, int], method: tuple[str, str]) -> None:
    size = mesh[0] * mesh[1]
    lengths = lengths_of(kind, size)
    total = sum(lengths)
    cases = [
        Case(total, *heads, 2 if size < 4 else 1, causal, window, bounds_of(total) if packed else None)
        for heads, causal, window, packed in itertools.product(HEADS, (False, True), (None, (2, 3)), (False, True))
    ]

    def program(axis: weft.Axis) -> list[str]:
        return [
            fault
            for case in every(cases if "WEFT_SOAK" in os.environ else cases[::5])
            for fault in faults(axis, case, lengths, layout, method=method, group=levels(axis, mesh[1]))
        ]

    found = [fault for rank in virtual_world(size).run(program).results for fault in rank]
    assert not found, "\n".join(found[:5])


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", TWO_LEVELS)
@pytest.mark.parametrize("mesh", [(2, 2), (3, 2)])
def test_every_mask(mesh: tuple[int, int], method: tuple[str, str]) -> None:
    """Each in one of the layouts and splits here, in all of them with `make soak`."""
    size, splits = mesh[0] * mesh[1], list(itertools.product(("uneven", "missing"), LAYOUTS))
    for number, (kind, layout) in enumerate(splits):
        lengths = lengths_of(kind, size)
        chosen = list(masks.cases(sum(lengths)))
        chosen = chosen if "WEFT_SOAK" in os.environ else chosen[number :: len(splits)]

        def program(axis: weft.Axis) -> list[str]:
            found = []
            for name, window in every(chosen):  # noqa: B023
                known, given, wanted = masks.problem(name, sum(lengths), window, 4, 2)  # noqa: B023
                options = {"method": method, "window": window, "group": levels(axis, mesh[1])}
                found += masks.faults(axis, known.mask, lengths, layout, given, wanted, **options)  # noqa: B023
            return found

        found = [fault for rank in virtual_world(size).run(program).results for fault in rank]
        assert not found, "\n".join(found[:5])


def chunks(lengths: tuple[int, ...], layout: str) -> tuple[TokenRun, ...]:
    """Runs of at most two tokens, dealt in turn; a rank's later ones lie before its earlier ones."""
    left, runs, rank, offset = list(lengths), [], 0, 0
    while any(left):
        length = min(2, left[rank])
        left[rank] -= length
        runs.append(TokenRun(rank, left[rank], length, offset))
        rank, offset = (rank + 1) % len(lengths), offset + length
    return tuple(run for run in runs if run.length)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", ["ulysses", *TWO_LEVELS])
def test_many_runs_on_a_rank_in_any_order(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.ops.sequence.layout.lay_out", chunks)
    lengths = (5, 8, 1, 0, 7, 4)
    case = Case(sum(lengths), 6, 3, 1, True, None, (0, 11, 25))

    def program(axis: weft.Axis) -> float:
        runs = sorted((run for run in chunks(lengths, "") if run.rank == axis.rank), key=lambda run: run.start)
        places = torch.tensor([run.offset + i for run in runs for i in range(run.length)], dtype=torch.int64)
        q, k, v, grad = (x[:, places] for x in problem(case)[0])
        leaves = [x.requires_grad_() for x in (q, k, v)]
        group = axis if method == "ulysses" else levels(axis, 3)
        out, lse = attention(*leaves, **case.options, method=method, return_lse=True, group=group)
        found = (out, lse, *torch.autograd.grad(out, leaves, grad))
        return max(distance(x, y[:, places]) for x, y in zip(found, problem(case)[1], strict=True))

    assert max(virtual_world(6).run(program).results) < 1e-10


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("method", TWO_LEVELS)
def test_a_sequence_over_all_ranks(method: tuple[str, str]) -> None:
    case, lengths = Case(19, 6, 3, 1, True, None, (0, 7, 8, 19)), (3, 7, 0, 9)

    def program(axis: weft.Axis) -> list[str]:
        where = weft.sequence(lengths[axis.rank], layout="zigzag", cu_seqlens=torch.tensor(case.bounds), group=axis)
        return faults(axis, case, lengths, "zigzag", method=method, sequence=where, group=levels(axis, 2))

    assert not any(virtual_world(4).run(program).results)


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_one_level(dtype: torch.dtype, every_network: str) -> None:
    case, lengths = Case(128, 4, 2, 1, causal=True, dim=16), (32,) * 4

    def program(axis: weft.Axis) -> list[float]:
        found = []
        for method, group in (("gather", axis), (("ulysses", "gather"), levels(axis, 2))):
            got = attend(axis, case, lengths, "zigzag", dtype, method=method, group=group)
            assert got["lse"].dtype == torch.float32
            for name, wanted in zip(NAMES, problem(case)[1], strict=True):
                apart = got[name].double() - slice_of(wanted, lengths, "zigzag", axis.rank)
                found.append(apart.square().mean().sqrt().item())
        return found

    for found in virtual_world(4).run(program).results:
        assert all(two <= 1.2 * one for one, two in zip(found[:5], found[5:], strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [(4, 2), (8, 8), (6, 1)])
def test_each_level_moves_what_its_method_moves(layout: str, heads: tuple[int, int]) -> None:
    """Among inner ranks as Ulysses; between two outer ones all keys and values of the group, but only of its heads."""
    tokens, dim, outer, inner = 6, 8, 3, 2
    deal, shared = deal_heads(*heads, inner), heads[0] // heads[1]

    def program(axis: weft.Axis) -> dict[int, int]:
        q, k, v = (torch.randn(1, tokens, n, dim) for n in (*heads, heads[1]))
        where = weft.sequence(tokens, layout=layout, group=axis)
        with weft.record() as ledger:
            attention(
                q, k, v, causal=False, method=("ulysses", "gather"), sequence=where, group=levels(axis, inner)
            )  # fmt: skip
        found: dict[int, int] = {}
        for peer, size in (message for event in ledger.events for message in event.receives):
            found[peer] = found.get(peer, 0) + size
        return found

    for rank, got in enumerate(weft.world.VirtualWorld(outer * inner).run(program).results):
        group, member = divmod(rank, inner)
        first = sum(deal[:member])
        keys = len({head // shared for head in range(first, first + deal[member])})
        other = group * inner + 1 - member
        assert got.pop(other) == 4 * dim * tokens * (deal[member] + 2 * keys + deal[1 - member])
        assert got == {
            member + inner * far: 4 * dim * 2 * keys * inner * tokens for far in range(outer) if far != group
        }  # fmt: skip


def wrong(axis: weft.Axis, **options: Any) -> Tensor:
    q = torch.ones(1, 4, 2, 4)
    return attention(q, q, q, **{"causal": True, "method": ("ulysses", "gather"), **options})


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (lambda axis: {"group": axis}, "needs a group of two: a 2-D DeviceMesh (outer, inner), or (all ranks, inner"),
        (lambda axis: {}, "needs a group of two"),
        (lambda axis: {"group": levels(axis, 2), "method": ("gather", "ulysses")},
         "method ('gather', 'ulysses') is not ('ulysses', 'gather') or ('ulysses', 'ring'), for inner and outer ranks"),
        (lambda axis: {"group": levels(axis, 2), "method": ("ulysses",)}, "method ('ulysses',) is not"),
        (lambda axis: {"group": levels(axis, 2), "method": ("ulysses", [])}, "method ('ulysses', []) is not"),
        (lambda axis: {"group": (axis, axis.subset([axis.rank % 2, axis.rank % 2 + 2]))},
         "cannot be inner ranks of [0, 1, 2, 3]; they must be neighbours there, and as many in each group"),
        (lambda axis: {"group": (axis, axis.subset([0, 1, 2] if axis.rank < 3 else [3]))},
         "the ranks [0, 1, 2] cannot be inner ranks of [0, 1, 2, 3]"),
        (lambda axis: {"group": (axis, axis.reversed())}, "the ranks [3, 2, 1, 0] cannot be inner ranks"),
        (lambda axis: {"group": levels(axis, 2), "strides": (1, 1)}, "strides are of method 'gather'"),
        (lambda axis: {"group": levels(axis, 2), "backward": "ring"}, "'ring' does not go with method ('ulysses', 'ga"),
        (lambda axis: {"group": levels(axis.reversed(), 2), "sequence": weft.sequence(4, group=axis)},
         "group has the ranks [3, 2, 1, 0], but the sequence lies on [0, 1, 2, 3]; it must lie on all ranks of"),
        (lambda axis: {"sequence": weft.sequence(4, group=axis)}, "needs a group of two"),
        (lambda axis: {"group": levels(axis, 2), "method": ("ulysses", "gather" if axis.rank else "ring")},
         "called attention(method=('ulysses', 'ring'))"),
        (lambda axis: {"group": levels(axis, 2 if axis.rank else 1)}, "called attention(inner=1)"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_on_every_rank(options: Any, words: str) -> None:
    caught = errors_of(lambda axis: wrong(axis, **options(axis)), size=4)
    assert len(caught) == 4 and all(words in told for told in caught), caught


@pytest.mark.usefixtures("every_network")
def test_what_is_wrong_on_one_rank_is_told_on_every_rank() -> None:
    caught = errors_of(lambda axis: wrong(axis, group=axis if axis.rank == 1 else levels(axis, 2)), size=4)
    assert (
        len(caught) == 4 and len(set(caught)) == 1 and "needs a group of two" in caught[0] and "(rank 1)" in caught[0]
    )


def test_one_level_takes_no_group_of_two() -> None:
    axis = weft.Axis.of(None)
    with pytest.raises(TypeError, match="group must be a ProcessGroup, a 1-D DeviceMesh, an Axis or None, got tuple"):
        wrong(axis, method="gather", group=(axis, axis))


def test_a_world_of_one_needs_no_group() -> None:
    q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 5, 2, 8)
    assert torch.equal(
        attention(q, k, k, causal=True, method=("ulysses", "ring")), attention(q, k, k, causal=True, method="ring")
    )


def on_a_mesh(axis: weft.Axis) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    lengths, found = (3, 9, 0, 7), []
    case = Case(sum(lengths), 6, 3, 1, True, None, (0, 8, 8, 19))
    for method, layout in itertools.product(TWO_LEVELS, LAYOUTS):
        found += faults(axis, case, lengths, layout, method=method, group=mesh)
        size = {"local_length": lengths[axis.rank]} if layout in ANY_LENGTHS else {"total": sum(lengths)}
        known = weft.sequence(**size, layout=layout, cu_seqlens=case.bounds, group=mesh._flatten())
        found += faults(axis, case, lengths, layout, method=method, group=mesh, sequence=known)
    for other, words in (
        (init_device_mesh("cpu", (2, 2)), "cannot be flattened without names"),
        (mesh["inner"], "needs a group of two"),
        (init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")), "the mesh has 3 dimensions"),
    ):
        try:
            wrong(axis, group=other)
            found.append(f"taken: {other}")
        except ValueError as error:
            found += [] if words in str(error) else [str(error)]
    return found


@pytest.mark.processes
def test_meshes_of_processes(four: ProcessWorld) -> None:
    found = [fault for rank in four.run(on_a_mesh) for fault in rank]
    assert not found, "\n".join(found[:5])
