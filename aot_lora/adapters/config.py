"""``adapter_config.json``: what PEFT writes there, and what of it cannot be served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from aot_lora.adapters.files import opened, parse_json, read_at, stamp_of
from aot_lora.adapters.naming import shown
from aot_lora.errors import AdapterError, DamagedAdapterError

_LARGEST_BYTES = 2**20
_RANK = Annotated[int, Field(ge=1, le=2**31 - 1)]
_ALPHA = Annotated[float, Field(allow_inf_nan=False)]
_LAYER = Annotated[int, Field(ge=0)]

# How LoRA was initialised matters only where it changed the base weights: these leave them alone.
_HARMLESS_INITS = ("gaussian", "eva", "orthogonal")
_CHANGING_INITS = re.compile(r"pissa(_niter_\d+)?|olora|corda|loftq|lora_ga", re.ASCII)

# Fields that make it another computation when they are set, and what that is called.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "LoRA with a bias",
    "modules_to_save": "modules saved whole beside the LoRA",
    "trainable_token_indices": "retrained token embeddings",
    "alora_invocation_tokens": "activated LoRA, which starts at a token",
    "layer_replication": "a base model with replicated layers",
    "target_parameters": "LoRA of bare parameters, as in mixtures of experts",
    "arrow_config": "Arrow routing between adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "Monte Carlo LoRA",
}


class PeftConfig(BaseModel):
    """The fields that matter here. Others are ignored: each PEFT release adds some."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    peft_type: str = "LORA"
    base_model_name_or_path: str | None = None
    r: _RANK
    lora_alpha: _ALPHA
    use_rslora: bool | None = False
    rank_pattern: dict[str, _RANK] | None = None
    alpha_pattern: dict[str, _ALPHA] | None = None
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: _LAYER | list[_LAYER] | None = None
    layers_pattern: str | list[str] | None = None
    bias: str | None = "none"
    init_lora_weights: bool | str | None = True


def read_config(path: Path) -> tuple[PeftConfig, tuple[int, int, int]]:
    """Reads and checks the config.

    Returns:
      The config, and the file's stamp.

    Raises:
      DamagedAdapterError: not readable, too large, not a JSON object, a field missing or of the
        wrong type. AdapterError: it asks for something else than plain LoRA.
    """
    where = str(path)
    with opened(path) as (fd, status):
        if status.st_size > _LARGEST_BYTES:
            raise DamagedAdapterError(
                "too large for a config",
                where=where,
                expected=f"at most {_LARGEST_BYTES:,} bytes",
                found=f"{status.st_size:,}",
            )
        value = parse_json(read_at(fd, status.st_size, 0, where=where), where=where)
    _check_kind(value, where)
    try:
        config = PeftConfig.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        if name.endswith("_pattern") and len(first["loc"]) > 1:
            name += f"[{shown(str(first['loc'][1]))}]"
        raise DamagedAdapterError(
            f"`{name}` is wrong: {shown(first['msg'])}",
            where=where,
            found="nothing" if first["type"] == "missing" else shown(str(first["input"])),
        ) from None
    return config, stamp_of(status)


def _check_kind(value: dict[str, Any], where: str) -> None:
    """Refuses, before any field's type, what is not plain LoRA: the name of it helps more."""
    if (kind := value.get("peft_type", "LORA")) != "LORA":
        raise _unsupported(f"peft_type {shown(str(kind))}", "another method than LoRA", where)
    for name, meaning in _REFUSED.items():
        if value.get(name):
            raise _unsupported(f"{name} {shown(str(value[name]))}", meaning, where)
    if (bias := value.get("bias") or "none") != "none":
        raise _unsupported(f"bias {shown(str(bias))}", "trained biases of the base", where)
    init = value.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in _HARMLESS_INITS:
        changing = _CHANGING_INITS.fullmatch(init.lower())
        meaning = "it changed the base weights" if changing else "an unknown initialisation"
        raise _unsupported(f"init_lora_weights {shown(init)}", meaning, where)


def _unsupported(field: str, meaning: str, where: str) -> AdapterError:
    return AdapterError(
        f"{field}: {meaning}; such an adapter cannot be served",
        where=where,
        expected="plain LoRA of linear layers",
        next_step="train or convert the adapter to plain LoRA",
    )
