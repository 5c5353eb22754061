"""The library inside a serving engine: open, seal, look up. It never traces or compiles."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from aot_lora.config import Config, load_config
from aot_lora.errors import OutOfPlanError, UnsupportedError
from aot_lora.plan import Plan, TargetSpec, Variant
from aot_lora.runtime import guard
from aot_lora.runtime.banks import Banks
from aot_lora.runtime.batch import Batch, make_batch
from aot_lora.runtime.load import load_all
from aot_lora.targets.devices import host_device


class Found(NamedTuple):
    """A looked-up executable and the bucket it was compiled for.

    Args:
      executable: a `jax.stages.Compiled`; call it with arrays of the bucket's shapes.
      tokens: token bucket T.
      lanes: lane bucket L.
    """

    executable: Any
    tokens: int
    lanes: int


@dataclass(frozen=True, slots=True)
class Padded:
    """A result in its bucket's shape.

    Args:
      array: [T, O]; rows from `count` on are padding.
      count: real rows.
    """

    array: jax.Array
    count: int

    def numpy(self) -> np.ndarray:
        """The real rows, on the host: [count, O]. Slicing on the device would compile."""
        return np.asarray(self.array)[: self.count]


class Runtime:
    """A sealed process's executables, banks and lookups.

    Make one with `Runtime.open`. Use it as a context manager, or call `close`, to lift the seal.
    """

    def __init__(
        self, config: Config, target: TargetSpec, executables: dict[str, Any], device: Any
    ) -> None:
        self.config = config
        self.target = target
        self.device = device
        plan = config.plan
        self._plan = plan
        self._executables = {v: executables[v.name] for v in plan.variants}
        self._dtype = jax.numpy.dtype(plan.dtype)
        self._modules = {module.name: module for module in plan.modules}
        self.banks = Banks(plan, self._executables.__getitem__, device)
        self._sealed_as = f"sealed by Runtime.open({str(config.path)!r})"
        guard.seal(self._sealed_as)

    @classmethod
    def open(cls, config: str | os.PathLike[str] | Config, *, store: str | None = None) -> Runtime:
        """Verifies that the store covers the plan on this host, loads it, and seals the process.

        Args:
          config: a config's path, a preset's name, or what `load_config` returned.
          store: overrides the store's folder.

        Raises:
          ConfigError: the config is wrong.
          CoverageError: no warmup fits, or variants are missing.
          IntegrityError: an artifact is damaged.
          UnsupportedError: this host has no device of any of the config's targets.
        """
        if not isinstance(config, Config):
            config = load_config(config, store=store)
        target, device = _target_here(config)
        return cls(config, target, load_all(config, target, device), device)

    @property
    def plan(self) -> Plan:
        """The plan that this runtime serves."""
        return self._plan

    def close(self) -> None:
        """Lifts the seal. A second call does nothing."""
        if self._sealed_as:
            guard.unseal(self._sealed_as)
            self._sealed_as = ""

    def __enter__(self) -> Runtime:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def lookup(
        self,
        program: str,
        *,
        tokens: int,
        slots: int = 0,
        rank: int | None = None,
        lanes: int | None = None,
    ) -> Found:
        """Finds a user program's executable for a batch.

        Args:
          program: its name.
          tokens: rows of the batch.
          slots: adapters in the batch.
          rank: the largest rank among them; the plan's largest unless given.
          lanes: lanes of all of them, instead of `slots` and `rank`.

        Raises:
          OutOfPlanError: no such program, or a shape outside the plan.
        """
        plan = self._plan
        if slots < 0 or (rank is not None and rank < 1):
            raise OutOfPlanError(
                "slots or rank out of range",
                expected="slots of 0 or more, rank of 1 or more",
                found=f"slots={slots}, rank={rank}",
            )
        if lanes is None:
            one = plan.adapter_lanes
            lanes = slots * (one.buckets[-1] if rank is None else one.bucket(rank))
        variant = Variant(
            program, plan.tokens.bucket(tokens), plan.lanes.bucket(lanes) if lanes else 0
        )
        executable = self._executables.get(variant)
        if executable is None:
            raise self._not_found(variant)
        return Found(executable, variant.tokens, variant.lanes)

    def _not_found(self, variant: Variant) -> OutOfPlanError:
        names = sorted(entry.name for entry in self._plan.user)
        if variant.program not in names:
            return OutOfPlanError(f"no program `{variant.program}`", expected=f"one of {names}")
        return OutOfPlanError(
            f"`{variant.program}` has no executable for {variant.tokens} tokens and "
            f"{variant.lanes} lanes",
            expected="batches without adapters" if variant.lanes else "batches with adapters",
            next_step="list slots above 0" if variant.lanes else "list 0 among lora.slots",
        )

    def batch(self, slots: np.ndarray) -> Batch:
        """The per-batch metadata: made once, reused by every module and layer.

        Args:
          slots: [tokens] integers on the host, each row's slot; -1 for no adapter.

        Raises:
          OutOfPlanError: outside the plan, or a slot that holds no adapter.
        """
        return make_batch(slots, self.banks.owned, self._plan, self.device)

    def apply(
        self,
        module: str,
        x: np.ndarray | jax.Array,
        slots: np.ndarray | Batch,
        base: np.ndarray | jax.Array | None = None,
        *,
        layer: int = 0,
    ) -> Padded:
        """Adds the adapters of one module to its base output.

        Args:
          module: for instance ``q_proj``.
          x: [tokens, D] on the host, padded here; or [T, D] on the device, T the batch's bucket.
          slots: [tokens] integers on the host, or a `Batch`.
          base: [tokens, O] or [T, O] likewise, the base projection's output; zero unless given.
            A device array is donated: its buffer becomes the result's.
          layer: which layer's banks.

        Returns:
          [T, O] with the count of real rows; the base itself where no row has an adapter.

        Raises:
          OutOfPlanError: module, layer, shape or dtype outside the plan.
        """
        shape = self._modules.get(module)
        if shape is None or not 0 <= layer < self._plan.layers:
            raise OutOfPlanError(
                f"no bank for {module} of layer {layer}",
                expected=f"{', '.join(self._modules)}; layers 0 to {self._plan.layers - 1}",
            )
        batch = slots if isinstance(slots, Batch) else self.batch(slots)
        y = self._rows("base", base, batch, shape.o)
        rows = self._rows("x", x, batch, shape.d)
        if not batch.lanes:
            return Padded(y, batch.count)
        self._require_current(batch)
        a_bank, b_bank = self.banks.arrays[module, layer]
        suffix = "_single" if batch.single else ""
        shrink = self._kernel("lora_shrink" + suffix, batch, ("d", shape.d))
        expand = self._kernel("lora_expand" + suffix, batch, ("o", shape.o))
        if batch.single:
            h = shrink(rows, a_bank, batch.blocks)
            return Padded(expand(y, h, b_bank, batch.blocks), batch.count)
        h = shrink(rows, a_bank, batch.blocks, batch.owners, batch.slots)
        return Padded(expand(y, h, b_bank, batch.blocks, batch.slots), batch.count)

    def _require_current(self, batch: Batch) -> None:
        """A write gives a slot a new tuple of blocks: another tuple is another adapter."""
        owned = self.banks.owned
        for slot, blocks in batch.held:
            if owned.get(slot) is not blocks:
                raise OutOfPlanError(
                    f"slot {slot} was written since this batch was made",
                    expected="a batch made after the last put() or reset() of its slots",
                    next_step="call batch() again: its blocks may be another adapter's now",
                )

    def _kernel(self, program: str, batch: Batch, dim: tuple[str, int]) -> Any:
        return self._executables[Variant(program, batch.tokens, batch.lanes, (dim,))]

    def _rows(
        self, name: str, rows: np.ndarray | jax.Array | None, batch: Batch, width: int
    ) -> jax.Array:
        """`rows` on the device in the batch's bucket; padded on the host, in numpy."""
        dtype = self._dtype
        if rows is None:
            return jax.device_put(np.zeros((batch.tokens, width), dtype), self.device)
        on_device = isinstance(rows, jax.Array)
        count = batch.tokens if on_device else batch.count
        if rows.shape != (count, width) or rows.dtype != dtype:
            place = f"a device array of the bucket's {count}" if on_device else f"{count}"
            raise OutOfPlanError(
                f"`{name}` does not fit the batch",
                expected=f"{place} rows: {dtype}[{count},{width}]",
                found=f"{rows.dtype}{list(rows.shape)}",
                next_step="pad and cast in numpy; the device would compile for it",
            )
        if isinstance(rows, jax.Array):
            return rows
        padded = np.zeros((batch.tokens, width), dtype)
        padded[:count] = rows
        return jax.device_put(padded, self.device)


def _target_here(config: Config) -> tuple[TargetSpec, Any]:
    """The first target of the config that this host has a device for."""
    refused: list[UnsupportedError] = []
    for target in config.targets:
        try:
            return target, host_device(target)
        except UnsupportedError as error:
            refused.append(error)
    raise refused[0]
