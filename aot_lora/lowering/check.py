"""Traces every variant of a plan for its platforms; no device of them is needed."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from aot_lora.config import Config
from aot_lora.errors import ProgramError
from aot_lora.lowering.lock import LockLine
from aot_lora.lowering.trace import prepare_tracing, trace
from aot_lora.programs.catalog import Catalog
from aot_lora.targets.cuda import without_gpu

Lines = dict[str, dict[str, LockLine]]

_OTHERS = (Path(jax.__file__).parent, Path(__file__).resolve().parents[1])


def trace_all(
    config: Config,
    *,
    on_trace: Callable[[], None] = lambda: None,
    warn: Callable[[str], None] = lambda _: None,
) -> tuple[Lines, dict[str, ProgramError]]:
    """Traces the plan once per target of the config.

    Args:
      config: from `load_config`.
      on_trace: called after each variant.
      warn: told of large constants.

    Returns:
      target -> variant -> line, and the errors of those that cannot be traced, by
      ``target variant``.
    """
    prepare_tracing()
    lines: Lines = {}
    errors: dict[str, ProgramError] = {}
    for target in config.targets:
        found = lines.setdefault(str(target), {})
        catalog = Catalog(config.plan, target, config=config.path)
        for variant in config.plan.variants:
            try:
                with without_gpu(target):
                    one = trace(
                        variant,
                        catalog.program(variant),
                        platform=target.platform,
                        devices=target.devices,
                    )
                found[variant.name] = one.line
                if one.warning:
                    warn(one.warning)
            except ProgramError as error:
                errors[f"{target} {variant.name}"] = error
            on_trace()
    return lines, errors


def own_traceback(error: BaseException) -> str:
    """Where a user's program raised, without the frames of JAX and of aot-lora around it."""
    cause = error.__cause__
    if cause is None:
        return ""
    frames = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _OTHERS)
        and not frame.filename.startswith("<")
    ]
    return "".join(traceback.format_list(frames)).rstrip()
