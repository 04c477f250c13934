"""`attention`: the public operation and its checks."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.arguments import (
    find_choice_fault,
    find_flag_fault,
    find_integer_fault,
    find_number_fault,
    show,
    the_choice,
)
from weft.comm.function import eager
from weft.ops.attention.distributed import METHODS, NAMES, TWO_LEVELS, Attention
from weft.ops.attention.gather import find_strides_fault
from weft.ops.attention.plan import Options
from weft.ops.sequence.layout import DTYPES, Sequence, read_on_axis, read_tokens
from weft.parallel.levels import all_ranks, count_inner_ranks


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | None = ..., scale: float | None = ...,
    window: tuple[int, int] | None = ..., cu_seqlens: Tensor | None = ..., layout: str | None = ...,
    method: str | tuple[str, str] = ...,
    strides: tuple[int, ...] | None = ..., backward_strides: tuple[int, ...] | None = ..., backward: str | None = ...,
    grad_dtype: torch.dtype | None = ..., return_lse: Literal[False] = ...,
    sequence: Sequence | None = ..., group: Any = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | None = ..., scale: float | None = ...,
    window: tuple[int, int] | None = ..., cu_seqlens: Tensor | None = ..., layout: str | None = ...,
    method: str | tuple[str, str] = ...,
    strides: tuple[int, ...] | None = ..., backward_strides: tuple[int, ...] | None = ..., backward: str | None = ...,
    grad_dtype: torch.dtype | None = ..., return_lse: Literal[True],
    sequence: Sequence | None = ..., group: Any = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@eager
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens: Tensor | None = None,
    layout: str | None = None,
    method: str | tuple[str, str] = "auto",
    strides: tuple[int, ...] | None = None,
    backward_strides: tuple[int, ...] | None = None,
    backward: str | None = None,
    grad_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    sequence: Sequence | None = None,
    group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over a sequence that lies on the ranks of ``group``: out, or (out, lse).

    Exactly as on one device: out = softmax(scale * q k^T) v over the keys a query sees. ``causal`` must be said: with
    True a token sees itself and those before it, with False it sees all. (`weft.linear_attention` is always causal.)

    | tensor       | shape                                    | on this rank                                  |
    |--------------|------------------------------------------|-----------------------------------------------|
    | q, out       | ``[B, S, H, D]``                         | its S tokens; S may differ and may be 0       |
    | k, v         | ``[B, S, Hk, D]``, H a multiple of Hk    | its S tokens; query head h uses h // (H / Hk) |
    | lse          | ``[B, S, H]``, fp32 (fp64 for fp64)      | log-sum-exp of the scores; has no gradient    |
    | `cu_seqlens` | ``[N+1]``, of the whole sequence, B = 1  | the whole, on every rank                      |

    A query at position p of the sequence sees keys p - left .. p + right of its document, with ``window`` = (left,
    right) and -1 for no limit; with ``causal`` none after p. ``layout`` is "contiguous" (if left out) or "zigzag" (see
    `weft.shard`), which balances causal work. ``scale`` defaults to D^-0.5. ``sequence`` (see `weft.sequence`) is given
    in place of ``layout``, ``cu_seqlens`` and ``group`` and saves the round of integers in which lengths are gathered.

    What crosses ranks, by ``method``:

    - "gather": the keys and values that are seen elsewhere, ``strides`` heads at a time (a tuple that sums to Hk; see
      `head_strides`), while the heads before them are computed. The backward does it again (``backward_strides``)
      and sends dK and dV home; with ``backward="ring"`` it goes round as the ring does.
    - "ring": the same keys and values from neighbour to neighbour, all heads at once; dK and dV straight home.
    - "ulysses": q, k, v and out, heads for sequence. A rank has at most H / P heads, rounded up; a key/value head goes
      to every rank that has some of its query heads.
    - ("ulysses", "gather"), ("ulysses", "ring"): on two levels. Inner ranks exchange heads for sequence, and over the
      outer ranks the keys and values of these heads travel. ``group`` is then a 2-D DeviceMesh (outer, inner), or
      (all ranks, inner ranks); with ``sequence``, too. Tokens lie on the ranks of the flattened mesh, in any layout.
    - "auto": gather or ulysses, the one with fewer bytes, unless the other is better in balance.

    ``grad_dtype`` is what dK and dV are on the way: None for fp32 (fp64 for fp64; with ulysses, where only those of a
    key/value head on several ranks are sums, the input's for the others). Sums over ranks are fp32 (fp64) and in a
    fixed order whatever it is; gradients take the input's dtype.

    >>> q, kv = torch.randn(1, 10, 4, 8), torch.randn(1, 10, 2, 8)
    >>> attention(q, kv, kv, causal=True).shape
    torch.Size([1, 10, 4, 8])
    """

    levels = group
    if isinstance(method, tuple):
        group = None if isinstance(sequence, Sequence) else all_ranks(group)

    def read_options(axis: Axis) -> Options | Exception:
        """What the ranks must have in common; or the first thing wrong with this rank's arguments."""
        name, rank, kinds = "attention", axis.rank, "a tensor of fp32, fp64, bf16 or fp16"
        where = read_tokens(name, rank, q, k, v, "S", kinds, layout, cu_seqlens, group, sequence)
        if isinstance(where, Exception):
            return where
        fault = (
            _find_shape_fault(rank, q, k, v)
            or _find_causal_fault(rank, causal)
            or (None if scale is None else find_number_fault(name, "scale", scale, rank))
            or _find_window_fault(rank, window)
            or _find_method_fault(rank, k.shape[2], method, strides, backward_strides, backward, grad_dtype)
            or find_flag_fault(name, "return_lse", return_lse, rank)
        )
        inner = count_inner_ranks(name, axis, levels) if fault is None and isinstance(method, tuple) else 0
        if isinstance(inner, Exception):
            return inner
        return fault or Options(
            q=(q.shape[0], *q.shape[2:]),
            kv_heads=k.shape[2],
            dtype=q.dtype,
            device=q.device.type,
            causal=bool(causal),
            scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
            window=(-1, -1) if window is None else (int(window[0]), int(window[1])),
            cu_seqlens=where[1],
            layout=where[0],
            lengths=None if sequence is None else sequence.lengths,
            method=the_choice(method, NAMES),
            strides=None if strides is None else tuple(int(stride) for stride in strides),
            backward_strides=None if backward_strides is None else tuple(int(stride) for stride in backward_strides),
            backward=None if backward is None else "ring",
            grad_dtype=grad_dtype,
            return_lse=return_lse,
            gradients=tuple(torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)),
            inner=inner,
        )

    axis, options = read_on_axis("attention", group, sequence, read_options)
    out, lse = Attention.apply(q, k, v, options, axis, sequence)
    return (out, lse) if return_lse else out


