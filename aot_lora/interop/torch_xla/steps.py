"""A server's side of torch_xla: warm, sealed, looked up by bucket."""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils import _pytree as pytree

from aot_lora.config import Config, load_config
from aot_lora.errors import OutOfPlanError, RecompileError
from aot_lora.interop.torch_xla.device import COMPILES, Device, tensors_of
from aot_lora.interop.torch_xla.warmup import Warmed, require_device, warm
from aot_lora.plan import Plan, Variant
from aot_lora.plan.pad import pad_batch, pad_rows


class Found(NamedTuple):
    """A looked-up variant and its bucket.

    Args:
      executable: call it with tensors of the bucket's shapes, on the device.
      tokens: token bucket T.
      lanes: lane bucket L.
    """

    executable: Callable[..., Any]
    tokens: int
    lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch's per-row and per-block arrays on the device, in its buckets.

    Args:
      count: real rows.
      lanes: lane bucket; 0 where no row has an adapter, and then the rest is None.
      slots: [T] int32; blocks, owners: [L / quantum] int32.
    """

    count: int
    lanes: int
    blocks: Any = None
    owners: Any = None
    slots: Any = None


class Steps:
    """The warm variants of a plan. A graph that is none of them is refused before it compiles.

    Make one with `Steps.open`, before anything else is on the device.
    """

    def __init__(self, plan: Plan, device: Device, warmed: Mapping[Variant, Warmed]) -> None:
        self.plan = plan
        self.device = device
        self._warmed = warmed
        self._sealed_at = device.count(COMPILES)

    @classmethod
    def open(cls, config: str | os.PathLike[str] | Config, *, store: str | None = None) -> Steps:
        """Runs every variant once, from the store's cache where the device can load it, and seals.

        Raises:
          ConfigError: the config is wrong; ProgramError: a variant does not compile.
          UnsupportedError: torch_xla cannot be imported here.
        """
        if not isinstance(config, Config):
            config = load_config(config, store=store)
        device = Device(config.store_root)
        require_device(config, device)
        warmed, report = warm(config, device)
        if report.failed:
            raise report.failed[0]
        return cls(config.plan, device, warmed)

    @property
    def compiles(self) -> int:
        """Graphs that torch_xla compiled since the seal, by its own counter."""
        return self.device.count(COMPILES) - self._sealed_at

    def put(self, array: np.ndarray) -> Any:
        """A numpy array on the device; compiles nothing."""
        import torch

        if array.dtype.name == "bfloat16":
            bits = torch.from_numpy(array.view(np.int16).copy())
            return bits.view(torch.bfloat16).to(self.device.device)
        return torch.from_numpy(np.array(array, order="C")).to(self.device.device)

    def rows(self, array: np.ndarray, tokens: int) -> Any:
        """`array` [count, ...] on the device, padded on the host to [tokens, ...]."""
        return self.put(pad_rows(array, tokens))

    def batch(self, slots: np.ndarray, owned: Mapping[int, tuple[int, ...]]) -> Batch:
        """The arrays that kernels share.

        Args:
          slots: [count] integers, each row's slot; -1 for none.
          owned: the bank blocks of each slot.

        Raises:
          OutOfPlanError: more rows or lanes than the plan has, or a slot without blocks.
        """
        active = [int(slot) for slot in np.unique(slots) if slot != -1]
        if unknown := [slot for slot in active if slot not in owned]:
            raise OutOfPlanError(
                f"slots {unknown} hold no adapter", expected=f"-1, or one of {sorted(owned)}"
            )
        tokens = self.plan.tokens.bucket(max(len(slots), 1))
        if not active:
            return Batch(count=len(slots), lanes=0)
        held = [(slot, owned[slot]) for slot in active]
        quantum = self.plan.quantum
        lanes = self.plan.lanes.bucket(sum(len(blocks) for _, blocks in held) * quantum)
        padded = pad_batch(slots, held, tokens=tokens, lanes=lanes, quantum=quantum)
        on_device, blocks, owners = (self.put(array) for array in padded)
        return Batch(count=len(slots), lanes=lanes, blocks=blocks, owners=owners, slots=on_device)

    def lookup(
        self,
        program: str,
        *,
        tokens: int,
        slots: int = 0,
        rank: int | None = None,
        lanes: int | None = None,
    ) -> Found:
        """Finds a user program's variant for a batch; arguments as of `Runtime.lookup`.

        Raises:
          OutOfPlanError: no such program, or a shape outside the plan.
        """
        plan = self.plan
        if lanes is None:
            lanes = plan.lanes_of(slots, rank)
        variant = Variant(
            program, plan.tokens.bucket(tokens), plan.lanes.bucket(lanes) if lanes else 0
        )
        return Found(self.variant(variant), variant.tokens, variant.lanes)

    def variant(self, variant: Variant) -> Callable[..., Any]:
        """What to call for a variant of the plan.

        Raises:
          OutOfPlanError: the plan has no such variant.
        """
        warmed = self._warmed.get(variant)
        if warmed is None:
            raise OutOfPlanError(
                f"the plan has no {variant.name}",
                expected=f"one of {sorted({v.program for v in self._warmed})} in its buckets",
                next_step="mend `programs:` or `lora.slots`, and run warmup",
            )
        return lambda *args: self._call(warmed, args)

    def _call(self, warmed: Warmed, args: tuple[Any, ...]) -> Any:
        given = tuple((tuple(one.shape), one.dtype) for one in tensors_of(pytree.tree_leaves(args)))
        if given != warmed.specs:
            raise RecompileError(
                "other arguments than were warmed",
                where=warmed.variant.name,
                expected=warmed.signature.partition(" -> ")[0],
                found=", ".join(f"{str(d).removeprefix('torch.')}{list(s)}" for s, d in given),
                next_step="pad on the host with `rows` and `batch`, and cast there; pass each "
                "tensor once",
            )
        result = warmed.fn(*args)
        tensors = tensors_of([*pytree.tree_leaves(result), *pytree.tree_leaves(args)])
        graph = self.device.graph_hash(tensors)
        if graph != warmed.graph:
            raise RecompileError(
                "its graph is another one than was warmed, and torch_xla would compile it",
                where=warmed.variant.name,
                expected=f"graph {warmed.graph.hex()} of {warmed.signature}",
                found=f"graph {graph.hex()}; an argument with operations still pending, or a "
                "Python value that changed",
                next_step="sync arguments before the call, and pass what changes as a tensor",
            )
        self.device.sync(tensors)
        if self.compiles:
            raise RecompileError(
                f"torch_xla compiled {self.compiles} graphs since the seal",
                where=f"seen at the end of {warmed.variant.name}",
                expected="none: operations on the device only inside variants",
                next_step="slice, cast and index on the host; PT_XLA_DEBUG=1 shows where it "
                "happened",
            )
        return result
