"""vLLM's Triton kernels, for `kernels.py forms --vllm DIR`: the pair that adds adapters.

DIR holds an unpacked wheel of vLLM, or as much of one as ``vllm/lora/ops/triton_ops``; what those
files import from the rest of it stands in below. Needs PyTorch and Triton. Each kernel is tuned by
hand for each point, and all layers of a chain run as one CUDA graph, as vLLM's own steps do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

BASE, PAIR = "vllm: base", "vllm"
_OPS = "vllm.lora.ops.triton_ops"
_DEVICE = "cuda"


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """A point's arrays; a rank for all adapters, the largest, as vLLM has it."""

    x: Any
    weights: list[Any]
    banks: list[tuple[Any, Any]]
    slots: Any
    meta: tuple[Any, ...]
    h: Any
    y: Any


class Peer:
    """The kernels of one unpacked wheel."""

    def __init__(self, folder: Path) -> None:
        if not (folder / Path(*_OPS.split(".")) / "lora_shrink_op.py").is_file():
            raise SystemExit(
                f"{folder}: no {_OPS.replace('.', '/')} in it; unpack vLLM's wheel there"
            )
        self.folder = folder
        self._ops = _import(folder)

    def compile(self, points: Iterable[Any]) -> None:
        """Fills Triton's cache for points, on all cores."""
        jobs = sorted(
            {(kind, *key, *config) for point in points for kind, key, config in _jobs(point)}
        )
        with ProcessPoolExecutor(max_workers=14, mp_context=get_context("spawn")) as pool:
            parts = [(str(self.folder), jobs[n::14]) for n in range(14)]
            list(pool.map(_compile, parts))

    def chains(self, point: Any) -> dict[str, Any]:
        """The base alone, and with the pair in its best tuning, checked: by label, to be timed."""
        import torch

        from aot_lora.tuning.measure import Chain, slots_of

        batch = _drawn(
            self._ops, slots_of(point), point.ranks, point.d, point.o[0], layers=point.depth
        )
        best = {
            kind: min(configs, key=lambda config: self._seconds(batch, kind, config, point))
            for kind, configs in _configs(point).items()
        }

        def base(layer: int) -> None:
            torch.mm(batch.x, batch.weights[layer], out=batch.y)

        def both(layer: int) -> None:
            base(layer)
            for kind, config in best.items():
                _run(self._ops, batch, kind, config, layer)

        self._check(batch, both, point)
        count = point.turns * point.depth
        return {
            label: Chain(_Replay(_graph(work, point)), count)
            for label, work in ((BASE, base), (PAIR, both))
        }

    def _seconds(self, batch: _Batch, kind: str, config: tuple[int, ...], point: Any) -> float:
        import torch

        run = partial(_run, self._ops, batch, kind, config)
        if not _fits(run):
            return float("inf")
        graph = _graph(run, point)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        began.record()
        for _ in range(3):
            graph.replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended)

    def _check(self, batch: _Batch, work: Callable[[int], None], point: Any) -> None:
        import torch

        work(0)
        (a, b), x = batch.banks[0], batch.x.float()
        right = x @ batch.weights[0].float()
        for slot in range(len(point.ranks)):
            rows = batch.slots == slot
            right[rows] += x[rows] @ a[slot].float().T @ b[slot].float().T
        error = float(torch.linalg.norm(batch.y.float() - right) / torch.linalg.norm(right))
        if not error < 0.02:
            raise ArithmeticError(f"vLLM's kernels at {point}: off by {error:.2g}")


def _drawn(ops: _Ops, slots: Any, ranks: tuple[int, ...], d: int, o: int, *, layers: int) -> _Batch:
    """Random arrays for rows of these slots [T], and all that the kernels ask of a batch."""
    import torch

    def normal(*shape: int) -> Any:
        return torch.randn(shape, dtype=torch.bfloat16, device=_DEVICE) * shape[-1] ** -0.5

    tokens, count, rank = len(slots), len(ranks), max(ranks)
    slots = torch.from_numpy(slots).to(_DEVICE)
    meta = ops.meta.LoRAKernelMeta.make(count, tokens, _DEVICE)
    meta.prepare_tensors(slots)
    return _Batch(
        x=normal(tokens, d),
        weights=[normal(d, o) for _ in range(layers)],
        banks=[(normal(count, rank, d), normal(count, o, rank)) for _ in range(layers)],
        slots=slots,
        meta=meta.meta_args(tokens, True),
        h=torch.empty((1, tokens, rank), dtype=torch.float32, device=_DEVICE),
        y=torch.zeros((tokens, o), dtype=torch.bfloat16, device=_DEVICE),
    )


def _run(ops: _Ops, batch: _Batch, kind: str, config: tuple[int, ...], layer: int) -> None:
    """One kernel of one layer, as vLLM launches it."""
    a, b = batch.banks[layer]
    module = getattr(ops, kind)
    module.get_lora_op_configs = lambda *_, **__: _named(kind, config)
    if kind == "shrink":
        module._lora_shrink(batch.x, [a], batch.h, *batch.meta, 1.0)
    else:
        module._lora_expand(batch.h, [b], batch.y, *batch.meta, add_inputs=True)


