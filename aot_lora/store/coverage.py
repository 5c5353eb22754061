"""Does the store cover a plan on this host? Every check that comes before a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aot_lora.config import Config
from aot_lora.errors import CoverageError, IntegrityError, UnsupportedError
from aot_lora.plan import Variant
from aot_lora.store.artifact import Header
from aot_lora.store.key import differences
from aot_lora.store.local import LocalStore
from aot_lora.store.manifest import Entry, Manifest
from aot_lora.store.warm import WarmIdentity


def find_manifest(store: LocalStore, warm: WarmIdentity, config: Config) -> Manifest:
    """The manifest of this warmup.

    Raises:
      CoverageError: there is none; it lists the parts that differ from the nearest one.
    """
    manifest = store.read_manifest(warm.identity)
    if manifest is not None:
        return manifest
    others = [m for m in store.manifests().values() if m.config == config.path.name]
    found = "no finished warmup of this config"
    if others:
        lines = min((differences(warm.parts, m.parts) for m in others), key=len)
        found = "a warmup that differs in\n    " + "\n    ".join(lines)
    raise CoverageError(
        "the store has no warmup that fits this config on this host",
        where=str(store.root),
        expected=f"manifest {warm.identity}",
        found=found,
        next_step=f"run `aot-lora warmup {config.path}` with what is installed here",
    )


def find_entries(store: LocalStore, warm: WarmIdentity, config: Config) -> dict[str, Entry]:
    """What the store holds for a server of this config, by variant name.

    Under the policy ``error`` that is the whole plan, or an error. Under the others it is what the
    last warmup built, finished or not, as long as adapters can be written.

    Raises:
      CoverageError: too little is there.
    """
    required = config.plan.variants
    journal: tuple[Entry, ...] = ()
    if config.on_miss != "error":
        required = tuple(v for v in required if v.program in ("bank_write", "bank_reset"))
        journal = store.read_journal(warm.identity)
    manifest = store.read_manifest(warm.identity) if journal else find_manifest(store, warm, config)
    finished = manifest.entries if manifest else ()
    entries = {entry.variant: entry for entry in (*finished, *journal)}
    check_present(set(entries), required, where=str(store.manifest_path(warm.identity)))
    return entries


def check_present(present: set[str], variants: Sequence[Variant], *, where: str) -> None:
    """Checks that a warmup has built every one of `variants`.

    Raises:
      CoverageError: it has not.
    """
    missing = [variant.name for variant in variants if variant.name not in present]
    if missing:
        raise CoverageError(
            f"{len(missing)} of {len(variants)} variants are not in the manifest",
            where=where,
            found=", ".join(missing[:5]) + (", …" if len(missing) > 5 else ""),
            next_step="run `aot-lora warmup` with the same config",
        )


def check_header(header: Header, expected: Mapping[str, str], *, where: str) -> None:
    """Checks that an artifact was made for this host; a wrong one could abort the process.

    Args:
      header: the artifact's.
      expected: the short parts of the target on this host.
      where: the artifact's file.

    Raises:
      UnsupportedError: another kind or number of devices.
      IntegrityError: any other part differs.
    """
    here = (expected["device count"], expected["device kind"])
    made_for = (header.parts.get("device count"), header.parts.get("device kind"))
    if made_for != here:
        raise UnsupportedError(
            "the artifact is for other devices",
            where=where,
            expected=f"{here[0]} x {here[1]}",
            found=f"{made_for[0]} x {made_for[1]}",
            next_step="warm up for this target",
        )
    stored = {name: header.parts.get(name, "") for name in expected}
    if stored != dict(expected):
        raise IntegrityError(
            "the artifact was made for another host",
            where=where,
            found="; ".join(differences(expected, stored)),
            next_step="run `aot-lora warmup` with what is installed here",
        )
