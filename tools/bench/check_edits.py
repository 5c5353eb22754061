"""Edits of the small engine beside this file: what must not move a trace, and what must.

Each is a name and replacements (file, old, new); a harmful one has the cause that `check` names.
"""
# ruff: noqa: E501 - an edit a line reads best

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

KERNELS, LAYERS, STEPS = "engine/kernels.py", "engine/layers.py", "engine/steps.py"
Change = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One edit.

    Args:
      name: for the reader.
      changes: (file, old, new); an empty `old` replaces the whole file, which may be a new one.
      cause: part of the cause to be named; empty for a benign edit.
      environ: variables to set.
      folder: where the engine stands.
      cwd: whether the command runs in another folder than the configs'.
    """

    name: str
    changes: tuple[Change, ...] = ()
    cause: str = ""
    environ: dict[str, str] = field(default_factory=dict[str, str])
    folder: str = "engine"
    cwd: bool = False

    def apply(self, root: Path) -> None:
        """Makes the changes in a copy of the engine."""
        for file, old, new in self.changes:
            path = root / file
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            assert old in text, (self.name, old)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.replace(old, new) if old else new, encoding="utf-8")


_HERE = Path(__file__).resolve().parent
_NORM = """def norm(x, weight):
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * weight


"""
_GATE = """@jax.jit
def gate(x):
    return jnp.tanh(x) * x
