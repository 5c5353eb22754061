"""JAX's own persistent cache: what it gives back for a CPU serializes without its code."""

from pathlib import Path

import jax
from serving import cli

from aot_lora import load_config
from aot_lora.runtime.load import load_all
from aot_lora.runtime.prime import prime


def test_a_warmup_compiles_past_it(tiny_config: Path, tmp_path: Path) -> None:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    for name in ("first", "second"):
        done = cli("warmup", tiny_config, "--store", tmp_path / name, "--jobs", 1, **cache)
        assert done.returncode == 0, done.stderr
    config = load_config(tiny_config, store=str(tmp_path / "second"))
    device = jax.devices()[0]
    prime(load_all(config, config.targets[0], [device]).values())