def _fits(run: Callable[[int], None]) -> bool:
    """Whether the GPU has what a tuning takes: shared memory, for one."""
    try:
        run(0)
    except Exception as error:  # Triton's own classes.
        if "OutOfResources" not in type(error).__name__:
            raise
        return False
    return True


class _Replay:
    """A call that JAX's `block_until_ready` can wait for."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def __call__(self) -> _Replay:
        self._graph.replay()
        return self

    def block_until_ready(self) -> _Replay:
        import torch

        torch.cuda.synchronize()
        return self


def _graph(work: Callable[[int], None], point: Any) -> Any:
    import torch

    work(0)  # Triton compiles, and cuBLAS makes its handles.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # JAX's threads may allocate meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(point.turns):
            for layer in range(point.depth):
                work(layer)
    return graph


# --- Tunings -------------------------------------------------------------------------------------

_FIELDS = {
    "shrink": ("block_m", "block_n", "block_k", "split_k", "num_warps", "num_stages"),
    "expand": ("block_m", "block_n", "block_k", "num_warps", "num_stages"),
}


def _named(kind: str, config: tuple[int, ...]) -> dict[str, int]:
    return {"num_ctas": 1, "group_size_m": 8, **dict(zip(_FIELDS[kind], config, strict=True))}


def _configs(point: Any) -> dict[str, list[tuple[int, ...]]]:
    """vLLM's defaults first, then what is worth trying."""
    rank = max(point.ranks)
    wide = min(rank, 64)
    if point.tokens <= 128:
        shrink = product((16,), sorted({16, wide}), (128, 256), (4, 8, 16, 32), (4,), (3,))
        expand = product((16,), (64, 128, 256), (wide,), (4,), (2,))
        default = (32, 16, 256 if point.tokens < 128 else 32, 64 if point.tokens < 128 else 8, 4, 2)
    else:
        shrink = product((32, 64, 128), (wide,), (64, 128), (1, 4, 8), (4,), (3,))
        expand = product((32, 64, 128), (128, 256), (wide,), (4, 8), (2,))
        default = (32, 16, 32, 8, 4, 2)
    return {"shrink": [default, *shrink], "expand": [(64, 128, 32, 4, 2), *expand]}


def _jobs(point: Any) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """What Triton compiles apart: it knows sizes as 1, as whole 16s, or as others."""
    sizes = 1 if point.tokens == 1 else 16, max(point.ranks), point.d, point.o[0]
    for kind, configs in _configs(point).items():
        for config in configs:
            yield kind, sizes, config


def _compile(part: tuple[str, list[tuple[Any, ...]]]) -> None:
    """Runs each job once on a small batch, in a process of its own."""
    folder, jobs = part
    if not jobs:
        return
    import numpy as np

    ops = _import(Path(folder))
    for kind, tokens, rank, d, o, *config in jobs:
        batch = _drawn(ops, np.zeros(tokens, np.int32), (rank,), d, o, layers=1)
        _fits(partial(_run, ops, batch, kind, tuple(config)))


# --- vLLM without the rest of it -----------------------------------------------------------------


@dataclass(frozen=True)
class _Ops:
    shrink: Any
    expand: Any
    meta: Any


def _import(folder: Path) -> _Ops:
    """The files of the kernels; each stands for itself, and imports little."""
    from importlib import import_module

    import torch
    import triton
    import triton.language as tl

    names = _OPS.split(".")
    for end in range(1, len(names) + 1):
        package = _module(".".join(names[:end]))
        package.__path__ = [str(folder.joinpath(*names[:end]))]
    _module(
        "vllm.envs",
        VLLM_BATCH_INVARIANT=False,
        VLLM_TUNED_CONFIG_FOLDER=None,
        VLLM_LORA_DISABLE_PDL=True,
        VLLM_LORA_ENABLE_DUAL_STREAM=False,
    )
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    _module("vllm.triton_utils", triton=triton, tl=tl, HAS_TRITON=True)
    _module("vllm.logger", init_logger=lambda _: None)
    _module("vllm.platforms", current_platform=_Platform())
    _module("vllm.utils").__path__ = []
    _module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2)

    def keep(**_: Any) -> None:
        raise AttributeError  # As where PyTorch has no custom operators: then the function is used.

    def to_device(values: Any, dtype: Any, device: Any) -> Any:
        return torch.tensor(values, dtype=dtype, device=device)

    _module("vllm.utils.torch_utils", direct_register_custom_op=keep, async_tensor_h2d=to_device)
    return _Ops(
        *(
            import_module(f"{_OPS}.{name}")
            for name in ("lora_shrink_op", "lora_expand_op", "lora_kernel_metadata")
        )
    )


class _Platform:
    def is_cuda(self) -> bool:
        return True

    def has_device_capability(self, version: int) -> bool:
        return version <= 90

    def is_device_capability(self, version: int) -> bool:
        return version == 90


def _module(name: str, **values: Any) -> ModuleType:
    found = sys.modules.setdefault(name, ModuleType(name))
    vars(found).update(values)
    return found
