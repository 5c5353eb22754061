"""`aot-lora verify`: are the stored artifacts whole, and for this host?"""

from __future__ import annotations

import sys

import click

from aot_lora import errors
from aot_lora.cli.options import common, emit, note, read_config, size
from aot_lora.config import Config
from aot_lora.errors import AotLoraError
from aot_lora.plan import TargetSpec
from aot_lora.store import LocalStore
from aot_lora.store.coverage import check_header, check_present, find_manifest
from aot_lora.store.key import shorten
from aot_lora.store.warm import WarmIdentity


@click.command()
@common
@click.option("--runnable", is_flag=True, help="Also require a device of the target here.")
def command(config: str, store: str | None, form: str, debug: bool, runnable: bool) -> int:
    """Check every artifact of CONFIG: present, whole, made for what is installed here."""
    del debug
    loaded = read_config(config, store)
    whole, total_bytes, damaged = 0, 0, list[AotLoraError]()
    for target in loaded.targets:
        sizes, found = _verify(loaded, target)
        whole += len(sizes)
        total_bytes += sum(sizes)
        damaged += found
        if runnable:
            from aot_lora.targets.devices import host_device

            host_device(target)
    for error in damaged:
        note(str(error))
    total = len(loaded.plan.variants) * len(loaded.targets)
    if form == "json":
        emit({"variants": total, "whole": whole, "damaged": len(damaged), "bytes": total_bytes})
    else:
        print(f"{whole} of {total} variants whole, {size(total_bytes)} in {loaded.store_root}")
    sys.stdout.flush()
    return damaged[0].exit_code if damaged else errors.EXIT_OK


def _verify(config: Config, target: TargetSpec) -> tuple[list[int], list[AotLoraError]]:
    store = LocalStore(config.store_root)
    warm = WarmIdentity.of(config, target)
    manifest = find_manifest(store, warm, config)
    where = str(store.manifest_path(warm.identity))
    check_present({e.variant for e in manifest.entries}, config.plan.variants, where=where)
    expected = shorten(warm.target_parts)
    sizes: list[int] = []
    damaged: list[AotLoraError] = []
    for entry in manifest.entries:
        try:
            header = store.read_entry(entry).header
            check_header(header, expected, where=str(store.artifact_path(entry.key)))
        except AotLoraError as error:
            damaged.append(error)
            continue
        sizes.append(entry.bytes)
    return sizes, damaged
