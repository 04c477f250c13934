"""What operations that carry a state along the tokens take alike: arguments, checks, options, which kernels."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from weft.comm.arguments import (
    find_choice_fault,
    find_flag_fault,
    find_integer_fault,
    find_number_fault,
    find_tensor_fault,
    the_choice,
)
from weft.comm.compiled import Shape
from weft.comm.function import tensors_are_real
from weft.ops.scan.affine import Form, Kind
from weft.ops.scan.methods import METHODS
from weft.ops.sequence.layout import DTYPES, Bounds, Sequence, count_documents, read_tokens

_KINDS = "a floating tensor"

# What the Triton kernels take.
MAX_DIM = 256  # K and V
MAX_CHUNK = 128
MAX_CELLS = 65535  # batch times value heads: the third axis of a grid, and CUDA takes no more there
_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class StateOptions:
    """What the ranks must have in common: everything but their lengths."""

    operation: ClassVar[str]  # what their calls are named
    max_chunk: ClassVar[int] = MAX_CHUNK  # of the Triton kernels
    q: tuple[int, ...]
    v: tuple[int, ...]
    g: tuple[int, ...] | None
    dtype: torch.dtype
    device: str  # its type
    scale: float
    initial_state: tuple[int, ...] | None
    output_final_state: bool
    cu_seqlens: Bounds | None
    layout: str
    lengths: tuple[int, ...] | None  # of a sequence that was made before
    method: str
    chunk_size: int
    gradients: tuple[bool, ...]

    @staticmethod
    def chunk_size_on(device: str) -> int:
        """Of a call that names none. Of the operation."""
        raise NotImplementedError

    @property
    def kind(self) -> Kind:
        """What a document does to the state that enters it. Of the operation."""
        raise NotImplementedError

    def form(self, device: torch.device) -> Form:
        """The form of one document's map."""
        batch, _, keys = self.q
        shape = torch.Size((batch, self.v[1], keys, self.v[2]))
        return Form(self.kind, shape, torch.promote_types(self.dtype, torch.float32), device)


OptionsT = TypeVar("OptionsT", bound=StateOptions)


@dataclass(frozen=True)
class StateArguments:
    """The arguments of ``operation`` as one rank gave them; ``rates`` are tensors that only it has, as beta."""

    operation: str
    q: Tensor
    k: Tensor
    v: Tensor
    rates: Mapping[str, Tensor]
    g: Tensor | None
    scale: float | None
    initial_state: Tensor | None
    output_final_state: bool
    cu_seqlens: Tensor | None
    layout: str | None
    method: str
    chunk_size: int | None
    backend: str
    sequence: Sequence | None
    group: Any

    def read(
        self, kind: type[OptionsT], rank: int, backends: tuple[str, ...],
        find_gate_fault: Callable[[str], Exception | None],
    ) -> OptionsT | Exception:  # fmt: skip
        """What the ranks must have in common, in options of ``kind``; or the first thing wrong with the arguments.

        ``find_gate_fault`` looks at the shapes of rates and g once q, k and v are right, and gets the words for where
        they are.
        """
        where = read_tokens(
            self.operation, rank, self.q, self.k, self.v, "T", _KINDS, self.layout, self.cu_seqlens, self.group,
            self.sequence,
        )  # fmt: skip
        if isinstance(where, Exception):
            return where
        name, place = self.operation, f"(rank {rank})"
        fault = (
            self._find_tensor_fault(rank, place)
            or find_gate_fault(place)
            or self._find_value_fault(where[1], place)
            or (None if self.scale is None else find_number_fault(name, "scale", self.scale, rank))
            or find_flag_fault(name, "output_final_state", self.output_final_state, rank)
            or self._find_method_fault(rank, place)
            or find_choice_fault(name, "backend", self.backend, rank, ("auto", *backends))
            or self._find_backend_fault(kind, place)
        )
        return fault or self._options(kind, *where)

    def _options(self, kind: type[OptionsT], layout: str, bounds: Bounds | None) -> OptionsT:
        q, v, g, initial = self.q, self.v, self.g, self.initial_state
        return kind(
            q=(q.shape[0], *q.shape[2:]),
            v=(v.shape[0], *v.shape[2:]),
            g=None if g is None else tuple(g.shape) if g.ndim == 1 else (g.shape[0], *g.shape[2:]),
            dtype=q.dtype,
            device=q.device.type,
            scale=q.shape[-1] ** -0.5 if self.scale is None else float(self.scale),
            initial_state=None if initial is None else tuple(initial.shape),
            output_final_state=self.output_final_state,
            cu_seqlens=bounds,
            layout=layout,
            lengths=None if self.sequence is None else self.sequence.compared,
            method=the_choice(self.method, ("auto", *METHODS)),
            chunk_size=kind.chunk_size_on(q.device.type) if self.chunk_size is None else int(self.chunk_size),
            gradients=tuple(
                torch.is_grad_enabled() and t is not None and t.requires_grad
                for t in (q, self.k, v, *self.rates.values(), g, initial)
            ),
        )

    def _find_tensor_fault(self, rank: int, place: str) -> Exception | None:
        """What is wrong with the kinds of the tensors, and with the shapes of q, k and v."""
        name, q, k, v = self.operation, self.q, self.k, self.v
        given = {"g": self.g, "initial_state": self.initial_state}
        for label, tensor in {**self.rates, **{label: x for label, x in given.items() if x is not None}}.items():
            if fault := find_tensor_fault(name, label, tensor, rank, DTYPES, _KINDS):
                return fault
            if tensor.device != q.device:
                return ValueError(f"{name}: {label} is on {tensor.device}, q on {q.device} {place}")
        if k.shape != q.shape:
            return ValueError(f"{name}: k {list(k.shape)} must have the shape of q {list(q.shape)} {place}")
        if min(q.shape[0], *q.shape[2:], *v.shape[2:]) < 1:
            return ValueError(f"{name}: only T may be zero, got q {list(q.shape)} and v {list(v.shape)} {place}")
        if v.shape[2] % q.shape[2]:
            return ValueError(f"{name}: {v.shape[2]} value heads are not a multiple of {q.shape[2]} heads {place}")
        return None

    def _find_value_fault(self, bounds: Bounds | None, place: str) -> Exception | None:
        """What is wrong with the values of g, and with the shape of the initial state."""
        name, g, initial = self.operation, self.g, self.initial_state
        if g is not None and g.device.type == "cpu" and tensors_are_real() and g.numel() and g.detach().max() > 0:
            return ValueError(f"{name}: g is the log of a decay and must not be positive, got {g.max():.3g} {place}")
        documents = self.q.shape[0] if bounds is None else len(bounds) - 1
        wanted = (documents, self.v.shape[2], self.q.shape[3], self.v.shape[3])
        if initial is not None and tuple(initial.shape) != wanted:
            return ValueError(f"{name}: initial_state must be {list(wanted)}, got {list(initial.shape)} {place}")
        return None

    def choose_backend(self, options: StateOptions) -> str:
        """Of the ``options`` that were read: "torch" or "triton"."""
        return choose_backend(self.backend, self.q, self.v, self._gates, options.chunk_size, options.max_chunk)

    @property
    def _gates(self) -> dict[str, Tensor | None]:
        return {**self.rates, "g": self.g}

    def _find_backend_fault(self, kind: type[StateOptions], place: str) -> Exception | None:
        if self.backend != "triton":
            return None
        size = self.chunk_size or kind.chunk_size_on(self.q.device.type)
        if (reason := find_triton_fault(self.q, self.v, self._gates, size, kind.max_chunk)) is None:
            return None
        return ValueError(f"{self.operation}: backend 'triton' {reason} {place}; backend='torch' takes it")

    def _find_method_fault(self, rank: int, place: str) -> Exception | None:
        name, size = self.operation, self.chunk_size
        if fault := find_choice_fault(name, "method", self.method, rank, ("auto", *METHODS)):
            return fault
        if size is None:
            return None
        if fault := find_integer_fault(name, "chunk_size", size, rank):
            return fault
        if size < 1 or size & (size - 1):
            return ValueError(f"{name}: chunk_size must be a power of two, got {size} {place}")
        return None


