"""The decoder against transformers and peft, token for token. Run in .venv-torch: see tools/test.

Not collected with the other tests: it needs torch, which nothing else here does.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import warm

from aot_lora import Runtime, load_config
from aot_lora.decoder import Session, load_checkpoint

# Whatever torch and its kin warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")

CONFIG = """\
model: {{q_proj: [64, 64], k_proj: [64, 32], v_proj: [64, 32], o_proj: [64, 64],
        gate_proj: [64, 96], up_proj: [64, 96], down_proj: [96, 64]}}
layers: 2
decoder:
  hidden: 64
  heads: 4
  kv_heads: 2
  head_dim: 16
  intermediate: 96
  vocab: 131
  norm_eps: 1.0e-5
  rope_theta: 10000.0
  rope_scaling: {scaling}
  tied: {tied}
kv_cache: {{sequences: 3, length: 300}}
target: {{platform: cpu}}
lora:
  modules: {modules}
  ranks: [16]
  slots: [0, 3]
  max_adapters: 3
  dtype: float32
tokens: {{budget: 180, buckets: [3, 180]}}
programs:
  - lora
  - {{entry: "aot_lora.decoder:mixed_step"}}
  - {{entry: "aot_lora.decoder:decode_step"}}
store: {{root: store}}
"""
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
COUNT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the adapters it is asked with."""

    scaled: bool
    tied: bool
    adapters: dict[str, dict[str, Any]]

    @property
    def modules(self) -> list[str]:
        return [*LINEAR] if self.tied else [*LINEAR, "lm_head"]


CASES = [
    Case(
        scaled=True,
        tied=False,
        adapters={
            "all": {"r": 16, "lora_alpha": 24, "target_modules": [*LINEAR, "lm_head"]},
            "patterns": {
                "r": 4,
                "lora_alpha": 4,
                "target_modules": LINEAR,
                "rank_pattern": {"q_proj": 3, "layers.1.mlp.down_proj": 9},
                "alpha_pattern": {"q_proj": 6, "layers.1.mlp.down_proj": 7},
            },
            "few": {"r": 8, "target_modules": ["v_proj", "lm_head"], "use_rslora": True},
        },
    ),
    Case(scaled=False, tied=True, adapters={"plain": {"r": 5, "target_modules": LINEAR}}),
]


@pytest.mark.parametrize("case", CASES, ids=["untied, scaled", "tied"])
def test_each_token_is_that_of_transformers_and_peft(tmp_path: Path, case: Case) -> None:
    model = make_model(case)
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    answers = {name: make_adapter(model, tmp_path / name, seed, options)
               for seed, (name, options) in enumerate(case.adapters.items())}  # fmt: skip
    prompts = make_prompts()
    expected = {
        name: [greedy(one, prompt) for prompt in prompts]
        for name, one in (answers | {"": model}).items()
    }
    config = tmp_path / "model.yaml"
    scaling = "{factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_length: 64}"
    config.write_text(
        CONFIG.format(
            scaling=scaling if case.scaled else "null",
            tied=str(case.tied).lower(),
            modules=case.modules,
        )
    )
    warm(config)

    with Runtime.open(config) as runtime:
        session = Session(runtime, load_checkpoint(tmp_path / "model", runtime.plan))
        slots = {name: runtime.adapters.load(tmp_path / name) for name in answers} | {"": -1}
        # All adapters at once, each with all prompts, in one stream of batches.
        asked = [(name, prompt) for prompt in prompts for name in slots]
        found = session.generate([p for _, p in asked], [slots[n] for n, _ in asked], COUNT)

    assert found == [expected[name][prompts.index(prompt)] for name, prompt in asked]
    said = [tuple(expected[name][0]) for name in slots]
    assert len(set(said)) == len(said), "the adapters say different things"
    assert "torch" in sys.modules
    assert load_config(config).plan.decoder


def make_model(case: Case) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    torch.set_num_threads(1)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if case.scaled:
        rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        num_hidden_layers=2,
        vocab_size=131,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
        tie_word_embeddings=case.tied,
        initializer_range=0.2,  # large enough that tokens depend on their context
    )
    return LlamaForCausalLM(config).eval()


def make_adapter(model: Any, folder: Path, seed: int, options: dict[str, Any]) -> Any:
    """A copy of the model with a random adapter, which is saved."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(100 + seed)
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
    ).eval()
    adapted.save_pretrained(folder)
    return adapted


def make_prompts() -> list[list[int]]:
    """Short ones, and one of more than a chunk of 128 rows and more than a step has room for."""
    return [[5, 90, 3], [11], [(7 * n * n + 3) % 131 for n in range(200)], list(range(40, 70))]


def greedy(model: Any, prompt: Sequence[int]) -> list[int]:
    import torch

    tokens = torch.tensor([list(prompt)])
    with torch.no_grad():
        for _ in range(COUNT):
            logits = model(input_ids=tokens, use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax().reshape(1, 1)], dim=1)
    return tokens[0, len(prompt) :].tolist()
