"""Wrong arguments are explained on every rank; and the small parts: strides, blocks, the choice of a method."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from ranks import errors_of
from test_attention_reference import distance

import weft
from weft.ops.attention import attention, head_strides, tiles
from weft.ops.attention.blockwise import merge_into
from weft.ops.attention.distributed import choose_method
from weft.ops.attention.gather import choose_strides
from weft.ops.attention.kernels import attend_block, attend_block_backward
from weft.ops.attention.plan import UNLIMITED, Block, plan_attention
from weft.ops.sequence.layout import lay_out

Q = torch.randn(1, 6, 6, 4)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"q": torch.ones(6, 2, 4)}, ValueError, r"q must be \[B, S, heads, dim\], got \[6, 2, 4\]"),
        ({"q": None}, TypeError, "q must be a tensor of fp32, fp64, bf16 or fp16, got NoneType"),
        ({"v": Q.long()}, TypeError, "v must be a tensor of fp32, fp64, bf16 or fp16, got torch.int64"),
        ({"k": Q.double()}, ValueError, "q, k and v must have one dtype"),
        ({"k": torch.ones(1, 5, 6, 4)}, ValueError, "must have the batch and length of q"),
        ({"v": torch.ones(1, 6, 3, 4)}, ValueError, "must have the same heads"),
        ({"k": torch.ones(1, 6, 6, 3)}, ValueError, "k the head size of q"),
        ({"v": torch.ones(1, 6, 6, 0)}, ValueError, "only S may be zero"),
        ({"q": torch.ones(1, 6, 4, 4)}, ValueError, "4 heads are not a multiple of 6 key/value heads"),
        ({"q": torch.ones(1, 6, 0, 4)}, ValueError, "only S may be zero"),
        (
            {"window": (1, 2, 3)},
            ValueError,
            r"window must be two integers \(left, right\), -1 for no limit, got \(1, 2, 3\)",
        ),
        ({"window": (-2, 0)}, ValueError, "window must be"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, ValueError, r"cu_seqlens end at 5, but the ranks hold \[6\]"),
        ({"cu_seqlens": torch.tensor([1, 6])}, ValueError, "integers that rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, ValueError, "integers that rise from 0"),
        ({"layout": "stripes"}, ValueError, "layout 'stripes' is not one of"),
        ({"method": "bush"}, ValueError, "method 'bush' is not one of auto, gather, ring, ulysses"),
        (
            {"strides": (4, 4)},
            ValueError,
            r"6 key/value heads cannot be split into strides \(4, 4\) \(rank 0\); strides",
        ),
        ({"strides": (6, 0)}, ValueError, "strides must be a tuple of positive integers"),
        ({"backward_strides": (1, 2)}, ValueError, r"into backward_strides \(1, 2\) .* must sum to 6"),
        ({"strides": (6,), "method": "ring"}, ValueError, "strides are of method 'gather'"),
        ({"backward_strides": (6,), "backward": "ring"}, ValueError, "backward_strides are of method 'gather'"),
        ({"backward": "gather"}, ValueError, "backward 'gather' does not go with method 'auto'"),
        ({"backward": "ring", "method": "ulysses"}, ValueError, "backward 'ring' does not go with method 'ulysses'"),
        (
            {"sinks": torch.ones(3)},
            ValueError,
            r"sinks must be \[heads\], one score for each head of q, got \[3\] with",
        ),
        (
            {"sinks": torch.ones(6).half()},
            TypeError,
            "sinks must be a tensor of fp32 or the dtype of q, got torch.float16",
        ),
        ({"sinks": torch.ones(6, device="meta")}, ValueError, "sinks is on meta, q on cpu"),
        ({"softcap": 0.0}, ValueError, r"softcap must be positive, got 0.0 \(rank 0\); leave it out for no cap"),
        ({"softcap": float("nan")}, ValueError, "softcap must be a finite number, got nan"),
        ({"grad_dtype": torch.int8}, TypeError, "grad_dtype must be fp32, fp64, bf16 or fp16, got torch.int8"),
    ],
)
def test_wrong_arguments_are_told(changes, kind, words) -> None:
    with pytest.raises(kind, match=words):
        attention(**{"q": Q, "k": Q, "v": Q, "causal": False, **changes})


@pytest.mark.usefixtures("every_network")
def test_causal_must_be_said() -> None:
    q = Q.detach()
    caught = errors_of(lambda axis: attention(q, q, q, **({} if axis.rank == 0 else {"causal": True}), group=axis))
    assert caught == [
        "attention: say causal=True (a token sees itself and those before it) or causal=False (it sees all) (rank 0)"
    ] * 3  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"causal": "no"}, "causal must be True or False, got 'no'"),
        ({"causal": 1}, "causal must be True or False, got 1"),
        ({"return_lse": 3}, "return_lse must be True or False, got 3"),
        ({"scale": "a"}, r"scale must be a number, got 'a' \(str\)"),
        ({"scale": True}, r"scale must be a number, got True \(bool\)"),
        ({"sequence": 4}, r"sequence must be what weft\.sequence\(\.\.\.\) returns, got int"),
        ({"cu_seqlens": "a"}, "cu_seqlens must be integers, got 'a'"),
        ({"cu_seqlens": [0, True]}, None),
    ],
)
def test_wrong_kinds_are_told_by_name(changes, words) -> None:
    with pytest.raises(TypeError if words else ValueError, match=words):
        attention(**{"q": Q, "k": Q, "v": Q, "causal": False, **changes})


def test_packed_sequences_need_a_batch_of_one() -> None:
    q = torch.randn(2, 6, 2, 4)
    with pytest.raises(ValueError, match="need a batch of 1, got 2"):
        attention(q, q, q, causal=True, cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"strides": (4, 4)}, "cannot be split into strides (4, 4) (rank 1); strides must sum to 6"),
        ({"causal": True}, "rank 1 called attention(causal=True)"),
        ({"window": (3, 3)}, "rank 1 called attention(window=(3, 3))"),
        ({"method": "ring"}, "rank 1 called attention(method=ring)"),
        ({"strides": (3, 3)}, "rank 1 called attention(strides=(3, 3))"),
        ({"grad_dtype": torch.bfloat16}, "rank 1 called attention(grad_dtype=bfloat16)"),
        ({"q": Q.clone().requires_grad_()}, "rank 1 called attention(gradients=(True, False, False))"),
        ({"k": Q[:, :, :3], "v": Q[:, :, :3]}, "rank 1 called attention(kv_heads=3)"),
        ({"softcap": 2}, "rank 1 called attention(softcap=2.0)"),
        ({"v": Q[..., :3]}, "rank 1 called attention(value_size=3)"),
        ({"sinks": torch.ones(6)}, "rank 1 called attention(gradients=(False, False, False, False), sinks=True)"),
    ],
)
def test_a_rank_that_differs_raises_everywhere(odd, words) -> None:
    def program(axis: weft.Axis) -> None:
        plain = Q.detach()
        attention(
            **{
                "q": plain,
                "k": plain,
                "v": plain,
                "causal": False,
                "method": "gather",
                **(odd if axis.rank == 1 else {}),
            },
            group=axis,
        )

    caught = errors_of(program)
    assert len(caught) == 3 and len(set(caught)) == 1 and words in caught[0], caught


@pytest.mark.usefixtures("every_network")
def test_a_total_that_does_not_fit_raises_everywhere() -> None:
    q = Q.detach()
    caught = errors_of(lambda axis: attention(q, q, q, causal=True, cu_seqlens=torch.tensor([0, 17]), group=axis))
    assert len(caught) == 3 and all("end at 17, but the ranks hold [6, 6, 6], 18 tokens" in words for words in caught)


def test_head_strides() -> None:
    assert head_strides(8, 2) == (2, 2, 2, 2)
    assert head_strides(8, 4, first=1) == (1, 3, 4)
    assert head_strides(12, 4, first=1, last=2) == (1, 3, 4, 2, 2)
    for wrong, words in [
        ((8, 3), "8 key/value heads are not a multiple of a stride of 3"),
        ((8, 4, 4), "first must be between 1 and stride - 1 = 3, got 4"),
        ((8, 4, None, 0), "last must be between 1 and stride - 1 = 3, got 0"),
        ((4, 4, 1, 1), "4 key/value heads are too few to split a first and a last stride of 4; at least 8"),
    ]:
        with pytest.raises(ValueError, match=words):
            head_strides(*wrong)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
def test_chosen_strides_are_small_at_both_ends(size: int) -> None:
    for kv_heads in range(1, 65):
        strides = choose_strides(kv_heads, size)
        first = max(1, kv_heads // size)
        assert sum(strides) == kv_heads and max(strides) <= max(first, kv_heads // 4)
        assert max(strides[0], strides[-1]) <= first
        assert all(b <= 2 * a for a, b in pairwise(strides))


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads", "layout", "causal", "window", "method"),
    [
        (1, 8, 8, "contiguous", True, (-1, -1), "gather"),
        (4, 8, 8, "contiguous", True, (-1, -1), "ulysses"),  # balance
        (4, 6, 3, "contiguous", True, (-1, -1), "ulysses"),  # 2 heads on one rank, but contiguous is further out of it
        (4, 6, 6, "zigzag", True, (-1, -1), "gather"),  # 2 heads on one rank
        (8, 15, 15, "zigzag", True, (-1, -1), "ulysses"),  # bytes
        (16, 4, 2, "contiguous", True, (-1, -1), "gather"),  # 12 ranks without a head
        (8, 8, 8, "zigzag", True, (-1, -1), "ulysses"),  # bytes
        (2, 32, 4, "zigzag", True, (-1, -1), "gather"),  # bytes: few key heads
        (2, 32, 4, "contiguous", True, (-1, -1), "ulysses"),  # more bytes, but balance
        (8, 8, 8, "contiguous", True, (8, 0), "gather"),  # a window: little travels and all have the same work
    ],
)
def test_the_choice_of_a_method(size, heads, kv_heads, layout, causal, window, method) -> None:
    plan = plan_attention(lay_out((64,) * size, layout), (64,) * size, None, causal, window)
    assert choose_method(plan, heads, kv_heads, torch.bfloat16, None) == method


BLOCKS = {
    "full": Block(0, 7, "full", 0, UNLIMITED, UNLIMITED),
    "causal": Block(0, 5, "causal", 0, UNLIMITED, 0),
    "band": Block(0, 7, "band", -4, 3, 0),
    "band with fully masked rows": Block(0, 7, "band", 3, 1, 2),
}


@pytest.mark.parametrize("most", [1 << 20, 240, 60, 8, 1])  # scores of a tile
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("size", "of_lse"), [(8, False), (3, False), (8, True), (3, True)])  # size: of values
def test_blocks_by_tiles_and_by_the_cpu_operator(
    name: str, most: int, size: int, of_lse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of devices and of capped scores, and the CPU operator behind its guard, say the same."""
    block = BLOCKS[name]
    monkeypatch.setattr(tiles, "SCORES_ON_CPU", most)
    q, k = (torch.randn(2, heads, tokens, 8, dtype=torch.float64) for heads, tokens in ((4, 5), (2, block.length)))
    v = torch.randn(2, 2, block.length, size, dtype=torch.float64)
    grad, out = (torch.randn(2, 4, 5, size, dtype=torch.float64) for _ in range(2))
    grad_lse = torch.randn(2, 4, 5, dtype=torch.float64) if of_lse else None
    both = [attend_block(q, k, v, block, 0.3), tiles.attend(q, k, v, block, 0.3, 0.0)]
    assert ("fully masked" in name) == bool(both[0][1].isinf().any())
    assert torch.equal(both[0][1].isinf(), both[1][1].isinf())
    for got, wanted in zip(*both, strict=True):
        assert distance(got.nan_to_num(neginf=0.0), wanted.nan_to_num(neginf=0.0)) < 1e-12
    lse = both[0][1].clamp_min(-1.0) + 0.5  # over all keys it is larger, and never -inf
    grads = (
        attend_block_backward(grad, grad_lse, q, k, v, out, lse, block, 0.3),
        tiles.attend_backward(grad, grad_lse, q, k, v, out, lse, block, 0.3, 0.0),
    )
    for got, wanted in zip(*grads, strict=True):
        assert distance(got, wanted) < 1e-12


