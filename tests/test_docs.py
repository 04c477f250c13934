"""docs/migrating.md: our calls are run over ranks and compared with one process, theirs where their package is here."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_recurrence import delta_reference
from published import Published
from recurrence import reference
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import virtual_world

import weft
from weft.world.launch import ProcessWorld

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
Names = dict[str, Any]


def read_blocks(heading: str) -> dict[str, list[str]]:
    """The code under each section's "### heading", by the section's first word."""
    found = {}
    for section in (ROOT / "docs" / "migrating.md").read_text().split("\n## ")[1:]:
        for part in section.split("\n### ")[1:]:
            if part.startswith(heading):
                found[section.split()[0].rstrip(":")] = BLOCK.findall(part)
    return found


OURS, THEIRS = read_blocks("weft"), read_blocks("Theirs")


def execute(block: str, **names: Any) -> Names:
    names |= {"weft": weft, "torch": torch, "nn": nn, "DistributedDataParallel": DistributedDataParallel}
    exec(compile(block, "docs/migrating.md", "exec"), names)
    return names


def test_every_block_has_a_test() -> None:
    assert {name: len(blocks) for name, blocks in OURS.items()} == {
        "LASP": 1, "flash-linear-attention": 3, "ring-flash-attention": 2, "Emerging-Optimizers": 1, "Sparse": 2,
    }  # fmt: skip
    assert OURS.keys() == THEIRS.keys()


def test_the_readme() -> None:
    """Its ten lines end in an assertion."""
    (block,) = BLOCK.findall((ROOT / "README.md").read_text())
    lines = [line for line in block.splitlines() if line]
    assert len(lines) <= 11 and lines[-1].startswith("assert ")
    execute(block)


# Sequences: what a block makes of slices is the slice of what the whole gives, and so are the gradients.

BOUNDS = torch.tensor([0, 7, 18, 24])


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(
    block: str, wanted: Callable[..., Tensor], inputs: dict[str, Tensor], dim: int, layout: str, result: str = "o",
    **others: Any,
) -> list[Names]:  # fmt: skip
    """Run ``block`` on three ranks; ``inputs`` are cut along ``dim`` in ``layout``. Returns the names of each rank."""
    whole = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    true = wanted(**whole)
    weight = draw(99, *true.shape)
    grads = torch.autograd.grad((true * weight).sum(), list(whole.values()))

    def program(axis: weft.Axis) -> Names:
        def cut(x: Tensor) -> Tensor:
            return weft.shard(x.detach(), dim, layout=layout, group=axis)

        local = {name: cut(x).requires_grad_() for name, x in inputs.items()}
        found = execute(block, **local, group=axis, rank=axis.rank, world_size=axis.size, cu_seqlens=BOUNDS, **others)
        out = found[result].reshape(cut(true).shape) if result == "out" else found[result]
        torch.testing.assert_close(out, cut(true), rtol=1e-10, atol=1e-10)
        mine = torch.autograd.grad((out * cut(weight)).sum(), list(local.values()))
        for one, other in zip(mine, grads, strict=True):
            torch.testing.assert_close(one, cut(other), rtol=1e-10, atol=1e-10)
        return found

    return virtual_world(3).run(program).results


def lasp(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """LASP's sum over the past, [b, h, n, d]: o_i = sum over j <= i of exp(-s (i - j)) (q_i k_j) v_j."""
    apart = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return ((q @ k.mT) * torch.where(apart >= 0, torch.exp(-s * apart.clamp_min(0)), 0.0)) @ v


@pytest.mark.parametrize(("result", "decays"), [("o", 1.0), ("o2", 0.0)])
def test_lasp(result: str, decays: float) -> None:
    (block,) = OURS["LASP"]
    s = torch.tensor([0.5, 0.05], dtype=torch.float64).view(2, 1, 1)
    inputs = {"q": draw(1, 2, 2, 24, 4), "k": draw(2, 2, 2, 24, 4), "v": draw(3, 2, 2, 24, 3)}
    back = f"{block}\n{result} = {result}.transpose(1, 2)"  # to their layout
    compare(back, lambda q, k, v: lasp(q, k, v, s * decays), inputs, 2, "contiguous", result, s=s)


