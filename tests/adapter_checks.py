"""What the tests of adapters share: plans, the definition, and how a refusal is looked at."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_files import (
    path_of,
    peft_config,
    random_pair,
    random_weights,
    write_adapter,
    write_config_file,
    write_tensors,
)

from aot_lora.adapters import Packed, pack, read_adapter
from aot_lora.errors import EXIT_USAGE, AdapterError
from aot_lora.plan import Module, Plan, build_plan

SHAPES = {"q_proj": (16, 16), "k_proj": (16, 8), "v_proj": (16, 8), "down_proj": (32, 16)}
FUSED = {"qkv_proj": (16, 32), "gate_up_proj": (16, 48)}
PARTS = {"q_proj": (16, 16), "k_proj": (16, 8), "v_proj": (16, 8)}
PARTS |= {"gate_proj": (16, 24), "up_proj": (16, 24)}
RNG = np.random.default_rng(7)


def plan_of(
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    *,
    layers: int = 2,
    ranks: tuple[int, ...] = (8, 16, 32),
    dtype: str = "float32",
    outside: Mapping[str, tuple[int, int]] | None = None,
) -> Plan:
    """A plan of these modules; `outside` are those that stand in no layer."""
    modules = [Module(name=n, d=d, o=o, layers=layers) for n, (d, o) in shapes.items()]
    modules += [Module(name=n, d=d, o=o, layers=1) for n, (d, o) in (outside or {}).items()]
    return build_plan(
        token_buckets=(8,),
        slots=(0, 1, 2),
        ranks=ranks,
        modules=tuple(modules),
        layers=layers,
        dtype=dtype,
        quantum=math.gcd(*ranks),
        max_adapters=2,
        resident_lanes=4 * ranks[-1],
        with_lora=True,
        user=(),
    )


def load(folder: Path, plan: Plan) -> Packed:
    return pack(read_adapter(folder), plan)


def served(packed: Packed, module: str, layer: int, x: np.ndarray) -> np.ndarray:
    """What the banks of `packed` add to x's output, float64."""
    held = packed.modules[module]
    a, b = held.a[layer].astype(np.float64), held.b[layer].astype(np.float64)
    return x @ a.T @ b.T * held.scale[layer]


def defined(pair: tuple[np.ndarray, np.ndarray], x: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """The definition: x @ A.T @ B.T * scale, float64."""
    a, b = (half.astype(np.float64) for half in pair)
    return x @ a.T @ b.T * scale


def refusal(act: Callable[[], object], *, exit_code: int = EXIT_USAGE) -> str:
    """The text of the error, which has to name a place."""
    with pytest.raises(AdapterError) as caught:
        act()
    assert caught.value.exit_code == exit_code
    assert caught.value.where
    return str(caught.value)


def read_refusal(folder: Path, *, exit_code: int = EXIT_USAGE) -> str:
    text = refusal(lambda: read_adapter(folder), exit_code=exit_code)
    assert str(folder) in text
    return text


def one_module(folder: Path, **config: Any) -> Path:
    """An adapter of rank 4 for q_proj in two layers."""
    weights = random_weights({"q_proj": (16, 16)}, layers=2, rank=4)
    return write_adapter(folder, weights, **config)


def mixed_ranks(folder: Path, **config: Any) -> Path:
    """q_proj and v_proj of four layers at rank 16, but q_proj of layer 3 at rank 32."""
    weights = {
        path_of(name, layer): random_pair(
            RNG, rank=32 if (name, layer) == ("q_proj", 3) else 16, d=16, o=16
        )
        for layer in range(4)
        for name in ("q_proj", "v_proj")
    }
    fields = {"r": 16, "lora_alpha": 16, "rank_pattern": {"layers.3.*q_proj": 32}} | config
    return write_adapter(folder, weights, **fields)


SQUARE = {"q_proj": (16, 16), "v_proj": (16, 16)}


def refused_tensors(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> str:
    write_tensors(folder, tensors)
    write_config_file(folder, peft_config({}, target_modules=None, **({"r": 4} | config)))
    return read_refusal(folder)


A, B = random_pair(RNG, rank=4, d=16, o=16)
