"""What runs where a compiled graph calls an operation: two operators, `torch.ops.weft.call` and `call_backward`.

The first calls the plain function, so that arguments are read, calls numbered and errors raised as without a compiler.
Autograd has no part in a graph that runs. What `RankFunction` leaves for its backward goes from operator to operator
in a `Kept`, which is an output of the first, so it lives as long as the graph of that step. Tensors the compiler knows
of (inputs, outputs) are not in there: it may write over their memory, or compute them anew, and gives them to the
backward itself.

Both operators have an effect: they are neither moved past each other, nor left out, nor run again for activation
checkpointing, so that all ranks that run one program make the same calls, whatever their compilers find best.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import with_effects
from torch._library.effects import EffectType
from torch._library.opaque_object import get_opaque_type_name
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from weft.comm.function import RankFunction, applied_by, second_derivatives
from weft.comm.opaque import Opaque


@dataclass(frozen=True)
class Operation:
    """A traceable operation: the function, and whether its backward wants the outputs."""

    run: Callable[..., Any]
    keeps_outputs: bool


operations: dict[str, Operation] = {}  # by name; `compiled.traceable` enters them


@functools.lru_cache(maxsize=1024)
def _code_of(operation: str, arguments: str) -> CodeType:
    return compile(f"{operation}({arguments})", "<compiled graph>", "eval")


class _Context:
    """What autograd's ctx is to a Function."""

    axis: Any
    how: Any

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: Sequence[Any] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """The graph was traced without asking."""

    def set_materialize_grads(self, value: bool) -> None:
        """In a graph they always are."""


