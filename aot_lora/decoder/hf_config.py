"""A checkpoint's config.json, held against the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aot_lora.decoder.weights import decoder_of
from aot_lora.errors import ConfigError, IntegrityError
from aot_lora.plan import Plan


def check_config(root: Path, plan: Plan) -> None:
    """Refuses a model that is not the one of the plan.

    Raises:
      ConfigError: a field of its config.json disagrees; IntegrityError: it cannot be read.
      ProgramError: the plan has no decoder.
    """
    wanted = _wanted(plan)
    path = root / "config.json"
    try:
        config = json.loads(path.read_text())
        found = _found(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise IntegrityError(
            f"not the config of a model: {type(error).__name__}: {error}",
            where=str(path),
            next_step="name a folder that save_pretrained wrote, and copy all of it",
        ) from None
    for key, expected in wanted.items():
        if found[key] != expected:
            raise ConfigError(
                f"`{key}` is not the plan's",
                where=str(path),
                expected=str(expected),
                found=str(found[key]),
                next_step="load the checkpoint that the config's `model` names, or mend `decoder:`",
            )


def _wanted(plan: Plan) -> dict[str, Any]:
    shape, _ = decoder_of(plan)
    scaling = shape.rope_scaling
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "num_hidden_layers": plan.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        },
        "tie_word_embeddings": shape.tied,
    }


def _found(config: dict[str, Any]) -> dict[str, Any]:
    """The same fields as the file has them, with the defaults of transformers' LlamaConfig."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    # transformers 5 writes one section; before it there were two fields.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "type")}
    return {
        "model_type": config.get("model_type"),
        "hidden_act": config.get("hidden_act", "silu"),
        "attention_bias": config.get("attention_bias", False),
        "mlp_bias": config.get("mlp_bias", False),
        "num_hidden_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_scaling": None if kind == "default" else scaling | {"rope_type": kind},
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
    }
