"""Traces every variant of a plan for its platforms; no device of them is needed."""

from __future__ import annotations

from collections.abc import Callable

from aot_lora.config import Config
from aot_lora.errors import ProgramError
from aot_lora.lowering.lock import LockLine
from aot_lora.lowering.trace import prepare_tracing, trace
from aot_lora.programs.catalog import Catalog
from aot_lora.targets.cuda import without_gpu

Lines = dict[str, dict[str, LockLine]]


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
                found[variant.name] = LockLine(
                    fingerprint=one.fingerprint, signature=str(one.signature)
                )
                if one.warning:
                    warn(one.warning)
            except ProgramError as error:
                errors[f"{target} {variant.name}"] = error
            on_trace()
    return lines, errors
