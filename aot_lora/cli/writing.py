"""Writes fitted buckets into a config of the user's own."""

from __future__ import annotations

import os
from pathlib import Path

from aot_lora.cli.options import note
from aot_lora.config import load_config
from aot_lora.config.edit import with_buckets
from aot_lora.errors import AotLoraError, ConfigError


def refuse_preset(name: str | None) -> None:
    """Refuses to write where there is no file of the user's.

    Raises:
      ConfigError: no config is named, or it is a preset.
    """
    if name is None:
        raise ConfigError("--write needs a config", next_step="name it with --config")
    if not Path(name).is_file():
        raise ConfigError(
            "--write would change a preset",
            where=name,
            expected="a config file of your own",
            next_step="copy the preset's file and name the copy",
        )


def write(
    path: Path,
    *,
    tokens: tuple[int, ...] | None = None,
    slots: tuple[int, ...] | None = None,
    ranks: tuple[int, ...] | None = None,
    quantum: int | None = None,
) -> None:
    """Writes buckets into a config, keeping its comments, if it is still a good one with them.

    Args:
      path: the file; the others: as for `with_buckets`.

    Raises:
      ConfigError: it cannot be changed or written, or would be refused; then it is as it was.
    """
    path = path.resolve()  # a link stays one
    text = path.read_bytes().decode("utf-8")
    after = with_buckets(text, str(path), tokens=tokens, slots=slots, ranks=ranks, quantum=quantum)
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        beside.write_bytes(after.encode("utf-8"))
        beside.chmod(path.stat().st_mode)
        load_config(beside)
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", where=str(path)) from None
    except AotLoraError as error:
        raise ConfigError(
            "not written: with these buckets it is no good config",
            where=str(path),
            found=error.problem + (f", expected {error.expected}" if error.expected else ""),
            next_step="change what does not go with them, or fit others",
        ) from None
    finally:
        beside.unlink(missing_ok=True)
    axes = {"token": tokens, "slots": slots, "rank": ranks}
    counts = [f"{len(found)} {name}" for name, found in axes.items() if found is not None]
    note(f"wrote {' and '.join(counts)} buckets into {path}")
