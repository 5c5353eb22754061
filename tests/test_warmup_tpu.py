"""Warmup with the real TPU compiler, on a host that has no TPU. Nothing here runs on one."""

from pathlib import Path

import pytest
from serving import artifacts_in, cli, manifest_of, store_of, warm

from aot_lora import Runtime, errors, load_config
from aot_lora.lowering.check import trace_all

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_compile

KINDS = {
    "v4:1x1x1": "TPU v4",
    "v5e:1x1": "TPU v5 lite",
    "v5p:1x1x1": "TPU v5",
    "v6e:1x1": "TPU v6 lite",
    "tpu7x:1x1x1": "TPU7x",
}


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A config of six variants, without its target."""
    path = tmp_path / "few.yaml"
    path.write_text(
        "model: {q_proj: [128, 128]}\n"
        "lora: {ranks: [8], slots: [1], max_adapters: 1}\n"
        "tokens: {budget: 8, buckets: [8]}\n"
        "store: {root: store}\n"
    )
    return path


def aim(config: Path, *topologies: str) -> None:
    targets = ", ".join(f'{{platform: tpu, topology: "{name}"}}' for name in topologies)
    config.write_text(f"{config.read_text()}target: [{targets}]\n")


@pytest.mark.parametrize("topology", KINDS)
def test_each_generation_is_compiled_and_says_so(few: Path, topology: str) -> None:
    aim(few, topology)
    report = warm(few)
    assert (report["variants"], report["compiled"], report["failed"]) == (6, 6, 0)

    manifest, store = manifest_of(few), store_of(few)
    headers = {entry.variant: store.read_entry(entry).header for entry in manifest.entries}
    assert manifest.parts["device kind"] == KINDS[topology]
    assert {header.parts["device kind"] for header in headers.values()} == {KINDS[topology]}
    assert {header.parts["topology"] for header in headers.values()} == {topology}

    lines, failed = trace_all(load_config(few))  # As the lock is made: without a topology.
    assert not failed
    assert {name: header.parts["fingerprint"] for name, header in headers.items()} == {
        name: line.fingerprint for name, line in lines[f"tpu {topology}"].items()
    }
    assert {name: str(header.signature) for name, header in headers.items()} == {
        name: line.signature for name, line in lines[f"tpu {topology}"].items()
    }

    with pytest.raises(errors.UnsupportedError, match="no tpu device on this host"):
        Runtime.open(few)


@pytest.mark.once
def test_two_targets_share_a_store_but_no_executable(few: Path) -> None:
    aim(few, "v5e:1x1", "v6e:1x1")
    report = warm(few)
    assert (report["variants"], report["compiled"]) == (12, 12)
    assert len(artifacts_in(few.parent / "store")) == 12

    report = warm(few)
    assert (report["traced"], report["compiled"], report["reused"]) == (0, 0, 12)
    assert cli("verify", few).returncode == errors.EXIT_OK
    refused = cli("verify", few, "--runnable", JAX_PLATFORMS="cpu")
    assert refused.returncode == errors.EXIT_UNSUPPORTED
    assert "no tpu device on this host" in refused.stderr


def test_a_topology_that_libtpu_refuses_is_one_message(few: Path) -> None:
    aim(few, "v6e:3x5x7")
    done = cli("warmup", few)

    assert done.returncode == errors.EXIT_UNSUPPORTED
    assert done.stderr.count("aot-lora: ") == 1
    assert "target.topology: v6e:3x5x7: the installed libtpu refuses this topology" in done.stderr
    assert "next: name another topology" in done.stderr
    assert "Traceback" not in done.stderr
