"""The decoder of a model: its section checked against the module shapes beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aot_lora.config.schema import DecoderSection
from aot_lora.config.yaml_nodes import Document
from aot_lora.errors import ConfigError
from aot_lora.plan import DecoderShape, RopeScaling


def decoder_shape(
    section: DecoderSection, modules: Mapping[str, Sequence[int]], document: Document, key: str
) -> DecoderShape:
    """The decoder that a section describes.

    Args:
      section: from the file.
      modules: name -> [D, O], the module shapes of the same file.
      document: the file; key: where in it the module shapes stand.

    Raises:
      ConfigError: a module that the decoder does not have, or has in another shape.
    """
    fields = section.model_dump(exclude={"rope_scaling"})
    scaling = section.rope_scaling
    shape = DecoderShape(
        **fields, rope_scaling=RopeScaling(**scaling.model_dump()) if scaling else None
    )
    known = shape.modules()
    for name, found in modules.items():
        if name not in known:
            raise ConfigError(
                f"the decoder has no module `{name}`",
                where=document.place((key, name)),
                expected="some of " + ", ".join(known),
                next_step="remove it, or remove `decoder:` and bring a step of your own",
            )
        if tuple(found) != known[name]:
            raise ConfigError(
                f"`{name}` does not have the shape that the decoder gives it",
                where=document.place((key, name)),
                expected=f"{list(known[name])}, from `decoder:`",
                found=str(list(found)),
                next_step="mend whichever of the two is wrong",
            )
    return shape
