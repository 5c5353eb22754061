"""What a server does about a batch that has no executable: refuse, pad up, or compile aside."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from aot_lora.config import Config
from aot_lora.errors import AotLoraError, OutOfPlanError
from aot_lora.plan import TargetSpec, WideAxis
from aot_lora.runtime.metrics import Metrics
from aot_lora.store.misses import bucket_for, record_miss, widened
from aot_lora.store.warm import WarmIdentity

_LOWEST_PRIORITY = 19  # of Unix: the compiler gets what serving leaves over


class Misses:
    """The policy `on_miss`.

    Under ``background`` a warmup runs in a process of its own, once for each plan that it could
    complete: the variants that are missing, and with them the buckets of larger batches, which are
    recorded in the store for every later warmup.

    Args:
      config: as opened.
      target: what this server runs.
      metrics: counts.
      switch: called in a thread of this class after a warmup, with the config and the buckets that
        were recorded; takes up what is new in the store.
    """

    def __init__(
        self,
        config: Config,
        target: TargetSpec,
        metrics: Metrics,
        switch: Callable[[Config], object],
    ) -> None:
        self._config = config
        self._target = target
        self._identity = self._identity_now() if config.on_miss == "background" else ""
        self._metrics = metrics
        self._switch = switch
        self._asked: set[tuple[WideAxis, int]] = set()
        self._requests: SimpleQueue[tuple[WideAxis, int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._warmup: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.failure = ""

    def planned(self) -> bool:
        """A point of the plan has no executable of its own: may a larger bucket serve it?"""
        self._metrics.misses.add()
        if self._config.on_miss == "background":
            self._ask("tokens", 0)
        return self._config.on_miss != "error"

    def beyond(self, axis: WideAxis, length: int, error: OutOfPlanError) -> None:
        """A batch does not fit the plan, as `error` says; it may if this axis is why.

        Raises:
          OutOfPlanError: a bucket that holds it is being compiled.
        """
        if self._config.on_miss != "background" or length < 0:
            return
        bucket = bucket_for(self._config.written_plan, axis, length)
        if bucket is None:
            return
        self._ask(axis, bucket)
        raise OutOfPlanError(
            error.problem,
            where=error.where,
            expected=error.expected,
            found=error.found,
            next_step=f"a bucket of {bucket} {axis} is recorded and compiled in the background; "
            + (
                f"that failed: {self.failure}" if self.failure else "send a smaller batch till then"
            ),
        )

    def close(self) -> None:
        """Ends the thread, and a warmup that is running: what it has stored stays valid."""
        with self._lock:
            self._closed = True
            warmup = self._warmup
        self._requests.put(None)
        if warmup is not None:
            with suppress(ProcessLookupError):
                os.killpg(warmup.pid, signal.SIGTERM)
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self.close)

    def _ask(self, axis: WideAxis, bucket: int) -> None:
        with self._lock:
            if (axis, bucket) in self._asked or self._closed:
                return
            self._asked.add((axis, bucket))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="aot-lora-background", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)
        self._requests.put((axis, bucket))

    def _work(self) -> None:
        tried: set[str] = set()
        for axis, bucket in iter(self._requests.get, None):
            try:
                if bucket:
                    record_miss(self._config, axis, bucket)
                    self._metrics.recorded_buckets.add()
                wide = widened(self._config)
                if wide.plan.digest() in tried:
                    continue
                tried.add(wide.plan.digest())
                problem = self._warm_up()
                if self._identity_now() != self._identity:
                    raise AotLoraError(
                        "the sources, or what is installed, are others than at start"
                    )
                self._switch(wide)
                if problem:
                    raise AotLoraError(problem)
                self._metrics.background_warmups.add()
            except Exception as error:  # whatever it is, the server goes on without
                self.failure = str(error) or type(error).__name__
                self._metrics.background_failures.add()

    def _identity_now(self) -> str:
        return WarmIdentity.of(self._config, self._target).identity

    def _warm_up(self) -> str:
        """Runs the warmup. Not in this process: its workers would import a script without guard.

        Returns:
          What it said last, where it failed.
        """
        config = self._config
        paths = [str(config.path), "--store", str(config.store_root)]
        with self._lock:
            if self._closed:
                return "the runtime was closed"
            self._warmup = process = subprocess.Popen(
                [sys.executable, "-m", "aot_lora", "warmup", *paths, "--jobs", "1"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
                start_new_session=True,  # Ctrl-C is the server's; and `close` ends the whole group
            )
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
        _, said = process.communicate()
        with self._lock:
            self._warmup = None
        return said.strip()[-1000:] if process.returncode else ""
