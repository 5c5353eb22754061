"""The worker processes: all cores, and one that dies takes only its own variant with it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, as_completed, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext
from typing import Any, TypeVar, cast

from pebble import ProcessExpired, ProcessPool

from aot_lora.errors import AotLoraError, ProgramError
from aot_lora.plan import Variant
from aot_lora.warmup.job import Job, start

Result = TypeVar("Result")

# A worker is replaced after this many variants, so that compilers that keep memory give it back.
_VARIANTS_PER_WORKER = 400


def run_all(
    job: Job, work: Callable[[Variant], Result], variants: list[Variant], workers: int
) -> Iterator[Result | AotLoraError]:
    """Works on variants in worker processes; results come in the order in which they are done.

    Args:
      job: what the workers are for.
      work: a function of a module, such as `job.build`.
      variants: what to call it with.
      workers: how many processes.

    Raises:
      AotLoraError: whatever concerns more than one variant, such as a full disk.
    """
    pool = ProcessPool(
        max_workers=workers,
        max_tasks=_VARIANTS_PER_WORKER,
        initializer=start,
        initargs=(job,),
        context=cast("Any", _Spawn()),
    )
    try:
        with _interrupts_held_back():
            futures: dict[Any, Variant] = {pool.schedule(work, args=(v,)): v for v in variants}
        while not wait(futures, timeout=1, return_when=FIRST_COMPLETED).done:
            if not pool.active:  # It tells only the futures that it has taken up by then.
                raise BrokenProcessPool("all workers ended")
        for future in as_completed(futures):
            try:
                yield future.result()
            except ProgramError as error:
                yield error
            except ProcessExpired as error:
                yield _died(futures[future], error)
        pool.close()
    except BrokenProcessPool as error:
        raise AotLoraError(
            "the worker processes ended before they took any work",
            found=str(error),
            next_step="see above for what they said; what a Python start runs here, "
            "such as sitecustomize, may end them",
        ) from error
    finally:
        pool.stop()  # No pool's own `with`: its end waits for tasks that no worker will take.
        pool.join()


class _Spawn(SpawnContext):
    """Holds its locks: pebble drops them before it stops workers that may still be starting."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def RLock(self) -> Any:  # noqa: N802
        lock = super().RLock()
        self._held.append(lock)
        return lock


@contextmanager
def _interrupts_held_back() -> Generator[None]:
    """Ctrl-C waits, and never reaches the processes and threads that are started inside.

    It is the parent's to handle, and a worker cannot ignore it before its imports are done.
    """
    resource_tracker.ensure_running()  # Else it starts inside, and lifts the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _died(variant: Variant, error: ProcessExpired) -> AotLoraError:
    return AotLoraError(
        "the compiler ended its process",
        where=variant.name,
        found=f"exit code {error.exitcode}",
        next_step="the other variants are done; run the command again to retry this one alone",
    )
