"""What is packed equals x @ A.T @ B.T * scale, and all of it is finite."""

import math
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adapter_checks import (
    RNG,
    SHAPES,
    defined,
    load,
    plan_of,
    refusal,
    served,
)
from adapter_files import (
    cast,
    path_of,
    random_pair,
    random_weights,
    write_adapter,
)
from hypothesis import example, given
from hypothesis import strategies as st

from aot_lora.adapters import pack, pack_arrays, read_adapter
from aot_lora.errors import AdapterError


@pytest.mark.parametrize("rank", [1, 3, 8, 24, 32])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("plan_dtype", ["float32", "float16", "bfloat16"])
def test_packed_is_the_definition(rank: int, dtype: str, plan_dtype: str, tmp_path: Path) -> None:
    """Cases 4 and 11: any rank, padded by lanes that are zero; cast once."""
    weights = random_weights(SHAPES, layers=2, rank=rank)
    folder = write_adapter(tmp_path / "a", weights, dtype=dtype, lora_alpha=3 * rank)
    packed = load(folder, plan_of(dtype=plan_dtype))

    assert (packed.name, packed.rank) == ("a", rank)
    assert packed.lanes == next(lanes for lanes in (8, 16, 32) if lanes >= rank)
    for name, (d, o) in SHAPES.items():
        held = packed.modules[name]
        assert held.a.shape == (2, packed.lanes, d)
        assert held.b.shape == (2, o, packed.lanes)
        assert held.a.dtype.name == held.b.dtype.name == plan_dtype
        assert held.scale.dtype == np.float32
        assert held.scale.tolist() == [3, 3]
        for layer in range(2):
            a, b = (cast(cast(w, dtype), plan_dtype) for w in weights[path_of(name, layer)])
            assert (held.a[layer, :rank] == a).all()
            assert (held.b[layer, :, :rank] == b).all()
            assert not held.a[layer, rank:].any()
            assert not held.b[layer, :, rank:].any()


def test_what_is_missing_contributes_nothing(tmp_path: Path) -> None:
    """Case 10: q and k present, v missing; and a layer without any."""
    weights = random_weights({"q_proj": (16, 16), "k_proj": (16, 8)}, layers=1, rank=4)
    folder = write_adapter(tmp_path / "a", weights, target_modules=["q_proj", "k_proj", "v_proj"])
    adapter = read_adapter(folder)
    packed = pack(adapter, plan_of())

    assert adapter.idle == ("v_proj",)
    assert set(packed.modules) == {"q_proj", "k_proj"}
    for held in packed.modules.values():
        assert held.a[0].any()
        assert not held.a[1].any()
        assert not held.b[1].any()
        assert held.scale.tolist() == [1, 0]


def test_a_module_outside_the_layers_has_one(tmp_path: Path) -> None:
    weights = random_weights(SHAPES, layers=2, rank=4)
    weights["lm_head"] = random_pair(RNG, rank=4, d=16, o=64)
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    packed = pack(adapter, plan_of(outside={"lm_head": (16, 64)}))

    assert adapter.pairs[-1].layer is None
    assert packed.modules["lm_head"].b.shape == (1, 64, 8)
    assert (packed.modules["lm_head"].a[0, :4] == weights["lm_head"][0]).all()


def test_threads_give_what_one_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights({"q_proj": (4096, 64)}, layers=8, rank=16)
    folder = write_adapter(tmp_path / "a", weights)
    plan = plan_of({"q_proj": (4096, 64)}, layers=8, dtype="bfloat16")
    many = load(folder, plan).modules["q_proj"]
    module = sys.modules["aot_lora.adapters.pack"]  # the package's `pack` is the function
    monkeypatch.setattr(module, "_MOST_THREADS", 1)
    one = load(folder, plan).modules["q_proj"]

    assert sum(a.nbytes + b.nbytes for a, b in weights.values()) > 2**20
    assert (many.a == one.a).all()
    assert (many.b == one.b).all()


ranks = st.integers(1, 12)
alphas = st.floats(0.01, 100)