def _find_causal_fault(rank: int, causal: object) -> Exception | None:
    if causal is None:
        return ValueError(
            f"attention: say causal=True (a token sees itself and those before it) or causal=False (it sees all) "
            f"(rank {rank})"
        )
    return find_flag_fault("attention", "causal", causal, rank)


def _find_shape_fault(rank: int, q: Tensor, k: Tensor, v: Tensor) -> Exception | None:
    where = f"(rank {rank})"
    if v.shape[:3] == k.shape[:3] and k.shape[3] == q.shape[3] != v.shape[3]:
        return NotImplementedError(
            f"attention: values of {v.shape[3]} with keys of {k.shape[3]} are not supported, as the kernels have one "
            f"head size; pad the smaller with zeros {where}"
        )
    if v.shape != k.shape or k.shape[3] != q.shape[3]:
        return ValueError(
            f"attention: k {list(k.shape)} and v {list(v.shape)} must have one shape, and the head size of q "
            f"{list(q.shape)} {where}"
        )
    if min(q.shape[0], *q.shape[2:], k.shape[2]) < 1:
        return ValueError(f"attention: only S may be zero, got q {list(q.shape)} and k {list(k.shape)} {where}")
    if q.shape[2] % k.shape[2]:
        return ValueError(f"attention: {q.shape[2]} heads are not a multiple of {k.shape[2]} key/value heads {where}")
    return None


def _find_window_fault(rank: int, window: object) -> Exception | None:
    if window is None:
        return None
    sides = window if isinstance(window, tuple | list) and len(window) == 2 else [None]
    if all(find_integer_fault("attention", "window", side, rank, least=-1) is None for side in sides):
        return None
    words = "must be two integers (left, right), -1 for no limit"
    return ValueError(f"attention: window {words}, got {show(window)} (rank {rank})")


def _find_method_fault(
    rank: int,
    kv_heads: int,
    method: object,
    strides: object,
    backward_strides: object,
    backward: str | None,
    grad_dtype: torch.dtype | None,
) -> Exception | None:
    where = f"(rank {rank})"
    if isinstance(method, tuple):
        if method not in list(TWO_LEVELS):
            known = " or ".join(map(str, TWO_LEVELS))
            return ValueError(f"attention: method {show(method)} is not {known}, for inner and outer ranks {where}")
    elif fault := find_choice_fault("attention", "method", method, rank, ("auto", *METHODS)):
        return fault
    if backward is not None and (
        find_choice_fault("attention", "backward", backward, rank, ("ring",))
        or method not in ("auto", "gather", "ring")
    ):
        return ValueError(
            f"attention: backward {show(backward)} does not go with method {method!r} {where}; it is None (as the "
            f"forward) or 'ring' after a 'gather'"
        )
    for name, given in (("strides", strides), ("backward_strides", backward_strides)):
        if given is None:
            continue
        if method not in ("auto", "gather") or (name == "backward_strides" and backward == "ring"):
            return ValueError(
                f"attention: {name} are of method 'gather' and have no meaning here {where}; leave them out"
            )
        if fault := find_strides_fault(name, kv_heads, given, rank):
            return fault
    if grad_dtype is not None and not (isinstance(grad_dtype, torch.dtype) and grad_dtype in DTYPES):
        return TypeError(f"attention: grad_dtype must be fp32, fp64, bf16 or fp16, got {show(grad_dtype)} {where}")
    return None
