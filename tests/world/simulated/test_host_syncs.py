"""Where the host waits for the device, it is counted by kind and place; and pinned memory that is not ready shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from weft.world import simulated
from weft.world.simulated import Rank, SimulatedDeviceError, Stream, current_stream, no_host_sync

KINDS: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "item": ("item", lambda x: x.sum().item()),
    "bool": ("item", lambda x: bool(x.sum() > 0)),
    "float": ("item", lambda x: float(x[0])),
    "cpu": ("copy to host", lambda x: x.cpu()),
    "tolist": ("copy to host", lambda x: x.tolist()),
    "numpy": ("copy to host", lambda x: x.cpu().numpy()),
    "copy to pageable memory": ("copy to host", lambda x: torch.empty(4).copy_(x, non_blocking=True)),
    "copy from the host": ("copy to device", lambda x: x.copy_(torch.ones(4))),
    "tensor of a list": ("copy to device", lambda x: torch.tensor([1.0], device="sim")),
    "nonzero": ("nonzero", lambda x: x.nonzero()),
    "where": ("nonzero", lambda x: torch.where(x > 0)),
    "mask": ("nonzero", lambda x: x[x > 0]),
    "values under a mask": ("nonzero", lambda x: x.index_put_((x > 0,), torch.ones(4, device="sim"))),
    "masked_select": ("masked_select", lambda x: x.masked_select(x > 0)),
    "CPU index": ("copy to device", lambda x: x[torch.tensor([0, 1])]),
    "equal": ("equal", lambda x: torch.equal(x, x)),
    "unique": ("unique", lambda x: torch.unique(x)),
    "unique_consecutive": ("unique", lambda x: torch.unique_consecutive(x)),
    "bincount": ("bincount", lambda x: torch.bincount(x.long())),
    "repeat_interleave": ("repeat_interleave", lambda x: x.repeat_interleave(x.long())),
    "eigh": ("eigh", lambda x: torch.linalg.eigh(torch.diag(x))),
    "eigvalsh": ("eigh", lambda x: torch.linalg.eigvalsh(torch.diag(x))),
    "svd": ("svd", lambda x: torch.linalg.svd(torch.diag(x))),
    "cholesky": ("item", lambda x: torch.linalg.cholesky(torch.diag(x))),
    "cholesky_ex": ("linalg_cholesky_ex", lambda x: torch.linalg.cholesky_ex(torch.diag(x), check_errors=True)),
    "inv": ("item", lambda x: torch.linalg.inv(torch.diag(x))),
    "coalesce": ("coalesce", lambda x: torch.sparse_coo_tensor(x.long()[None], x, (9,)).coalesce()),
    "multinomial": ("multinomial", lambda x: torch.multinomial(x, 2)),
    "stream": ("synchronize", lambda x: current_stream().synchronize()),
    "event": ("synchronize", lambda x: current_stream().record_event().synchronize()),
    "device": ("synchronize", lambda x: torch.get_device_module("sim").synchronize()),
}


def four() -> torch.Tensor:
    return torch.arange(1.0, 5.0, pin_memory=True).to("sim", non_blocking=True)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_host_syncs_are_counted_by_kind_and_place(sim: Rank, name: str) -> None:
    kind, program = KINDS[name]
    x = four()
    assert not sim.host_syncs
    program(x)
    assert sim.host_syncs[kind] == 1 and set(sim.host_syncs) <= {kind, "item"}
    assert all(" at test_host_syncs.py:" in place for place in sim.places_of_syncs())
    with no_host_sync(), pytest.raises(SimulatedDeviceError, match=r"forbidden: .* at test_host_syncs.py:\d+ <lambda>"):
        program(x)


FREE: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1).softmax(0).sum(),
    "index": lambda x: x[x.long() - 1],
    "number under a mask": lambda x: x.__setitem__(x > 0, 5.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 5.0),
    "chosen": lambda x: torch.where(x > 0, x, 0.0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long(), output_size=10),
    "repeats of one number": lambda x: x.repeat_interleave(2),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(torch.diag(x)),
    "qr": lambda x: torch.linalg.qr(torch.diag(x)),
    "to pinned memory": lambda x: x.to("cpu", non_blocking=True),
    "from pinned memory": lambda x: x.copy_(torch.ones(4, pin_memory=True), non_blocking=True),
    "between streams": lambda x: current_stream().wait_stream(Stream()),
    "query": lambda x: current_stream().query(),
    "factories": lambda x: [
        torch.zeros(3, device="sim"),
        torch.arange(4, device="sim"),
        torch.full((), 2, device="sim"),
    ],
    "adamw": lambda x: torch.optim.AdamW([torch.nn.Parameter(x)], foreach=True).step(),
    "backward": lambda x: (x.detach().requires_grad_() ** 2).sum().backward(),
}


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_wait_is_not_counted(sim: Rank, name: str) -> None:
    x = four()
    with no_host_sync():
        FREE[name](x)
    assert not sim.host_syncs


def test_regions_end_and_nest(sim: Rank) -> None:
    x = four()
    with no_host_sync():
        with no_host_sync():
            pass
        with pytest.raises(SimulatedDeviceError):
            x.sum().item()
    assert x.sum().item() == 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool])
def test_a_copy_to_pinned_memory_arrives_when_the_host_has_waited(sim: Rank, dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1], dtype=dtype).to("sim")
    for wait in ("stream", "event", "query", "item"):
        copy = x.to("cpu", non_blocking=True)
        done = current_stream().record_event()
        assert copy.is_pinned() and not torch.equal(copy, torch.tensor([0, 1, 1], dtype=dtype))
        assert copy.isnan().all() if dtype.is_floating_point else copy.tolist() != [0, 1, 1]
        if wait == "stream":
            current_stream().synchronize()
        elif wait == "event":
            done.synchronize()
        elif wait == "query":
            assert not done.query() and done.query()
        else:
            x[0].item()
        assert copy.tolist() == [0, 1, 1]


def test_waiting_for_another_stream_or_an_earlier_event_is_not_enough(sim: Rank) -> None:
    x, target = four(), torch.empty(4, pin_memory=True)
    before = current_stream().record_event()
    target.copy_(x, non_blocking=True)
    before.synchronize()
    Stream().synchronize()
    assert target.isnan().all()
    after = Stream()
    after.wait_stream(current_stream())
    after.synchronize()
    assert target.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_copy_takes_what_the_device_had_then(sim: Rank) -> None:
    x = four()
    copy = x.to("cpu", non_blocking=True)
    x.zero_()
    current_stream().synchronize()
    assert copy.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_the_host_overwrites_a_source_too_early(sim: Rank) -> None:
    source = torch.ones(4, pin_memory=True)
    x = source.to("sim", non_blocking=True)
    current_stream().synchronize()
    source.fill_(2)  # over: right
    x.copy_(source, non_blocking=True)
    source.fill_(3)
    with pytest.raises(SimulatedDeviceError, match=r"over the source of the non-blocking copy at test_host"):
        current_stream().synchronize()
    x.copy_(source, non_blocking=True)
    source.fill_(4)
    with pytest.raises(SimulatedDeviceError, match="over the source"):
        x.copy_(source, non_blocking=True)  # the next batch, with nothing waited for


def test_the_host_writes_into_a_target_too_early(sim: Rank) -> None:
    target = torch.empty(4, pin_memory=True)
    target.copy_(four(), non_blocking=True)
    target[1] = 7
    with pytest.raises(SimulatedDeviceError, match="wrote over the target"):
        current_stream().synchronize()


EARLY: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "reads": lambda target, source: target + 1,
    "reads .*_local_scalar_dense": lambda target, source: target[1].item(),
    "reads .*copy_": lambda target, source: torch.empty(4).copy_(target),
    "writes .*fill_": lambda target, source: target[2:].fill_(0),
    "writes .*add": lambda target, source: torch.add(torch.ones(4), 1, out=source),
}


@pytest.mark.parametrize("words", EARLY)
def test_the_line_that_uses_pinned_memory_too_early_is_found(sim: Rank, words: str) -> None:
    target, source = torch.empty(4, pin_memory=True), torch.ones(4, pin_memory=True)
    with simulated.WatchHost():
        target.copy_(source.to("sim", non_blocking=True), non_blocking=True)
        target.view(2, 2)[1:].detach()  # looks at sizes only
        source + 1
        with pytest.raises(SimulatedDeviceError, match=rf"the host {words}.* at test_host_syncs.py:\d+ <lambda>"):
            EARLY[words](target, source)
    with simulated.collect_reports():
        current_stream().synchronize()
    with simulated.WatchHost():
        EARLY[words](target, source)


def test_pinned_memory_between_streams(sim: Rank) -> None:
    """Copies in the order of streams see one another, though the host sees none of them."""
    x, pinned, side = four(), torch.empty(4, pin_memory=True), Stream()
    pinned.copy_(x, non_blocking=True)
    back = pinned.to("sim", non_blocking=True)
    with no_host_sync():
        pinned.copy_(x * 2, non_blocking=True)
    assert pinned.isnan().all()
    with side, pytest.raises(SimulatedDeviceError, match="race: a copy on stream"):
        pinned.to("sim", non_blocking=True)
    assert back.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_pinned_memory_has_several_makers(sim: Rank) -> None:
    made = [
        torch.zeros(3).pin_memory(),
        torch.zeros(3, pin_memory=True),
        torch.empty_like(torch.zeros(3), pin_memory=True),
    ]
    assert all(one.is_pinned() and one[1:].is_pinned() for one in made)
    assert not torch.zeros(3).is_pinned() and not torch.zeros(3, pin_memory=False).is_pinned()
    assert torch.ones(2, pin_memory=True, requires_grad=True).requires_grad
    assert simulated.current_rank() is sim


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_factories_are_what_they_were_for_compilers(sim: Rank) -> None:
    def plus(x: torch.Tensor) -> torch.Tensor:
        return x + torch.zeros(3, dtype=x.dtype) + torch.full((3,), 2.0) + torch.empty_like(x).fill_(1)

    x = torch.ones(3)
    assert torch.jit.script(plus)(x).tolist() == [4.0] * 3
    assert torch.compile(plus, backend="eager", fullgraph=True)(x).tolist() == [4.0] * 3
    with torch.device("meta"):
        assert torch.zeros(3).is_meta
