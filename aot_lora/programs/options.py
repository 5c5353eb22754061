"""Which of JAX's options cannot change an executable. No jax here."""

# Prefixes of environment names: where to write, what to print, which backends to open.
SILENT_JAX = (
    "JAX_PLATFORMS",
    "JAX_PLATFORM_NAME",
    "JAX_COMPILATION_CACHE",
    "JAX_ENABLE_COMPILATION_CACHE",
    "JAX_PERSISTENT_CACHE",
    "JAX_TRACEBACK",
    "JAX_LOG",
    "JAX_DEBUG_LOG",
    "JAX_DUMP",
    "JAX_EXPLAIN_CACHE_MISSES",
    "JAX_CHECK_TRACER_LEAKS",
    "JAX_INCLUDE_",
)
