"""The same operations on real Gloo processes: a pool of seven, of which each test takes a subgroup."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from serial import KINDS, as_arguments, random_maps, relative_error, serial_scan
from torch.distributed.device_mesh import init_device_mesh

import weft
from weft.ops.scan import METHODS
from weft.world.launch import ProcessWorld

SHAPE = (2, 3, 4)


def scan_on(group: object, kind: str, method: str, reverse: bool, seed: int) -> float:
    """The largest error of this rank's result and gradients against serial autograd."""
    axis = weft.Axis.of(group)
    states, decays = random_maps(kind, axis.size, SHAPE, "slow", seed)
    make = torch.Generator().manual_seed(seed)
    weights = [torch.randn(SHAPE, generator=make, dtype=torch.float64) for _ in states]
    wanted = serial_scan(kind, states, decays, reverse)
    leaves = [states[axis.rank]] + ([decays[axis.rank]] if kind != "none" else [])
    loss = sum((w * out).sum() for w, out in zip(weights, wanted, strict=True))
    true = torch.autograd.grad(loss, leaves, allow_unused=True)
    out = weft.exclusive_scan(
        leaves[0], **as_arguments(kind, decays[axis.rank]), group=group, method=method, reverse=reverse
    )
    got = torch.autograd.grad((weights[axis.rank] * out).sum(), leaves)
    errors = [relative_error(out.detach(), wanted[axis.rank].detach())]
    for grad, reference in zip(got, true, strict=True):
        errors.append(relative_error(grad, torch.zeros_like(grad) if reference is None else reference))
    return max(errors)


def all_methods(axis: weft.Axis, size: int) -> float:
    group = dist.new_group(range(size))
    if axis.rank >= size:
        return 0.0
    return max(
        scan_on(group, kind, method, reverse, seed=size)
        for kind in KINDS
        for method in METHODS
        for reverse in (False, True)
    )


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_every_method_and_its_gradients(pool: ProcessWorld, size: int) -> None:
    assert max(pool.run(all_methods, size)) <= 1e-12


def on_a_device_mesh(axis: weft.Axis) -> tuple[float, str]:
    worst, words = 0.0, ""
    for shape, names in (((2, 3), ("data", "sequence")), ((3, 2), ("sequence", "data"))):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for method in METHODS:
            worst = max(worst, scan_on(mesh["sequence"], "vector", method, True, seed=6))
            worst = max(worst, scan_on(mesh["data"], "dense", method, False, seed=7))
        try:
            weft.exclusive_scan(torch.ones(2, 2), group=mesh)
        except ValueError as error:
            words = str(error)
    return worst, words


@pytest.mark.processes
def test_device_meshes_in_both_orders() -> None:
    with ProcessWorld(6, timeout=timedelta(seconds=60)) as world:
        results = world.run(on_a_device_mesh)
    assert max(worst for worst, _ in results) <= 1e-12
    assert all("the mesh has 2 dimensions" in words for _, words in results)


def repeat(axis: weft.Axis) -> bool:
    group = dist.new_group(range(4))
    if axis.rank >= 4:
        return True
    states, decays = random_maps("vector", 4, (4, 16, 16), "slow", seed=2, dtype=torch.float32)
    mine = (states[axis.rank].detach(), decays[axis.rank].detach())
    same = True
    for method in METHODS:
        outs = [weft.exclusive_scan(mine[0], log_decay=mine[1], group=group, method=method) for _ in range(5)]
        same = same and all(torch.equal(outs[0], out) for out in outs)
    return same


def test_same_inputs_same_bits(pool: ProcessWorld) -> None:
    assert all(pool.run(repeat))


def count_bytes(axis: weft.Axis, method: str) -> weft.comm.Ledger:
    group = dist.new_group(range(5))
    with weft.record() as ledger:
        if axis.rank < 5:
            weft.exclusive_scan(torch.ones(2, 4, 4), log_decay=torch.zeros(2), group=group, method=method)
    return ledger


@pytest.mark.parametrize("method", METHODS)
def test_the_ledger_agrees_with_the_virtual_world(pool: ProcessWorld, method: str) -> None:
    real = pool.run(count_bytes, method)[:5]
    virtual = weft.world.VirtualWorld(5).run(
        lambda axis: weft.exclusive_scan(torch.ones(2, 4, 4), log_decay=torch.zeros(2), group=axis, method=method)
    )
    assert [one.bytes_sent for one in real] == [one.bytes_sent for one in virtual.ledgers]
    assert [one.bytes_received for one in real] == [one.bytes_received for one in virtual.ledgers]
    assert weft.comm.Ledger.merge(real).rounds == virtual.timeline.rounds


def many(axis: weft.Axis) -> float:
    return max(scan_on(None, "scalar", method, False, seed=1) for method in METHODS)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_thirty_two_ranks_do_not_hang() -> None:
    with ProcessWorld(32, timeout=timedelta(seconds=120)) as world:
        assert max(world.run(many)) <= 1e-12
