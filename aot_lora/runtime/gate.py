"""Who may touch the banks when: many readers side by side, or one writer alone."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager


class Gate:
    """Lets many readers through, or one writer; a writer that waits holds new readers back.

    A thread that reads may read again inside; a writer may not read, and a reader may not write.
    What is guarded is short: fetching arrays and dispatching calls, never the device's work.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()  # held by a writer, for an instant by a reader that enters
        self._inside = 0
        self._left = threading.Condition(threading.Lock())
        self._mine = threading.local()

    def enter(self) -> None:
        """Begins to read."""
        depth = getattr(self._mine, "depth", 0)
        if not depth:
            with self._door, self._left:
                self._inside += 1
        self._mine.depth = depth + 1

    def leave(self) -> None:
        """Ends what `enter` began."""
        self._mine.depth -= 1
        if not self._mine.depth:
            with self._left:
                self._inside -= 1
                if not self._inside:
                    self._left.notify_all()

    @contextmanager
    def reading(self) -> Generator[None]:
        """`enter` and `leave` around a block."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def check_may_write(self) -> None:
        """Refuses a thread that reads: it would wait for itself.

        Raises:
          RuntimeError: it does.
        """
        if getattr(self._mine, "depth", 0):
            raise RuntimeError("a thread that reads the banks cannot write them")

    @contextmanager
    def writing(self) -> Generator[None]:
        """Waits for the readers to leave, and holds new ones back inside the block."""
        self.check_may_write()
        with self._door:
            with self._left:
                self._left.wait_for(lambda: not self._inside)
            yield
