"""The same plan through torch_xla, on its CPU device. Run in .venv-torch: see tools/test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import aot_lora
from aot_lora import kernels as jax_kernels
from aot_lora import load_config
from aot_lora.errors import OutOfPlanError, ProgramError, RecompileError, UnsupportedError
from aot_lora.interop.torch_xla import kernels
from aot_lora.interop.torch_xla.calls import Call
from aot_lora.interop.torch_xla.check import trace_all
from aot_lora.interop.torch_xla.device import COMPILES, MISSES, Device
from aot_lora.interop.torch_xla.steps import Steps
from aot_lora.interop.torch_xla.trace import StandIns, trace
from aot_lora.interop.torch_xla.warmup import _refused, warm_store
from aot_lora.kernels.reference import lora, tolerance
from aot_lora.plan import Variant
from aot_lora.store.artifact import unpack

pytestmark = pytest.mark.filterwarnings("ignore")  # Whatever torch and its kin warn of is theirs.

CONFIG = """\
model: {up: [32, 48]}
layers: 2
target: {platform: cpu}
lora: {ranks: [8], slots: [0, 1, 2], max_adapters: 4, dtype: float32}
tokens: {budget: 16, buckets: [4, 16]}
programs: [lora, {entry: "torch_engine:step"}]
store: {root: store}
"""
ENGINE = """\
import torch
from aot_lora.interop import program
from aot_lora.interop.layers import with_adapters

SCALE = 1.0

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(32, 48, bias=False)
        self.down = torch.nn.Linear(48, 32, bias=False)

    def forward(self, x):
        return x + SCALE * self.down(torch.tanh(self.up(x)))

def build():
    return torch.nn.Sequential(Block(), Block())

def step(point, context):
    with torch.device("meta"):
        module = with_adapters(build(), context.plan)
    return program(module, (context.array(point.tokens, 32),), point, context)
"""
# jax is hidden: torch_xla's side of aot-lora does without.
COMMAND = """\
import sys
sys.modules["jax"] = sys.modules["jaxlib"] = None
from aot_lora.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def command(*args: str, cwd: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *args, "--backend", "torch_xla", "--format", "json"],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> aot_lora.Config:
    folder = tmp_path_factory.mktemp("torch_xla")
    (folder / "step.yaml").write_text(CONFIG)
    (folder / "torch_engine.py").write_text(ENGINE)
    return load_config(folder / "step.yaml")


@pytest.fixture(scope="module")
def warmed(config: aot_lora.Config) -> dict[str, Any]:
    """What `aot-lora warmup --backend torch_xla` said, in a process without jax."""
    return command("warmup", "step.yaml", cwd=config.path.parent)


@pytest.fixture(scope="module")
def opened(config: aot_lora.Config, warmed: dict[str, Any]) -> tuple[Steps, int]:
    """Warm and sealed; and the keys that it missed on disk."""
    assert warmed["failed"] == 0
    # Another file name, other lines: neither may reach a key.
    (config.path.parent / "torch_engine.py").write_text("\n\n# moved\n" + ENGINE)
    steps = Steps.open(config)
    return steps, steps.device.count(MISSES)


@pytest.fixture
def steps(opened: tuple[Steps, int]) -> Steps:
    found = opened[0]
    found._sealed_at = found.device.count(COMPILES)  # what other tests made it compile
    return found


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def test_warmup_runs_each_variant_once_and_another_process_finds_every_key(
    config: aot_lora.Config, warmed: dict[str, Any], opened: tuple[Steps, int]
):
    assert warmed["variants"] == warmed["compiled"] == len(config.plan.variants)
    assert warmed["bytes"] > 0
    assert opened[1] == 0


def test_random_lengths_compile_nothing_and_are_right(steps: Steps):
    rng = np.random.default_rng(0)
    model = sys.modules["torch_engine"].build()
    weights = {name: tensor.detach().to("xla") for name, tensor in model.named_parameters()}
    quantum = steps.plan.quantum
    owned = {0: (1,), 3: (2,)}
    # The banks, written by the plan's own program.
    bank = [np.zeros((2, steps.plan.bank_blocks, quantum, width), np.float32) for width in (32, 48)]
    banks = [steps.put(one) for one in bank]
    adapters = {}
    for slot, blocks in owned.items():
        lanes = len(blocks) * quantum
        a, b = normal(rng, 2, lanes, 32), normal(rng, 2, 48, lanes)
        write = steps.variant(
            Variant("bank_write", 0, lanes, steps.plan.dims(steps.plan.modules[0], "do"))
        )
        arrays = (a, b, np.ones(2, np.float32), np.array(blocks, np.int32))
        write(*banks, *map(steps.put, arrays))
        adapters[slot] = (a, b)
    for _ in range(40):
        rows = rng.integers(1, 17)
        slots = rng.choice([-1, 0, 3], rows)
        x = normal(rng, rows, 32)
        batch = steps.batch(slots, owned)
        found = steps.lookup("step", tokens=batch.count, lanes=batch.lanes)
        args = (weights, steps.rows(x, found.tokens))
        if batch.lanes:
            given = {"up": tuple(banks)}
            y = found.executable(*args, given, batch.blocks, batch.owners, batch.slots)
        else:
            y = found.executable(*args)
        want = x
        for layer in range(2):
            w_up, w_down = (
                model[layer].get_parameter(n).detach().numpy() for n in ("up.weight", "down.weight")
            )
            own = {slot: (a[layer], b[layer].T) for slot, (a, b) in adapters.items()}
            want = want + np.tanh(lora(want, want @ w_up.T, own, slots)) @ w_down.T
        np.testing.assert_allclose(y.cpu().numpy()[:rows], want, rtol=1e-4, atol=1e-5)
    assert steps.compiles == 0


