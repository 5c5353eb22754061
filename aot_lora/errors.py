"""The error tree and the exit codes of the command line.

An error says where, what was wrong, what was expected, what was found and what to do next.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_CHECK = 3
EXIT_INTEGRITY = 4
EXIT_UNSUPPORTED = 5
EXIT_INTERRUPTED = 130


class AotLoraError(Exception):
    """Base of every error that aot-lora raises on purpose.

    Args:
      problem: what is wrong, in one clause.
      where: the file with line and column, the variant, or the argument.
      expected: what would have been right.
      found: what was there.
      next_step: what the reader can do about it.
    """

    exit_code = EXIT_INTERNAL

    def __init__(
        self,
        problem: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(self._text())

    def _text(self) -> str:
        head = f"{self.where}: {self.problem}" if self.where else self.problem
        lines = [head]
        if self.expected is not None:
            lines.append(f"  expected: {self.expected}")
        if self.found is not None:
            lines.append(f"  found: {self.found}")
        if self.next_step is not None:
            lines.append(f"  next: {self.next_step}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Keeps the fields when the error crosses a process boundary."""
        return (_rebuild, (type(self), self.problem, self.fields()))

    def fields(self) -> dict[str, str | None]:
        """Everything but the problem, by name."""
        return {
            "where": self.where,
            "expected": self.expected,
            "found": self.found,
            "next_step": self.next_step,
        }


def _rebuild(cls: type[AotLoraError], problem: str, fields: dict[str, str | None]) -> AotLoraError:
    return cls(problem, **fields)


class ConfigError(AotLoraError):
    """The config, a preset name or a command-line value is wrong."""

    exit_code = EXIT_USAGE


class PlanError(ConfigError):
    """The plan that a config asks for breaks one of its own limits."""


class ProgramError(ConfigError):
    """A user program could not be found, called or lowered."""


class CheckFailed(AotLoraError):
    """The lock and the traces disagree."""

    exit_code = EXIT_CHECK


class CoverageError(AotLoraError):
    """The store lacks variants of the plan that would fit this host."""

    exit_code = EXIT_CHECK


class IntegrityError(AotLoraError):
    """Stored bytes are not what was written."""

    exit_code = EXIT_INTEGRITY


class UnsupportedError(AotLoraError):
    """This host, or what is installed on it, cannot do what was asked."""

    exit_code = EXIT_UNSUPPORTED


class StoreError(UnsupportedError):
    """The store cannot be read or written on this host (full, read-only, no permission)."""


class RecompileError(AotLoraError):
    """A sealed process was asked to compile. Raised before XLA starts."""


class OutOfPlanError(AotLoraError, LookupError):
    """A shape outside the plan; names the shape and the nearest bucket."""


class DonatedError(AotLoraError, RuntimeError):
    """An array was given that an earlier call took over, or that is taken over twice in one."""


class CapacityError(OutOfPlanError):
    """It does not fit beside what is there now; it may later. Nothing has changed."""


class AdapterError(AotLoraError):
    """An adapter that cannot be served: unsupported, at odds with itself or with the plan."""

    exit_code = EXIT_USAGE


class DamagedAdapterError(AdapterError, IntegrityError):
    """An adapter's files are missing, cut short or not what their headers say."""

    exit_code = EXIT_INTEGRITY
