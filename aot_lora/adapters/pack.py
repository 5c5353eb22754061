"""Reads an adapter's weights into arrays of the shape that the bank writes take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from aot_lora.adapters.copying import Job, Target, Worker
from aot_lora.adapters.files import opened, stamp_of
from aot_lora.adapters.match import Match, match, match_pairs
from aot_lora.adapters.sources import FileSource, Source, pairs_of
from aot_lora.adapters.values import DTYPES, Adapter
from aot_lora.errors import DamagedAdapterError
from aot_lora.plan import Plan, round_up, usable_cores

_WORTH_THREADS_BYTES = 2**20  # below that, starting threads takes longer than the work
_MOST_THREADS = 8
_ALIGNED = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModule:
    """One module's weights for all of its layers; what an adapter lacks is zero.

    Args:
      a: [N, L, D], in the plan's dtype; lanes past a layer's rank are zero.
      b: [N, O, L], likewise.
      scale: [N] float32, the factor of each layer; 0 where the adapter has nothing.
    """

    a: np.ndarray
    b: np.ndarray
    scale: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """An adapter, ready for the banks of a plan. All of it is finite.

    Args:
      name: what to call it.
      rank: the largest, after joining.
      lanes: L, the plan's bucket for it.
      modules: by name, only those that the adapter changes.
    """

    name: str
    rank: int
    lanes: int
    modules: dict[str, PackedModule]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(m.a.nbytes + m.b.nbytes + m.scale.nbytes for m in self.modules.values())


def pack(adapter: Adapter, plan: Plan, *, name: str | None = None) -> Packed:
    """Reads an adapter's weights for a plan. Casts once, if the file's dtype is another.

    Args:
      adapter: from `read_adapter`.
      plan: whose modules, layers, ranks and dtype it has to fit.
      name: what to call it; the folder's name otherwise.

    Raises:
      AdapterError: the plan does not serve all of it, or a value is not finite in its dtype.
      DamagedAdapterError: the file changed since it was read, or ends early.
    """
    found = match(adapter, plan)
    where = str(adapter.file)
    with opened(adapter.file) as (fd, status):
        if stamp_of(status) != adapter.stamp[-1]:
            raise DamagedAdapterError(
                "the file has changed since its header was read",
                where=where,
                next_step="read the adapter again, once nothing writes to it",
            )
        source = FileSource(fd=fd, where=where)
        return _fill(found, plan, source, name=adapter.folder.name if name is None else name)


def pack_arrays(
    weights: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]],
    plan: Plan,
    *,
    scale: float = 1.0,
    name: str = "",
) -> Packed:
    """Packs weights that are in memory already, with the checks of `pack`.

    Args:
      weights: (module, layer) -> (A [r, D], B [O, r]), float32, float16 or bfloat16; ranks may
        differ. A module outside the layers has layer 0.
      plan: what they have to fit.
      scale: the factor of B @ A, a finite float32.
      name: what to call it.

    Raises:
      AdapterError: the plan does not serve all of it, or a value is not finite in its dtype.
    """
    where = name or "weights"
    pairs, source = pairs_of(weights, plan, scale=scale, where=where)
    return _fill(match_pairs(pairs, plan, where=where), plan, source, name=name)


def _fill(found: Match, plan: Plan, source: Source, *, name: str) -> Packed:
    dtype = DTYPES[plan.dtype]
    modules = _allocate(found, plan, dtype)
    jobs = _jobs(found, modules)
    total = sum(job.tensor.nbytes for job in jobs)
    threads = min(usable_cores(), _MOST_THREADS) if total > _WORTH_THREADS_BYTES else 1
    if threads == 1:
        Worker(source, dtype).run(jobs)
    else:
        # Jobs in the order of the file, dealt out in turn: all threads read nearby.
        shares = [jobs[first::threads] for first in range(threads)]
        with ThreadPoolExecutor(threads, thread_name_prefix="aot-lora-pack") as pool:
            list(pool.map(lambda share: Worker(source, dtype).run(share), shares))
    return Packed(name=name, rank=found.rank, lanes=found.lanes, modules=modules)


def _jobs(found: Match, modules: dict[str, PackedModule]) -> list[Job]:
    """One job for each tensor: a fused A goes to several places, but is read once."""
    targets: dict[str, list[Target]] = {}
    tensors = {}
    for (name, layer), parts in found.parts.items():
        module = modules[name]
        # The scales of what is joined may differ; then they go into B, and the layer's is 1.
        scales = {part.pair.scale for part in parts}
        module.scale[layer] = scales.pop() if (alike := len(scales) == 1) else 1.0
        for part in parts:
            pair, lanes = part.pair, slice(part.lane, part.lane + part.pair.rank)
            tensors[pair.a.key], tensors[pair.b.key] = pair.a, pair.b
            targets.setdefault(pair.a.key, []).append(Target(module.a[layer, lanes]))
            targets.setdefault(pair.b.key, []).append(
                Target(
                    module.b[layer, part.out : part.out + part.rows, lanes],
                    first_row=part.first_row,
                    factor=None if alike else pair.scale,
                    scale=pair.scale,
                )
            )
    jobs = [Job(tensors[key], tuple(places)) for key, places in targets.items()]
    return sorted(jobs, key=lambda job: job.tensor.offset)


def _allocate(found: Match, plan: Plan, dtype: np.dtype) -> dict[str, PackedModule]:
    """All zero, and all in one allocation: page faults take a third of the time in small ones."""
    filled = {module.name for module in found.modules}
    shapes = {
        module: ((module.layers, found.lanes, module.d), (module.layers, module.o, found.lanes))
        for module in plan.modules
        if module.name in filled
    }
    sizes = [math.prod(shape) * dtype.itemsize for pair in shapes.values() for shape in pair]
    # Bytes, since numpy takes the zeros of its own types from calloc, which costs nothing.
    slab = np.zeros(sum(round_up(size, _ALIGNED) for size in sizes), np.uint8)
    start = 0
    arrays: list[np.ndarray] = []
    for shape, size in zip((s for pair in shapes.values() for s in pair), sizes, strict=True):
        arrays.append(slab[start : start + size].view(dtype).reshape(shape))
        start += round_up(size, _ALIGNED)
    return {
        module.name: PackedModule(
            a=arrays[2 * index],
            b=arrays[2 * index + 1],
            scale=np.zeros(module.layers, np.float32),
        )
        for index, module in enumerate(shapes)
    }
