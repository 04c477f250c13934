"""An operation over ranks as torch sees it, whatever is set around the call: autograd, the compiler, modes.

`RankFunction` is for autograd, `eager` for the compiler. State and cross-rank arithmetic keep their dtype, even
inside ``torch.autocast``. What is kept from one call to the next is ordinary: a tensor made under inference mode cannot
be written to in a training step, and one made under a FakeTensorMode has no memory, nor can a call there use
an ordinary one. So what is kept is made outside the first, and the second neither keeps nor uses any.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from weft.comm.axis import Axis
from weft.comm.device import outside_autocast, runs_behind, stream_number

P = ParamSpec("P")
T = TypeVar("T")

_MODES = torch._C._TorchDispatchModeKey
_TRACING = (_MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL)
SPARE_BYTES = 64 << 20  # of borrowed memory that a thread keeps


def tensors_are_real() -> bool:
    """Whether tensors have values now, and what is made may be kept.

    >>> tensors_are_real()
    True
    """
    return all(torch._C._get_dispatch_mode(mode) is None for mode in _TRACING)


def ordinary() -> Any:
    """A context in which tensors that will be kept are made: outside inference mode."""
    return torch.inference_mode(False)


def keep_tensors(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """``functools.lru_cache`` for a function that makes tensors, on the devices among its arguments.

    On a device that runs behind the host every stream has tensors of its own: nothing orders another one after them.
    """

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        def make_ordinary(streams: Sequence[int], *args: P.args, **keywords: P.kwargs) -> T:
            with ordinary():
                return make(*args, **keywords)

        kept: Callable[..., T] = functools.lru_cache(maxsize)(make_ordinary)

        @functools.wraps(make)
        def get(*args: P.args, **keywords: P.kwargs) -> T:
            if not tensors_are_real():
                return make(*args, **keywords)
            devices = [one for one in (*args, *keywords.values()) if isinstance(one, torch.device)]
            return kept(tuple(stream_number(one) for one in devices), *args, **keywords)

        return get

    return decorate


class ReusedMemory(threading.local):
    """Memory a thread reuses: buffers by name, and those that were borrowed and given back.

    Fresh memory comes from the system page by page, and for buffers written once that costs as much as a product. What
    is in a named buffer does not outlive the work on it, so calls in flight in one thread can share them.
    """

    def __init__(self) -> None:
        self._named: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._spare: list[Tensor] = []

    def buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A dense buffer; what it held under the same name is lost."""
        size, key = math.prod(shape), (name, dtype, device)
        held = self._named.get(key)
        if held is None or held.numel() < size:
            with ordinary():
                held = self._named[key] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)

    def borrow(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that lasts until it is given back."""
        for i, held in enumerate(self._spare):
            if held.shape == shape and held.dtype == dtype and held.device == device:
                return self._spare.pop(i)
        with ordinary():
            return torch.empty(shape, dtype=dtype, device=device)

    def give_back(self, borrowed: Sequence[Tensor]) -> None:
        self._spare.extend(borrowed)
        while sum(one.nbytes for one in self._spare) > SPARE_BYTES:
            self._spare.pop(0)


_memory = ReusedMemory()


def reused_memory(device: torch.device) -> ReusedMemory:
    """This thread's. A device's allocator keeps memory by itself, for each stream; there it is new each time."""
    return _memory if tensors_are_real() and not runs_behind(device) else ReusedMemory()


@contextmanager
def outside_modes(weight: Tensor) -> Iterator[None]:
    """No gradients, no inference mode, no autocast and, if ``weight`` is real, no fake tensors."""
    with ExitStack() as stack:
        stack.enter_context(ordinary())
        stack.enter_context(torch.no_grad())  # after it: leaving inference mode switches gradients on
        stack.enter_context(outside_autocast())
        if not isinstance(weight, FakeTensor):
            stack.enter_context(unset_fake_temporarily())
        yield


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
        if _instead.run is not None:
            return _instead.run(cls, args)
        return super().apply(*args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{type(ctx)._forward_cls.operation}: forward-mode derivatives are not supported; use the backward"
        )


class _Instead(threading.local):
    run: Callable[[type[RankFunction], Sequence[Any]], Any] | None = None


_instead = _Instead()


@contextmanager
def applied_by(run: Callable[[type[RankFunction], Sequence[Any]], Any]) -> Iterator[None]:
    """``apply(*args)`` of every `RankFunction` is ``run(function, args)`` in this thread, where autograd is no part."""
    before, _instead.run = _instead.run, run
    try:
        yield
    finally:
        _instead.run = before


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
        axis.begin(f"{operation}.backward.backward", fault=second_derivatives(operation))


def second_derivatives(operation: str) -> NotImplementedError:
    """The error of who differentiates a gradient that has no derivatives."""
    return NotImplementedError(
        f"{operation}: second derivatives are not supported; detach its gradients, or leave out create_graph=True"
    )


def eager(operation: Callable[P, T], traced: Callable[P, T] | None = None) -> Callable[P, T]:
    """Let ``operation``, which numbers its calls and talks to other ranks, run outside torch.compile.

    A model that calls it has a graph break there, or what ``traced`` does in the place of it while a model is traced.
    Like ``torch.compiler.disable``, but without importing the compiler, which takes seconds, where nobody compiles.
    """

    disabled: list[Callable[P, T]] = []

    @functools.wraps(operation)
    def outside(*args: P.args, **keywords: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return operation(*args, **keywords)
        if not disabled:
            disabled.append(torch.compiler.disable(operation))
        return disabled[0](*args, **keywords)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark torch.compiler.disable leaves
    if traced is None:
        return outside

    @functools.wraps(operation)
    def run(*args: P.args, **keywords: P.kwargs) -> T:
        return traced(*args, **keywords) if torch.compiler.is_dynamo_compiling() else outside(*args, **keywords)

    return run
