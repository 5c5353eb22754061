"""Checkpoints: read into the tree of a step, and refused by name where they are not the plan's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from adapter_files import safetensors_bytes
from decoding import DECODER
from serving import write

from aot_lora import errors, load_config
from aot_lora.decoder import load_checkpoint, random_weights
from aot_lora.plan import Plan

HOMES = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
}
# As transformers 4 wrote it.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "vocab_size": 97,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
}
Tensors = dict[str, np.ndarray]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return load_config(write(tmp_path / "decoder.yaml", DECODER)).plan


def tensors_of(weights: dict[str, Any]) -> Tensors:
    """The tensors as a checkpoint names and lays them out."""
    found = {
        "model.embed_tokens.weight": weights["embed"],
        "model.norm.weight": weights["norm"],
        "lm_head.weight": weights["lm_head"].T,
    }
    for name, home in HOMES.items():
        for layer, array in enumerate(weights["layers"][name]):
            found[f"model.layers.{layer}.{home}.weight"] = array.T
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def save(folder: Path, tensors: Tensors, *, shards: int = 1, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {name: value for name, value in (CONFIG | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files = {f"model-{n}.safetensors": names[n::shards] for n in range(shards)}
    if shards == 1:
        files = {"model.safetensors": names}
    else:
        index = {"weight_map": {name: file for file, held in files.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, held in files.items():
        (folder / file).write_bytes(safetensors_bytes({name: tensors[name] for name in held}))
    return folder


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return first.dtype == second.dtype and bool((first == second).all())


@pytest.mark.parametrize("shards", [1, 3])
def test_weights_come_back_as_they_were(tmp_path: Path, plan: Plan, shards: int) -> None:
    weights = random_weights(plan, 4)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    folder = save(tmp_path / "model", tensors_of(weights) | buffer, shards=shards)

    assert same(load_checkpoint(folder, plan), weights)
    assert same(random_weights(plan, 4), weights)
    assert not same(random_weights(plan, 5), weights)


def test_two_byte_floats_are_cast_to_the_plans_dtype(tmp_path: Path, plan: Plan) -> None:
    narrow = {
        n: a.astype(ml_dtypes.bfloat16) for n, a in tensors_of(random_weights(plan, 4)).items()
    }
    loaded = load_checkpoint(save(tmp_path / "model", narrow), plan)

    assert loaded["embed"].dtype == np.float32
    assert (loaded["embed"] == narrow["model.embed_tokens.weight"].astype(np.float32)).all()


def test_a_tied_head_is_not_read(tmp_path: Path) -> None:
    text = DECODER.replace("kv_heads: 2", "kv_heads: 2\n  tied: true")
    plan = load_config(write(tmp_path / "decoder.yaml", text)).plan
    weights = random_weights(plan, 0)
    assert "lm_head" not in weights
    tensors = tensors_of(weights | {"lm_head": np.zeros((32, 97), np.float32)})

    for held in (tensors, {n: a for n, a in tensors.items() if n != "lm_head.weight"}):
        folder = save(tmp_path / "model", held, tie_word_embeddings=True)
        assert same(load_checkpoint(folder, plan), weights)


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (drop(UP), [f"{UP}: is missing", "the 21 tensors of a Llama of the plan's size"]),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1." in name],
            ["model.layers.1.input_layernorm.weight: is missing, and 8 more such tensors"],
        ),
        (
            lambda tensors: tensors.update({UP.replace(".weight", ".bias"): np.zeros(48)}),
            ["model.layers.1.mlp.up_proj.bias: is not of the plan's decoder"],
        ),
        (
            lambda tensors: tensors.update({UP: np.zeros((32, 48), np.float32)}),
            [f"{UP}: does not have the plan's shape", "expected: [48, 32]", "found: [32, 48]"],
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, plan: Plan, change: Callable[[Tensors], object], lines: list[str]
) -> None:
    tensors = tensors_of(random_weights(plan, 0))
    change(tensors)

    with pytest.raises(errors.ConfigError) as caught:
        load_checkpoint(save(tmp_path / "model", tensors), plan)
    assert all(line in str(caught.value) for line in lines), str(caught.value)
    assert caught.value.exit_code == errors.EXIT_USAGE


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("model_type", "mistral", "mistral"),
        ("num_hidden_layers", 3, "3"),
        ("num_key_value_heads", ..., "4"),
        ("rms_norm_eps", 1e-6, "1e-06"),
        ("rope_theta", 500000.0, "500000.0"),
        ("rope_scaling", ..., "None"),
        (
            "rope_scaling",
            {"type": "linear", "factor": 8.0},
            "{'factor': 8.0, 'rope_type': 'linear'}",
        ),
        ("tie_word_embeddings", True, "True"),
        ("attention_bias", True, "True"),
        ("head_dim", 16, "16"),
    ],
)
def test_a_config_that_disagrees_with_the_plan_is_refused(
    tmp_path: Path, plan: Plan, key: str, value: Any, found: str
) -> None:
    folder = save(tmp_path / "model", tensors_of(random_weights(plan, 0)), **{key: value})

    with pytest.raises(errors.ConfigError) as caught:
        load_checkpoint(folder, plan)
    assert f"config.json: `{key}` is not the plan's" in str(caught.value)
    assert caught.value.found == found


def test_transformers_5_writes_rotary_positions_as_one_section(tmp_path: Path, plan: Plan) -> None:
    weights = random_weights(plan, 0)
    rope = CONFIG["rope_scaling"] | {"rope_theta": 10000.0}  # type: ignore[operator]
    parts = {"rope_parameters": rope, "rope_scaling": ..., "rope_theta": ...}

    assert same(
        load_checkpoint(save(tmp_path / "new", tensors_of(weights), **parts), plan), weights
    )


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("config.json", None, "not the config of a model: FileNotFoundError"),
        ("config.json", "[]", "not the config of a model: TypeError"),
        ("model.safetensors", None, "model.safetensors: is missing"),
        ("model.safetensors", "not one", "model.safetensors: cannot be read"),
        ("model.safetensors.index.json", "{}", "not an index of shards"),
    ],
)
def test_a_damaged_folder_is_an_integrity_error(
    tmp_path: Path, plan: Plan, file: str, content: str | None, text: str
) -> None:
    folder = save(tmp_path / "model", tensors_of(random_weights(plan, 0)))
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)

    with pytest.raises(errors.IntegrityError) as caught:
        load_checkpoint(folder, plan)
    assert text in str(caught.value)
