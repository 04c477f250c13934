"""The emulated flash operators refuse what CUDA's refuse, and agree with attention by its definition."""

from __future__ import annotations

import math

import pytest
import torch

pytestmark = pytest.mark.usefixtures("sim")
_aten = torch.ops.aten


def attend(q, k, v, seen, scale):
    """[n, h, d] by definition; rows that see nothing are zero."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (scale * torch.einsum("rhd,chd->hrc", q, k)).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("hrc,chd->rhd", scores.softmax(-1).nan_to_num(), v), lse


def visible(rows: int, columns: int, causal: bool, left: int | None, right: int | None) -> torch.Tensor:
    seen = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        for column in range(columns):
            at = row + columns - rows  # the last row is beside the last column
            far_left = left is not None and column < at - left
            far_right = (causal and column > at) or (right is not None and column > at + right)
            seen[row, column] = not far_left and not far_right
    return seen


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.bfloat16).to("sim")


WINDOWS = [
    (False, None, None), (True, None, None), (True, 3, None), (False, 2, 1), (False, None, 2), (False, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("causal", "left", "right"), WINDOWS)
@pytest.mark.parametrize(("rows", "columns"), [(9, 9), (5, 9), (9, 5)])
def test_dense(causal: bool, left: int | None, right: int | None, rows: int, columns: int) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, n, h, 16).bfloat16().float() for n, h in ((rows, 4), (columns, 2), (columns, 2), (rows, 4))
    )
    leaves = [t.requires_grad_() for t in (q, k, v)]
    seen = visible(rows, columns, causal, left, right)
    wanted, lses = zip(*(attend(*(t[b] for t in leaves), seen, 0.3) for b in range(2)), strict=True)
    torch.stack(wanted).backward(grad)
    options = {"scale": 0.3, "window_size_left": left, "window_size_right": right}
    args = [on_device(t) for t in leaves]
    out, lse, seed, offset, _ = _aten._flash_attention_forward(
        *args, None, None, rows, columns, 0.0, causal, False, **options
    )
    torch.testing.assert_close(out.cpu().float(), torch.stack(wanted).detach(), atol=2e-2, rtol=2e-2)
    lse_wanted = torch.stack(lses).detach()
    torch.testing.assert_close(lse.cpu(), lse_wanted.masked_fill(lse_wanted == -math.inf, math.inf))
    found = _aten._flash_attention_backward(
        on_device(grad), *args, out, lse, None, None, rows, columns, 0.0, causal, seed, offset, **options
    )
    for one, leaf in zip(found, leaves, strict=True):
        assert one.device.type == "sim" and one.dtype == torch.bfloat16
        torch.testing.assert_close(one.cpu().float(), leaf.grad, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(("causal", "left", "right"), WINDOWS[:4])
def test_cumulative_lengths(causal: bool, left: int | None, right: int | None) -> None:
    """Each sequence for itself; a sequence may have fewer queries than keys."""
    torch.manual_seed(0)
    ends_q, ends_k = [0, 3, 8, 9], [0, 5, 10, 14]
    q, k, v, grad = (torch.randn(n, 2, 8).bfloat16().float() for n in (9, 14, 14, 9))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    parts, lses = [], []
    for at in range(3):
        rows, columns = slice(*ends_q[at : at + 2]), slice(*ends_k[at : at + 2])
        seen = visible(rows.stop - rows.start, columns.stop - columns.start, causal, left, right)
        part, part_lse = attend(q[rows], k[columns], v[columns], seen, 8**-0.5)
        parts.append(part)
        lses.append(part_lse)
    torch.cat(parts).backward(grad)
    cum_q, cum_k = (torch.tensor(ends, dtype=torch.int32, device="sim") for ends in (ends_q, ends_k))
    args = [on_device(t) for t in leaves]
    options = {"window_size_left": left, "window_size_right": right}
    out, lse, seed, offset, _ = _aten._flash_attention_forward(*args, cum_q, cum_k, 5, 5, 0.0, causal, False, **options)
    torch.testing.assert_close(out.cpu().float(), torch.cat(parts).detach(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.cpu(), torch.cat(lses, 1).detach())
    found = _aten._flash_attention_backward(
        on_device(grad), *args, out, lse, cum_q, cum_k, 5, 5, 0.0, causal, seed, offset, **options
    )
    for one, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(one.cpu().float(), leaf.grad, atol=5e-2, rtol=5e-2)


def test_a_side_without_a_limit_beside_one_is_as_many_keys() -> None:
    """Too few for the first of many queries, as in CUDA's: they see what a right of 4 keys shows, not all."""
    q, k = (torch.randn(1, n, 1, 8, device="sim", dtype=torch.float16) for n in (9, 4))
    found = [
        _aten._flash_attention_forward(q, k, k, None, None, 9, 4, 0.0, False, False, **sides)[0].cpu()
        for sides in (
            {"window_size_left": 2},
            {"window_size_left": 2, "window_size_right": 3},
            {"window_size_left": 2, "window_size_right": 4},
            {"window_size_right": 4},
            {},
        )
    ]  # fmt: skip
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])  # 4 sides are none, and none is 4
    assert torch.equal(found[3], found[4]) and not found[0][0, :1].any() and found[4][0, :1].any()


