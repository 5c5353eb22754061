"""Hugging Face checkpoints of Llama's family: checked against the plan, stacked over layers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from aot_lora.decoder.hf_config import check_config
from aot_lora.decoder.weights import Weights, decoder_of, host_dtype, shapes
from aot_lora.errors import ConfigError, IntegrityError
from aot_lora.plan import COLUMN_MODULES, HEAD_MODULE, ROW_MODULES, Plan

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
_IGNORED = "rotary_emb.inv_freq"  # a buffer that old releases saved; it follows from the config


def load_checkpoint(folder: str | os.PathLike[str], plan: Plan) -> Weights:
    """Reads a model's weights into the tree that the steps take.

    Args:
      folder: with config.json and model.safetensors, or its index and shards.
      plan: of a config for this model.

    Returns:
      Numpy arrays in the plan's dtype, see `weights.shapes`.

    Raises:
      ConfigError: the model is not the plan's: its config.json or a tensor's shape disagrees, or a
        tensor is missing or unknown.
      IntegrityError: a file is damaged or missing.
      ProgramError: the plan has no decoder.
    """
    root = Path(folder)
    check_config(root, plan)
    with ExitStack() as stack:
        files = {name: _open(stack, root / name) for name in _files(root)}
        homes = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118
        sources = dict(_sources(plan))
        _check_names(root, set(homes), set(sources), tied=decoder_of(plan)[0].tied)
        weights = _empty(shapes(plan), host_dtype(plan))
        for name, (path, index) in sources.items():
            target: Any = weights
            for key in path:
                target = target[key]
            place: np.ndarray = target if index is None else target[index]
            # Files hold [O, D]; the step takes [D, O]. The embedding is a table, not a projection.
            flipped = place.ndim == 2 and path != ("embed",)
            wanted = place.T if flipped else place
            _check_shape(root, name, homes[name].get_slice(name).get_shape(), wanted.shape)
            wanted[...] = _tensor(homes[name], name, root)
    return weights


def _sources(plan: Plan) -> Iterator[tuple[str, tuple[tuple[str, ...], int | None]]]:
    """Tensor's name -> (where it goes in the tree, which layer)."""
    shape, _ = decoder_of(plan)
    yield "model.embed_tokens.weight", (("embed",), None)
    yield "model.norm.weight", (("norm",), None)
    if not shape.tied:
        yield "lm_head.weight", ((HEAD_MODULE,), None)
    inside = {
        name: f"{'self_attn' if name in _ATTENTION else 'mlp'}.{name}"
        for name in (*COLUMN_MODULES, *ROW_MODULES)
    }
    inside |= _NORMS
    for layer in range(plan.layers):
        for name, path in inside.items():
            yield f"model.layers.{layer}.{path}.weight", (("layers", name), layer)


def _empty(tree: Weights, dtype: np.dtype[Any]) -> Weights:
    return {
        name: _empty(value, dtype) if isinstance(value, dict) else np.empty(value, dtype)
        for name, value in tree.items()
    }


def _files(root: Path) -> list[str]:
    index = root / INDEX
    if not index.is_file():
        return [SINGLE]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise IntegrityError(
            f"not an index of shards: {type(error).__name__}: {error}",
            where=str(index),
            next_step="copy the checkpoint again",
        ) from None


def _open(stack: ExitStack, path: Path) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except FileNotFoundError:
        raise IntegrityError(
            "is missing",
            where=str(path),
            expected=f"{SINGLE}, or {INDEX} and its shards",
            next_step="name a folder that save_pretrained wrote, and copy all of it",
        ) from None
    except (SafetensorError, OSError) as error:
        raise IntegrityError(
            f"cannot be read: {error}", where=str(path), next_step="copy the checkpoint again"
        ) from None


def _tensor(file: Any, name: str, root: Path) -> np.ndarray:
    try:
        return file.get_tensor(name)
    except (SafetensorError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot be read: {error}",
            where=f"{root}: {name}",
            expected="floats of 16 or 32 bits",
            next_step="save the model unquantized",
        ) from None


def _check_names(root: Path, found: set[str], wanted: set[str], *, tied: bool) -> None:
    missing = sorted(wanted - found)
    extra = sorted(n for n in found - wanted if not n.endswith(_IGNORED))
    if tied:  # some writers save the head a second time
        extra = [name for name in extra if name != "lm_head.weight"]
    for names, problem in ((missing, "is missing"), (extra, "is not of the plan's decoder")):
        if names:
            more = f", and {len(names) - 1} more such tensors" if len(names) > 1 else ""
            raise ConfigError(
                f"{problem}{more}",
                where=f"{root}: {names[0]}",
                expected=f"the {len(wanted)} tensors of a Llama of the plan's size",
                next_step="load the checkpoint that the config's `model` names",
            )


def _check_shape(root: Path, name: str, found: list[int], wanted: tuple[int, ...]) -> None:
    if tuple(found) != wanted:
        raise ConfigError(
            "does not have the plan's shape",
            where=f"{root}: {name}",
            expected=str(list(wanted)),
            found=str(list(found)),
            next_step="load the checkpoint that the config's `model` names",
        )
