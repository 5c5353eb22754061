"""The traces of a config: from the cache, from here, or from a process on each core."""

from __future__ import annotations

from importlib import metadata

from aot_lora.checking.cache import Cache
from aot_lora.checking.processes import Failure, Request, Traced, merged, run_all
from aot_lora.config import Config
from aot_lora.plan import usable_cores

_PER_PROCESS = 50  # variants; fewer are traced sooner than a process has started


def traces_of(config: Config, *, store: str | None, use_cache: bool) -> Traced:
    """Traces all variants of a config; what cannot be traced is in `failures`.

    Args:
      config: from `load_config`.
      store: what it was loaded with.
      use_cache: whether traces of an earlier run will do, where nothing has changed since.
    """
    cache = Cache(config)
    if use_cache and (known := cache.read()):
        return known
    targets = config.targets
    count = min(usable_cores(), len(config.plan.variants) * len(targets) // _PER_PROCESS)
    # jaxlib 0.12 lowers kernels for GPUs otherwise once it has lowered one for a TPU.
    apart = bool(config.plan.user) and any(target.platform == "cuda" for target in targets)
    if count > 1 or apart:
        names = [variant.name for variant in config.plan.variants]
        count = max(count, 1)
        requests = [
            Request(config=config.path, store=store, names=only, part=(part, count))
            for only in ([{str(target): names} for target in targets] if apart else [None])
            for part in range(count)
        ]
        found = merged(config, run_all(requests))
    else:
        found = _traced_here(config)
    cache.write(found)
    return found


def jax_version() -> str:
    """Of the JAX that is installed, without importing it."""
    return metadata.version("jax")


def _traced_here(config: Config) -> Traced:
    from aot_lora.checking.child import user_modules  # with jax
    from aot_lora.lowering.check import own_traceback, trace_all

    warnings: list[str] = []
    lines, errors = trace_all(config, warn=warnings.append)
    return Traced(
        lines=lines,
        failures={
            name: Failure(error=error, traceback=own_traceback(error))
            for name, error in errors.items()
        },
        warnings=tuple(warnings),
        modules=user_modules() if config.plan.user else {},
    )
