"""GPUs that need not be present: XLA's target configs, shipped under ``buckets/devices/``."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from aot_lora.config import presets
from aot_lora.errors import ConfigError

SUFFIX = ".txtpb"

# Of a text proto: a field with a scalar or string, the begin and the end of a message, a comment.
_TOKEN = re.compile(
    r"""(?P<name>\w+)\s*(?:(?P<begin>:?\s*\{)|:\s*(?P<value>"(?:[^"\\]|\\.)*"|[^\s{}"#,;]+))"""
    r"""|(?P<end>\})|\#[^\n]*"""
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What tells one kind of GPU from another.

    Args:
      name: as JAX has it in `device_kind`, for instance ``NVIDIA H200``.
      compute_capability: for instance ``9.0``.
      cores: streaming multiprocessors; a MIG slice has fewer.
      memory_bytes: of the whole device.
    """

    name: str
    compute_capability: str
    cores: int
    memory_bytes: int


def names() -> tuple[str, ...]:
    """The shipped ones, sorted."""
    return tuple(sorted(path.stem for path in _folder().glob("*" + SUFFIX)))


def read(topology: str, *, config: Path, where: str) -> str:
    """The target config that a topology names, as text; checked to be one of a GPU.

    Args:
      topology: a shipped one's name, or the path of a file, from the config's folder.
      config: the config's path; where: the topology's place in it.

    Raises:
      ConfigError: an unknown name, no such file, or not a target config.
    """
    shipped = not topology.endswith(SUFFIX)
    path = _folder() / f"{topology}{SUFFIX}" if shipped else config.absolute().parent / topology
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            "unknown GPU" if shipped else f"the target config cannot be read: {reason}",
            where=where,
            expected=f"one of {', '.join(names())}, or a {SUFFIX} file beside the config",
            found=topology,
            next_step="`aot-lora doctor --target-config -o FILE` on such a GPU writes its file",
        ) from None
    try:
        gpu_of(text)
    except ValueError as error:
        raise ConfigError(
            "not a target config of a GPU",
            where=f"{where}: {path}",
            expected="a text proto as `aot-lora doctor --target-config` writes it",
            found=str(error),
        ) from None
    return text


@lru_cache(maxsize=8)
def gpu_of(target_config: str) -> Gpu:
    """What a target config says of its GPU.

    Raises:
      ValueError: it lacks something; says what.
    """
    fields = _fields(target_config)

    def field(name: str) -> str:
        if name not in fields:
            raise ValueError(f"no {name}")
        return fields[name]

    info = "gpu_device_info"
    capability = f"{info}.cuda_compute_capability"
    return Gpu(
        name=field("device_description_str"),
        # A zero is left out of a text proto.
        compute_capability=f"{field(f'{capability}.major')}.{fields.get(f'{capability}.minor', 0)}",
        cores=int(field(f"{info}.core_count")),
        memory_bytes=int(field(f"{info}.device_memory_size")),
    )


def _fields(text: str) -> dict[str, str]:
    """The fields of a text proto by dotted path; of a repeated one the last."""
    found: dict[str, str] = {}
    inside: list[str] = []
    for token in _TOKEN.finditer(text):
        if token["begin"]:
            inside.append(token["name"])
        elif token["end"] and inside:
            inside.pop()
        elif token["value"]:
            found[".".join((*inside, token["name"]))] = token["value"].strip('"')
    return found


def autotune_path(config: Path) -> Path:
    """Where the autotuning results of a config's matmuls lie. XLA knows the format by the name."""
    return config.with_suffix(".autotune.textproto")


def autotune_digest(config: Path) -> str:
    """The SHA-256 of the results beside a config; empty where there are none."""
    path = autotune_path(config)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _folder() -> Path:
    return presets.presets_root() / "devices"
