"""Serves `torch_step.yaml` from its store: no torch is traced, and nothing compiles.

aot-lora warmup docs/examples/torch_step.yaml
python docs/examples/serve_torch_step.py
"""

from pathlib import Path

import jax
import numpy as np
import torch
from torch_step import build

import aot_lora
from aot_lora.adapters import pack_arrays
from aot_lora.interop import torchax

CONFIG = Path(__file__).with_name("torch_step.yaml")
Weights = dict[
    tuple[str, int], tuple[np.ndarray, np.ndarray]
]  # (module, layer): A [r, D], B [O, r]


def main() -> None:
    """Loads two adapters of different rank and runs three batches through the step."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = build()
    with aot_lora.Runtime.open(CONFIG) as runtime:
        weights = jax.device_put(torchax.weights(model), runtime.device)
        adapters = {slot: random_adapter(rng, rank) for slot, rank in ((0, 8), (3, 16))}
        for slot, adapter in adapters.items():
            runtime.banks.put(slot, pack_arrays(adapter, runtime.plan))
        for rows in ([0, 3, -1, 3, 0], [3] * 37, [-1, -1]):
            slots = np.array(rows)
            x = rng.standard_normal((len(rows), 64)).astype(np.float32)
            y, tokens = serve(runtime, weights, x, slots)
            error = np.abs(y - expected(model, x, slots, adapters)).max()
            print(f"{len(rows):2} rows in a bucket of {tokens}: largest error {error:.1e}")


def serve(
    runtime: aot_lora.Runtime, weights: object, x: np.ndarray, slots: np.ndarray
) -> tuple[np.ndarray, int]:
    """Looks the step up, pads in numpy, calls it: [tokens, 64] and the bucket."""
    batch = runtime.batch(slots)
    step = runtime.lookup("step", tokens=batch.count, lanes=batch.lanes)
    padded = np.zeros((step.tokens, x.shape[1]), x.dtype)
    padded[: batch.count] = x
    args = (weights, jax.device_put(padded, runtime.device))
    if batch.lanes:
        with runtime.banks.reading() as banks:  # a load may write them meanwhile
            y = step.executable(*args, banks, batch.blocks, batch.owners, batch.slots)
    else:
        y = step.executable(*args)
    return np.asarray(y)[: batch.count], step.tokens


def expected(
    model: torch.nn.Module, x: np.ndarray, slots: np.ndarray, adapters: dict[int, Weights]
) -> np.ndarray:
    """The same in torch, one row at a time, with the row's adapter merged into the weights."""
    rows: list[np.ndarray] = []
    for row, slot in zip(x, slots, strict=True):
        merged = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        for (name, layer), (a, b) in adapters.get(int(slot), {}).items():
            merged[f"{layer}.{name}.weight"] += torch.from_numpy(b @ a)
        y = torch.func.functional_call(model, merged, torch.from_numpy(row))
        rows.append(y.detach().numpy())
    return np.stack(rows)


def random_adapter(rng: np.random.Generator, rank: int) -> Weights:
    """An adapter of both modules in both blocks."""

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    sizes = {"up_proj": (64, 128), "down_proj": (128, 64)}
    return {
        (name, layer): (normal(rank, d), normal(o, rank))
        for name, (d, o) in sizes.items()
        for layer in (0, 1)
    }


if __name__ == "__main__":
    main()
