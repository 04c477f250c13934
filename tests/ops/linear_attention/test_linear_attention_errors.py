from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from ranks import errors_of

import weft
from weft.ops.scan.arguments import choose_backend

Q = torch.randn(1, 6, 2, 4)
V = torch.randn(1, 6, 4, 3)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"q": torch.ones(6, 2, 4)}, ValueError, r"q must be \[B, T, heads, dim\], got \[6, 2, 4\]"),
        ({"k": torch.ones(1, 6, 2, 5)}, ValueError, r"k \[1, 6, 2, 5\] must have the shape of q \[1, 6, 2, 4\]"),
        ({"v": torch.ones(1, 5, 4, 3)}, ValueError, "must have the batch and length of q"),
        ({"v": torch.ones(1, 6, 3, 3)}, ValueError, "3 value heads are not a multiple of 2 heads"),
        ({"v": V.double()}, ValueError, "q, k and v must have one dtype"),
        ({"v": V.long()}, TypeError, "v must be a floating tensor, got torch.int64"),
        ({"g": torch.zeros(3)}, ValueError, r"g \[3\] is not \[H\], \[B, T, H\] or \[B, T, H, K\]"),
        ({"g": torch.zeros(1, 6, 2, 3)}, ValueError, r"g \[1, 6, 2, 3\] is not"),
        ({"g": torch.full((1, 6, 2), 0.25)}, ValueError, "must not be positive, got 0.25"),
        ({"initial_state": torch.zeros(1, 2, 4, 3)}, ValueError, r"initial_state must be \[1, 4, 4, 3\], got"),
        ({"cu_seqlens": torch.tensor([0, 3, 5])}, ValueError, r"cu_seqlens end at 5, but the ranks hold \[6\]"),
        ({"cu_seqlens": torch.tensor([1, 6])}, ValueError, "integers that rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, ValueError, "integers that rise from 0"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, TypeError, "cu_seqlens must be integers"),
        ({"layout": "stripes"}, ValueError, "layout 'stripes' is not one of"),
        ({"method": "bush"}, ValueError, "method 'bush' is not one of auto, ring"),
        ({"chunk_size": 48}, ValueError, "chunk_size must be a power of two, got 48"),
        ({"backend": "cuda"}, ValueError, "backend 'cuda' is not one of auto, torch, triton"),
        (
            {"backend": "triton"},
            ValueError,
            r"backend 'triton' needs CUDA tensors .*, got cpu \(rank 0\); backend='torch'",
        ),
    ],
)
def test_wrong_arguments_are_told(changes, kind, words) -> None:
    arguments = {"q": Q, "k": Q, "v": V, **changes}
    with pytest.raises(kind, match=words):
        weft.linear_attention(**arguments)


def test_packed_sequences_need_a_batch_of_one() -> None:
    q = torch.randn(2, 6, 2, 4)
    with pytest.raises(ValueError, match="need a batch of 1, got 2"):
        weft.linear_attention(q, q, q, cu_seqlens=torch.tensor([0, 6]))


@pytest.mark.usefixtures("every_network")
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"g": torch.full((1, 6, 2), 1.0)}, "must not be positive, got 1 (rank 1)"),
        ({"scale": 2.0}, "rank 1 called linear_attention(scale=2.0)"),
        ({"method": "tree"}, "rank 1 called linear_attention(method=tree)"),
        ({"output_final_state": True}, "rank 1 called linear_attention(output_final_state=True)"),
        ({"cu_seqlens": torch.tensor([0, 7, 18])}, "rank 1 called linear_attention(cu_seqlens=(0, 7, 18))"),
    ],
)
def test_a_rank_that_differs_raises_everywhere(odd, words) -> None:
    def program(axis: weft.Axis) -> None:
        common = {"g": torch.zeros(1, 6, 2), "method": "ring", "scale": 1.0}
        if "cu_seqlens" in odd:
            common["cu_seqlens"] = torch.tensor([0, 9, 18])
        weft.linear_attention(Q, Q, V, **{**common, **(odd if axis.rank == 1 else {})}, group=axis)

    caught = errors_of(program)
    assert len(caught) == 3 and len(set(caught)) == 1 and words in caught[0], caught


@pytest.mark.usefixtures("every_network")
def test_a_total_that_does_not_fit_raises_everywhere() -> None:
    caught = errors_of(lambda axis: weft.linear_attention(Q, Q, V, cu_seqlens=torch.tensor([0, 17])))
    assert len(caught) == 3 and all(
        "cu_seqlens end at 17, but the ranks hold [6, 6, 6], 18 tokens" in c for c in caught
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": torch.float64}, "takes bfloat16, float16 or float32, got q, k, v in float64"),
        ({"keys": 257}, "takes K and V up to 256, got 257 and 8"),
        ({"chunk_size": 256}, "takes chunk_size up to 128, got 256"),
        ({"batch": 65536}, "takes batches times value heads up to 65,535, got 65536 x 1"),
    ],
)
def test_what_triton_does_not_take_is_told(changes, words) -> None:
    """On meta tensors, which have no device to miss."""
    like = {"dtype": changes.get("dtype", torch.float32), "device": "meta"}
    batch, keys = changes.get("batch", 1), changes.get("keys", 8)
    q, v = torch.empty(batch, 4, 1, keys, **like), torch.empty(batch, 4, 1, 8, **like)
    with pytest.raises(ValueError, match=words):
        weft.linear_attention(q, q, v, backend="triton", chunk_size=changes.get("chunk_size"))


@pytest.mark.parametrize(
    ("device", "dtype", "keys", "chunk_size", "installed", "expected"),
    [
        ("cuda", torch.bfloat16, 256, 128, True, "triton"),
        ("cuda", torch.float16, 8, 16, True, "triton"),
        ("cuda", torch.float32, 8, 64, True, "triton"),
        ("cuda", torch.bfloat16, 8, 64, False, "torch"),
        ("cuda", torch.float64, 8, 64, True, "torch"),
        ("cuda", torch.bfloat16, 257, 64, True, "torch"),
        ("cuda", torch.bfloat16, 8, 256, True, "torch"),
        ("cpu", torch.float32, 8, 64, True, "torch"),
    ],
)
def test_auto_takes_triton_on_cuda_where_it_can(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    keys: int,
    chunk_size: int,
    installed: bool,
    expected: str,
) -> None:
    """With what the choice looks at of a tensor: there is no CUDA here to make one."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    q = SimpleNamespace(
        is_cuda=device == "cuda", device=torch.device(device), dtype=dtype, shape=torch.Size([1, 4, 1, keys])
    )
    assert choose_backend("auto", q, q, {"g": None}, chunk_size) == expected
    for name in ("torch", "triton"):
        assert choose_backend(name, q, q, {"g": None}, chunk_size) == name
    if chunk_size > 64 or expected == "torch":  # the delta rule's chunks are shorter
        assert choose_backend("auto", q, q, {"g": None}, chunk_size, max_chunk=64) == "torch"
