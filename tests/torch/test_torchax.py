"""A torch module as a program of a plan, through torchax. Run in .venv-torch: see tools/test."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import aot_lora
from aot_lora import Context, Point, load_config
from aot_lora.errors import ProgramError
from aot_lora.interop import torchax
from aot_lora.interop.layers import with_adapters
from aot_lora.lowering.check import trace_all
from aot_lora.warmup import warmup

# Whatever torch and its kin warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

from serve_torch_step import expected, random_adapter, serve  # noqa: E402
from torch_step import build  # noqa: E402

CONFIG = """\
model: {up_proj: [64, 128], down_proj: [128, 64]}
layers: 2
target: TARGET
lora: {ranks: [8, 16], slots: [0, 2], max_adapters: 4, dtype: float32}
tokens: {budget: 8, buckets: [8]}
programs: [PROGRAMS]
store: {root: store}
"""
STEP = '{entry: "torch_step:step"}'


def config(folder: Path, programs: str = STEP, target: str = "{platform: cpu}") -> aot_lora.Config:
    path = folder / "step.yaml"
    path.write_text(CONFIG.replace("TARGET", target).replace("PROGRAMS", programs))
    return load_config(path)


def context(folder: Path) -> Context:
    loaded = config(folder)
    return Context(plan=loaded.plan, target=loaded.targets[0])


def test_a_torch_module_is_warmed_sealed_and_served(tmp_path: Path):
    loaded = config(tmp_path, "lora, " + STEP)
    report = warmup(loaded, jobs=1)
    assert not report.failed
    rng = np.random.default_rng(0)
    model = build()
    with aot_lora.Runtime.open(loaded) as runtime:
        weights = jax.device_put(torchax.weights(model), runtime.device)
        adapters = {slot: random_adapter(rng, rank) for slot, rank in ((0, 8), (3, 16))}
        for slot, adapter in adapters.items():
            runtime.banks.put(slot, aot_lora.adapters.pack_arrays(adapter, runtime.plan))
        for rows in ([0, 3, -1, 3, 0], [-1]):
            x = rng.standard_normal((len(rows), 64)).astype(np.float32)
            y, bucket = serve(runtime, weights, x, np.array(rows))
            assert bucket == 8
            np.testing.assert_allclose(
                y, expected(model, x, np.array(rows), adapters), rtol=1e-4, atol=1e-5
            )


@pytest.mark.tpu_compile
def test_it_compiles_for_tpus_without_one(tmp_path: Path):
    target = '[{platform: tpu, topology: "v6e:1x1"}, {platform: tpu, topology: "v5e:1x1"}]'
    report = warmup(config(tmp_path, target=target), jobs=1)
    assert not report.failed
    assert report.compiled == report.variants == 2 * 3


def test_a_trace_repeats_and_names_its_arguments(tmp_path: Path):
    (lines, errors), (again, _) = (trace_all(config(tmp_path)) for _ in range(2))
    assert not errors
    assert lines == again
    signature = lines["cpu"]["step/t8-l32"].signature
    assert "weights['0.up_proj.weight']: f32[128,64]" in signature, signature
    assert "slots: i32[8]" in signature, signature


def test_bfloat16_weights_keep_their_bits():
    module = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    found = torchax.weights(module)["weight"]
    assert found.dtype.name == "bfloat16"
    assert (found.astype(np.float32) == module.weight.detach().float().numpy()).all()


def test_64_bit_weights_are_refused_by_name(tmp_path: Path):
    module = torch.nn.BatchNorm1d(3)  # counts its batches in int64
    with pytest.raises(ProgramError) as refused:
        torchax.program(module, (), Point(tokens=8, lanes=0), context(tmp_path))
    assert str(refused.value) == (
        "num_batches_tracked: a tensor of int64\n"
        "  expected: int32: JAX narrows 64 bits silently, and a TPU emulates them\n"
        "  found: int64[]\n"
        "  next: convert it once, with .to(torch.int32)"
    )


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (torch.nn.Sequential(build()[0]), "1 layers called `up_proj`"),
        (torch.nn.ModuleDict({"up_proj": torch.nn.Linear(64, 127)}), "of 64 and 127"),
        (torch.nn.ModuleDict({"up_proj": torch.nn.Identity()}), "Identity of None and None"),
    ],
)
def test_layers_that_are_not_the_plans_are_refused(
    tmp_path: Path, module: torch.nn.Module, says: str
):
    with pytest.raises(ProgramError, match=says):
        with_adapters(module, context(tmp_path).plan)
