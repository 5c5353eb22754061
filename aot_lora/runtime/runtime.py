"""The library inside a serving engine: open, seal, look up. It never traces or compiles."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import jax
import numpy as np

from aot_lora.config import Config, load_config
from aot_lora.errors import DonatedError, OutOfPlanError, UnsupportedError
from aot_lora.plan import Plan, TargetSpec, Variant
from aot_lora.plan.pad import pad_rows
from aot_lora.programs.mesh import specs
from aot_lora.runtime import guard
from aot_lora.runtime.adapters import Adapters
from aot_lora.runtime.admission import Admission
from aot_lora.runtime.banks import Banks
from aot_lora.runtime.batch import Batch, check_current, make_batch
from aot_lora.runtime.executables import Executables
from aot_lora.runtime.load import Loaded, load_all
from aot_lora.runtime.metrics import Metrics
from aot_lora.runtime.misses import Misses
from aot_lora.runtime.places import Places
from aot_lora.runtime.prime import prime
from aot_lora.store.misses import widened
from aot_lora.targets.devices import host_devices


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
        self, config: Config, target: TargetSpec, loaded: dict[Variant, Loaded], places: Places
    ) -> None:
        self.config = config
        self.target = target
        self.places = places
        self.metrics = Metrics()
        plan = config.plan
        self._plan = plan
        found = {variant: one.executable for variant, one in loaded.items()}
        self._misses = Misses(config, target, self.metrics, self._take_up)
        self._executables = Executables(plan, found, self._misses)
        self._dtype = jax.numpy.dtype(plan.dtype)
        self._modules = {module.name: module for module in plan.modules}
        self._row_places = {
            module.name: (places.at(specs(module.split).x), places.at(specs(module.split).base))
            for module in plan.modules
        }
        most = max((module.layers for module in plan.modules), default=0)
        self._layers = jax.device_put([np.int32(layer) for layer in range(most)], places.everywhere)
        self.banks = Banks(plan, found.__getitem__, places)
        self.adapters = Adapters(
            plan,
            self.banks,
            swap=config.swap,
            host_cache_bytes=config.host_cache_bytes,
            metrics=self.metrics,
        )
        self._sealed_as = f"sealed by Runtime.open({str(config.path)!r})"
        self._signatures = {variant.name: one.signature for variant, one in loaded.items()}
        guard.seal(self._sealed_as, self._signatures)

    @classmethod
    def open(
        cls,
        config: str | os.PathLike[str] | Config,
        *,
        store: str | None = None,
        device: Any = None,
    ) -> Runtime:
        """Verifies that the store covers the plan on this host, loads it, and seals the process.

        Args:
          config: a config's path, a preset's name, or what `load_config` returned.
          store: overrides the store's folder.
          device: the device to run on, or the first of the mesh; this host's first unless given.
            One store serves as many replicas as there are devices.

        Raises:
          ConfigError: the config is wrong.
          CoverageError: no warmup fits, or variants are missing.
          IntegrityError: an artifact is damaged.
          UnsupportedError: this host has no device of any of the config's targets.
        """
        if not isinstance(config, Config):
            config = load_config(config, store=store)
        config = widened(config)
        target, devices = _target_here(config, device)
        loaded = load_all(config, target, devices)
        if config.priming:
            prime(loaded.values())
        return cls(config, target, loaded, Places(devices))

    @property
    def device(self) -> Any:
        """What a step's own arguments are put on: the device, or all of a mesh, whole on each."""
        return self.places.everywhere

    @property
    def plan(self) -> Plan:
        """The plan that this runtime serves; a background warmup may add buckets to it."""
        return self._plan

    def close(self) -> None:
        """Lifts the seal. A second call does nothing."""
        self.adapters.close()
        self._misses.close()
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
        if lanes is None:
            lanes = self._plan.lanes_of(slots, rank)
        variant, executable = self._executables.step(program, tokens, lanes)
        self.metrics.lookups.add()
        return Found(executable, variant.tokens, variant.lanes)

    def _take_up(self, config: Config) -> None:
        """Serves what a warmup has stored meanwhile, with the buckets of a wider config.

        What is loaded now is not primed: the device's memory is in use by now.
        """
        held = self._executables.loaded
        loaded = load_all(config, self.target, self.places.devices, held=held)
        signatures = {v.name: one.signature for v, one in loaded.items()} | self._signatures
        guard.seal(self._sealed_as, signatures)
        guard.unseal(self._sealed_as)  # the older one
        found = {variant: one.executable for variant, one in loaded.items()}
        self._executables = Executables(config.plan, {**held, **found}, self._misses)
        self._signatures, self._plan = signatures, config.plan

    def batch(self, slots: np.ndarray) -> Batch:
        """The per-batch metadata: made once, reused by every module and layer.

        Args:
          slots: [tokens] integers on the host, each row's slot; -1 for no adapter.

        Raises:
          OutOfPlanError: outside the plan, or a slot that holds no adapter.
        """
        batch = make_batch(slots, self.banks.owned, self._executables, self.device)
        metrics = self.metrics
        metrics.batches.add()
        metrics.rows.add(batch.count)
        metrics.padded_rows.add(batch.tokens)
        metrics.pad_waste.observe(1 - batch.count / batch.tokens)
        return batch

    def admission(self, *, adapters: int | None = None) -> Admission:
        """An empty batch to put requests into, each admitted or refused alone.

        Args:
          adapters: most adapters in it; the largest of lora.slots unless given.
        """
        return Admission(self._plan, self.banks.owned, adapters=adapters, metrics=self.metrics)

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
          DonatedError: a device array was given away or deleted before.
        """
        shape = self._modules.get(module)
        if shape is None or not 0 <= layer < shape.layers:
            last = f"0 to {shape.layers - 1}" if shape else "as the model has"
            raise OutOfPlanError(
                f"no bank for {module} of layer {layer}",
                expected=f"{', '.join(self._modules)}; layers {last}",
            )
        batch = slots if isinstance(slots, Batch) else self.batch(slots)
        place, base_place = self._row_places[module]
        y = self._rows("base", base, batch, shape.o, base_place)
        rows = self._rows("x", x, batch, shape.d, place)
        if not batch.lanes:
            return Padded(y, batch.count)
        _, shrink, expand = batch.kernels[module]
        at = self._layers[layer]
        banks = self.banks
        banks.gate.enter()
        try:
            check_current(batch, banks.owned)
            a_bank, b_bank = banks.arrays[module]
            if batch.single:
                h = shrink(rows, a_bank, at, batch.blocks)
                y = expand(y, h, b_bank, at, batch.blocks)
            else:
                h = shrink(rows, a_bank, at, batch.blocks, batch.owners, batch.slots)
                y = expand(y, h, b_bank, at, batch.blocks, batch.slots)
        finally:
            banks.gate.leave()
        return Padded(y, batch.count)

    def _rows(
        self,
        name: str,
        rows: np.ndarray | jax.Array | None,
        batch: Batch,
        width: int,
        place: Any,
    ) -> jax.Array:
        """`rows` on the device in the batch's bucket; padded on the host, in numpy."""
        dtype = self._dtype
        if rows is None:
            return jax.device_put(np.zeros((batch.tokens, width), dtype), place)
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
            if rows.is_deleted():
                raise DonatedError(
                    f"`{name}` was given away or deleted",
                    expected="an array that is still there: a call that takes over an argument "
                    "leaves nothing of it",
                    next_step="go on with the result of the call that took it, or put it anew",
                )
            return rows
        return jax.device_put(pad_rows(rows, batch.tokens), place)


def _target_here(config: Config, first: Any) -> tuple[TargetSpec, tuple[Any, ...]]:
    """The first target of the config that this host has devices for, and these."""
    refused: list[UnsupportedError] = []
    for target in config.targets:
        try:
            return target, host_devices(target, first)
        except UnsupportedError as error:
            refused.append(error)
    raise refused[0]
