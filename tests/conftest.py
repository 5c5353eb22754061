"""A tiny config with a store of its own; no test needs an accelerator."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # Before anything imports jax.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"  # for meshes and replicas
os.environ.pop("AOT_LORA_CACHE", None)  # A store of the caller's is not for tests.

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings
from serving import shared_folder, write_served

from aot_lora import load_config
from aot_lora.warmup import warmup

signal.signal(signal.SIGINT, signal.default_int_handler)  # In the background a shell turns it off.

settings.register_profile("shared host", deadline=None)  # A compile, or a busy core, is no bug.
settings.load_profile("shared host")

TINY = """\
model: {q_proj: [16, 16], down_proj: [32, 16]}
target: {platform: cpu}
lora: {modules: all-linear, ranks: [8], slots: [0, 1, 2], max_adapters: 2, dtype: float32}
tokens: {budget: 8, buckets: [8]}
store: {root: store}
"""


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config into `tmp_path`: `TINY`, with top-level keys or texts replaced."""

    def write(text: str = TINY, *, name: str = "tiny.yaml", **lines: str) -> Path:
        kept = [line for line in text.splitlines() if line.partition(":")[0] not in lines]
        path = tmp_path / name
        path.write_text("\n".join([*kept, *(f"{k}: {v}" for k, v in lines.items()), ""]))
        return path

    return write


@pytest.fixture
def tiny_config(write_config: Callable[..., Path]) -> Path:
    """A CPU config of thirteen small variants; its store is the folder `store` beside it."""
    return write_config()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config `SERVED`, warmed up; copy it before changing its store."""
    config = write_served(shared_folder(tmp_path_factory, "served"))
    assert not warmup(load_config(config)).failed
    return config


@pytest.fixture
def known_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates that no new measurement moves: 2 core-seconds and 1 MiB a variant, 4 cores."""
    for table in ("_PER_VARIANT", "_PER_STEP"):
        monkeypatch.setattr(f"aot_lora.plan.cost.{table}", {"cpu": (2.0, 2**20)})
    for module in ("aot_lora.plan.cost", "aot_lora.config.limits"):
        monkeypatch.setattr(f"{module}.usable_cores", lambda: 4)
