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
    find_tensor_fault,
    kind_of,
    show,
    the_choice,
)
from weft.comm.compiled import Shape, traceable
from weft.ops.attention.distributed import METHODS, NAMES, TWO_LEVELS, Attention, find_mask_fault
from weft.ops.attention.gather import find_strides_fault
from weft.ops.attention.plan import Options
from weft.ops.sequence.layout import DTYPES, Sequence, read_on_axis, read_tokens
from weft.ops.sequence.mask import Mask
from weft.parallel.levels import all_ranks, count_inner_ranks


def _shapes(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **others: Any) -> list[Shape]:
    """Of out and lse, for the compiler."""
    out = (*q.shape[:-1], *v.shape[-1:]), q.dtype
    return [out, (q.shape[:-1], torch.promote_types(q.dtype, torch.float32))] if return_lse else [out]


def _arrange(outs: list[Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    return outs[0] if len(outs) == 1 else (outs[0], outs[1])


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | None = ..., scale: float | None = ...,
    softcap: float | None = ..., sinks: Tensor | None = ...,
    window: tuple[int, int] | None = ..., cu_seqlens: Tensor | None = ..., layout: str | None = ...,
    method: str | tuple[str, str] = ...,
    strides: tuple[int, ...] | None = ..., backward_strides: tuple[int, ...] | None = ..., backward: str | None = ...,
    grad_dtype: torch.dtype | None = ..., return_lse: Literal[False] = ...,
    sequence: Sequence | None = ..., mask: Mask | None = ..., group: Any = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | None = ..., scale: float | None = ...,
    softcap: float | None = ..., sinks: Tensor | None = ...,
    window: tuple[int, int] | None = ..., cu_seqlens: Tensor | None = ..., layout: str | None = ...,
    method: str | tuple[str, str] = ...,
    strides: tuple[int, ...] | None = ..., backward_strides: tuple[int, ...] | None = ..., backward: str | None = ...,
    grad_dtype: torch.dtype | None = ..., return_lse: Literal[True],
    sequence: Sequence | None = ..., mask: Mask | None = ..., group: Any = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@traceable(_shapes, _arrange, keeps_outputs=True)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
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
    mask: Mask | None = None,
    group: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention over a sequence that lies on the ranks of ``group``: out, or (out, lse).

    Exactly as on one device: out = softmax(scale * q k^T) v over the keys a query sees. ``causal`` must be said: with
    True a token sees itself and those before it, with False it sees all. (`weft.linear_attention` is always causal.)

    | tensor       | shape                                    | on this rank                                  |
    |--------------|------------------------------------------|-----------------------------------------------|
    | q            | ``[B, S, H, D]``                         | its S tokens; S may differ and may be 0       |
    | k, v         | ``[B, S, Hk, D]``, ``[B, S, Hk, E]``     | its S tokens; query head h uses h // (H / Hk) |
    | out          | ``[B, S, H, E]``                         | its S tokens; E may be D                      |
    | lse          | ``[B, S, H]``, fp32 (fp64 for fp64)      | log-sum-exp of the scores, and the sinks      |
    | `sinks`      | ``[H]``, fp32 or the dtype of q          | the same on every rank                        |
    | `cu_seqlens` | ``[N+1]``, of the whole sequence, B = 1  | the whole, on every rank                      |

    A query at position p of the sequence sees keys p - left .. p + right of its document, with ``window`` = (left,
    right) and -1 for no limit; with ``causal`` none after p. ``layout`` is "contiguous" (if left out), "zigzag",
    which balances the work of one causal document, or "balanced", that of any (see `weft.sequence`). ``scale`` defaults
    to D^-0.5. ``sequence`` is given in place of ``layout``, ``cu_seqlens`` and ``group`` and saves the round of
    integers in which lengths are gathered.

    ``mask`` (see `weft.Mask`) says who sees whom in place of ``causal`` and ``cu_seqlens``: prefixes, trees of shared
    prefixes, chunks or slices of one's own, over the whole sequence and the same on every rank. ``window`` and the
    documents of a ``sequence`` limit it further. A query that sees nothing has out 0 and lse -inf.

    With ``softcap`` c a score s becomes c * tanh(s / c), before the mask: it stays between -c and c.

    ``sinks`` are a score for each head that every query has beside those of its keys, with a value of zeros: out and
    lse are those of the softmax with it. Their gradient is this rank's part; the sum over ranks is the whole, as of
    every replicated parameter.

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
            or _find_seen_fault(rank, causal, cu_seqlens, mask, layout, sequence)
            or (None if scale is None else find_number_fault(name, "scale", scale, rank))
            or (None if softcap is None else _find_softcap_fault(rank, q.dtype, softcap))
            or _find_window_fault(rank, window)
            or _find_method_fault(rank, k.shape[2], method, strides, backward_strides, backward, grad_dtype)
            or find_flag_fault(name, "return_lse", return_lse, rank)
            or (None if sinks is None else _find_sinks_fault(rank, q, sinks))
        )
        leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
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
            lengths=None if sequence is None else sequence.compared,
            method=the_choice(method, NAMES),
            strides=None if strides is None else tuple(int(stride) for stride in strides),
            backward_strides=None if backward_strides is None else tuple(int(stride) for stride in backward_strides),
            backward=None if backward is None else "ring",
            grad_dtype=grad_dtype,
            return_lse=return_lse,
            gradients=tuple(torch.is_grad_enabled() and x.requires_grad for x in leaves),
            sinks=sinks is not None,
            value_size=v.shape[3],
            softcap=0.0 if softcap is None else float(softcap),
            mask=mask,
            inner=inner,
        )

    axis, options = read_on_axis("attention", group, sequence, read_options)
    out, lse = Attention.apply(q, k, v, options, axis, sequence, sinks)
    return (out, lse) if return_lse else out


