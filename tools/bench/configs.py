"""Configs that benchmarks write into a temporary folder: many small variants, or few."""

from __future__ import annotations

from pathlib import Path

_CONFIG = """\
model: {{{modules}}}
target: {target}
lora:
  ranks: [8, 16, 32, 64, 128]
  slots: {slots}
  max_adapters: 8
  resident_lanes: 512
  dtype: {dtype}
tokens: {{budget: {budget}, buckets: pow2, smallest: {smallest}}}
programs: [{programs}]
"""
_TARGETS = {
    "cpu": ("{platform: cpu}", "float32"),
    "tpu": ('{platform: tpu, topology: "v6e:1x1"}', "bfloat16"),
}
# variants -> widths of the square modules, slots, smallest token bucket and budget
_SIZES = {
    120: ((64, 128), "[2]", 16, 256),
    200: ((64, 128, 192, 256), "[2]", 16, 256),
    1000: ((32, 64, 96, 128, 160, 192, 224, 256), "[2, 4]", 1, 512),
}


def write_config(folder: Path, *, variants: int, platform: str = "cpu", entry: str = "") -> Path:
    """Writes a config with at least that many variants of small shapes.

    Args:
      folder: where it goes.
      variants: 120, 200 or 1000.
      platform: ``cpu`` or ``tpu``.
      entry: a user program as ``module:function``, beside the kernels.
    """
    widths, slots, smallest, budget = _SIZES[variants]
    target, dtype = _TARGETS[platform]
    path = folder / f"{platform}-{variants}.yaml"
    path.write_text(
        _CONFIG.format(
            modules=", ".join(f"m{width}: [{width}, {width}]" for width in widths),
            target=target,
            slots=slots,
            dtype=dtype,
            smallest=smallest,
            budget=budget,
            programs="lora" + (f', {{entry: "{entry}"}}' if entry else ""),
        ),
        encoding="utf-8",
    )
    return path
