"""A slice of `test_wrong_kinds` on real processes: told to every rank, and soon."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_wrong_kinds import ODD, Outcome, alike, outcome_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from wrong_kinds import SUBJECTS, VALUES

import weft
from weft.world.launch import ProcessWorld

SOON = 5.0  # seconds
CASES = [
    ("ShardedEmbedding.forward", "ids", "list", "ids must be a tensor of int32 or int64, got list (rank 1)"),
    ("ShardedEmbedding.prefetch", "ids", "text", "ids must be a tensor of int32 or int64, got str (rank 1)"),
    ("attention", "scale", "text", "scale must be a number, got 'a' (str) (rank 1)"),
    ("attention", "q", "dtensor", "q is a DTensor; pass q.to_local(), this rank's part (rank 1)"),
    ("attention", "v", "meta", "v is on meta, q on cpu (rank 1)"),
    ("attention with a sequence", "k", "hostile tensor", "k cannot be read: RuntimeError: no operation on this tensor"),
    ("linear_attention", "chunk_size", "float", "chunk_size must be an integer, got 64.0 (float) (rank 1)"),
    ("linear_attention", "chunk_size", "digits", "chunk_size must be an integer, got '64' (str) (rank 1)"),
    ("linear_attention", "chunk_size", "true", "chunk_size must be an integer, got True (bool) (rank 1)"),
    ("linear_attention", "output_final_state", "text", "output_final_state must be True or False, got 'a' (rank 1)"),
    ("exclusive_scan", "state", "none", "state must be a floating tensor, got NoneType (rank 1)"),
    ("unshard", "dim", "hostile", "dim must be an integer, got Hostile (rank 1)"),
    ("sequence", "local_length", "huge", "local_length must fit in 64 bits"),
    ("RowExchange", "ids", "none", "ids must be a tensor of int32 or int64, or a list of such, got None (rank 1)"),
    ("RowExchange.pull", "shards", "none", "rows.pull: the arguments cannot be read"),
    ("BigramHashEmbedding.forward", "tokens", "array", "tokens must be a tensor of integers, got ndarray (rank 1)"),
    ("ShardedAdamW", "params", "none", "ShardedAdamW: the parameters cannot be taken"),
    ("ShardedAdamW.step", "betas", "text", "betas must be two numbers, got 'a' (rank 1)"),
    ("ShardedAdamW", "clip", "half", "the ranks disagree"),
    ("REKLS", "params", "none", "params must be an iterable of tensors or groups, got None (rank 1)"),
    ("REKLS.step", "lr", "text", "lr must be a number, got 'a' (str) (rank 1)"),
    ("OverlappedStep.step", "eps", "hostile", "eps must be a number, got Hostile (rank 1)"),
]


def try_all(axis: weft.Axis, later: bool) -> list[tuple[Outcome, float, bool]]:
    """For each case: what this rank raises, after how long, and whether a right call works then, where it should."""
    found = []
    for name, argument, value, _ in CASES:
        group = dist.new_group(range(3), timeout=timedelta(seconds=40))
        if axis.rank >= 3:
            continue
        mine = weft.Axis.of(group)
        subject = SUBJECTS[name]
        call = subject.start(mine)
        if later:
            call()
        odd: Any = a_real_dtensor(group) if value == "dtensor" else VALUES[value]()
        start = time.monotonic()
        outcome = outcome_of(call, {argument: odd} if axis.rank == ODD else {})
        took = time.monotonic() - start
        closed = later and (not subject.gathers or name == "REKLS")  # found, and the group closed
        found.append((outcome, took, closed or alike(call(), call()) or name.endswith((".step", "ShardedAdamW"))))
    return found


def a_real_dtensor(group: dist.ProcessGroup) -> torch.Tensor:
    mesh = DeviceMesh.from_group(group, "cpu")
    return DTensor.from_local(torch.ones(1, 4, 2, 2), mesh, [Replicate()], run_check=False)


@pytest.mark.parametrize("later", [False, True], ids=["at the first call", "later"])
def test_wrong_kinds_on_processes(pool: ProcessWorld, later: bool) -> None:
    for case, ranks in zip(CASES, zip(*pool.run(try_all, later)[:3], strict=True), strict=True):
        outcomes = [outcome for outcome, _, _ in ranks]
        assert outcomes[0] == outcomes[1] == outcomes[2] and case[3] in outcomes[0][1], (case, outcomes)
        assert all(works for _, _, works in ranks), case
        assert max(took for _, took, _ in ranks) < SOON, (case, ranks)


def use_a_wrong_group(axis: weft.Axis) -> list[str]:
    words = []
    apart = dist.new_group([0, 1])
    mesh = DeviceMesh("cpu", torch.arange(6).view(2, 3)) if axis.rank < 6 else "no mesh"
    for group in ("sequence", mesh, apart if axis.rank > 1 else "no group"):
        words.append(outcome_of(lambda **_: weft.exclusive_scan(torch.ones(2, 2), group=group), {})[1])  # noqa: B023
    return words


def test_a_wrong_group_is_told_where_it_is(pool: ProcessWorld) -> None:
    text, mesh, other = pool.run(use_a_wrong_group)[2]
    assert (
        "group must be a ProcessGroup, a 1-D DeviceMesh, an Axis or None, got str (raised on this rank alone)" in text
    )
    assert "the mesh has 2 dimensions" in mesh and "(raised on this rank alone)" in mesh
    assert "this rank is not a member of the group" in other and "(raised on this rank alone)" in other


def step_with_wrong_betas(axis: weft.Axis) -> tuple[Outcome, Outcome]:
    """`RowAdam.step` sends nothing: the others hear of a fault when they next wait for that rank."""
    group = dist.new_group(range(3), timeout=timedelta(seconds=40))
    if axis.rank >= 3:
        return ("", ""), ("", "")
    table = weft.ShardedEmbedding(12, 4, group=group)
    optimizer = weft.optim.RowAdam(table.parameters())
    table(torch.arange(6)).sum().backward()
    if axis.rank == ODD:
        optimizer.param_groups[0]["betas"] = (0.9, "a")
    at_the_step = outcome_of(lambda **_: optimizer.step(), {})
    if axis.rank == ODD:
        return at_the_step, at_the_step
    return at_the_step, outcome_of(lambda **_: table(torch.arange(6)), {})


def test_a_fault_where_nothing_is_sent_is_heard_of_later(pool: ProcessWorld) -> None:
    results = pool.run(step_with_wrong_betas)[:3]
    assert [here for here, _ in results] == [("", ""), results[ODD][0], ("", "")]
    assert {later for _, later in results} == {("TypeError", "RowAdam: betas must be a number, got 'a' (str) (rank 1)")}


def pass_other_numbers_of_sets(axis: weft.Axis) -> Outcome:
    """After a first call: one rank has two sets of ids, so it gathers more integers than the others expect."""
    group = dist.new_group(range(3), timeout=timedelta(seconds=40))
    if axis.rank >= 3:
        return "", ""
    ids = torch.arange(3)
    weft.RowExchange(ids, 6, group=group).start_ids()
    sets = [ids, ids] if axis.rank == ODD else [ids]
    return outcome_of(lambda **_: weft.RowExchange(sets, 6, group=group).wait_ids(), {})


def test_ranks_that_gather_other_numbers_of_integers_are_named(pool: ProcessWorld) -> None:
    results = pool.run(pass_other_numbers_of_sets)[:3]
    assert len(set(results)) == 1 and results[0][0] == "DisagreementError", results
    assert "rank 1 called rows(num_embeddings=(6, 6))" in results[0][1]