class Kept(Opaque):
    """What one forward leaves for its backward: the Function, its context, and where its tensors are to be had."""

    def __init__(self) -> None:
        self.operation = ""
        self._function: type[RankFunction] | None = None
        self._ctx: _Context | None = None
        self._args: Sequence[Any] = ()
        self._results: Sequence[Tensor | None] = ()
        self._places: tuple[list[int], list[int]] = [], []  # of the call's tensors among the arguments, and of results

    def apply(self, function: type[RankFunction], args: Sequence[Any]) -> Any:
        """As ``function.apply(*args)``."""
        assert self._function is None, "a traceable operation applies one Function"
        needs = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
        self.operation, self._function, self._ctx, self._args = function.operation, function, _Context(needs), args
        with torch.no_grad():
            self._results = function.forward(self._ctx, *args)
        return self._results

    def trim(self, tensors: Sequence[Tensor], outs: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        """Let go of what the compiler has. ``given``: what it will hand to the backward."""
        if self._ctx is None or not any(self._ctx.needs_input_grad):
            self.release()
            return
        self._places = [_find(x, self._args) for x in tensors], [_find(x, self._results) for x in outs]
        lost = [x for x, place in zip(tensors, self._places[0], strict=True) if place < 0 and x.requires_grad]
        assert not lost and -1 not in self._places[1], "a traceable operation does nothing around its Function"
        saved: list[Tensor | int | None] = []
        for x in self._ctx.saved_tensors:
            place = -1 if x is None else _find(x, given)
            saved.append(x if x is None else place if place >= 0 else _apart(x, [*tensors, *outs]))
        self._ctx.saved_tensors = saved
        self._args, self._results = (), [None] * len(self._results)

    def backward(self, grads: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the call's tensors, None where there is none."""
        assert self._function is not None and self._ctx is not None, "torch refuses a second backward before this"
        ctx, (tensors, outs) = copy.copy(self._ctx), self._places
        ctx.saved_tensors = tuple(given[x] if isinstance(x, int) else x for x in self._ctx.saved_tensors)
        of_results: list[Tensor | None] = [None] * len(self._results)
        for place, grad in zip(outs, grads, strict=True):
            of_results[place] = grad
        found = self._function.backward(ctx, *of_results)
        return [found[place] if place >= 0 else None for place in tensors]

    def release(self) -> None:
        self._function = self._ctx = None
        self._args = self._results = ()


def _find(x: Tensor, among: Sequence[Any]) -> int:
    return next((place for place, one in enumerate(among) if one is x), -1)


def _apart(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """``x``, or a copy if it lies in the memory of another one."""
    memory = x.untyped_storage().data_ptr()
    return x.clone() if memory and any(one.untyped_storage().data_ptr() == memory for one in others) else x


def _own(found: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Tensors as an operator must return them: each in memory of its own, as the compiler expects."""
    made: list[Tensor] = []
    for x in found:
        made.append(_apart(x.contiguous(), [*others, *made]))
    return made


def _call(
    operation: str, arguments: str, tensors: list[Tensor], integers: list[int], floats: list[float],
    objects: list[Any], needs: list[bool], sizes: list[int], dims: list[int], dtypes: list[torch.dtype],
) -> tuple[list[Tensor], Kept]:  # fmt: skip
    """The tensors that ``operation(arguments)`` gives, and what it leaves. The text speaks of the lists by name.

    ``needs``: which tensors want gradients. ``sizes``, ``dims`` and ``dtypes`` say what the compiler expects: the sizes
    of all outputs in one list, how many of them each has, its dtype.
    """
    kept, known = Kept(), operations[operation]
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    names = {
        operation: known.run, "tensors": leaves, "integers": integers, "floats": floats, "objects": objects,
        "torch": torch,
    }  # fmt: skip
    with torch.set_grad_enabled(any(needs)), applied_by(kept.apply):
        found = eval(_code_of(operation, arguments), {"__builtins__": {}}, names)
    outs = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    assert [size for x in outs for size in x.shape] == sizes, f"{operation}: the compiler expects other shapes"
    kept.trim(leaves, outs, [*leaves, *outs] if known.keeps_outputs else leaves)
    return _own(outs, tensors), kept


def _fake_call(
    operation: str, arguments: str, tensors: list[Tensor], integers: list[int], floats: list[float],
    objects: list[Any], needs: list[bool], sizes: list[int], dims: list[int], dtypes: list[torch.dtype],
) -> tuple[list[Tensor], Kept]:  # fmt: skip
    made, at = [], 0
    for count, dtype in zip(dims, dtypes, strict=True):
        made.append(tensors[0].new_empty(sizes[at : at + count], dtype=dtype))
        at += count
    return made, Kept()


def _call_backward(kept: Kept, grads: list[Tensor], given: list[Tensor], needs: list[bool]) -> list[Tensor]:
    """The gradients of the tensors that need them. ``given``: the call's tensors, and its outputs if they are kept."""
    found = kept.backward(grads, given)
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        kept.release()
    wanted = [(x, grad) for x, grad, need in zip(given, found, needs, strict=False) if need]
    made = [torch.zeros_like(x) if grad is None else grad.to(x.dtype) for x, grad in wanted]
    return _own(made, [*grads, *given])


def _fake_backward(kept: Kept, grads: list[Tensor], given: list[Tensor], needs: list[bool]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, need in zip(given, needs, strict=False) if need]


def _set_up(ctx: Any, inputs: Sequence[Any], output: tuple[list[Tensor], Kept]) -> None:
    operation, _, tensors, *_ = inputs
    outs, ctx.kept = output
    ctx.needs = inputs[6]
    ctx.empty = [index for index, value in enumerate(inputs) if value == []]
    ctx.save_for_backward(*tensors, *(outs if operations[operation].keeps_outputs else ()))
    _keep_from_recomputation()


def _keep_from_recomputation() -> None:
    """In a checkpointed region the compiler marks all it traces as to be computed again. Take that back here."""
    mode = get_proxy_mode()
    made: list[torch.fx.Node] = []  # the operator, and what takes its results apart
    for node in () if mode is None else reversed(mode.tracer.graph.nodes):
        made.append(node)
        if node.target is with_effects and node.args[1] is torch.ops.weft.call.default:
            for one in made:
                one.meta.pop("recompute", None)
            break


def _backward(ctx: Any, grads: list[Tensor], _: None) -> tuple[Any, ...]:
    found = iter(torch.ops.weft.call_backward(ctx.kept, grads, list(ctx.saved_tensors), ctx.needs))
    back: list[Any] = [[] if index in ctx.empty else None for index in range(_ARGUMENTS)]  # as torch wants empty lists
    back[2] = [next(found) if need else None for need in ctx.needs]
    return tuple(back)


def _set_up_second(ctx: Any, inputs: Sequence[Any], output: list[Tensor]) -> None:
    ctx.operation = inputs[0].operation


def _refuse_second(ctx: Any, grads: list[Tensor]) -> None:
    raise second_derivatives(ctx.operation)


_LIST = f"{get_opaque_type_name(Opaque)}[]"
_SCHEMAS = {
    "call": f"(str operation, str arguments, Tensor[] tensors, SymInt[] integers, float[] floats, {_LIST} objects, "
    f"bool[] needs, SymInt[] sizes, int[] dims, ScalarType[] dtypes) -> (Tensor[], {get_opaque_type_name(Kept)})",
    "call_backward": f"({get_opaque_type_name(Kept)} kept, Tensor[] grads, Tensor[] given, bool[] needs) -> Tensor[]",
}
_ARGUMENTS = 10  # of call


def _define() -> torch.library.Library:
    library = torch.library.Library("weft", "FRAGMENT")
    for name, run, fake in (("call", _call, _fake_call), ("call_backward", _call_backward, _fake_backward)):
        library.define(name + _SCHEMAS[name], tags=(torch.Tag.cudagraph_unsafe, torch.Tag.pt2_compliant_tag))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"weft::{name}", fake, lib=library)
        library._register_effectful_op(f"weft::{name}", EffectType.ORDERED)
    torch.library.register_autograd("weft::call", _backward, setup_context=_set_up, lib=library)
    torch.library.register_autograd("weft::call_backward", _refuse_second, setup_context=_set_up_second, lib=library)
    return library


_library = _define()  # operators live as long as this; the compiler must find them when it traces
