"""A process that traces variants for `check`. Run as a file: it may import another aot-lora.

Standard input holds one JSON object: config, store, names (target -> variants, or null for all),
part ([index, count], of the variants), folder (for StableHLO, or null). Each line of standard
output is one: {target, name, line} or {target, name, error, fields, traceback}, or {modules}.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any


def main() -> None:
    """Does what standard input says."""
    request: dict[str, Any] = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # What a program prints is not for the parent to read.
    from aot_lora.config import load_config

    config = load_config(request["config"], store=request["store"])
    # Kernels for a TPU last: once one was lowered, jaxlib 0.12 lowers those for GPUs otherwise.
    for target in sorted(config.targets, key=lambda target: target.platform == "tpu"):
        for variant, found in _traces(config, target, request):
            answer: dict[str, Any] = {"target": str(target), "name": variant.name}
            if isinstance(found, Exception):
                answer |= _error(found)
            else:
                answer |= _trace(found)
                if request["folder"]:
                    path = Path(request["folder"]) / f"{hash_of(str(target), variant.name)}.mlir"
                    path.write_text(found.lowered.as_text(), encoding="utf-8")
            out.write(json.dumps(answer) + "\n")
    out.write(json.dumps({"modules": user_modules()}) + "\n")
    out.flush()


def _traces(config: Any, target: Any, request: dict[str, Any]) -> Any:
    # The base of a comparison may be of any age: nothing newer than `trace` itself is used.
    from aot_lora.errors import ProgramError
    from aot_lora.lowering.trace import prepare_tracing, trace
    from aot_lora.programs.catalog import Catalog
    from aot_lora.targets.cuda import without_gpu

    prepare_tracing()
    catalog = Catalog(config.plan, target, config=config.path)
    names, (index, count) = request["names"], request["part"]
    wanted = [
        variant
        for variant in config.plan.variants
        if names is None or variant.name in names.get(str(target), ())
    ]
    for variant in wanted[index::count]:
        try:
            with without_gpu(target):
                program = catalog.program(variant)
                platform, devices = target.platform, target.devices
                yield variant, trace(variant, program, platform=platform, devices=devices)
        except ProgramError as error:
            yield variant, error


def _trace(found: Any) -> dict[str, Any]:
    if not hasattr(found, "line"):  # An older aot-lora's, whose StableHLO is all that counts.
        return {"line": None}
    return {"line": found.line.model_dump(), "warning": found.warning}


def _error(error: Any) -> dict[str, Any]:
    try:
        from aot_lora.lowering.check import own_traceback
    except ImportError:
        return {"error": error.problem, "fields": error.fields(), "traceback": ""}
    text = own_traceback(error)
    return {"error": error.problem, "fields": error.fields(), "traceback": text}


def hash_of(target: str, name: str) -> str:
    """A file's name for a variant."""
    return hashlib.sha256(f"{target} {name}".encode()).hexdigest()[:32]


def user_modules() -> dict[str, str]:
    """Files of modules that were imported from neither an installation nor aot-lora, digested."""
    installed = [Path(path).resolve() for path in {*sysconfig.get_paths().values()}]
    own = Path(sys.modules["aot_lora"].__file__ or "").resolve().parent
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        path = Path(name).resolve() if name else None
        if path is None or path.suffix != ".py" or path.is_relative_to(own):
            continue
        if not any(path.is_relative_to(folder) for folder in installed) and path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


if __name__ == "__main__":
    main()
