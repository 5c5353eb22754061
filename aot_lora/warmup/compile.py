"""Compiles a traced variant, and says in our words what XLA says in its own."""

from __future__ import annotations

from typing import Any

from aot_lora.errors import ProgramError, UnsupportedError
from aot_lora.plan import Variant

# XLA's words: it finds neither ptxas nor nvlink; a matmul was never recorded; what was recorded is
# not text of its own or of another version.
_NO_PTXAS = "No PTX compilation provider"
_NOT_RECORDED = "No cached config found"
_NOT_RESULTS = "autotune results"


def compile_tuned(variant: Variant, lowered: Any) -> tuple[Any, bool]:
    """As `compile_lowered`, with recorded autotuning results, and whether they lack no matmul.

    Raises:
      ProgramError: the compiler refuses it; UnsupportedError: it cannot read the results.
    """
    try:
        options: dict[str, bool | str] = {"xla_gpu_require_complete_aot_autotune_results": True}
        return compile_lowered(variant, lowered, options), True
    except ProgramError as error:
        if _NOT_RECORDED not in error.problem:
            raise
    return compile_lowered(variant, lowered), False


def compile_lowered(
    variant: Variant, lowered: Any, options: dict[str, bool | str] | None = None
) -> Any:
    """Compiles a traced variant, past JAX's persistent cache.

    Args:
      variant: for names in errors.
      lowered: of its trace.
      options: of XLA, beside those of the environment.

    Raises:
      ProgramError: the compiler refuses it; UnsupportedError: a tool that it needs is missing.
    """
    from aot_lora import _jax_compat

    try:
        with _jax_compat.without_cache():
            return lowered.compile(compiler_options=options)
    except Exception as error:
        if _NO_PTXAS in str(error):
            raise UnsupportedError(
                "compiling for a GPU needs ptxas and nvlink",
                where=variant.name,
                found="neither in the nvidia-cuda-nvcc package, a CUDA toolkit, or PATH",
                next_step="pip install 'aot-lora[cuda-build]', or install the CUDA toolkit",
            ) from None
        if _NOT_RESULTS in str(error):  # Once a process: it would compile the next one without.
            raise UnsupportedError(
                "the recorded autotuning results cannot be read",
                where=variant.name,
                found=str(error).strip()[:200],
                next_step="record them again with the jax of this host (`aot-lora autotune` on "
                "the GPU), or remove the .autotune.textproto beside the config",
            ) from None
        raise ProgramError(
            f"the compiler refused it: {type(error).__name__}: {str(error).strip()[:1000]}",
            where=variant.name,
            next_step="make the point smaller (tokens, lanes), or mend the program",
        ) from error
