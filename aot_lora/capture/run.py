"""Runs a command so that each Python in it is recorded. No jax here."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from pathlib import Path

from aot_lora.capture.bootstrap import VARIABLE
from aot_lora.errors import ConfigError

_PASSED_ON = {
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
_BY_THE_KERNEL = 0x80  # si_code of a signal that a terminal's key made


def run_recorded(command: Sequence[str], folder: Path) -> int:
    """Runs a command to its end; its processes write their records into the folder.

    Signals that this process gets are passed on. Those of a terminal's keys are not: the terminal
    has sent them to the command already.

    Returns:
      Its exit code; 128 and the signal's number where one ended it.

    Raises:
      ConfigError: it cannot be started.
    """
    site = str(Path(__file__).parent / "site")
    path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, VARIABLE: str(folder), "PYTHONPATH": path}
    waited = _PASSED_ON | {signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    try:
        child = _spawn(command, environment, before)
        while True:
            # Another thread, where there is one, may have taken the SIGCHLD: look now and then.
            got = signal.sigtimedwait(waited, 0.5)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if got and got.si_signo in _PASSED_ON and got.si_code != _BY_THE_KERNEL:
                os.kill(child, got.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(command: Sequence[str], environment: dict[str, str], mask: Collection[int]) -> int:
    try:
        return os.posix_spawnp(
            command[0],
            list(command),
            environment,
            setsigmask=mask,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them; the command may not
        )
    except OSError as error:
        raise ConfigError(
            f"the command cannot be started: {error.strerror}",
            where=command[0],
            expected="a program on PATH, with its arguments",
            next_step="aot-lora capture [options] -- python -m my_server ...",
        ) from None
