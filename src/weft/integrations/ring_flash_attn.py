"""weft's attention under the names and signatures of ring-flash-attention, so that a program changes one import.

    from weft.integrations.ring_flash_attn import zigzag_ring_flash_attn_func

Results are those of one device, also where the originals refuse or differ: windows, uneven lengths, any batch, CPUs.
What is not supported (dropout, ALiBi) is refused, on every rank alike. ``deterministic`` changes nothing, since all
sums have a fixed order.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from weft.comm import Axis
from weft.comm.device import copy_to_device
from weft.ops.attention import attention, head_strides
from weft.ops.sequence import Sequence
from weft.ops.sequence.layout import Bounds, shard_lengths

Window = tuple[int, int]
Out = Tensor | tuple[Tensor, Tensor, None]


def ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Out:  # fmt: skip
    """Ring attention; rank r holds the r-th part of the sequence. q, out ``[B, S, H, D]``, k and v ``[B, S, Hk, D]``.

    Keys and values travel from neighbour to neighbour as far as they are seen, their gradients straight home. With
    ``return_attn_probs`` the result is (out, lse ``[B, H, S]``, None).

    >>> q = torch.randn(1, 6, 2, 4)
    >>> ring_flash_attn_func(q, q, q, causal=True).shape
    torch.Size([1, 6, 2, 4])
    """
    return _ring("ring_flash_attn_func", "contiguous", q, k, v, dropout_p, softmax_scale, causal, window_size,
                 alibi_slopes, return_attn_probs, group)  # fmt: skip


def zigzag_ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Any = None,
) -> Out:  # fmt: skip
    """As `ring_flash_attn_func`; rank r holds parts r and 2P-1-r of 2P, as `weft.shard` with "zigzag" cuts.

    >>> q = torch.randn(1, 6, 2, 4)
    >>> zigzag_ring_flash_attn_func(q, q, q, causal=True).shape
    torch.Size([1, 6, 2, 4])
    """
    return _ring("zigzag_ring_flash_attn_func", "zigzag", q, k, v, dropout_p, softmax_scale, causal, window_size,
                 alibi_slopes, return_attn_probs, group)  # fmt: skip


def _ring(
    name: str, layout: str, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None,
    causal: bool, window_size: Window, alibi_slopes: Tensor | None, return_attn_probs: bool, group: Any,
) -> Out:  # fmt: skip
    axis = Axis.of(group)
    if fault := _find_fault(name, axis.rank, dropout_p, alibi_slopes):
        axis.begin("attention", metadata=(0,), fault=fault)
    out, lse = attention(
        q, k, v, causal=causal, scale=softmax_scale, window=window_size, layout=layout, method="ring",
        return_lse=True, group=axis,
    )  # fmt: skip
    return (out, lse.transpose(1, 2), None) if return_attn_probs else out


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """What `llama3_flash_attn_varlen_func` takes: (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, k slice).

    ``cu_seqlens`` ``[N+1]`` are the boundaries in the whole sequence, of which rank r holds the r-th part. The first
    document of a part may have begun on another rank, so its keys begin before the part does.

    >>> llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 3, 8]), True, 1, 2)
    (tensor([0, 4], dtype=torch.int32), tensor([0, 5], dtype=torch.int32), 4, 5, slice(3, 8, None))
    """
    bounds = tuple(dict.fromkeys(cu_seqlens.tolist()))
    lengths = shard_lengths(bounds[-1], "contiguous", world_size)
    begin = sum(lengths[:rank])
    end = begin + lengths[rank]
    inside = [bound for bound in bounds if begin < bound < end]
    start = _document_at(bounds, begin)[0] if begin < end else begin
    stop = end if causal or begin == end else _document_at(bounds, end - 1)[1]
    of_q, of_k = (0, *(b - begin for b in inside), end - begin), (0, *(b - start for b in inside), stop - start)
    as_tensors = (copy_to_device(torch.tensor(one, dtype=torch.int32), cu_seqlens.device) for one in (of_q, of_k))
    return *as_tensors, _longest(of_q), _longest(of_k), slice(start, stop)  # type: ignore[return-value]


def _document_at(bounds: Bounds, position: int) -> tuple[int, int]:
    """Where the document of a position begins and ends."""
    number = bisect_right(bounds, position) - 1
    return bounds[number], bounds[number + 1]


def llama3_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Any = None, *,
    first_stride: int | None = None, backward_first_stride: int | None = None, backward_last_stride: int | None = None,
) -> Out:  # fmt: skip
    """Attention over packed documents, keys and values gathered ``heads_k_stride`` KV heads at a time.

    q, out ``[T, H, D]``, k and v ``[T, Hk, D]``: this rank's T tokens of a sequence cut into P parts. The five
    arguments about documents are what `llama3_flash_attn_prepare_cu_seqlens` gives, here or in the original. With
    ``return_attn_probs`` the result is (out, lse ``[H, T]``, None).

    What crosses ranks beside keys and values: the boundaries, in two small rounds, when other tensors of boundaries
    come than the last time. Pass the same ones to every layer of a batch. (Those made under ``torch.inference_mode()``
    do not say when they change: with them the rounds are made every time.)

    ``first_stride``, ``backward_first_stride`` and ``backward_last_stride`` split the first step of the forward and
    the first and last of the backward, which nothing hides in the original: see `weft.head_strides`.
    """
    name, axis = "llama3_flash_attn_varlen_func", Axis.of(group)
    fault = _find_fault(name, axis.rank, dropout_p, alibi_slopes)
    strides: list[tuple[int, ...]] = []
    if fault is None:
        try:
            strides.append(head_strides(k.shape[1], heads_k_stride, first_stride))
            strides.append(head_strides(k.shape[1], heads_k_stride, backward_first_stride, backward_last_stride))
        except ValueError as error:
            fault = ValueError(f"{name}: {error} (rank {axis.rank})")
    longest = (max_seqlen_q, max_seqlen_k)
    sequence = _find_documents(axis, len(q), (cu_seqlens_q, cu_seqlens_k), longest, local_k_slice, causal, fault)
    out, lse = attention(
        *(x.unsqueeze(0) for x in (q, k, v)), causal=causal, scale=softmax_scale, window=window_size,
        method="gather", strides=strides[0], backward_strides=strides[1], return_lse=True, sequence=sequence,
    )  # fmt: skip
    return (out[0], lse[0].T, None) if return_attn_probs else out[0]


def _find_fault(name: str, rank: int, dropout_p: float, alibi_slopes: Tensor | None) -> Exception | None:
    if dropout_p:
        return NotImplementedError(
            f"{name}: dropout_p={dropout_p} is not supported (rank {rank}); pass 0.0 and drop elsewhere"
        )
    if alibi_slopes is not None:
        return NotImplementedError(f"{name}: alibi_slopes are not supported (rank {rank}); leave them out")
    return None


def _find_documents(
    axis: Axis, length: int, bounds: tuple[Tensor, Tensor], longest: tuple[int, int], keys: slice, causal: bool,
    fault: Exception | None,
) -> Sequence:  # fmt: skip
    """The boundaries in the whole sequence, from what every rank knows of its own part.

    Remembered for as long as the same tensors come, so that they are gathered once for the layers of a batch. Tensors
    made under ``torch.inference_mode()`` may be refilled without a trace, so for those every layer gathers.
    """
    versions = tuple(-1 if one.is_inference() else one._version for one in bounds)
    known = None if -1 in versions else (*versions, length, longest, keys.start, keys.stop, causal)
    remembered = axis.counter.cache.get("llama3 documents")
    if fault is None and known is not None and remembered is not None:
        seen, before, sequence = remembered
        if all(ref() is one for ref, one in zip(seen, bounds, strict=True)) and known == before:
            return sequence
    of_q, of_k = (one.tolist() for one in bounds)
    mine = [length, *longest, keys.start or 0, keys.stop or 0, int(causal), len(of_q), *of_q, *of_k]
    name = "llama3_flash_attn_varlen_func"
    sizes = [size for (size,) in axis.begin(name, metadata=(len(mine),), fault=fault).metadata.wait()]
    padded = (*mine, *[0] * (max(sizes) - len(mine)))
    rows = axis.begin(f"{name}.documents", metadata=padded).metadata.wait()
    sequence = _join([list(row[:size]) for row, size in zip(rows, sizes, strict=True)], axis)
    if known is not None:
        axis.counter.cache["llama3 documents"] = tuple(weakref.ref(one) for one in bounds), known, sequence
    return sequence


def _join(parts: list[list[int]], axis: Axis) -> Sequence:
    """Every rank has the integers of all, so all find the same fault or the same documents."""
    lengths = tuple(part[0] for part in parts)
    total, begin = sum(lengths), 0
    found = {0, total}
    for rank, (length, longest_q, longest_k, start, stop, causal, count, *rest) in enumerate(parts):
        of_q, of_k = rest[:count], rest[count:]
        inside = [begin + bound for bound in of_q[1:-1]]
        last = begin + length if causal else stop
        right = (
            of_q[0] == 0 and of_q[-1] == length
            and of_k == [0, *(bound - start for bound in inside), stop - start]
            and start <= begin and stop == last
            and _longest(of_q) <= longest_q and _longest(of_k) <= longest_k
        )  # fmt: skip
        if not right and length:
            raise ValueError(
                f"llama3_flash_attn_varlen_func: cu_seqlens_q {of_q[:8]} (max {longest_q}), cu_seqlens_k {of_k[:8]} "
                f"(max {longest_k}) and k slice {start}:{stop} do not go together for tokens {begin}:{begin + length} "
                f"of {total} (rank {rank}); take them from llama3_flash_attn_prepare_cu_seqlens"
            )
        if length:
            found |= {start, *inside}
        begin += length
    bounds: Bounds = tuple(sorted(found))
    return Sequence(axis, "contiguous", lengths, bounds if len(bounds) > 1 else (0, total))


def _longest(bounds: Iterable[int]) -> int:
    return max((b - a for a, b in pairwise(bounds)), default=0)