def test_rows_beyond_the_longest_are_not_written() -> None:
    q = torch.randn(6, 1, 8, device="sim", dtype=torch.float16)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32, device="sim")
    out, *_ = _aten._flash_attention_forward(q, q, q, ends, ends, 3, 4, 0.0, False, False)
    assert out.isnan().flatten(1).any(1).tolist() == [False] * 5 + [True]


def heads(count: int = 2, size: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, 8, count, size, device="sim").to(dtype)


def cut(tensor: torch.Tensor) -> torch.Tensor:
    """With a last dimension that is not contiguous."""
    return tensor.transpose(1, 3).contiguous().transpose(1, 3)


REFUSED = {
    "fp32": (lambda: [heads(dtype=torch.float32)] * 3, "fp16 and bf16"),
    "two dtypes": (lambda: [heads(), heads(), heads(dtype=torch.float16)], "same dtype"),
    "a head size": (lambda: [heads(size=12)] * 3, "multiple of 8"),
    "a large head": (lambda: [heads(size=264)] * 3, "at most 256"),
    "strides": (lambda: [cut(heads()), heads(), heads()], "contiguous last dimension"),
    "heads": (lambda: [heads(3), heads(2), heads(2)], "must divide"),
    "sizes": (lambda: [heads(2), heads(1), heads(2)], "wrong sizes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(RuntimeError, match=words):
        _aten._flash_attention_forward(*make(), None, None, 8, 8, 0.0, True, False)


def test_lengths_are_int32_and_dropout_is_not_emulated() -> None:
    q, ends = heads()[0], torch.tensor([0, 8], device="sim")
    with pytest.raises(RuntimeError, match="int32"):
        _aten._flash_attention_forward(q, q, q, ends, ends, 8, 8, 0.0, True, False)
    with pytest.raises(RuntimeError, match="both"):
        _aten._flash_attention_forward(q, q, q, ends.int(), None, 8, 8, 0.0, True, False)
    with pytest.raises(NotImplementedError, match="dropout"):
        _aten._flash_attention_forward(*[heads()] * 3, None, None, 8, 8, 0.1, True, False)


def test_the_backward_checks_too() -> None:
    q = heads()
    out, lse, seed, offset, _ = _aten._flash_attention_forward(q, q, q, None, None, 8, 8, 0.0, True, False)
    wrong = [(out.float(), out, "dtype"), (cut(out), out, "contiguous last"), (out, out[:, 1:], "sizes")]
    for grad, made, words in wrong:
        with pytest.raises(RuntimeError, match=words):
            _aten._flash_attention_backward(grad, q, q, q, made, lse, None, None, 8, 8, 0.0, True, seed, offset)
    for total, words in ((lse.double(), "fp32"), (lse.repeat(1, 1, 2)[..., ::2], "contiguous memory")):
        with pytest.raises(RuntimeError, match=words):
            _aten._flash_attention_backward(out, q, q, q, out, total, None, None, 8, 8, 0.0, True, seed, offset)
