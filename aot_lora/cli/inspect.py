"""`aot-lora inspect`: what does the store hold?"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import click

from aot_lora.cli.options import common, emit, read_config, size, table
from aot_lora.config import Config
from aot_lora.errors import ConfigError
from aot_lora.plan import TargetSpec
from aot_lora.store import LocalStore, Manifest
from aot_lora.store import artifact as artifacts
from aot_lora.store.coverage import find_manifest
from aot_lora.store.misses import widened
from aot_lora.store.warm import WarmIdentity


@click.command()
@common
@click.argument("variant", required=False)
def command(config: str, store: str | None, form: str, debug: bool, variant: str | None) -> None:
    """Show the warmup of CONFIG, one VARIANT of it, or a single .aot file."""
    del debug
    if config.endswith(".aot"):
        _artifact(Path(config), form)
        return
    loaded = widened(read_config(config, store))
    for target in loaded.targets:
        manifest = find_manifest(
            LocalStore(loaded.store_root), WarmIdentity.of(loaded, target), loaded
        )
        if variant is None:
            _manifest(loaded, target, manifest, form)
        else:
            _artifact(_path_of(loaded, manifest, variant), form)


def _path_of(config: Config, manifest: Manifest, variant: str) -> Path:
    for entry in manifest.entries:
        if entry.variant == variant:
            return LocalStore(config.store_root).artifact_path(entry.key)
    raise ConfigError(
        f"no variant `{variant}`",
        where=str(config.path),
        next_step="`aot-lora plan --variants` lists them",
    )


def _manifest(config: Config, target: TargetSpec, manifest: Manifest, form: str) -> None:
    files = {entry.key: entry.bytes for entry in manifest.entries}
    if form == "json":
        emit(
            {
                "target": str(target),
                "variants": len(manifest.entries),
                "artifacts": len(files),
                "bytes": sum(files.values()),
                "parts": manifest.parts,
            }
        )
        return
    print(f"{config.path} for {target}, in {config.store_root}")
    print(
        f"{len(manifest.entries)} variants in {len(files)} artifacts, {size(sum(files.values()))}"
    )
    by_program: dict[str, list[int]] = defaultdict(list)
    for entry in manifest.entries:
        by_program[entry.variant.partition("/")[0]].append(entry.bytes)
    rows = [
        (name, str(len(sizes)), size(sum(sizes)), size(max(sizes)))
        for name, sizes in by_program.items()
    ]
    table("programs", ("program", "variants", "bytes", "largest"), rows)
    rows = [(name, value[:70] or "none") for name, value in manifest.parts.items()]
    table("identity", ("part", "value"), rows)


def _artifact(path: Path, form: str) -> None:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    artifact = artifacts.unpack(data, where=str(path))
    header = artifact.header
    if form == "json":
        emit({"bytes": len(data), "digest": artifact.digest, **asdict(header)})
        return
    print(f"{header.variant}: {size(len(data))}, {size(header.raw_bytes)} unpacked")
    print(f"signature: {header.signature}")
    table(
        "key", ("part", "value"), [(name, value or "none") for name, value in header.parts.items()]
    )
