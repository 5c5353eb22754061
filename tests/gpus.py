"""What tests of GPUs that are not there share."""

from importlib import metadata
from pathlib import Path

import pytest

from aot_lora.config.presets import presets_root

H200 = (presets_root() / "devices/h200.txtpb").read_text(encoding="utf-8")


def other(old: str, new: str) -> str:
    """The H200's target config with one line of another GPU."""
    assert old in H200
    return H200.replace(old, new)


def _compiler() -> str:
    try:
        found = metadata.version("jax-cuda13-plugin")
    except metadata.PackageNotFoundError:
        return ""
    return found if tuple(map(int, found.split(".")[:2])) >= (0, 11) else ""


needs_cuda_compiler = pytest.mark.skipif(
    not _compiler(), reason="no jax-cuda13-plugin of 0.11 or newer: pip install '.[cuda-build]'"
)


def write_small(folder: Path, target: str = "{platform: cuda, topology: h200}") -> Path:
    """A config of eight variants, with a matmul that an autotuner would choose for."""
    path = folder / "small.yaml"
    path.write_text(
        "model: {q_proj: [512, 256]}\n"
        f"target: {target}\n"
        "lora: {ranks: [16], slots: [1, 2], max_adapters: 2}\n"
        "tokens: {budget: 64, buckets: [64]}\n"
        "store: {root: store}\n",
        encoding="utf-8",
    )
    return path