@given(
    r=ranks,
    alpha=alphas,
    rank_pattern=st.dictionaries(st.sampled_from(sorted(SHAPES)), ranks),
    alpha_pattern=st.dictionaries(st.sampled_from(["q_proj", "layers.1.*", r"mlp\.\w+"]), alphas),
    rslora=st.booleans(),
    style=st.sampled_from(["peft", "default", "bare"]),
    present=st.sets(
        st.tuples(st.sampled_from(sorted(SHAPES)), st.integers(0, 1)), min_size=1, max_size=8
    ),
)
def test_any_adapter_is_the_definition(
    tmp_path_factory: pytest.TempPathFactory,
    r: int,
    alpha: float,
    rank_pattern: dict[str, int],
    alpha_pattern: dict[str, float],
    rslora: bool,
    style: str,
    present: set[tuple[str, int]],
) -> None:
    weights = {
        path_of(name, layer): random_pair(
            RNG, rank=rank_pattern.get(name, r), d=SHAPES[name][0], o=SHAPES[name][1]
        )
        for name, layer in sorted(present)
    }
    folder = write_adapter(
        tmp_path_factory.mktemp("any") / "a",
        weights,
        style=style,
        r=r,
        lora_alpha=alpha,
        use_rslora=rslora,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
    )
    packed = load(folder, plan_of(ranks=(2, 6, 12)))

    assert packed.rank == max(a.shape[0] for a, _ in weights.values())
    for name, layer in present:
        pair, width = weights[path_of(name, layer)], SHAPES[name][0]
        tests = {
            "q_proj": name == "q_proj",
            "layers.1.*": layer == 1,
            r"mlp\.\w+": name == "down_proj",
        }
        chosen = next((alpha_pattern[p] for p in alpha_pattern if tests[p]), alpha)
        rank = pair[0].shape[0]
        x = RNG.standard_normal((2, width))
        wanted = defined(pair, x, chosen / (math.sqrt(rank) if rslora else rank))
        np.testing.assert_allclose(served(packed, name, layer, x), wanted, rtol=1e-5, atol=1e-6)


def test_arrays_are_packed_as_files_are(tmp_path: Path) -> None:
    weights = random_weights(SHAPES, layers=2, rank=3)
    plan = plan_of(dtype="bfloat16")
    from_file = load(write_adapter(tmp_path / "a", weights, lora_alpha=6), plan)
    arrays = {
        (name, layer): tuple(np.asfortranarray(half) for half in weights[path_of(name, layer)])
        for name in SHAPES
        for layer in range(2)
    }
    in_memory = pack_arrays(arrays, plan, scale=2.0, name="a")

    assert (in_memory.name, in_memory.rank, in_memory.nbytes) == ("a", 3, from_file.nbytes)
    for name, held in in_memory.modules.items():
        assert (held.a == from_file.modules[name].a).all()
        assert (held.b == from_file.modules[name].b).all()
        assert (held.scale == from_file.modules[name].scale).all()


def test_arrays_outside_the_layers_are_layer_0() -> None:
    pair = random_pair(RNG, rank=2, d=16, o=64)
    packed = pack_arrays({("lm_head", 0): pair}, plan_of(outside={"lm_head": (16, 64)}))

    assert (packed.modules["lm_head"].b[0, :, :2] == pair[1]).all()


