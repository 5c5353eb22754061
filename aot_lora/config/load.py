"""Reads a config: YAML -> strict models -> a frozen `Config` with its plan."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from aot_lora.config import gpus, presets, schema
from aot_lora.config.asked import Asked
from aot_lora.config.decoder import decoder_shape
from aot_lora.config.limits import hold_limits
from aot_lora.config.problems import validate
from aot_lora.config.schema import OnMiss
from aot_lora.config.yaml_nodes import Document, parse
from aot_lora.errors import ConfigError
from aot_lora.plan import (
    HEAD_MODULE,
    Axis,
    DecoderShape,
    Module,
    Plan,
    TargetSpec,
    gaps,
    pow2_buckets,
    step_buckets,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A config, resolved.

    Args:
      path: the file it was read from.
      targets: what to compile for, at least one.
      plan: the variants.
      written_plan: those that the file asks for; `plan` may have buckets that servers missed.
      asked: the file itself, to plan it with other buckets.
      store_root: the folder of the store.
      user_sources: extra source files of the user's programs, as globs beside the config.
      on_miss: what a server does at a point without an executable.
      swap: whether adapters give way to others when the banks are full.
      host_cache_bytes: of prepared adapters in a server's memory.
      priming: whether a server runs each executable once before it serves.
      hbm_fraction: the share of a device's memory that a plan may need, 0 to 1.
      prefill_chunk: the most prompt tokens of a step; None for as many as there is room for.
      warnings: findings that do not stop anything, each with its place.
    """

    path: Path
    targets: tuple[TargetSpec, ...]
    plan: Plan
    written_plan: Plan
    asked: Asked = field(repr=False)
    store_root: Path
    user_sources: tuple[str, ...]
    on_miss: OnMiss
    swap: bool
    host_cache_bytes: int
    priming: bool
    hbm_fraction: float
    prefill_chunk: int | None
    warnings: tuple[str, ...]

    @property
    def lock_path(self) -> Path:
        """The lock beside the config: ``llama-3.1-8b.lock.json``."""
        return self.path.with_suffix(".lock.json")

    @property
    def autotune_path(self) -> Path:
        """The recorded autotuning results beside the config, for builds without a GPU."""
        return gpus.autotune_path(self.path)


def load_config(
    name: str | os.PathLike[str], *, store: str | None = None, limited: bool = True
) -> Config:
    """Reads and checks a config file or preset.

    Args:
      name: a path, or a preset such as ``cpu/quickstart``.
      store: overrides the store's folder.

    Raises:
      ConfigError: anything wrong with the file; PlanError: the plan breaks a limit other than
        that of seconds, which is for hosts that compile: see `hold_limits`.
    """
    config = read(name, store=store)
    hold_limits(config.asked, config.plan, config.targets)
    return config


def read(name: str | os.PathLike[str], *, store: str | None = None) -> Config:
    """Like `load_config`, but whatever the plan costs."""
    path = presets.find_config(os.fspath(name))
    document = _read(path)
    file = validate(schema.ConfigFile, document)
    warnings: list[str] = []
    token_buckets = _token_buckets(file.tokens, document, path, warnings)
    modules, layers, decoder = _modules(file, document)
    asked = Asked(file=file, document=document, modules=modules, layers=layers, decoder=decoder)
    plan = asked.plan(
        tokens=token_buckets,
        slots=_sorted(file.lora.slots, ("lora", "slots"), document, warnings),
        ranks=_sorted(file.lora.ranks, ("lora", "ranks"), document, warnings),
    )
    return Config(
        path=path,
        targets=_targets(file, document, path),
        plan=plan,
        written_plan=plan,
        asked=asked,
        store_root=_store_root(path, file.store.root, store),
        user_sources=tuple(glob for entry in asked.entries for glob in entry.sources),
        on_miss=file.on_miss,
        swap=file.adapters.mode == "swap",
        host_cache_bytes=file.adapters.host_cache,
        priming=file.priming,
        hbm_fraction=file.limits.hbm_fraction,
        prefill_chunk=file.tokens.prefill_chunk,
        warnings=tuple(warnings),
    )


def _read(path: Path) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    return parse(text, str(path))


def _targets(file: schema.ConfigFile, document: Document, config: Path) -> tuple[TargetSpec, ...]:
    written = file.target if isinstance(file.target, list) else [file.target]
    tp = file.mesh.tp
    targets: list[TargetSpec] = []
    for index, target in enumerate(written):
        path = ("target", index) if isinstance(file.target, list) else ("target",)
        if target.platform == "cuda" and target.topology:
            where = document.place((*path, "topology"))
            targets.append(
                TargetSpec(
                    "cuda",
                    target.topology,
                    tp,
                    target_config=gpus.read(target.topology, config=config, where=where),
                    autotune=gpus.autotune_digest(config),
                )
            )
            continue
        targets.append(TargetSpec(target.platform, target.topology, tp))
        if target.platform != "tpu" or tp == 1:
            continue
        chips = math.prod(map(int, target.topology.partition(":")[2].split("x")))
        if tp != chips:
            raise ConfigError(
                f"the topology has {chips} chips and the mesh {tp}",
                where=document.place(path),
                expected="mesh.tp of 1, or all chips of the topology",
                found=f"{target.topology}, mesh.tp {tp}",
                next_step="name a topology of as many chips as the mesh has",
            )
    return tuple(dict.fromkeys(targets))


