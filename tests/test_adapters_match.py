"""Adapters and plans: split, joined, or refused where the plan does not serve all of it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from adapter_checks import (
    FUSED,
    PARTS,
    RNG,
    defined,
    load,
    one_module,
    plan_of,
    refusal,
    served,
)
from adapter_files import (
    WEIGHTS,
    cast,
    keys_of,
    path_of,
    random_pair,
    random_weights,
    write_adapter,
)

from aot_lora import load_config
from aot_lora.adapters import match, pack, read_adapter


@pytest.mark.parametrize("plan_dtype", ["float32", "bfloat16"])
def test_a_fused_adapter_is_split(plan_dtype: str, tmp_path: Path) -> None:
    """Case 13: rows of q, k, v and of gate, up; A is shared."""
    weights = random_weights(FUSED, layers=2, rank=4)
    adapter = read_adapter(write_adapter(tmp_path / "a", weights, lora_alpha=8))
    plan = plan_of(PARTS, dtype=plan_dtype)
    packed = pack(adapter, plan)

    assert {m.name: (m.how, m.sources, m.ranks) for m in match(adapter, plan).modules} == {
        "q_proj": ("split", ("qkv_proj",), (4, 4)),
        "k_proj": ("split", ("qkv_proj",), (4, 4)),
        "v_proj": ("split", ("qkv_proj",), (4, 4)),
        "gate_proj": ("split", ("gate_up_proj",), (4, 4)),
        "up_proj": ("split", ("gate_up_proj",), (4, 4)),
    }
    x = RNG.standard_normal((3, 16))
    for layer in range(2):
        for fused, parts in (("qkv_proj", list(PARTS)[:3]), ("gate_up_proj", list(PARTS)[3:])):
            pair = tuple(cast(half, plan_dtype) for half in weights[path_of(fused, layer)])
            found = np.concatenate([served(packed, part, layer, x) for part in parts], axis=1)
            np.testing.assert_allclose(found, defined(pair, x, 2.0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "present",
    [["q_proj", "k_proj", "v_proj"], ["q_proj", "v_proj"], ["k_proj"], ["v_proj"], ["q_proj"]],
    ids="+".join,
)
@pytest.mark.parametrize("alphas", [{}, {"k_proj": 12, "v_proj": 0.5}], ids=["alike", "differing"])
def test_a_split_adapter_is_joined(
    present: list[str], alphas: dict[str, float], tmp_path: Path
) -> None:
    """Case 13, the reverse: block-structured B, ranks add up, differing scales go into B."""
    weights = {
        path_of(name, layer): random_pair(RNG, rank=4, d=16, o=PARTS[name][1])
        for name in present
        for layer in range(2)
    }
    adapter = read_adapter(write_adapter(tmp_path / "a", weights, alpha_pattern=alphas))
    plan = plan_of(FUSED)
    packed = pack(adapter, plan)

    (found,) = match(adapter, plan).modules
    assert (found.name, found.how, found.sources) == ("qkv_proj", "joined", tuple(present))
    assert packed.rank == 4 * len(present)
    x = RNG.standard_normal((3, 16))
    for layer in range(2):
        rows = [
            defined(weights[path_of(name, layer)], x, alphas.get(name, 4) / 4)
            if name in present
            else np.zeros((3, PARTS[name][1]))
            for name in ("q_proj", "k_proj", "v_proj")
        ]
        wanted = np.concatenate(rows, axis=1)
        np.testing.assert_allclose(
            served(packed, "qkv_proj", layer, x), wanted, rtol=1e-6, atol=1e-6
        )


def test_gate_and_up_are_joined_at_different_ranks(tmp_path: Path) -> None:
    weights = {
        path_of("gate_proj", 0): random_pair(RNG, rank=5, d=16, o=24),
        path_of("up_proj", 0): random_pair(RNG, rank=2, d=16, o=24),
        path_of("up_proj", 1): random_pair(RNG, rank=2, d=16, o=24),
    }
    folder = write_adapter(tmp_path / "a", weights, rank_pattern={"up_proj": 2}, lora_alpha=1)
    packed = load(folder, plan_of(FUSED))

    x = RNG.standard_normal((3, 16))
    wanted = [
        np.concatenate(
            [
                defined(weights[path_of("gate_proj", 0)], x, 1 / 5),
                defined(weights[path_of("up_proj", 0)], x, 1 / 2),
            ],
            axis=1,
        ),
        np.concatenate(
            [np.zeros((3, 24)), defined(weights[path_of("up_proj", 1)], x, 1 / 2)], axis=1
        ),
    ]
    for layer in range(2):
        found = served(packed, "gate_up_proj", layer, x)
        np.testing.assert_allclose(found, wanted[layer], rtol=1e-5, atol=1e-6)


def test_joined_ranks_may_pass_the_largest(tmp_path: Path) -> None:
    weights = random_weights({k: PARTS[k] for k in ("q_proj", "k_proj")}, layers=1, rank=20)
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    text = refusal(lambda: match(adapter, plan_of(FUSED)))

    assert "joined into `qkv_proj`, has rank 40 > 32, the largest" in text


def test_an_adapter_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    """Case 7."""
    weights = random_weights({"down_proj": (32, 16)}, layers=2, rank=4)
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    text = refusal(lambda: match(adapter, plan_of(PARTS)))

    assert "0 of 2 modules apply" in text
    assert "only modules of the plan: q_proj, k_proj, v_proj, gate_proj, up_proj" in text
    assert "found: down_proj" in text
    assert "add them to lora.modules and warm up" in text


def test_an_adapter_that_applies_in_part_is_refused(tmp_path: Path) -> None:
    weights = random_weights({"q_proj": (16, 16), "o_proj": (16, 16)}, layers=2, rank=4)
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    text = refusal(lambda: match(adapter, plan_of()))

    assert "2 of 4 modules apply; without o_proj it would be another adapter" in text


def test_a_fused_module_of_which_a_part_is_not_served_is_refused(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "a", random_weights(FUSED, layers=1, rank=4)))
    text = refusal(lambda: match(adapter, plan_of({k: PARTS[k] for k in ("q_proj", "v_proj")})))

    assert "0 of 2 modules apply" in text
    assert "found: gate_up_proj, k_proj of qkv_proj" in text


def test_a_rank_above_the_largest_is_refused(tmp_path: Path) -> None:
    """Case 5."""
    weights = {path_of("q_proj", 0): random_pair(RNG, rank=512, d=16, o=16)}
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    text = refusal(lambda: match(adapter, plan_of(ranks=(16, 256))))

    assert "has rank 512 > 256, the largest" in text


def test_a_layer_that_the_plan_lacks_is_refused(tmp_path: Path) -> None:
    adapter = read_adapter(one_module(tmp_path / "a"))
    text = refusal(lambda: match(adapter, plan_of(layers=1)))

    assert "no bank for `model.layers.1.self_attn.q_proj`" in text
    assert "expected: `q_proj` of layers 0 to 0" in text


@pytest.mark.parametrize(
    ("path", "found"),
    [("q_proj", "found: no layer number"), ("model.layers.0.lm_head", "found: layer 0")],
)
def test_a_module_in_the_wrong_place_is_refused(path: str, found: str, tmp_path: Path) -> None:
    weights = {path: random_pair(RNG, rank=4, d=16, o=16)}
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    text = refusal(lambda: match(adapter, plan_of(outside={"lm_head": (16, 16)})))

    assert f"no bank for `{path}`" in text
    assert found in text


@pytest.mark.parametrize(
    ("d", "o", "text"),
    [
        (17, 16, "A of `model.layers.0.self_attn.q_proj` does not fit `q_proj`"),
        (16, 15, "B of `model.layers.0.self_attn.q_proj` does not fit `q_proj`"),
    ],
)
def test_a_shape_that_the_plan_denies_is_refused(d: int, o: int, text: str, tmp_path: Path) -> None:
    weights = {path_of("q_proj", 0): random_pair(RNG, rank=4, d=d, o=o)}
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    found = refusal(lambda: match(adapter, plan_of()))

    assert text in found
    assert "the plan's is D 16, O 16" in found


def test_rows_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    adapter = read_adapter(
        write_adapter(tmp_path / "a", random_weights({"qkv_proj": (16, 40)}, layers=1, rank=4))
    )
    text = refusal(lambda: match(adapter, plan_of(PARTS)))

    assert "B of `model.layers.0.self_attn.qkv_proj` cannot be split" in text
    assert "expected: 32 rows: q_proj 16 + k_proj 8 + v_proj 8\n  found: 40 rows" in text


@pytest.mark.parametrize(
    "rows",
    [
        {"q_proj": 16, "k_proj": 8, "v_proj": 7},
        {"q_proj": 15},
        {"k_proj": 16},
        {"q_proj": 32},
        {"q_proj": 8, "k_proj": 8},
        {"gate_proj": 23},
        {"gate_proj": 24, "up_proj": 25},
    ],
    ids=str,
)
def test_rows_that_cannot_be_joined_are_refused(rows: dict[str, int], tmp_path: Path) -> None:
    shapes = {name: (16, count) for name, count in rows.items()}
    adapter = read_adapter(write_adapter(tmp_path / "a", random_weights(shapes, layers=1, rank=4)))

    assert "cannot be joined into" in refusal(lambda: match(adapter, plan_of(FUSED)))


@pytest.mark.parametrize("name", ["query_key_value", "W_pack", "c_attn"])
def test_a_layout_that_is_not_known_is_refused(name: str, tmp_path: Path) -> None:
    weights = random_weights({name: (16, 32)}, layers=1, rank=4)
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    text = refusal(lambda: match(adapter, plan_of(PARTS)))

    assert f"`{name}` is fused, and the order of its rows differs between models" in text
    assert match(adapter, plan_of({name: (16, 32)})).modules[0].how == "direct"


def test_a_module_both_fused_and_split_is_refused(tmp_path: Path) -> None:
    weights = random_weights({"q_proj": (16, 16), "qkv_proj": (16, 32)}, layers=1, rank=4)
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))
    for shapes in (PARTS, FUSED):
        text = refusal(lambda shapes=shapes: match(adapter, plan_of(shapes)))
        assert "more than one module fills" in text
        assert "self_attn.q_proj, model.layers.0.self_attn.qkv_proj" in text


def test_absurd_sizes_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    """A sparse file is whole, and claims 2 TB."""
    rows = 2**35
    header = {
        key: {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        for key, shape, offsets in zip(
            keys_of(path_of("q_proj", 0), "peft"),
            ([4, 16], [rows, 4]),
            ([0, 256], [256, 256 + rows * 16]),
            strict=True,
        )
    }
    folder = one_module(tmp_path / "a")
    text = json.dumps(header).encode()
    with (folder / WEIGHTS).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 256 + rows * 16)

    assert "does not fit `q_proj`" in refusal(lambda: load(folder, plan_of()))


def test_a_plan_without_adapters_serves_none(write_config: Callable[..., Path]) -> None:
    lora = "{modules: all-linear, ranks: [8], slots: [0], max_adapters: 1, dtype: float32}"
    config = write_config(lora=lora, programs='[{entry: "m:f"}]')
    folder = one_module(config.parent / "a")

    text = refusal(lambda: match(read_adapter(folder), load_config(config).plan))
    assert "none, as it lists no slots above 0" in text
