"""Serves `two_layer_step.yaml` from its store, without a compile.

aot-lora warmup docs/examples/two_layer_step.yaml
python docs/examples/serve_two_layer_step.py
"""

from pathlib import Path

import jax
import numpy as np

import aot_lora
from aot_lora.adapters import pack_arrays
from aot_lora.kernels.reference import lora

CONFIG = Path(__file__).with_name("two_layer_step.yaml")


def main() -> None:
    """Loads two adapters of different rank and runs three batches through the step."""
    rng = np.random.default_rng(0)
    weights = tuple(_normal(rng, *shape) for shape in ((64, 128), (128, 64)))
    on_device = jax.device_put(weights)
    with aot_lora.Runtime.open(CONFIG) as runtime:
        adapters = {}
        for slot, rank in ((0, 8), (3, 16)):
            adapters[slot] = {
                ("up_proj", 0): (_normal(rng, rank, 64), _normal(rng, rank, 128)),
                ("down_proj", 0): (_normal(rng, rank, 128), _normal(rng, rank, 64)),
            }
            runtime.banks.put(slot, packed(runtime.plan, adapters[slot]))
        for slots in ([0, 3, -1, 3, 0], [3] * 37, [-1, -1]):
            rows = np.array(slots)
            x = _normal(rng, len(rows), 64)
            y, tokens = serve(runtime, x, rows, on_device)
            error = np.abs(y - expected(x, rows, weights, adapters)).max()
            print(f"{len(rows):2} rows in a bucket of {tokens}: largest error {error:.1e}")


def serve(runtime: aot_lora.Runtime, x: np.ndarray, slots: np.ndarray, weights: object):
    """Looks the step up, pads in numpy, calls it: [tokens, 64] and the bucket."""
    batch = runtime.batch(slots)
    step = runtime.lookup("step", tokens=batch.count, lanes=batch.lanes)
    padded = np.zeros((step.tokens, x.shape[1]), x.dtype)
    padded[: batch.count] = x
    args = (jax.device_put(padded), weights)
    if batch.lanes:
        with runtime.banks.reading() as arrays:  # a load may write them meanwhile
            banks = (arrays["up_proj"], arrays["down_proj"])
            y = step.executable(*args, banks, batch.blocks, batch.owners, batch.slots)
    else:
        y = step.executable(*args)
    return np.asarray(y)[: batch.count], step.tokens


def packed(plan, weights):
    """Weights in memory, as (A [r, D], B [r, O]), made ready for the banks."""
    return pack_arrays({place: (a, b.T) for place, (a, b) in weights.items()}, plan)


def expected(x, slots, weights, adapters):
    """The same step by its definition, in float32."""
    for (name, w), last in zip(
        (("up_proj", weights[0]), ("down_proj", weights[1])), (False, True), strict=True
    ):
        own = {slot: pairs[name, 0] for slot, pairs in adapters.items()}
        x = lora(x, x @ w, own, slots)
        x = x if last else np.maximum(x, 0)
    return x


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


if __name__ == "__main__":
    main()