def _store_root(config: Path, configured: str | None, override: str | None) -> Path:
    """Flag, then AOT_LORA_CACHE, then the config, then the default of this platform."""
    chosen = override or os.environ.get("AOT_LORA_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if configured:
        return (config.absolute().parent / Path(configured).expanduser()).resolve()
    return presets.default_store_root()


def _sorted(
    values: list[int], path: tuple[str, ...], document: Document, warnings: list[str]
) -> tuple[int, ...]:
    ordered = tuple(sorted(set(values)))
    if list(ordered) != values:
        warnings.append(
            f"{document.place(path)}: {values} is not sorted and distinct; read as {list(ordered)}"
        )
    return ordered


def _token_buckets(
    tokens: schema.TokensSection, document: Document, config: Path, warnings: list[str]
) -> tuple[int, ...]:
    if isinstance(tokens.buckets, schema.FitBuckets):
        from aot_lora.config.fitted import fitted_buckets  # numpy, for those who fit

        return fitted_buckets(tokens.buckets, tokens, config, document.place(("tokens", "buckets")))
    if isinstance(tokens.buckets, schema.StepBuckets):
        return step_buckets(step=tokens.buckets.step, budget=tokens.budget)
    if tokens.buckets == "pow2":
        return pow2_buckets(smallest=tokens.smallest, budget=tokens.budget)
    path = ("tokens", "buckets")
    buckets = _sorted(tokens.buckets, path, document, warnings)
    if buckets[-1] < tokens.budget:
        warnings.append(
            f"{document.place(path)}: the last bucket {buckets[-1]} is below the budget; "
            f"{tokens.budget} was added"
        )
        buckets = (*buckets, tokens.budget)
    for lower, upper, worst, between in gaps(Axis(name="tokens", buckets=buckets)):
        warnings.append(
            f"{document.place(path)}: a gap from {lower} to {upper} pads up to "
            f"{100 * worst:.0f} % of a batch; add {between}"
        )
    return buckets


def _modules(
    file: schema.ConfigFile, document: Document
) -> tuple[tuple[Module, ...], int, DecoderShape | None]:
    """The modules with banks, the layers, and the decoder if the model is known as one."""
    if isinstance(file.model, dict):
        shapes, extra, layers, decoder = _written_out(file.model, file, document)
    else:
        for key in ("layers", "decoder"):
            if getattr(file, key) is not None:
                raise ConfigError(
                    f"`{key}` beside a named model",
                    where=document.place((key,)),
                    expected=f"{key} only where module shapes are written out",
                    next_step="remove it: the model's file says it",
                )
        model, decoder = _model_file(file.model, document)
        shapes, extra, layers = model.modules, model.extra_modules, model.layers
    if file.kv_cache and decoder is None:
        raise ConfigError(
            "`kv_cache` for a model that is not known as a decoder",
            where=document.place(("kv_cache",)),
            expected="a `decoder:` section with its sizes",
            next_step="add one beside `model:`, or remove `kv_cache:`",
        )
    wanted = file.lora.modules
    if wanted == "all-linear":
        names = list(shapes)
    else:
        known = {**shapes, **extra}
        names = list(dict.fromkeys(wanted))
        for index, name in enumerate(wanted):
            if name not in known:
                raise ConfigError(
                    f"unknown module `{name}`",
                    where=document.place(("lora", "modules", index)),
                    expected="all-linear, or a list from " + ", ".join(known),
                )
        shapes = known
    modules = tuple(
        Module(
            name=n,
            d=shapes[n][0],
            o=shapes[n][1],
            layers=1 if n in extra else layers,
            split="d" if n in file.mesh.row_parallel else "o",
        )
        for n in names
    )
    _check_mesh(file.mesh, modules, {*shapes, *extra}, document)
    return modules, layers, decoder


def _check_mesh(
    mesh: schema.MeshSection, modules: tuple[Module, ...], known: set[str], document: Document
) -> None:
    for index, name in enumerate(mesh.row_parallel):
        if name not in known and "row_parallel" in mesh.model_fields_set:
            raise ConfigError(
                f"unknown module `{name}`",
                where=document.place(("mesh", "row_parallel", index)),
                expected="some of " + ", ".join(sorted(known)),
            )
    for module in modules:
        what, size = ("inputs", module.d) if module.split == "d" else ("outputs", module.o)
        if size % mesh.tp:
            raise ConfigError(
                f"the mesh does not divide {module.name}",
                where=document.place(("mesh", "tp")),
                expected=f"a divisor of its {size} {what}",
                found=f"{mesh.tp}",
            )


def _written_out(
    shapes: schema.Modules, file: schema.ConfigFile, document: Document
) -> tuple[schema.Modules, schema.Modules, int, DecoderShape | None]:
    if file.decoder is None:
        return shapes, {}, file.layers or 1, None
    if HEAD_MODULE in shapes:
        raise ConfigError(
            f"`{HEAD_MODULE}` beside a decoder",
            where=document.place(("model", HEAD_MODULE)),
            expected="the modules of a layer; the decoder brings its head",
            next_step="remove it; name it in lora.modules if adapters may change it",
        )
    decoder = decoder_shape(file.decoder, shapes, document, "model")
    head = {HEAD_MODULE: list(decoder.modules()[HEAD_MODULE])}
    return shapes, head, file.layers or 1, decoder


def _model_file(name: str, document: Document) -> tuple[schema.ModelFile, DecoderShape | None]:
    root = presets.presets_root() / "models"
    path = root / f"{name}.yaml"
    if "/" in name or not path.is_file():
        known = ", ".join(sorted(found.stem for found in root.glob("*.yaml")))
        raise ConfigError(
            f"unknown model `{name}`",
            where=document.place(("model",)),
            expected=f"one of {known}, or module shapes written out",
            next_step="write `model: {q_proj: [4096, 4096], ...}` for a model of your own",
        )
    found = _read(path)
    model = validate(schema.ModelFile, found)
    if model.decoder is None:
        return model, None
    decoder_shape(model.decoder, model.extra_modules, found, "extra_modules")
    return model, decoder_shape(model.decoder, model.modules, found, "modules")