@pytest.mark.parametrize(
    ("weights", "options", "text"),
    [
        ({}, {}, "no weights at all"),
        ({("x", 0): (np.ones((2, 16)), np.ones((16, 2)))}, {}, "[2, 16] of float64"),
        ({("q_proj", 0): ((2, 16), (16, 3))}, {}, "A and B of `q_proj of layer 0` have different"),
        ({("q_proj", 0): ((2, 15), (16, 2))}, {}, "A of `q_proj of layer 0` does not fit `q_proj`"),
        ({("q_proj", 0): ((2, 16), (15, 2))}, {}, "B of `q_proj of layer 0` does not fit `q_proj`"),
        ({("q_proj", 2): ((2, 16), (16, 2))}, {}, "no bank for `q_proj of layer 2`"),
        ({("q_proj", -1): ((2, 16), (16, 2))}, {}, "no bank for `q_proj of layer -1`"),
        ({("q_proj", 0): ((0, 16), (16, 0))}, {}, "[0, 16] of float32"),
        ({("q_proj", 0): ((2, 16, 1), (16, 2))}, {}, "[2, 16, 1] of float32"),
        ({("q_proj", 0): ((33, 16), (16, 33))}, {}, "`q_proj of layer 0` has rank 33 > 32"),
        ({("lm_head", 1): ((2, 16), (64, 2))}, {}, "no bank for `lm_head of layer 1`"),
        ({("other", 0): ((2, 16), (16, 2))}, {}, "0 of 1 modules apply"),
        ({("q_proj", 0): ((2, 16), (16, 2))}, {"scale": math.nan}, "scale nan"),
        ({("q_proj", 0): ((2, 16), (16, 2))}, {"scale": 0.0}, "scale 0.0"),
    ],
    ids=lambda value: None,
)
def test_arrays_that_do_not_fit_are_refused(
    weights: dict[tuple[str, int], Any], options: dict[str, float], text: str
) -> None:
    arrays = {
        key: tuple(np.ones(half, np.float32) if isinstance(half, tuple) else half for half in pair)
        for key, pair in weights.items()
    }
    plan = plan_of(outside={"lm_head": (16, 64)})

    assert text in refusal(lambda: pack_arrays(arrays, plan, **options))


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("half", ["A", "B"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rank", [3, 8], ids=["padded", "straight"])
def test_a_value_that_is_not_finite_is_refused(
    value: float, half: str, dtype: str, rank: int, tmp_path: Path
) -> None:
    weights = random_weights(SHAPES, layers=2, rank=rank)
    weights[path_of("k_proj", 1)]["AB".index(half)][2, 1] = value
    adapter = read_adapter(write_adapter(tmp_path / "a", weights, dtype=dtype))
    text = refusal(lambda: pack(adapter, plan_of(dtype=dtype)))

    assert f"model.layers.1.self_attn.k_proj.lora_{half}.weight` is not all finite" in text


@pytest.mark.parametrize(
    ("value", "dtype", "plan_dtype", "problem"),
    [
        (65504.0, "float32", "float16", None),
        (65519.0, "float32", "float16", None),  # rounds to 65504
        (65520.0, "float32", "float16", "overflows float16"),
        (-1e5, "bfloat16", "float16", "overflows float16"),
        (3.3895e38, "float32", "bfloat16", None),
        (-3.4e38, "float32", "bfloat16", "overflows bfloat16"),
        (3.4e38, "float32", "float32", None),
        (-65504.0, "float16", "bfloat16", None),
        (1e-45, "float32", "float16", None),
    ],
)
def test_a_value_that_overflows_in_the_cast_is_refused(
    value: float, dtype: str, plan_dtype: str, problem: str | None, tmp_path: Path
) -> None:
    weights = {path_of("q_proj", 0): random_pair(RNG, rank=4, d=16, o=16)}
    weights[path_of("q_proj", 0)][0][1, 1] = value
    adapter = read_adapter(write_adapter(tmp_path / "a", weights, dtype=dtype))
    plan = plan_of(dtype=plan_dtype)
    if problem is None:
        held = pack(adapter, plan).modules["q_proj"]
        assert np.isfinite(held.a.astype(np.float32)).all()
    else:
        assert problem in refusal(lambda: pack(adapter, plan))


def test_a_scale_that_overflows_b_is_refused(tmp_path: Path) -> None:
    weights = {path_of("q_proj", 0): (np.ones((1, 16)), np.full((16, 1), -1000.0))}
    fits = read_adapter(write_adapter(tmp_path / "fits", weights, lora_alpha=65))
    over = read_adapter(write_adapter(tmp_path / "over", weights, lora_alpha=66))
    plan = plan_of(dtype="float16")

    assert pack(fits, plan).modules["q_proj"].scale[0] == 65
    text = refusal(lambda: pack(over, plan))
    assert "lora_B.weight` times its scale overflows float16" in text
    assert "found: 1000 x 66" in text


@given(
    values=st.lists(
        st.one_of(st.floats(width=32), st.sampled_from([3.4e38, -3.4e38, 65504.0, 65520.0])),
        min_size=16,
        max_size=16,
    ),
    scale=st.floats(2**-10, 1000, width=32),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    plan_dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
@example(values=[0.0] * 16, scale=1.0, dtype="bfloat16", plan_dtype="float16")
def test_values_are_refused_exactly_when_not_finite(
    values: list[float], scale: float, dtype: str, plan_dtype: str
) -> None:
    with np.errstate(over="ignore", under="ignore"):
        b = cast(np.array(values, np.float32).reshape(16, 1), dtype)
        held = cast(b.astype(np.float32), plan_dtype).astype(np.float64)
    limit = float(ml_dtypes.finfo(plan_dtype).max)
    sound = bool(np.isfinite(held).all() and (abs(held) * scale <= limit).all())
    a = cast(np.ones((1, 16)), dtype)
    try:
        packed = pack_arrays({("q_proj", 0): (a, b)}, plan_of(dtype=plan_dtype), scale=scale)
    except AdapterError:
        assert not sound
    else:
        assert sound
        assert (packed.modules["q_proj"].b[0, :, :1].astype(np.float64) == held).all()
