"""An operation over ranks as torch sees it: `RankFunction` for autograd, `eager` for the compiler."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor

from weft.comm.axis import Axis
from weft.comm.modes import outside_autocast

P = ParamSpec("P")
T = TypeVar("T")


class RankFunction(torch.autograd.Function):
    """An operation over ranks, as autograd sees it.

    Its forward and backward run outside autocast, whatever is set around them: states and sums over ranks keep their
    dtype. Its gradients can be differentiated again if its backward is made of such operations (``any_order``);
    otherwise whoever tries gets the same worded error on every rank, not numbers with a part missing. For that, a
    forward sets ``ctx.axis`` and saves every tensor it may have to give a gradient for, or its `tie`.
    """

    operation: ClassVar[str]
    any_order: ClassVar[bool] = False

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        backward = cls.backward if cls.any_order else _only_once(cls.operation, cls.backward)
        cls.forward = staticmethod(outside_autocast()(cls.forward))  # type: ignore[method-assign]
        cls.backward = staticmethod(outside_autocast()(backward))  # type: ignore[method-assign]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{cls.operation}: torch.func (grad, vjp, jvp, vmap, ...) is not supported over ranks; use "
                f"torch.autograd and a batch dimension"
            )
        return super().apply(*args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{type(ctx)._forward_cls.operation}: forward-mode derivatives are not supported; use the backward"
        )


def tie(x: Tensor) -> Tensor:
    """An empty tensor that hangs on ``x`` in the graph and holds nothing of its memory."""
    with torch.enable_grad():
        return x[:0].clone()


def _only_once(operation: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward`` without a graph. Where one is asked for, its gradients refuse to be differentiated."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found: Sequence[Tensor | None] = backward(ctx, *grads)
        behind = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
        return _LastDerivative.apply(operation, ctx.axis, len(found), *found, *behind)

    return run


class _LastDerivative(torch.autograd.Function):
    """Gradients as they are, hung on what they depend on, for whoever wants to differentiate them."""

    @staticmethod
    def forward(ctx: Any, operation: str, axis: Axis, count: int, *tensors: Tensor | None) -> Any:
        ctx.how = operation, axis
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        operation, axis = ctx.how
        fault = NotImplementedError(
            f"{operation}: second derivatives are not supported; detach its gradients, or leave out create_graph=True"
        )
        axis.begin(f"{operation}.backward.backward", fault=fault)


def eager(operation: Callable[P, T]) -> Callable[P, T]:
    """Let ``operation``, which numbers its calls and talks to other ranks, run outside torch.compile.

    A model that calls it has a graph break there.
    Like ``torch.compiler.disable``, but without importing the compiler, which takes seconds, where nobody compiles.
    """

    outside: list[Callable[P, T]] = []

    @functools.wraps(operation)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return operation(*args, **kwargs)
        if not outside:
            outside.append(torch.compiler.disable(operation))
        return outside[0](*args, **kwargs)

    run._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark torch.compiler.disable leaves
    return run
