"""Adapters are read as PEFT means them: keys, ranks, scales and targets."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adapter_checks import (
    RNG,
    SHAPES,
    SQUARE,
    load,
    mixed_ranks,
    one_module,
    plan_of,
    read_refusal,
    refusal,
)
from adapter_files import (
    CONFIG,
    WEIGHTS,
    cast,
    edit_config,
    path_of,
    random_pair,
    random_weights,
    write_adapter,
)
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from aot_lora.adapters import match, pack, read_adapter
from aot_lora.cli.adapters import command

REAL_CONFIGS = sorted((Path(__file__).parent / "golden" / "adapter-configs").glob("*.json"))


def test_an_adapter_is_read_without_its_weights(tmp_path: Path) -> None:
    weights = random_weights(SHAPES, layers=2, rank=4)
    folder = write_adapter(tmp_path / "a", weights, dtype="bfloat16", lora_alpha=8)
    adapter = read_adapter(folder)

    assert adapter.base_model == "meta-llama/Llama-3.1-8B"
    assert (adapter.rank, len(adapter.pairs), adapter.idle) == (4, 8, ())
    assert adapter.nbytes == 2 * 2 * 4 * sum(d + o for d, o in SHAPES.values())
    assert {pair.path: pair.a.shape for pair in adapter.pairs} == {
        path: a.shape for path, (a, _) in weights.items()
    }
    assert {pair.scale for pair in adapter.pairs} == {2.0}
    raw = (folder / WEIGHTS).read_bytes()
    for pair in adapter.pairs:
        for half, array in zip((pair.a, pair.b), weights[pair.path], strict=True):
            found = np.frombuffer(raw, ml_dtypes.bfloat16, math.prod(half.shape), half.offset)
            assert (found.reshape(half.shape) == cast(array, "bfloat16")).all()


def with_base_weight(folder: Path, path: str, shape: tuple[int, int]) -> Path:
    """As PEFT saves an adapter of lm_head: the base's own weight beside it."""
    tensors = load_file(folder / WEIGHTS)
    tensors[f"base_model.model.{path}.base_layer.weight"] = np.ones(shape, np.float32)
    save_file(tensors, folder / WEIGHTS)
    return folder


def test_a_copy_of_the_base_weight_is_not_read(tmp_path: Path) -> None:
    weights = {"lm_head": random_pair(RNG, rank=4, d=16, o=32)}
    plain = write_adapter(tmp_path / "plain", weights)
    folder = with_base_weight(write_adapter(tmp_path / "a", weights), "lm_head", (32, 16))
    adapter = read_adapter(folder)
    assert (adapter.copies, read_adapter(plain).copies) == (("lm_head",), ())
    assert [(p.path, p.rank) for p in adapter.pairs] == [("lm_head", 4)]

    done = CliRunner().invoke(command, ["inspect", str(folder)])
    assert "beside them the base's own weight of lm_head: not read" in done.output


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("lm_head", (40, 16), "[32, 16], as its lora_A and lora_B say"),  # a grown vocabulary
        ("model.embed_tokens", (32, 16), "no such tensor"),
    ],
)
def test_a_base_weight_that_is_no_copy_is_refused(
    tmp_path: Path, path: str, shape: tuple[int, int], expected: str
) -> None:
    weights = {"lm_head": random_pair(RNG, rank=4, d=16, o=32)}
    folder = with_base_weight(write_adapter(tmp_path / "a", weights), path, shape)
    text = read_refusal(folder)
    assert "base_layer.weight` is a weight of the base model" in text
    assert f"expected: {expected}" in text


def test_the_stamp_moves_with_each_file(tmp_path: Path) -> None:
    folder = one_module(tmp_path / "a")
    before = read_adapter(folder).stamp
    edit_config(folder, lora_alpha=16)
    config_edited = read_adapter(folder).stamp
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes())

    assert before != config_edited != read_adapter(folder).stamp


@pytest.mark.parametrize("style", ["peft", "default", "bare"])
def test_keys_are_normalised(style: str, tmp_path: Path) -> None:
    """Case 8."""
    weights = random_weights(SHAPES, layers=2, rank=4)
    adapter = read_adapter(write_adapter(tmp_path / "a", weights, style=style))

    assert {pair.path for pair in adapter.pairs} == set(weights)


@pytest.mark.parametrize("path", REAL_CONFIGS, ids=lambda path: path.stem)
def test_a_config_from_the_wild_is_read(path: Path, tmp_path: Path) -> None:
    config = json.loads(path.read_text())
    weights = {
        path_of(module, layer): random_pair(RNG, rank=config["r"], d=16, o=16)
        for module in config["target_modules"]
        for layer in range(2)
    }
    folder = write_adapter(tmp_path / "a", weights)
    (folder / CONFIG).write_bytes(path.read_bytes())
    adapter = read_adapter(folder)

    assert adapter.base_model == config["base_model_name_or_path"]
    assert {pair.scale for pair in adapter.pairs} == {config["lora_alpha"] / config["r"]}
    assert {pair.module for pair in adapter.pairs} == set(config["target_modules"])


def test_all_real_configs_are_there() -> None:
    assert len(REAL_CONFIGS) == 7


def test_a_rank_of_one_module_counts(tmp_path: Path) -> None:
    """Case 1."""
    adapter = read_adapter(mixed_ranks(tmp_path / "a"))
    text = refusal(lambda: match(adapter, plan_of(SQUARE, layers=4, ranks=(8, 16))))

    assert "`model.layers.3.self_attn.q_proj` has rank 32 > 16, the largest" in text
    assert "add 32 to lora.ranks and warm up" in text
    packed = pack(adapter, plan_of(SQUARE, layers=4))
    assert (packed.rank, packed.lanes) == (32, 32)


