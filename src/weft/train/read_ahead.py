"""`ReadAhead`: an iterator whose next items are made by a thread before they are asked for."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")
_END_OF_THREAD = 10.0  # seconds that `close` waits for an item that is being made


class ReadAhead(Generic[Item]):
    """The items of ``source`` in their order, up to ``count`` of them made ahead.

    An error of ``source`` is raised where its item would have come, and again at every later call. The thread ends with
    the source, by `close`, when nobody holds this object any more, and when Python ends.

    >>> list(ReadAhead(iter("weft"), 2))
    ['w', 'e', 'f', 't']
    """

    def __init__(self, source: Iterator[Item], count: int) -> None:
        if count < 1:
            raise ValueError(f"ReadAhead: count must be at least 1, got {count}")
        self._shelf = _Shelf[Item](count)
        thread = threading.Thread(target=self._shelf.fill, args=(source,), name="weft-read-ahead", daemon=True)
        # Also at exit: a daemon thread that is stopped within an operator of torch takes the process with it.
        self._close = weakref.finalize(self, _close, self._shelf, thread)
        thread.start()

    def __iter__(self) -> ReadAhead[Item]:
        return self

    def __next__(self) -> Item:
        return self._shelf.get(take=True)

    def peek(self) -> Item:
        """The next item, which stays the next. StopIteration after the last."""
        return self._shelf.get(take=False)

    def close(self) -> None:
        """End the thread; what was made ahead is dropped. May be called twice."""
        self._close()


class _Shelf(Generic[Item]):
    """What the thread and its reader share. It does not know the reader, so that the reader can be forgotten."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._items: deque[Item] = deque()
        self._end: BaseException | None = None  # what is raised after the items
        self._changed = threading.Condition()

    def fill(self, source: Iterator[Item]) -> None:
        try:
            for item in source:
                with self._changed:
                    if self._end is None:  # it may have been closed while the item was made
                        self._items.append(item)
                        self._changed.notify_all()
                        self._changed.wait_for(lambda: len(self._items) < self._count or self._end is not None)
                    if self._end is not None:
                        return
            self.end(StopIteration())
        except BaseException as error:  # it is the reader's
            self.end(error)

    def end(self, why: BaseException) -> None:
        with self._changed:
            self._end = self._end or why
            self._changed.notify_all()

    def get(self, take: bool) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._end is not None)
            if not self._items:
                assert self._end is not None
                raise self._end
            if not take:
                return self._items[0]
            self._changed.notify_all()
            return self._items.popleft()

    def drop(self) -> None:
        with self._changed:
            self._items.clear()
            self._end = RuntimeError("ReadAhead: closed; nothing can be read any more")
            self._changed.notify_all()


def _close(shelf: _Shelf[Item], thread: threading.Thread) -> None:
    shelf.drop()
    if thread is not threading.current_thread():  # the last reference may end anywhere
        thread.join(_END_OF_THREAD)
