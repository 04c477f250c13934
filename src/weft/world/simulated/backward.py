"""A backward on the simulated device: every node runs on the stream of its forward, errors in hooks come out as errors.

Private names of torch: ``_engine_run_backward``, ``_acc.DeviceGuard``, ``_current_autograd_node``, ``_sequence_nr``.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable
from typing import Any

import torch

from weft.world.simulated.streams import Stream, backwards, current_stream, this_thread

_C: Any = torch._C
_LAST_NUMBER = 2**62  # an AccumulateGrad has a number beyond it
# Found once: with an error pending, asking for an attribute of ctypes is an error in itself.
_raise_pending = ctypes.pythonapi.PyErr_Occurred


class _Backward:
    """A backward that runs: the streams of the forward by the numbers of nodes, and the streams used so far."""

    __slots__ = ("caller", "error", "switches", "used")

    def __init__(self, switches: list[tuple[int, Stream]], caller: Stream) -> None:
        self.switches, self.caller, self.used = switches, caller, [caller]
        self.error: BaseException | None = None  # of a hook: see `DeviceGuard`

    def stream_of_node(self) -> Stream:
        """The stream of the node's forward, after all that came before in this backward.

        The engine lets it wait only for the nodes it needs. That cannot be followed from here: where two gradients of
        one input are added, between nodes, the engine waits for both on a stream of its choice and tells nobody.
        """
        stream, node = self.caller, _C._current_autograd_node()
        if node is not None and self.switches and 0 <= (number := node._sequence_nr()) < _LAST_NUMBER:
            at = bisect.bisect_right(self.switches, number, key=lambda switch: switch[0])
            stream = self.switches[at - 1][1] if at else stream.rank.default_stream
        if self.used[-1] is not stream:
            stream.wait_stream(self.used[-1])
            self.used.append(stream)
        return stream


def follow_forward(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``_engine_run_backward`` such that nodes run on the streams of their forwards."""

    def run(*args: Any, **kwargs: Any) -> Any:
        stream, before = current_stream(), this_thread.backward
        backward = this_thread.backward = _Backward(this_thread.switches, stream)
        backwards.append(backward)
        try:
            with torch.autograd.set_multithreading_enabled(this_thread.rank is None):
                return run_backward(*args, **kwargs)
        except SystemError:  # an error was raised, and is no longer known
            if backward.error is None:
                raise
            raise backward.error from None
        finally:
            this_thread.backward = before
            backwards.remove(backward)
            for other in set(backward.used):
                stream.wait_stream(other)

    return run


class DeviceGuard(_C._acc.DeviceGuard):
    """What torch asks, of this backend alone in Python, whenever it goes to a stream and comes back from it.

    The engine comes back, too, when a hook has raised, and the error is then still pending in the interpreter: a
    function that returns so is an error in itself, which nobody can catch there. So it is taken here; `run` raises it.
    """

    def type_(self) -> Any:
        try:
            _raise_pending()
        except BaseException as error:
            running: Any = this_thread.backward or backwards[-1]
            running.error = error
        return _C._autograd.DeviceType.PrivateUse1
