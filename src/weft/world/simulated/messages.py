"""Messages as NCCL's: one stream for each communicator of a rank, and a wait that orders streams and not the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.world.simulated.memory import access, record_stream
from weft.world.simulated.places import place
from weft.world.simulated.streams import Event, Stream, current_stream


class Work:
    """A group of messages under way. Its buffers are held until a wait; without one, until it is over."""

    def __init__(self, stream: Stream, tensors: Sequence[torch.Tensor]) -> None:
        self._stream, self._tensors = stream, tensors
        self._event: Event = stream.record_event()

    def wait(self) -> None:
        """What the current stream is given from now on comes after the messages. The host goes on."""
        current_stream().wait_event(self._event)
        self._tensors = ()

    def is_completed(self) -> bool:
        """As `Event.query`: not at first."""
        return self._event.query()

    def __del__(self) -> None:
        for tensor in self._tensors:
            record_stream(tensor, self._stream)


class Communicator:
    """The messages of this thread's rank over one group of ranks."""

    def __init__(self) -> None:
        self.stream = Stream()

    def issue(self, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]) -> Work:
        """Messages that read ``sends`` and write ``receives`` on the communicator's stream, after the current stream.

        Only the order is simulated: whoever moves the bytes does so through `host_alias`, between this and the wait.
        """
        tensors = [*sends, *receives]
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(
                    f"a message must be contiguous, got sizes {list(tensor.shape)} and strides {tensor.stride()}"
                )
        self.stream.wait_stream(current_stream())
        count, where = self.stream.tick(), place()
        for tensor in sends:
            access(tensor, False, self.stream, count, where, "send")
        for tensor in receives:
            access(tensor, True, self.stream, count, where, "receive")
        return Work(self.stream, tensors)