def test_alpha_of_one_module_counts(tmp_path: Path) -> None:
    """Case 2: alpha 128 at rank 32 is 4, alpha 16 at rank 16 is 1."""
    folder = mixed_ranks(tmp_path / "a", alpha_pattern={"layers.3.*q_proj": 128})
    packed = load(folder, plan_of(SQUARE, layers=4))

    assert packed.modules["q_proj"].scale.tolist() == [1, 1, 1, 4]
    assert packed.modules["v_proj"].scale.tolist() == [1, 1, 1, 1]


def test_rslora_divides_by_the_root(tmp_path: Path) -> None:
    """Case 3."""
    weights = random_weights({"q_proj": (16, 16)}, layers=1, rank=16)
    write_adapter(tmp_path / "a", weights, use_rslora=True, lora_alpha=16)

    assert {pair.scale for pair in read_adapter(tmp_path / "a").pairs} == {4.0}


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        ("self_attn_q_proj", False),
        ("selfXattn.q_proj", False),
        ("self.attn.q_proj", True),  # a dot is any character
        ("attn.q_proj", False),  # whole components only
        ("^model.layers.3.self_attn.q_proj", True),
        ("^layers.3.self_attn.q_proj", False),
        ("^q_proj", False),
        ("layers.[0-3].*", True),
        ("layers.*", True),
        (r"layers\.\d+\.self_attn\.(q|k)_proj", True),
        ("a)|(.*q_proj", True),  # PEFT puts it between parentheses, whatever it is
        ("q_proj$", True),
        ("q_pro", False),
        ("Q_proj", False),
    ],
)
def test_patterns_match_as_in_peft(pattern: str, matches: bool, tmp_path: Path) -> None:
    weights = {path_of("q_proj", 3): random_pair(RNG, rank=4, d=16, o=16)}
    folder = write_adapter(tmp_path / "a", weights, alpha_pattern={pattern: 400})

    assert read_adapter(folder).pairs[0].scale == (100.0 if matches else 1.0)


def test_the_first_pattern_that_matches_counts(tmp_path: Path) -> None:
    folder = one_module(tmp_path / "a", alpha_pattern={"v_proj": 1, "q_proj": 8, "layers.*": 80})

    assert {pair.scale for pair in read_adapter(folder).pairs} == {2.0}


@pytest.mark.parametrize(
    "targets",
    [
        ".*self_attn.(q|v)_proj$",
        "all-linear",
        "ALL-LINEAR",
        r"^(model(?=\.).*\.(q_proj|k_proj|v_proj))$",
        r"^(?!.*vision).*\.[qv]_proj",
        ["q_proj", "v_proj", "o_proj"],
        ["self_attn.q_proj", "model.layers.0.self_attn.v_proj", "layers.1.self_attn.v_proj"],
        None,
    ],
    ids=str,
)
def test_targets_are_resolved_from_the_tensors(targets: object, tmp_path: Path) -> None:
    """Case 6."""
    weights = random_weights(SQUARE, layers=2, rank=4)
    folder = write_adapter(tmp_path / "a", weights, target_modules=targets)
    packed = load(folder, plan_of(SQUARE))

    assert set(packed.modules) == {"q_proj", "v_proj"}
    assert read_adapter(folder).idle == (("o_proj",) if "o_proj" in (targets or ()) else ())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"target_modules": ["v_proj"]}, "target_modules is v_proj"),
        ({"target_modules": ["proj"]}, "target_modules is proj"),
        ({"target_modules": []}, "target_modules is empty"),
        ({"target_modules": "q_proj"}, "target_modules is `q_proj`"),  # a regex for the whole path
        ({"target_modules": ".*v_proj"}, "target_modules is `.*v_proj`"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules names q_proj"),
        ({"exclude_modules": r".*\.0\..*"}, r"exclude_modules is `.*\\.0\\..*`"),
        ({"layers_to_transform": [1]}, "layers_to_transform is [1]"),
        ({"layers_to_transform": 1}, "layers_to_transform is 1"),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, "layers_to_transform is [1]"),
        ({"layers_to_transform": [0, 1], "layers_pattern": ["h"]}, "layers_to_transform is [0, 1]"),
    ],
    ids=str,
)
def test_tensors_that_the_config_denies_are_refused(
    fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    text = read_refusal(one_module(tmp_path / "a", **fields))

    assert "config and tensors disagree about `model.layers.0.self_attn.q_proj`" in text
    assert f"expected: no tensors for it: {reason}" in text


@pytest.mark.parametrize(
    "fields",
    [
        {"exclude_modules": ["proj", "model.layers.2"]},
        {"exclude_modules": ".*vision.*"},
        {"layers_to_transform": []},
        {"layers_to_transform": [0, 1]},
        {"layers_to_transform": [0, 1], "layers_pattern": "layers"},
    ],
    ids=str,
)
def test_tensors_that_the_config_grants_are_read(fields: dict[str, Any], tmp_path: Path) -> None:
    assert len(read_adapter(one_module(tmp_path / "a", **fields)).pairs) == 2


@pytest.mark.parametrize("fields", [{"r": 8}, {"rank_pattern": {"q_proj": 8}}], ids=str)
def test_a_rank_that_the_tensors_deny_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    text = read_refusal(one_module(tmp_path / "a", **fields))

    assert "disagree about the rank of `model.layers.0.self_attn.q_proj`" in text
    assert "expected: 8, as adapter_config.json says\n  found: 4: A [4, 16] and B [16, 4]" in text