"""
_ADD = """def add_rows(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] + y_ref[...]
"""

BENIGN = (
    Edit(name="a comment above", changes=((KERNELS, "import functools", "# A comment.\n\nimport functools"),)),
    Edit(name="blank lines before a kernel", changes=((KERNELS, "def scale_rows", "\n\n\ndef scale_rows"),)),
    Edit(name="a comment in a kernel", changes=((KERNELS, "    o_ref[...] = doubled", "    # Why.\n    o_ref[...] = doubled"),)),
    Edit(name="a docstring", changes=((STEPS, '"""One step of decoding."""', '"""Decodes.\n\n    More.\n    """'),)),
    Edit(name="a renamed local of a step", changes=((STEPS, "normed", "after_norm"),)),
    Edit(name="a renamed local of a kernel", changes=((KERNELS, "doubled", "twice"),)),
    Edit(name="renamed arguments of a kernel", changes=((KERNELS, "x_ref", "rows_ref"), (KERNELS, "o_ref", "out_ref"))),
    Edit(name="a renamed inner function", changes=((LAYERS, "_positions", "_angles"), (STEPS, "_positions", "_angles"))),
    Edit(name="a renamed step function", changes=((STEPS, "decode_step", "one_decode_step"),)),
    Edit(name="reordered functions of XLA", changes=((LAYERS, _NORM, ""), (LAYERS, "@jax.jit\ndef _positions", _NORM + "@jax.jit\ndef _positions"))),
    Edit(name="reordered kernels", changes=((KERNELS, "\n\n" + _ADD, ""), (KERNELS, "def scale_rows", _ADD + "\n\ndef scale_rows"))),
    Edit(name="reformatted", changes=((LAYERS, "x * jax.lax.rsqrt(mean + 1e-6) * weight", "(\n        x\n        * jax.lax.rsqrt(\n            mean + 1e-6,\n        )\n        * weight\n    )"),)),
    Edit(name="dead code", changes=((LAYERS, "    hidden = gate(x @ up)", "    _ = jnp.sin(x) + 1\n    hidden = gate(x @ up)"),)),
    Edit(name="a dead call, which numbers symbols", changes=((LAYERS, "    hidden = gate(x @ up)", "    gate(x)\n    jax.jit(lambda y: jnp.where(y > 0, y, 0))(x)\n    hidden = gate(x @ up)"),)),
    Edit(name="a function in a file of its own", changes=(("engine/moved.py", "", "import jax\nimport jax.numpy as jnp\n\n\n" + _GATE), (LAYERS, _GATE, "from .moved import gate\n"))),
    Edit(name="one call deeper", changes=((STEPS, "    return Program(fn=decode_step", "    def deeper(*args, **static):\n        return decode_step(*args, **static)\n\n    names = ('cache', 'x', 'weight', 'up', 'down', 'lengths', 'bias')\n    return Program(names=names, fn=deeper"),)),
    Edit(name="another folder", folder="some/other/place"),
    Edit(name="another working directory", cwd=True),
    Edit(name="another hash seed", environ={"PYTHONHASHSEED": "4294967295"}),
    Edit(name="variables of the environment that cannot matter", environ={"ENGINE": "1", "JAX_TRACEBACK_FILTERING": "off"}),
)  # fmt: skip

_KEPT = "        context.array(128),\n    )\n    return"
_CODE = "code moved, signature did not"

HARMFUL = (
    Edit(name="a constant of a kernel", cause="kernel scale_rows moved", changes=((KERNELS, "* 2.0", "* 3.0"),)),
    Edit(name="code of a kernel", cause="kernel add_rows moved", changes=((KERNELS, "x_ref[...] + y_ref[...]", "x_ref[...] - y_ref[...]"),)),
    Edit(name="a block size", cause="kernel add_rows and kernel scale_rows moved", changes=((KERNELS, "BLOCK = 64", "BLOCK = 32"),)),
    Edit(name="a compiler parameter of a kernel", cause="kernel add_rows and kernel scale_rows moved", changes=((KERNELS, "num_warps=4", "num_warps=8"),)),
    Edit(name="a renamed kernel", cause="kernel add_all (new) and kernel add_rows (gone)", changes=((KERNELS, "add_rows", "add_all"), (STEPS, "add_rows", "add_all"))),
    Edit(name="code around kernels", cause="code around the kernels moved", changes=((STEPS, "y, platform=context.target.platform) - 1", "y, platform=context.target.platform) - 2"),)),
    Edit(name="code of a step", cause=_CODE, changes=((LAYERS, "jnp.tanh(x) * x", "jnp.tanh(x)"),)),
    Edit(name="a captured constant", cause=_CODE, changes=((LAYERS, 'dtype="float32") / 4', 'dtype="float32") / 5'),)),
    Edit(name="an epsilon", cause=_CODE, changes=((LAYERS, "1e-6", "1e-5"),)),
    Edit(name="a shape", cause="argument up: shape; argument down: shape", changes=((STEPS, "256", "512"),)),
    Edit(name="a dtype", cause="argument bias: dtype", changes=((STEPS, _KEPT, _KEPT.replace("128)", '128, dtype="bfloat16")')),)),
    Edit(name="a narrower integer", cause="argument lengths: dtype", changes=((STEPS, 'dtype="int32"', 'dtype="int16"'),)),
    Edit(name="a Python scalar for an array", cause="argument bias: weak type, as of a Python scalar", changes=((STEPS, _KEPT, _KEPT.replace("context.array(128)", "1.0")),)),
    Edit(name="donation", cause="argument cache: donation", changes=((STEPS, "donate=(0,), ", ""),)),
    Edit(name="an argument more", cause="argument extra is new", changes=((STEPS, "bias, *, scale", "bias, extra, *, scale"), (STEPS, _KEPT, "        context.array(128),\n        context.array(8),\n    )\n    return"))),
    Edit(name="an argument less", cause="argument bias is gone", changes=((STEPS, "lengths, bias, *", "lengths, *"), (STEPS, "* scale + bias", "* scale"), (STEPS, _KEPT, "    )\n    return"))),
    Edit(name="a result more", cause="number of results 2 -> 3", changes=((STEPS, "return cache + rows, rows", "return cache + rows, rows, normed"),)),
    Edit(name="a static value", cause="argument scale: 2 -> 3", changes=((STEPS, '{"scale": 2}', '{"scale": 3}'),)),
    Edit(name="a sharding", cause="argument x: sharding, layout or memory", changes=((STEPS, 'PartitionSpec("tp")', 'PartitionSpec(None, "tp")'),)),
    Edit(name="a layout", cause="argument y: sharding, layout or memory", changes=((STEPS, "args=(x, x))", "args=(x, x), auto_layouts=(1,))"),)),
    Edit(name="an option of JAX", cause="options: +JAX_DEFAULT_MATMUL_PRECISION=highest; code moved", environ={"JAX_DEFAULT_MATMUL_PRECISION": "highest"}),
)  # fmt: skip


def copy_engine(root: Path) -> None:
    """Copies the engine and its configs into a folder."""
    source = _HERE / "engine"
    (root / "engine").mkdir(parents=True)
    for path in source.glob("*.py"):
        (root / "engine" / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    for path in source.glob("*.yaml"):
        (root / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