def plain_step(steps: Steps, rows: int = 4):
    model = sys.modules["torch_engine"].build()
    weights = {name: tensor.detach().to("xla") for name, tensor in model.named_parameters()}
    return steps.lookup("step", tokens=rows), weights


def test_a_length_outside_the_plan_is_refused(steps: Steps):
    with pytest.raises(OutOfPlanError, match="17 tokens are outside the plan"):
        steps.lookup("step", tokens=17)


def test_other_shapes_are_refused_before_a_compile(steps: Steps):
    found, weights = plain_step(steps)
    with pytest.raises(RecompileError) as refused:
        found.executable(weights, steps.rows(np.zeros((5, 32), np.float32), 5))
    assert "step/t4-l0: other arguments than were warmed" in str(refused.value)
    assert "float32[5, 32]" in str(refused.value.found)
    assert "f32[4,32]" in str(refused.value.expected)
    assert steps.compiles == 0


def test_another_graph_is_refused_before_a_compile(steps: Steps, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["torch_engine"], "SCALE", 2.0)
    found, weights = plain_step(steps)
    x = steps.rows(np.zeros((4, 32), np.float32), 4)
    with pytest.raises(RecompileError, match="another one than was warmed") as refused:
        found.executable(weights, x)
    assert refused.value.where == "step/t4-l0"
    assert steps.compiles == 0


def test_a_compile_beside_the_plan_is_seen_at_the_steps_end(steps: Steps):
    """The positive control of the counter: without it 0 compiles would prove nothing."""
    found, weights = plain_step(steps)
    x = steps.rows(np.zeros((4, 32), np.float32), 4)
    found.executable(weights, x)
    assert steps.compiles == 0
    eager = x[:3] + 1
    steps.device.sync([eager])
    with pytest.raises(RecompileError, match="compiled 1 graphs since the seal"):
        found.executable(weights, x)


