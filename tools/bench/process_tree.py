"""Memory of a process and everything below it, read from /proc while it runs."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The largest sums seen at one moment, in bytes.

    Args:
      pss_bytes: proportional: pages that processes share count once.
      rss_bytes: resident: they count once for each process.
      processes: the most processes at one moment.
    """

    pss_bytes: int
    rss_bytes: int
    processes: int


def run_watched(
    command: Sequence[str], environment: Mapping[str, str], *, every_s: float = 0.2
) -> Peak:
    """Runs a command to its end and samples the memory of its process tree.

    Raises:
      CalledProcessError: it failed.
    """
    process = subprocess.Popen(command, env=dict(environment), stdout=subprocess.DEVNULL)
    done = threading.Event()
    samples: list[tuple[int, int, int]] = []

    def watch() -> None:
        while not done.wait(every_s):
            sizes = [size for pid in _tree(process.pid) if (size := _memory(pid)) is not None]
            samples.append((sum(s[0] for s in sizes), sum(s[1] for s in sizes), len(sizes)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    done.set()
    watcher.join()
    if code:
        raise subprocess.CalledProcessError(code, list(command))
    pss, rss, count = (max(column) for column in zip(*samples, strict=True))
    return Peak(pss_bytes=pss, rss_bytes=rss, processes=count)


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:  # grows while it is walked
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def _memory(pid: int) -> tuple[int, int] | None:
    """(PSS, RSS) in bytes; None for a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return None
    sizes = {line.split()[0]: line.split()[1] for line in text.splitlines()[1:]}
    return int(sizes["Pss:"]) * 1024, int(sizes["Rss:"]) * 1024
