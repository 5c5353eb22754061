"""Compiles of this process as they happen, each with the reason for it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aot_lora._jax_compat import hooks
from aot_lora._jax_compat.calls import Call, calls_at_hand
from aot_lora._jax_compat.described import call_from, context_now
from aot_lora.capture.compiles import describe
from aot_lora.capture.reasons import AGAIN, described, differences_text, reason
from aot_lora.errors import RecompileError
from aot_lora.runtime.differences import arguments_text, nearest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """A compile, or one that the guard refused.

    Args:
      fields: of `compiles.describe`.
      why: what tells it from the nearest call of its function that was compiled before.
      refusal: the guard's words; empty where it was let through.
    """

    fields: dict[str, Any]
    why: str
    refusal: str = ""

    def lines(self) -> list[str]:
        """For people."""
        function = described(self.fields["function"], self.fields.get("place", ""))
        lines = [f"{function} for {arguments_text(call_from(self.fields))}", f"  {self.why}"]
        if self.fields["at"]:
            lines.append(f"  called from {self.fields['at']}")
        return lines


@contextmanager
def watch() -> Generator[list[Watched]]:
    """What is compiled inside the block, in any thread, goes into the list."""
    seen: list[Watched] = []
    before: list[dict[str, Any]] = []
    context = context_now()

    def hook(inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        try:
            call, earlier = calls_at_hand()
            fields = describe(args, context, call)
            why = _why(fields, before, call, earlier)
            before.append(fields)
        except Exception as error:  # Whatever JAX has moved: a compile has to be seen.
            why = f"cannot be described: {type(error).__name__}: {error}"
            name = hooks.computation_text(args[1])[0].removeprefix("jit_")
            fields = {"function": name, "fingerprint": "", "platform": "", "frames": [], "at": ""}
        try:
            executable = inner(*args, **named)
        except RecompileError as error:
            seen.append(Watched(fields=fields, why=why, refusal=str(error)))
            raise
        except BaseException:
            seen.append(Watched(fields=fields, why=why))
            raise
        seen.append(Watched(fields=fields, why=why))
        return executable

    with hooks.compile_hook(hook):
        yield seen


def _why(
    fields: Mapping[str, Any],
    before: Sequence[Mapping[str, Any]],
    call: Call | None,
    earlier: Sequence[Call],
) -> str:
    # JAX forgets a function that nobody holds any more, as one that a loop defined: we do not.
    own = [other for other in before if other.get("place") == fields.get("place")]
    known = reason(fields, own)
    if known is not None and known.text == AGAIN:
        return AGAIN
    near = nearest(call, (), earlier) if call else None
    if near is not None:
        return differences_text(near.differences) or AGAIN
    return known.text if known else "nothing by this name was compiled before"
