"""What the tests of store, warmup and runtime share: a config that serves, and the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from aot_lora import load_config
from aot_lora.store import LocalStore, Manifest
from aot_lora.store.warm import WarmIdentity

# Mixed ranks, two layers, a step of the user's own and a function that ignores the lanes axis.
SERVED = """\
model: {up: [16, 24], gate: [16, 24]}
layers: 2
target: {platform: cpu}
lora:
  modules: all-linear
  ranks: [8, 128]
  slots: [0, 1, 2]
  max_adapters: 8
  resident_lanes: 320
  dtype: float32
tokens: {budget: 16, buckets: [4, 16]}
programs: [lora, {entry: "engine:step"}, {entry: "engine:norm", max_tokens: 4}]
store: {root: store}
"""

ENGINE = '''\
"""A two-layer decoder step with the LoRA kernels inside, and a norm that needs no adapter."""

import jax.numpy as jnp
from aot_lora import Program
from aot_lora.kernels import lora_expand, lora_shrink


def step(point, context):
    array, plan = context.array, context.plan
    layer = {"up": array(16, 24), "gate": array(16, 24), "down": array(24, 16)}
    x, weights = array(point.tokens, 16), [layer] * plan.layers
    if not point.lanes:
        return Program(fn=plain, args=(x, weights))
    banks = {m.name: context.banks(m) for m in plan.modules}
    batch = context.batch(point.tokens, point.lanes)
    return Program(
        fn=adapted, args=(x, weights, banks, (batch.blocks, batch.owners, batch.slots))
    )


def plain(x, weights):
    for layer in weights:
        x = jnp.tanh((x @ layer["up"]) * (x @ layer["gate"]) @ layer["down"])
    return x


def adapted(x, weights, banks, batch):
    blocks, owners, slots = batch
    for n, layer in enumerate(weights):
        def project(name):
            a_bank, b_bank = banks[name]
            h = lora_shrink(x, a_bank, n, blocks, owners, slots)
            return lora_expand(x @ layer[name], h, b_bank, n, blocks, slots)

        x = jnp.tanh(project("up") * project("gate") @ layer["down"])
    return x


def norm(point, context):
    return Program(fn=scaled, args=(context.array(point.tokens, 16),))


def scaled(x):
    return x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
'''


def write_served(folder: Path) -> Path:
    """Writes the config `SERVED` and the module it names."""
    write(folder / "engine.py", ENGINE)
    return write(folder / "served.yaml", SERVED)


def write(path: Path, text: str) -> Path:
    """Writes a file at once: another process may be reading it."""
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(text)
    return new.replace(path)


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """One folder for all processes of a test run; the store's writer lock shares the work."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(exist_ok=True)
    return folder


def command(*arguments: object) -> list[str]:
    """The command line in a process of its own."""
    return [sys.executable, "-m", "aot_lora", *map(str, arguments)]


def cli(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line to its end."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=120, env=os.environ | environ
    )


def warm(config: Path, *arguments: object) -> dict[str, Any]:
    """Warms up in a process of its own, with one worker unless told, and returns its report."""
    done = cli("warmup", config, "--format", "json", "--jobs", 1, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def store_of(config: Path) -> LocalStore:
    return LocalStore(load_config(config).store_root)


def identity_of(config: Path) -> str:
    loaded = load_config(config)
    return WarmIdentity.of(loaded, loaded.targets[0]).identity


def manifest_of(config: Path) -> Manifest:
    manifest = store_of(config).read_manifest(identity_of(config))
    assert manifest is not None
    return manifest


def artifacts_in(root: Path) -> list[Path]:
    return sorted(root.glob("artifacts/*/*.aot"))


def edit_manifest(config: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the manifest's JSON in place."""
    path = store_of(config).manifest_path(identity_of(config))
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@contextmanager
def process_group(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The command line as leader of a process group, none of which outlives the block."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Returns once `condition` holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.002)


@contextmanager
def tmpfs(folder: Path, *, size: str) -> Iterator[Path]:
    """A file system of its own with a size; skips where this user may not mount one."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