def _find_seen_fault(
    rank: int, causal: object, cu_seqlens: object, mask: object, layout: str | None, sequence: Sequence | None
) -> Exception | None:
    if mask is not None:
        if not isinstance(mask, Mask):
            return TypeError(f"attention: mask must be a weft.Mask, got {kind_of(mask)} (rank {rank})")
        for name, value in (("causal", causal), ("cu_seqlens", cu_seqlens)):
            if value is not None:
                return ValueError(f"attention: mask says who sees whom; leave {name} out (rank {rank})")
        if sequence is None and layout == "balanced":  # dealt by a mask or not, ranks hold as many tokens
            return ValueError(
                f"attention: with a mask and layout 'balanced' pass the sequence they were cut by (rank {rank})"
            )
        return None if sequence is None else find_mask_fault(mask, sequence.lengths, f" (rank {rank})")
    if causal is None:
        return ValueError(
            f"attention: say causal=True (a token sees itself and those before it) or causal=False (it sees all) "
            f"(rank {rank})"
        )
    return find_flag_fault("attention", "causal", causal, rank)


def _find_shape_fault(rank: int, q: Tensor, k: Tensor, v: Tensor) -> Exception | None:
    where = f"(rank {rank})"
    if v.shape[:3] != k.shape[:3] or k.shape[3] != q.shape[3]:
        return ValueError(
            f"attention: k {list(k.shape)} and v {list(v.shape)} must have the same heads, and k the head size of q "
            f"{list(q.shape)} {where}"
        )
    if min(q.shape[0], *q.shape[2:], *v.shape[2:]) < 1:
        return ValueError(f"attention: only S may be zero, got q {list(q.shape)} and v {list(v.shape)} {where}")
    if q.shape[2] % k.shape[2]:
        return ValueError(f"attention: {q.shape[2]} heads are not a multiple of {k.shape[2]} key/value heads {where}")
    return None


def _find_softcap_fault(rank: int, dtype: torch.dtype, softcap: float) -> Exception | None:
    if fault := find_number_fault("attention", "softcap", softcap, rank):
        return fault
    if float(softcap) <= 0:
        return ValueError(f"attention: softcap must be positive, got {softcap} (rank {rank}); leave it out for no cap")
    numbers = torch.finfo(torch.promote_types(dtype, torch.float32))
    if not numbers.tiny <= float(softcap) <= numbers.max:
        return ValueError(
            f"attention: softcap must be a number of {numbers.dtype}, {numbers.tiny:.1e} to {numbers.max:.1e}, got "
            f"{softcap} (rank {rank}); leave it out for no cap"
        )
    return None


def _find_sinks_fault(rank: int, q: Tensor, sinks: Tensor) -> Exception | None:
    kinds = (torch.float32, q.dtype)
    if fault := find_tensor_fault("attention", "sinks", sinks, rank, kinds, "a tensor of fp32 or the dtype of q"):
        return fault
    if sinks.shape != q.shape[2:3]:
        shapes = f"got {list(sinks.shape)} with q {list(q.shape)}"
        return ValueError(f"attention: sinks must be [heads], one score for each head of q, {shapes} (rank {rank})")
    if sinks.device != q.device:
        return ValueError(f"attention: sinks is on {sinks.device}, q on {q.device} (rank {rank})")
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
