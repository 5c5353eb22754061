"""`aot-lora verify`: are the stored artifacts whole, and for this host?"""

from __future__ import annotations

import os
import sys

import click

from aot_lora import errors
from aot_lora.cli.options import common, emit, note, read_config, size, table
from aot_lora.config import Config
from aot_lora.errors import AotLoraError
from aot_lora.plan import TargetSpec
from aot_lora.store import LocalStore
from aot_lora.store.coverage import check_header, check_present, find_manifest
from aot_lora.store.key import shorten
from aot_lora.store.misses import widened
from aot_lora.store.warm import WarmIdentity
from aot_lora.targets.environment import worker_environment


@click.command()
@common
@click.option("--runnable", is_flag=True, help="Also require a device of the target here.")
@click.option(
    "--execute", is_flag=True, help="Also run each LoRA program against its float32 definition."
)
def command(
    config: str, store: str | None, form: str, debug: bool, runnable: bool, execute: bool
) -> int:
    """Check every artifact of CONFIG: present, whole, made for what is installed here."""
    del debug
    loaded = widened(read_config(config, store))
    whole, total_bytes, damaged = 0, 0, list[AotLoraError]()
    for target in loaded.targets:
        sizes, found = _verify(loaded, target)
        whole += len(sizes)
        total_bytes += sum(sizes)
        damaged += found
        if runnable:
            from aot_lora.targets.cuda import check_gpus
            from aot_lora.targets.devices import host_devices

            check_gpus(target, host_devices(target))
    for error in damaged:
        note(str(error))
    if execute and not damaged:
        return _execute(loaded, form)
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


def _execute(config: Config, form: str) -> int:
    """Runs every point on this host's device and shows the worst error of each variant."""
    for target in config.targets:
        if target.platform == "cpu":  # before JAX is imported: a mesh of CPUs has to be asked for
            os.environ.update(worker_environment(target))
    from aot_lora.runtime import Runtime
    from aot_lora.runtime.prove import Proof, prove

    with Runtime.open(config) as runtime:
        worst: dict[str, Proof] = {}
        for proof in prove(runtime):
            before = worst.get(proof.variant)
            if before is None or proof.error > before.error:
                worst[proof.variant] = proof
        target = runtime.target
    without = [v.name for v in config.plan.variants if v.name not in worst]
    wrong = [proof for proof in worst.values() if not proof.error <= proof.limit]
    if form == "json":
        errors_of = {name: proof.error for name, proof in worst.items()}
        emit({"executed": len(worst), "wrong": len(wrong), "unproven": without, "error": errors_of})
    else:
        rows = [(p.variant, f"{p.error:.1e}", f"{p.limit:.1e}") for p in worst.values()]
        table(f"worst error on {target}", ("variant", "error", "limit"), rows)
        print(f"{len(worst) - len(wrong)} of {len(worst)} variants are right")
        if without:
            print(
                f"{len(without)} were not run: a user's own program has no definition here, and "
                "no batch of so few tokens has so many adapters"
            )
    for proof in wrong:
        note(f"{proof.variant}: error {proof.error:.1e} is above {proof.limit:.1e}")
    sys.stdout.flush()
    return errors.EXIT_CHECK if wrong else errors.EXIT_OK
