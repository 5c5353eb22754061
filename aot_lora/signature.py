"""A program's signature: everything needed to call its executable. No jax here."""

from __future__ import annotations

from dataclasses import dataclass

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "bool": "pred", "complex": "c"}

_LONG = {short: long for long, short in _SHORT.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """An abstract array. `name` is the argument's path, empty for results."""

    shape: tuple[int, ...]
    dtype: str
    weak_type: bool = False
    name: str = ""

    def __str__(self) -> str:
        letters = self.dtype.rstrip("0123456789")
        short = _SHORT.get(letters, letters) + self.dtype[len(letters) :]
        weak = "~" if self.weak_type else ""
        return f"{weak}{short}[{','.join(map(str, self.shape))}]"

    @classmethod
    def parse(cls, text: str, *, name: str = "") -> ArraySpec:
        """The array that reads so."""
        short, _, sizes = text.removeprefix("~").rstrip("]").rpartition("[")
        letters = short.rstrip("0123456789")
        dtype = _LONG.get(letters, letters) + short[len(letters) :]
        shape = tuple(int(size) for size in sizes.split(",") if size)
        return cls(shape=shape, dtype=dtype, weak_type=text.startswith("~"), name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where an executable runs, other than on a target's first device.

    Args:
      devices: ids, in the order of its device assignment.
      shardings: each one that occurs, as text.
      inputs: for each kept input, which of `shardings`.
      outputs: for each result, likewise.
      committed: whether its results are committed to the devices.
    """

    devices: tuple[int, ...]
    shardings: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    committed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Arguments and results of an executable, flattened.

    Args:
      function: the function's name.
      inputs: all arguments in order, unused ones included.
      outputs: all results in order.
      donated: positions of donated inputs.
      kept: positions of the inputs that the executable takes.
      in_tree: of ((arguments), {}), as JAX's protocol buffer in base64.
      out_tree: of the results, likewise.
      placement: of a recorded call, or on a mesh; None for a variant on one device.
      layouts: of each kept input its layout as text, "" for JAX's default; empty where all are.
      call: of a recorded call, what else tells it from others, as JSON; empty otherwise.
    """

    function: str
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    donated: tuple[int, ...]
    kept: tuple[int, ...]
    in_tree: str
    out_tree: str
    placement: Placement | None = None
    layouts: tuple[str, ...] = ()
    call: str = ""

    def __str__(self) -> str:
        """One line: ``x: f32[16,64], donated base: f32[16,64] -> f32[16,64]``."""
        inputs = ", ".join(
            f"{'donated ' if i in self.donated else ''}{spec.name}: {spec}"
            for i, spec in enumerate(self.inputs)
        )
        return f"{inputs} -> {', '.join(map(str, self.outputs))}"
