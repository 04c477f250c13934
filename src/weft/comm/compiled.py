"""An operation over ranks in a compiled model: one operator of the graph, that the compiler does not look into.

Outside of torch.compile a `traceable` operation stays the plain function. While a model is traced, its call is written
down as an operator, `torch.ops.weft.call`: tensors and numbers as its inputs, groups and sequences as opaque ones, all
else as text. Nothing is checked, numbered or sent then. What happens when the graph runs is in `graph_call`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from weft.comm.function import eager
from weft.comm.graph_call import Operation, operations
from weft.comm.opaque import Opaque

P = ParamSpec("P")
T = TypeVar("T")
Shape = tuple[Sequence[int], torch.dtype]  # of an output

_PLAIN = (Tensor, torch.nn.Parameter)


def traceable(
    shapes: Callable[..., list[Shape]], arrange: Callable[[list[Tensor]], Any], keeps_outputs: bool = False
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let an operation be part of a compiled graph. It applies one `RankFunction`, to the tensors it was given.

    ``shapes`` gets the operation's arguments, whatever they are, and says what comes out; it is traced. ``arrange``
    makes what the operation returns of the tensors that came out. ``keeps_outputs``: they are saved for the backward.
    """

    def decorate(operation: Callable[P, T]) -> Callable[P, T]:
        name, outside = operation.__name__, eager(operation)
        operations[name] = Operation(outside, keeps_outputs)

        def write(*args: P.args, **keywords: P.kwargs) -> T:
            call = _WrittenCall()
            words = [call.write(value) for value in args]
            words += [f"{key}={call.write(value)}" for key, value in keywords.items()]
            if not (call.tensors and call.is_whole):
                return outside(*args, **keywords)  # a graph break; what is wrong is said there
            made = shapes(*args, **keywords)
            outs, _ = torch.ops.weft.call(
                name,
                ", ".join(words),
                call.tensors,
                call.integers,
                call.floats,
                call.objects,
                [torch.is_grad_enabled() and x.requires_grad for x in call.tensors],
                [size for shape, _ in made for size in shape],
                [len(shape) for shape, _ in made],
                [dtype for _, dtype in made],
            )
            return arrange(outs)

        return eager(operation, traced=write)

    return decorate


class _WrittenCall:
    """Arguments of a call as text, and the lists of what it refers to. Used while a model is traced."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.integers: list[int] = []  # not in the text, where another number would be another graph
        self.floats: list[float] = []
        self.objects: list[Any] = []
        self.is_whole = True  # whether everything could be written

    def write(self, value: object) -> str:
        if isinstance(value, Tensor):
            if type(value) not in _PLAIN:
                self.is_whole = False
            return _refer("tensors", self.tensors, value)
        # One by one: of opaque kinds in a tuple the compiler says no.
        if isinstance(value, Opaque) or isinstance(value, ProcessGroup) or isinstance(value, DeviceMesh):  # noqa: SIM101
            return _refer("objects", self.objects, value)
        kind = type(value)  # not of a subclass, which may be shown as something else
        if value is None or kind is bool or kind is str:
            return repr(value)
        if kind is int:
            return _refer("integers", self.integers, value)
        if kind is float:
            return _refer("floats", self.floats, value)
        if kind is torch.dtype:
            return str(value)
        if isinstance(value, tuple | list) and (kind is tuple or kind is list):
            words = "".join([self.write(one) + ", " for one in value])
            return f"({words})" if kind is tuple else f"[{words}]"
        self.is_whole = False
        return ""


def _refer(name: str, values: list[Any], value: object) -> str:
    values.append(value)
    return f"{name}[{len(values) - 1}]"
