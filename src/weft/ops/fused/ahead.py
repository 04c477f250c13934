"""Compile the kernels ahead of time, for GPUs that are not there: registers, spills, shared memory, matrix products.

What is compiled are an operation's launches, made on meta tensors: the same blocks, warps, stages and constants.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from weft.ops.fused.launch import Launch
from weft.ops.fused.operators import launch_of

_TYPES = {
    torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32",
}  # fmt: skip
_MATRIX = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")


@dataclass(frozen=True)
class Shape:
    """One class of inputs. ``gate_dtype`` is that of g; a batch, heads and tokens by which classes differ."""

    gate: str
    keys: int = 128
    values: int = 128
    chunk: int = 64
    dtype: torch.dtype = torch.bfloat16
    gate_dtype: torch.dtype = torch.float32
    heads: int = 16
    tokens: int = 8192


@dataclass(frozen=True)
class Counted:
    """A launch with what its operator counts: the bytes of its tensors, and the FLOPs of its products."""

    name: str
    launch: Launch
    size: int
    flops: int


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a launch; ``matrix`` are the instructions in its PTX that are matrix products."""

    registers: int
    spilled: int
    shared: int
    matrix: int
    ttir: str
    ptx: str


class Collector(TorchDispatchMode):
    """Collects the operators of kernels, instead of running them; ``found`` has them by phase, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Counted]] = {}
        self._launched: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "weft":
            self._launched.append((func._overloadpacket.__name__, args))
            return None
        return func(*args, **(kwargs or {}))

    def end(self, phase: str) -> None:
        """What was launched since the end before belongs to ``phase``."""
        self.found[phase] = [
            Counted(name, launch_of(name, args), _bytes(args), _flops(name, args)) for name, args in self._launched
        ]
        self._launched.clear()


def collect_phases(
    make_forward: Callable[[], Any], make_backward: Callable[[Any], Any], state: Tensor
) -> dict[str, list[Counted]]:
    """All launches of a forward and a backward, in order, by phase; ``state`` is what arrives in both."""
    with Collector() as collect:
        forward = make_forward()
        collect.end("forward")
        forward.intra()
        collect.end("forward.intra")
        forward.finish(state)
        collect.end("forward.finish")
        backward = make_backward(forward)
        collect.end("backward")
        backward.intra()
        collect.end("backward.intra")
        backward.finish(state)
        collect.end("backward.finish")
    return collect.found


def empty_tokens(shape: Shape, dim: int) -> Tensor:
    """q, k, v or do of the class, on meta."""
    return torch.empty(1, shape.tokens, shape.heads, dim, dtype=shape.dtype, device="meta")


def empty_gate(shape: Shape) -> Tensor | None:
    """A gate of the class, on meta."""
    dims = {"constant": (shape.heads,), "scalar": (1, shape.tokens, shape.heads)}
    dims["vector"] = (1, shape.tokens, shape.heads, shape.keys)
    return None if shape.gate == "none" else torch.empty(dims[shape.gate], dtype=shape.gate_dtype, device="meta")


def distinct(phases: Mapping[str, Sequence[Counted]]) -> list[Counted]:
    """What there is to compile: a kernel of the same kind and constants comes once."""
    found: dict[Any, Counted] = {}
    for one in (one for phase in phases.values() for one in phase):
        found.setdefault((one.name, tuple(sorted(one.launch.constants.items()))), one)
    return list(found.values())


def _bytes(args: tuple[Any, ...]) -> int:
    tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
    return sum(x.numel() * x.element_size() for x in tensors)


def _flops(name: str, args: tuple[Any, ...]) -> int:
    return flop_registry[getattr(torch.ops.weft, name)](*args)


def compile_for(made: Launch, capability: int) -> Compiled:
    """Compile a launch for a compute capability (80, 90, 100) and look at the result."""
    if not isinstance(made.kernel, triton.JITFunction):
        raise ValueError("kernels cannot be compiled under TRITON_INTERPRET=1; start again without it")
    signature, constants, attributes = _specialise(made)
    source = ASTSource(made.kernel, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=made.options)
    registers, spilled = _resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    return Compiled(registers, spilled, kernel.metadata.shared, len(_MATRIX.findall(ptx)), str(kernel.asm["ttir"]), ptx)


def _specialise(made: Launch) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """Types, constants and alignment of the arguments, as Triton finds them at a launch."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(made.constants)
    attributes: dict[Any, Any] = {}
    for index, name in enumerate(made.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        value = made.arguments[index]
        if isinstance(value, Tensor):
            signature[name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[name] = "fp32"
            continue
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
            continue
        else:
            signature[name] = "i32" if value < 2**31 else "i64"
        if isinstance(value, Tensor) or value % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and the bytes of its stack: these kernels have no arrays, so all of it is spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"  # in every version's wheel
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say what a kernel uses: {said!r}")
    return int(found[1]), int(found[2])