def shapes_of(
    q: Tensor, k: Tensor, v: Tensor, *rates: Tensor | None, output_final_state: bool = False,
    cu_seqlens: Any = None, sequence: Sequence | None = None, **others: Any,
) -> list[Shape]:  # fmt: skip
    """Of o and the final states, for the compiler."""
    o = v.shape, v.dtype
    if output_final_state is not True or not q.ndim == v.ndim == 4:
        return [o]
    states = count_documents(q.shape[0], cu_seqlens, sequence), v.shape[2], q.shape[3], v.shape[3]
    return [o, (states, torch.promote_types(q.dtype, torch.float32))]


def with_state(outs: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """The output, and the final states if they were asked for."""
    return outs[0], outs[1] if len(outs) > 1 else None


def choose_backend(
    backend: str, q: Tensor, v: Tensor, others: Mapping[str, Tensor | None], chunk_size: int, max_chunk: int = MAX_CHUNK
) -> str:
    """ "torch" or "triton": auto takes Triton for CUDA tensors where it can."""
    if backend != "auto":
        return backend
    return "triton" if q.is_cuda and find_triton_fault(q, v, others, chunk_size, max_chunk) is None else "torch"


def find_triton_fault(
    q: Tensor, v: Tensor, others: Mapping[str, Tensor | None], chunk_size: int, max_chunk: int = MAX_CHUNK
) -> str | None:
    """Why Triton's kernels cannot take these inputs, ``others`` (g, beta) among them; None if they can."""
    if q.device.type not in ("cuda", "meta") and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs CUDA tensors (or TRITON_INTERPRET=1, set before the start), got {q.device.type}"
    if q.device.type != "meta" and importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed"
    for label, x in {"q, k, v": q, **others}.items():
        if x is not None and x.dtype not in _FUSED_DTYPES:
            return f"takes bfloat16, float16 or float32, got {label} in {str(x.dtype).removeprefix('torch.')}"
    if max(q.shape[-1], v.shape[-1]) > MAX_DIM:
        return f"takes K and V up to {MAX_DIM}, got {q.shape[-1]} and {v.shape[-1]}"
    if q.shape[0] * v.shape[2] > MAX_CELLS:
        return f"takes batches times value heads up to {MAX_CELLS:,}, got {q.shape[0]} x {v.shape[2]}"
    if chunk_size > max_chunk:
        return f"takes chunk_size up to {max_chunk}, got {chunk_size}"
    return None