def test_tiles_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many heads, queries and keys, also backward: a query of one key/value head is the least at once."""
    made: list[int] = []
    original = tiles._scores

    def scores(*args):
        found = original(*args)
        made.append(found[0].numel())
        return found

    monkeypatch.setattr(tiles, "_scores", scores)
    monkeypatch.setattr(tiles, "SCORES_ON_CPU", 5000)
    q, k, v = (torch.randn(2, heads, 300, 4) for heads in (6, 3, 3))
    for block in (Block(0, 300, "causal", 0, UNLIMITED, 0), Block(0, 300, "band", 0, 20, 30)):
        out, lse = tiles.attend(q, k, v, block, 0.3, 2.0)
        tiles.attend_backward(torch.ones_like(q), None, q, k, v, out, lse, block, 0.3, 2.0)
    assert max(made) <= 5000 and len(made) < 4 * 300


def test_merging_rows_that_see_nothing() -> None:
    out, lse = torch.zeros(1, 3, 1, 2), torch.full((1, 3, 1), -torch.inf)
    seen = torch.tensor([0.5, -torch.inf, 2.0]).view(1, 3, 1)
    merge_into(out, lse, torch.ones(1, 3, 1, 2), seen)
    assert torch.equal(lse, seen)
    assert out[0, :, 0, 0].tolist() == [1.0, 0.0, 1.0]
    merge_into(out, lse, torch.full((1, 3, 1, 2), 3.0), torch.tensor([0.5, 1.0, -torch.inf]).view(1, 3, 1))
    assert torch.allclose(out[0, :, 0, 0], torch.tensor([2.0, 3.0, 1.0]))