def test_check_repeats_and_sees_another_graph(
    config: aot_lora.Config, opened: tuple[Steps, int], monkeypatch: pytest.MonkeyPatch
):
    (lines, errors), (again, _) = trace_all(config), trace_all(config)
    assert not errors
    assert lines == again
    assert set(lines) == {"torch_xla cpu"}
    line = lines["torch_xla cpu"]["lora_shrink/t4-l8-d32-n2"]
    assert line.signature == (
        "x: f32[4,32], a_bank: f32[2,5,8,32], layer: i32[1], blocks: i32[1], owners: i32[1], "
        "slots: i32[4] -> f32[4,8]"
    )
    step = lines["torch_xla cpu"]["step/t4-l8"].signature
    assert step.startswith("weights['0.up.weight']: f32[48,32], "), step
    monkeypatch.setattr(sys.modules["torch_engine"], "SCALE", 2.0)
    moved, _ = trace_all(config)
    changed = {
        name
        for name, line in moved["torch_xla cpu"].items()
        if line != lines["torch_xla cpu"][name]
    }
    assert changed == {name for name in lines["torch_xla cpu"] if name.startswith("step/")}
    command("check", "step.yaml", "--update", cwd=config.path.parent)
    locked = json.loads(config.lock_path.read_text())["traces"]["torch_xla cpu"]
    assert locked == {
        name: one.model_dump(exclude_defaults=True) for name, one in lines["torch_xla cpu"].items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_kernels_are_those_of_jax_and_of_the_definition(dtype: str, device: str):
    rng = np.random.default_rng(1)
    t, d, o, q = 6, 32, 48, 8
    owned = {0: (1,), 3: (2, 4)}
    slots = np.array([0, 3, -1, 3, 0, -1], np.int32)
    blocks, owners = np.array([1, 2, 4, 0], np.int32), np.array([0, 3, 3, -2], np.int32)
    arrays = [
        normal(rng, t, d),
        normal(rng, 2, 5, q, d),
        normal(rng, 2, 5, q, o),
        normal(rng, t, o),
    ]
    arrays[1][:, 0] = arrays[2][:, 0] = 0
    x, a_bank, b_bank, base = (np.asarray(one, jnp.dtype(dtype)) for one in arrays)

    def put(array: np.ndarray) -> torch.Tensor:
        if array.dtype == np.int32:
            return torch.from_numpy(array).to(device)
        return torch.from_numpy(array.astype(np.float32)).to(getattr(torch, dtype)).to(device)

    def check(found: torch.Tensor, want: Any) -> None:
        want = np.asarray(want, np.float32)
        error = np.linalg.norm(found.float().cpu().numpy() - want) / np.linalg.norm(want)
        assert error < tolerance(dtype, reduction=d)

    def both(name: str, *args: Any) -> torch.Tensor:
        """One kernel on both sides; the arguments are numpy."""
        found = getattr(kernels, name)(
            *(put(one) if isinstance(one, np.ndarray) else one for one in args)
        )
        check(found, getattr(jax_kernels, name)(*(jnp.asarray(one) for one in args)))
        return found

    h = both("lora_shrink", x, a_bank, 1, blocks, owners, slots)
    both("lora_shrink_single", x, a_bank, 1, blocks)
    wide = np.asarray(h.float().cpu().numpy(), jnp.dtype(dtype))
    y = both("lora_expand", base, wide, b_bank, 1, blocks, slots)
    both("lora_expand_single", base, wide, b_bank, 1, blocks)
    lanes = {slot: list(theirs) for slot, theirs in owned.items()}
    adapters = {
        slot: (a_bank[1, theirs].reshape(-1, d), b_bank[1, theirs].reshape(-1, o))
        for slot, theirs in lanes.items()
    }
    check(y, lora(x, base, adapters, slots))
    alone = y.float().cpu().numpy()[slots == -1]
    assert (alone == base.astype(np.float32)[slots == -1]).all()  # no adapter: bit for bit


@pytest.mark.parametrize("layer", [0, 1, 5])
def test_a_layer_that_is_passed_is_no_constant_of_the_graph(steps: Steps, layer: int):
    shrink = steps.variant(Variant("lora_shrink_single", 4, 8, (("d", 32), ("n", 2))))
    bank = np.ones((2, steps.plan.bank_blocks, 8, 32), np.float32)
    blocks, at = (np.array([one], np.int32) for one in (1, layer % 2))
    shrink(*map(steps.put, (np.ones((4, 32), np.float32), bank, at, blocks)))
    assert steps.compiles == 0


def test_a_scalar_argument_is_refused(steps: Steps):
    call = Call(fn=lambda x: x + 1, args=(torch.empty((), device="meta"),))
    with pytest.raises(ProgramError, match="step/t4-l0: `x` has no dimensions"):
        trace(Variant("step", 4), call, StandIns(steps.device))


@pytest.mark.tpu_compile
def test_graphs_compile_for_tpus_without_one(config: aot_lora.Config, opened: tuple[Steps, int]):
    target = '[{platform: tpu, topology: "v6e:1x1"}, {platform: tpu, topology: "v5e:1x1"}]'
    path = config.path.with_name("tpu.yaml")
    text = CONFIG.replace("{platform: cpu}", target).replace("lora, ", "").replace("4, 16]", "16]")
    path.write_text(text.replace("float32", "bfloat16"))
    tpu, said = load_config(path), list[str]()
    report = warm_store(tpu, say=said.append)
    assert not report.failed
    assert report.compiled == report.variants == 2 * 3
    assert sum("bytes of device memory" in line for line in said) == 2
    for file in (tpu.store_root / "artifacts").rglob("*.aot"):
        header = unpack(file.read_bytes(), where=str(file)).header
        assert header.parts["made by"] == "torch_xla 2.9.0: not loadable by torch_xla"
        if header.variant == "step/t16-l8":
            names = [header.signature.inputs[one].name for one in header.signature.kept]
            assert set(names) >= {"input", "weights['0.up.weight']", "slots", "blocks"}
            assert names != [one.name for one in header.signature.inputs]  # not the call's order
    assert warm_store(tpu, say=said.append).compiled == 0


def test_a_config_for_another_device_is_refused(config: aot_lora.Config, opened: Any):
    path = config.path.with_name("gpu.yaml")
    path.write_text(CONFIG.replace("platform: cpu", "platform: cuda"))
    with pytest.raises(UnsupportedError, match="torch_xla's device is a CPU"):
        Steps.open(path)


def test_64_bit_indices_are_refused_by_name():
    bank, blocks = torch.zeros(1, 2, 8, 4), torch.tensor([1])
    with pytest.raises(ProgramError) as refused:
        kernels.lora_shrink_single(torch.zeros(2, 4), bank, 0, blocks)
    assert str(refused.value).startswith("`blocks` is of int64\n  expected: int32")
    assert "dtype=torch.int32" in str(refused.value.next_step)


def test_what_the_cpu_runtime_lacks_is_named():
    said = RuntimeError("Unimplemented: Unsupported element type in DotThunk: BF16 x BF16 = F32")
    refused = _refused(Variant("step", 4), said)
    assert "a product of bfloat16 with a float32 result" in refused.problem
    assert "x.float() @ w.float()" in str(refused.next_step)


def test_a_second_store_in_one_process_is_refused(opened: tuple[Steps, int], tmp_path: Path):
    with pytest.raises(UnsupportedError, match="before its cache was opened"):
        Device(tmp_path)


def test_debug_flags_that_put_lines_into_keys_are_refused(
    opened: tuple[Steps, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XLA_IR_DEBUG", "1")
    with pytest.raises(UnsupportedError, match="XLA_IR_DEBUG is set"):
        Device(tmp_path)