def gated(seed: int) -> dict[str, Tensor]:
    inputs = {name: draw(seed + place, 1, 24, 2, 4) for place, name in enumerate("qkv")}
    return {**inputs, "g": -draw(9, 1, 24, 2).abs()}


def test_flash_linear_attention() -> None:
    packed, with_states, _ = OURS["flash-linear-attention"]
    lengths = BOUNDS.diff().tolist()
    compare(packed, lambda q, k, v, g: reference(q, k, v, g, 0.5, None, lengths)[0], gated(1), 1, "zigzag")
    inputs, entering = gated(5), draw(4, 1, 2, 4, 4)
    ranks = compare(
        with_states, lambda q, k, v, g: reference(q, k, v, g, 0.5, entering, [24])[0], inputs, 1, "contiguous",
        initial_state=entering,
    )  # fmt: skip
    leaving = reference(*inputs.values(), 0.5, entering, [24])[1]
    for found in ranks:
        torch.testing.assert_close(found["state"], leaving)


def test_flash_linear_attention_by_its_names() -> None:
    block = OURS["flash-linear-attention"][2]
    weight = draw(7, 8, 4)

    def wanted(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        mixed = nn.functional.conv1d(v.flatten(2).mT, weight.unsqueeze(1), padding=3, groups=8)[..., :24]
        v = nn.functional.silu(mixed).mT.unflatten(2, (2, 4))
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        start = v.new_zeros(len(BOUNDS) - 1, 2, 4, 4)
        return delta_reference(q, k, v, beta, g, 0.5, start, BOUNDS.diff().tolist())[0]

    inputs = {**gated(1), "beta": draw(8, 1, 24, 2).sigmoid()}
    compare(block, wanted, inputs, 1, "contiguous", weight=weight)


@pytest.mark.filterwarnings("ignore")
def test_what_is_said_of_flash_linear_attention() -> None:
    """Which of its operations go over ranks, how it cuts, what it refuses."""
    pytest.importorskip("fla")
    (block,) = THEIRS["flash-linear-attention"]
    execute("\n".join(line for line in block.splitlines() if line.startswith("from")))
    over_ranks = ["gated_delta_rule", "gated_delta_product", "kda", "rwkv7"]
    for name in [*over_ranks, "simple_gla", "gla", "retention", "linear_attn"]:
        op = getattr(importlib.import_module(f"fla.ops.{name}"), f"chunk_{name}")
        assert ("cp_context" in inspect.signature(op).parameters) == (name in over_ranks), name
    from fla.ops.cp.context import build_cp_context, get_cp_cu_seqlens
    from fla.ops.simple_gla import chunk_simple_gla

    inspect.signature(build_cp_context).bind(BOUNDS, group=None, layout="zigzag")
    inspect.signature(chunk_simple_gla).bind(1, 2, 3, 4, initial_state=None, output_final_state=True)
    with pytest.raises(ValueError, match="divisible"):
        get_cp_cu_seqlens(torch.tensor([0, 25]), world_size=3, rank=0, layout="zigzag")
    for rank in range(3):
        theirs = get_cp_cu_seqlens(BOUNDS, world_size=3, rank=rank, layout="zigzag").cu_seqlens

        def begins(axis: weft.Axis) -> Tensor:  # of a document, or of a part: every 4 tokens in zigzag over 3 ranks
            places = torch.arange(24)
            first = torch.isin(places, BOUNDS) | (places % 4 == 0)
            return weft.shard(first, 0, layout="zigzag", group=axis).nonzero().flatten()

        ours = virtual_world(3).run(begins).results[rank]
        assert theirs.tolist() == [*ours.tolist(), 8]


def attend(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> Tensor:
    """Plain attention of ``[B, S, H, D]`` with a mask."""
    places = torch.arange(q.shape[1])
    mask = places[:, None] >= places
    if packed:
        document = torch.searchsorted(BOUNDS, places, right=True)
        mask &= document[:, None] == document
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def test_ring_flash_attention() -> None:
    inputs = {"q": draw(1, 1, 24, 8, 4), "k": draw(2, 1, 24, 4, 4), "v": draw(3, 1, 24, 4, 4)}
    packed, ring = OURS["ring-flash-attention"]
    compare(packed, lambda q, k, v: attend(q, k, v, True), inputs, 1, "zigzag", "out")
    compare(ring, lambda q, k, v: attend(q, k, v, False), inputs, 1, "zigzag", "out")


def test_ring_flash_attention_by_one_import() -> None:
    strided, zigzag = (
        block.replace("from ring_flash_attn ", "from weft.integrations.ring_flash_attn ")
        for block in THEIRS["ring-flash-attention"]
    )
    inputs = {"q": draw(1, 24, 8, 4), "k": draw(2, 24, 4, 4), "v": draw(3, 24, 4, 4)}
    compare(strided, lambda **x: attend(*(t[None] for t in x.values()), True)[0], inputs, 0, "contiguous", "out")
    inputs = {name: x[None] for name, x in inputs.items()}
    compare(zigzag, lambda q, k, v: attend(q, k, v, False), inputs, 1, "zigzag", "out")


def test_tensor_parallel_rekls() -> None:
    (block,) = OURS["Emerging-Optimizers"]
    cut = {"column": 0, "row": 1, "whole": None}
    shapes = {"column": (6, 5), "row": (5, 8), "whole": (4, 3)}
    weights = {name: draw(1, *shape) for name, shape in shapes.items()}

    def part(axis: weft.Axis, name: str, x: Tensor) -> Tensor:
        return (x if cut[name] is None else weft.shard(x, cut[name], group=axis)).clone()

    def program(axis: weft.Axis) -> dict[str, Tensor]:
        torch.set_num_threads(1)
        parameters = {name: [nn.Parameter(part(axis, name, weight))] for name, weight in weights.items()}
        optimizer = execute(block, **parameters, group=axis)["optimizer"]
        for step in range(4):
            for name, (parameter,) in parameters.items():
                parameter.grad = part(axis, name, draw(10 + step, *shapes[name]))
            optimizer.step()
        return {
            name: one.detach() if cut[name] is None else weft.unshard(one.detach(), cut[name], group=axis)
            for name, (one,) in parameters.items()
        }

    for found in virtual_world(2).run(program).results:
        for name, weight in weights.items():
            wanted = Published(weight, 1e-3)
            for step in range(4):
                wanted.step(draw(10 + step, *shapes[name]))
            assert torch.equal(found[name], wanted.weight), name


# Tables: their block under DDP and ours, on the same processes.


def train_tables(axis: weft.Axis) -> list[Tensor]:
    """Their table and ours after six steps, then ours of six from theirs of three."""
    (theirs,), (ours, load) = THEIRS["Sparse"], OURS["Sparse"]
    batches = [draw(10 * step + axis.rank, 9).mul(3).long() % 11 for step in range(6)]
    sizes = {"rows": 11, "width": 3, "group": axis}

    def run(block: str, some: list[Tensor]) -> Names:
        torch.manual_seed(0)
        return execute(block, **sizes, batches=some)

    half, new = run(theirs, batches[:3]), run(ours, [])
    execute(load, table=new["table"], optimizer=new["optimizer"], their_table=half["table"],
            their_optimizer=half["optimizer"])  # fmt: skip
    loop = ours[ours.index("for ") :]
    execute(loop, table=new["table"], optimizer=new["optimizer"], batches=batches[3:])
    full = run(ours, batches)["table"], new["table"]
    return [run(theirs, batches)["table"].weight.detach(), *(table.full_weight().detach() for table in full)]


def test_a_run_of_ddp_goes_on(pool: ProcessWorld) -> None:
    torch.manual_seed(0)
    begin = nn.Embedding(11, 3).weight.detach()
    for theirs, ours, continued in pool.run(train_tables):
        assert (theirs - begin).abs().max() > 0.02
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)  # eps has another place
        torch.testing.assert_close(continued, theirs, rtol=0, atol=2e-5)


def test_the_tests_and_pages_named_are_there() -> None:
    words = (ROOT / "docs" / "migrating.md").read_text()
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", words)
    assert len(named) == 6
    for path, name in named:
        assert f"def {name}(" in (ROOT / path).read_text(), name
    for page in re.findall(r"\]\((\w+\.md)\)", words):
        assert (ROOT / "docs" / page).is_file(), page
    for path in re.findall(r"`((?:examples|tests)/\w+\.py)`", words):
        assert (ROOT / path).is_file(), path
