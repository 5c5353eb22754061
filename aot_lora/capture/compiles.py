"""A compile on its way to XLA, as plain JSON. Loaded into the programs that are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aot_lora._jax_compat import hooks, stack
from aot_lora._jax_compat.calls import Argument, Call, calls_at_hand
from aot_lora._jax_compat.described import call_fields, tree_texts
from aot_lora.lowering.fingerprint import fingerprint
from aot_lora.signature import ArraySpec


def describe(
    compile_arguments: Sequence[Any], context: Mapping[str, str], call: Call | None = None
) -> dict[str, Any]:
    """What is being compiled, from inside of a compile hook.

    Args:
      compile_arguments: what the hook was called with: backend, computation, devices, options.
      context: JAX's options that are taken for the default: `described.context_now`.
      call: where the hook has looked for it already.
    """
    backend, computation, _, options, *_ = compile_arguments
    call = call or calls_at_hand(earlier=False)[0] or _call_of(computation)
    if call.options is None:
        call = replace(call, options=dict(options.env_option_overrides))
    frames, at = stack.user_frames()
    return {
        **call_fields(call, context),
        "fingerprint": fingerprint(str(computation), trees=tree_texts(call)),
        "platform": str(getattr(backend, "platform", "")),
        "frames": list(frames),
        "at": at,
    }


def _call_of(computation: Any) -> Call:
    """Where this release of JAX comes to its compiler by a way that we do not know."""
    name, types = hooks.computation_text(computation)
    specs = [ArraySpec.parse(text, name=f"argument {n}") for n, text in enumerate(types)]
    arguments = tuple(Argument(spec=spec) for spec in specs)
    return Call(function=name.removeprefix("jit_"), arguments=arguments)
