"""Folders, tensors and configs that are refused, each by name."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapter_checks import (
    RNG,
    A,
    B,
    load,
    one_module,
    plan_of,
    read_refusal,
    refusal,
    refused_tensors,
)
from adapter_files import (
    CONFIG,
    WEIGHTS,
    keys_of,
    path_of,
    random_pair,
    random_weights,
    write_adapter,
    write_tensors,
)

from aot_lora.adapters import Adapter, pack, read_adapter
from aot_lora.errors import EXIT_INTEGRITY, EXIT_USAGE, DamagedAdapterError


def test_a_file_that_changed_since_is_refused(tmp_path: Path) -> None:
    folder = one_module(tmp_path / "a")
    adapter = read_adapter(folder)
    write_tensors(folder, {"x": np.ones((1, 1), np.float32)})
    text = refusal(lambda: pack(adapter, plan_of()), exit_code=EXIT_INTEGRITY)

    assert "the file has changed since its header was read" in text


def test_a_file_cut_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = read_adapter(one_module(tmp_path / "a"))
    monkeypatch.setattr("aot_lora.adapters.files.os.preadv", lambda *_: 0)
    text = refusal(lambda: pack(adapter, plan_of()), exit_code=EXIT_INTEGRITY)

    assert "the file ends early" in text


def test_short_reads_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = one_module(tmp_path / "a")
    whole = load(folder, plan_of())
    preadv = os.preadv
    monkeypatch.setattr(
        "aot_lora.adapters.files.os.preadv",
        lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset),
    )

    assert (load(folder, plan_of()).modules["q_proj"].a == whole.modules["q_proj"].a).all()


def test_links_are_followed(tmp_path: Path) -> None:
    """The cache of Hugging Face holds links to blobs."""
    folder = one_module(tmp_path / "blobs")
    (tmp_path / "a").mkdir()
    for name in (CONFIG, WEIGHTS):
        (tmp_path / "a" / name).symlink_to(folder / name)

    assert load(tmp_path / "a", plan_of()).rank == 4


@pytest.mark.parametrize(
    ("files", "text", "exit_code"),
    [
        ([], "an empty folder", EXIT_USAGE),
        (["config.json", "model.safetensors"], "a base model, not an adapter", EXIT_USAGE),
        (["model-00001-of-00002.safetensors"], "a base model, not an adapter", EXIT_USAGE),
        (["notes.txt"], "no adapter in this folder", EXIT_USAGE),
        (
            [CONFIG, "adapter_model.bin"],
            "save_pretrained(..., safe_serialization=True)",
            EXIT_USAGE,
        ),
        ([CONFIG], f"{WEIGHTS} is missing", EXIT_INTEGRITY),
        ([WEIGHTS], f"{CONFIG} is missing", EXIT_INTEGRITY),
    ],
    ids=str,
)
def test_a_folder_of_something_else_is_refused(
    files: list[str], text: str, exit_code: int, tmp_path: Path
) -> None:
    """Case 12."""
    (tmp_path / "a").mkdir()
    for name in files:
        (tmp_path / "a" / name).write_bytes(b"{}")

    assert text in read_refusal(tmp_path / "a", exit_code=exit_code)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert "no such folder" in read_refusal(tmp_path / "absent")
    assert "not a folder" in read_refusal(tmp_path / "file")
    assert "cannot be read" in refusal(lambda: read_adapter("a\0b"), exit_code=EXIT_INTEGRITY)


def test_safetensors_beside_a_pickle_are_read(tmp_path: Path) -> None:
    folder = one_module(tmp_path / "a")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04never read")

    assert read_adapter(folder).rank == 4


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    """Case 12."""
    folder = one_module(tmp_path / "a")
    whole = (folder / WEIGHTS).read_bytes()
    for length in range(0, len(whole), 13):
        (folder / WEIGHTS).write_bytes(whole[:length])
        with pytest.raises(DamagedAdapterError, match=r"cut short|too short"):
            read_adapter(folder)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (f"{Q}.lora_magnitude_vector", "is DoRA, which cannot be served"),
        (f"{Q}.lora_magnitude_vector.default.weight", "is DoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "is LoRA of an embedding"),
        ("base_model.model.lm_head.modules_to_save.weight", "is a module saved whole"),
        ("base_model.model.modules_to_save.head.lora_A.weight", "is a module saved whole"),
        (f"{Q}.lora_B.bias", "is LoRA with a bias (lora_bias)"),
        (f"{Q}.lora_B.default.bias", "is LoRA with a bias (lora_bias)"),
        ("base_model.model.model.embed_tokens.weight", "embed_tokens.weight` is no LoRA tensor"),
        (f"{Q}.bias", "q_proj.bias` is no LoRA tensor"),
        (f"{Q}.lora_A", "is no LoRA tensor"),
        (f"{Q}.lora_C.weight", "is no LoRA tensor"),
        ("base_model.model.a.mlp.experts.3.up_proj.lora_A.weight", "belongs to an expert"),
        ("base_model.model.a.mlp.experts.base_layer.lora_A.weight", "belongs to an expert"),
        ("base_model.model.block.1.layer.0.q.lora_A.weight", "stands in layers within layers"),
        ("..lora_A.weight", "names no module"),
        ("a b.lora_A.weight", "names no module"),
    ],
)
def test_other_tensors_are_refused_by_name(key: str, text: str, tmp_path: Path) -> None:
    """Case 9."""
    pair = random_pair(RNG, rank=4, d=16, o=16)
    folder = write_adapter(tmp_path / "a", {path_of("q_proj", 0): pair})
    tensors = dict(zip(keys_of(path_of("q_proj", 0), "peft"), pair, strict=True))
    twin = key.replace("lora_A", "lora_B") if key.endswith("lora_A.weight") else key
    write_tensors(folder, tensors | {key: pair[0], twin: pair[1]})

    assert text in read_refusal(folder)


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({f"{Q}.lora_A.weight": A}, "has lora_A but no lora_B"),
        ({f"{Q}.lora_B.weight": B}, "has lora_B but no lora_A"),
        ({}, "no LoRA tensors: this looks like a base model's weights"),
        ({"model.embed_tokens.weight": A}, "no LoRA tensors: this looks like a base model's"),
        (
            {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B.T[:3].T},
            "A and B of `model.layers.0.self_attn.q_proj` have different ranks",
        ),
        ({f"{Q}.lora_A.weight": A[None], f"{Q}.lora_B.weight": B}, "has 3 dimensions"),
        ({f"{Q}.lora_A.weight": A[:0], f"{Q}.lora_B.weight": B[:, :0]}, "a rank of at least 1"),
        (
            {f"{Q}.lora_A.one.weight": A, f"{Q}.lora_B.two.weight": B},
            "more than one adapter in one file",
        ),
        (
            {f"{Q}.lora_A.one.weight": A, f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B},
            "are the same tensor",
        ),
        (
            {
                "model.layers.0.self_attn.q_proj.lora_A.weight": A,
                f"{Q}.lora_A.weight": A,
                f"{Q}.lora_B.weight": B,
            },
            "are the same tensor",
        ),
        (
            {
                f"{stack}.0.q_proj.lora_{half}.weight": {"A": A, "B": B}[half]
                for stack in ("model.language.layers", "model.vision.blocks")
                for half in "AB"
            },
            "found: model.language.layers, model.vision.blocks",
        ),
        (
            {
                f"model.layers.0.{home}.q_proj.lora_{half}.weight": {"A": A, "B": B}[half]
                for home in ("self_attn", "cross_attn")
                for half in "AB"
            },
            "`model.layers.0.self_attn.q_proj` and `model.layers.0.cross_attn.q_proj` are both "
            "`q_proj` of layer 0",
        ),
    ],
    ids=lambda value: None,
)
def test_tensors_that_do_not_go_together_are_refused(
    tensors: dict[str, np.ndarray], text: str, tmp_path: Path
) -> None:
    """Case 10, and others."""
    assert text in refused_tensors(tmp_path / "a", tensors)


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn"])
def test_a_dtype_that_is_not_taken_is_refused_by_name(dtype: str, tmp_path: Path) -> None:
    weights = random_weights({"q_proj": (16, 16)}, layers=1, rank=4)
    text = read_refusal(write_adapter(tmp_path / "a", weights, dtype=dtype))

    assert f"has dtype {dtype.removesuffix('fn')}" in text
    assert "float32, float16, bfloat16" in text


def test_a_tower_of_its_own_is_fine(tmp_path: Path) -> None:
    """One stack of layers, whatever it is called, and modules outside of it."""
    weights = {
        "model.language_model.layers.0.self_attn.q_proj": (A, B),
        "model.language_model.layers.1.self_attn.q_proj": (A, B),
        "model.projector.linear": (A, B),
    }
    adapter = read_adapter(write_adapter(tmp_path / "a", weights))

    assert [(pair.module, pair.layer) for pair in adapter.pairs] == [
        ("q_proj", 0),
        ("q_proj", 1),
        ("linear", None),
    ]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3: another method than LoRA"),
        ({"use_dora": True}, "use_dora True: DoRA"),
        ({"use_qalora": True}, "use_qalora True: QA-LoRA"),
        ({"bias": "lora_only"}, "bias lora_only: trained biases"),
        ({"lora_bias": True}, "lora_bias True: LoRA with a bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save ['lm_head']: modules saved whole"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices [1]: retrained token"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens [1]: activated LoRA"),
        ({"layer_replication": [[0, 4]]}, "layer_replication [[0, 4]]: a base model with"),
        ({"target_parameters": ["w"]}, "target_parameters ['w']: LoRA of bare parameters"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config {'top_k': 3}: Arrow routing"),
        ({"kasa_config": {"beta": 1}}, "kasa_config {'beta': 1}: KaSA"),
        ({"monteclora_config": {"n": 1}}, "Monte Carlo LoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "block-diagonal LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa: it changed the base"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights pissa_niter_16: it changed"),
        ({"init_lora_weights": "olora"}, "init_lora_weights olora: it changed the base"),
        ({"init_lora_weights": "corda"}, "init_lora_weights corda: it changed the base"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights loftq: it changed the base"),
        ({"init_lora_weights": "new"}, "init_lora_weights new: an unknown initialisation"),
    ],
    ids=str,
)
def test_another_kind_of_adapter_is_refused_by_name(
    fields: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """Case 9."""
    found = read_refusal(one_module(tmp_path / "a", **fields))

    assert text in found
    assert "such an adapter cannot be served" in found


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": None},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "orthogonal"},
        {"modules_to_save": [], "layer_replication": None, "megatron_config": None},
        {"enable_lora": None, "merge_weights": True, "fan_in_fan_out": True},
        {"bias": None, "use_rslora": None, "rank_pattern": None, "alpha_pattern": None},
        {"of a later release": {"x": [1]}, "peft_version": "9.9"},
        {"lora_alpha": 4.0},
    ],
    ids=str,
)
def test_what_does_not_change_the_result_is_taken(fields: dict[str, Any], tmp_path: Path) -> None:
    assert {pair.scale for pair in read_adapter(one_module(tmp_path / "a", **fields)).pairs} == {1}


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('{\n  "r": 4,\n}', f"{CONFIG}:3:1: not valid JSON"),
        ("[]", "not a JSON object\n  found: a list"),
        ('{"r": 4, "lora_alpha": NaN}', "NaN is not JSON"),
        ('{"r": 4}', "`lora_alpha` is wrong: Field required\n  found: nothing"),
        ('{"lora_alpha": 4}', "`r` is wrong: Field required"),
        ('{"r": 0, "lora_alpha": 4}', "`r` is wrong: Input should be greater than or equal to 1"),
        ('{"r": true, "lora_alpha": 4}', "`r` is wrong: Input should be a valid integer"),
        ('{"r": "4", "lora_alpha": 4}', "`r` is wrong: Input should be a valid integer"),
        ('{"r": 4, "lora_alpha": "4"}', "`lora_alpha` is wrong: Input should be a valid number"),
        ('{"r": 4, "lora_alpha": 1e999}', "`lora_alpha` is wrong: Input should be a finite number"),
        (
            '{"r": 4, "lora_alpha": 4, "rank_pattern": {"a\\u001b": 0}}',
            r"`rank_pattern[a\x1b]` is wrong: Input should be greater than or equal to 1",
        ),
        ('{"r": 4, "lora_alpha": 4, "target_modules": 7}', "`target_modules` is wrong"),
        ("\xff", "not valid JSON"),
    ],
)
def test_a_config_that_is_not_one_is_refused(config: str, text: str, tmp_path: Path) -> None:
    folder = one_module(tmp_path / "a")
    (folder / CONFIG).write_bytes(config.encode("latin-1"))

    assert text in read_refusal(folder, exit_code=EXIT_INTEGRITY)


def test_alpha_0_is_refused(tmp_path: Path) -> None:
    text = read_refusal(one_module(tmp_path / "a", lora_alpha=0))

    assert "the scale of `model.layers.0.self_attn.q_proj` is 0" in text


def test_names_in_a_config_twice_take_the_last(tmp_path: Path) -> None:
    """As every reader of JSON does, PEFT's too."""
    folder = one_module(tmp_path / "a")
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text[:-1] + ', "lora_alpha": 40}')

    assert {pair.scale for pair in read_adapter(folder).pairs} == {10.0}


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "is not valid: missing )"),
        ("q_proj)", "is not valid: unbalanced parenthesis"),
        ("[a", "is not valid: unterminated character set"),
        ("*", "is not valid: nothing to repeat"),
        ("a**", "is not valid: multiple repeat"),
        ("a\\", "is not valid: bad escape"),
        ("a" * 5000, "a pattern of 5,000 characters"),
        ("[z-a]", "is not valid: bad character range"),
    ],
    ids=lambda value: value[:20],
)
@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
def test_a_pattern_that_is_not_taken_is_refused(
    field: str, pattern: str, problem: str, tmp_path: Path
) -> None:
    text = read_refusal(one_module(tmp_path / "a", **{field: pattern}))

    assert CONFIG in text
    assert problem in text


def test_names_are_escaped_and_cut(tmp_path: Path) -> None:
    text = refused_tensors(tmp_path / "a", {"\x1b[31m" + "x" * 9999 + ".lora_A.weight": A})

    assert "\x1b" not in text
    assert r"`\x1b[31mxxx" in text
    assert len(text) < 600


def test_a_whole_adapter_is_an_adapter(tmp_path: Path) -> None:
    """The positive control of the refusals above: what they start from is accepted."""
    adapter = read_adapter(one_module(tmp_path / "a"))

    assert isinstance(adapter, Adapter)
    assert pack(adapter, plan_of()).modules["q_proj"].a.any()
