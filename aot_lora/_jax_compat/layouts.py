"""Layouts of arguments in a device's memory, as text that another process can read back."""
# pyright: reportPrivateUsage=false

from __future__ import annotations

import json
from typing import Any

from jax.experimental.layout import Layout


def layouts_of(compiled: Any) -> tuple[str, ...]:
    """The layout of each kept input of a `jax.stages.Compiled`, "" for JAX's default.

    Returns:
      Nothing at all where every one is the default.
    """
    found = compiled._executable._unloaded_executable.dispatch_in_layouts
    texts = tuple("" if layout is None else layout_text(layout) for layout in found)
    return texts if any(texts) else ()


def layout_text(layout: Any) -> str:
    """A layout as JSON: dimensions from major to minor, tiles, bits of an element below a byte."""
    fields = layout.major_to_minor, layout.tiling or (), layout.sub_byte_element_size_in_bits
    return json.dumps(fields)


def layout_of(text: str) -> Any:
    """The layout that `layout_text` wrote; None for ""."""
    if not text:
        return None
    order, tiles, bits = json.loads(text)
    return Layout(tuple(order), tuple(tuple(tile) for tile in tiles), bits)
