"""A signature in one line, with what a mesh, a layout or a memory adds to its arrays.

donated x: bf16[16,64] over [{"tp"}, {}], y: f32[4] layout auto, block=128 -> bf16[16,64]
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

from aot_lora.signature import Signature

_MAIN = re.compile(r"^ *func\.func public @main\((.*)\) -> \(?(.*?)\)? \{$", re.MULTILINE)
_ARGUMENT = re.compile(r"%arg\d+: \S+?(?: \{(.*?)\})?(?=, %arg|$)")
_RESULT = re.compile(r"tensor<[^>]*>(?: \{(.*?)\})?(?=, tensor|$)")
_SHARDING = re.compile(r"sdy\.sharding = #sdy\.sharding<@mesh\w*, (\[.*?\])(?:, .*?)?>")
_MHLO_SHARDING = re.compile(r'mhlo\.sharding = "\{(.*?)\}"')
_LAYOUT = re.compile(r'mhlo\.layout_mode = "(.*?)"')
_MEMORY = re.compile(r'mhlo\.memory_kind = "(.*?)"')
_WHOLE = re.compile(r"\[(?:\{\}(?:, )?)*\]|replicated")
_MESH = re.compile(r"^ *sdy\.mesh @mesh\w* = <\[(.*?)\]", re.MULTILINE)


def described(
    signature: Signature, stablehlo: str, *, static: Mapping[str, Any] | None = None
) -> str:
    """The line that a lock holds.

    Args:
      signature: of the program.
      stablehlo: what it was lowered to.
      static: its static arguments.
    """
    main = _MAIN.search(stablehlo)
    inputs = [_notes(found[1]) for found in _ARGUMENT.finditer(main[1])] if main else []
    outputs = [_notes(found[1]) for found in _RESULT.finditer(main[2])] if main else []
    noted = dict(zip(signature.kept, inputs, strict=False))
    items = [
        f"{'donated ' if i in signature.donated else ''}{spec.name}: {spec}{noted.get(i, '')}"
        for i, spec in enumerate(signature.inputs)
    ]
    items += [f"{name}={_value(value)}" for name, value in (static or {}).items()]
    outputs += [""] * (len(signature.outputs) - len(outputs))
    results = [f"{spec}{note}" for spec, note in zip(signature.outputs, outputs, strict=False)]
    mesh = [f" on {found}" for found in _MESH.findall(stablehlo)]
    return f"{', '.join(items)} -> {', '.join(results)}{''.join(mesh)}"


def _notes(attributes: str | None) -> str:
    """Nothing for JAX's defaults, so that most lines stay as short as they were."""
    text = attributes or ""
    notes: list[str] = []
    divided = _SHARDING.search(text) or _MHLO_SHARDING.search(text)
    if divided and not _WHOLE.fullmatch(divided[1]):
        notes.append(f" over {divided[1]}")
    if (layout := _LAYOUT.search(text)) and layout[1] != "default":
        notes.append(f" layout {layout[1]}")
    if memory := _MEMORY.search(text):
        notes.append(f" in {memory[1]}")
    return "".join(notes)


def _value(value: Any) -> str:
    """Other values are told apart by the code that they make: their text may hold an address."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, cast('tuple[Any, ...]', value)))})"
    plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if plain else type(value).__name__
