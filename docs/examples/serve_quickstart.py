"""Serves the quickstart from its store: mixed ranks in one batch, and not one compile.

./tools/run warmup buckets/cpu/quickstart.yaml
.venv/bin/python docs/examples/serve_quickstart.py
"""

import time

import jax
import numpy as np

import aot_lora
from aot_lora.adapters import pack_arrays
from aot_lora.kernels.reference import lora


def main() -> None:
    """Opens the store, loads three adapters, runs three batches, and tries to compile."""
    rng = np.random.default_rng(0)
    began = time.perf_counter()
    with aot_lora.Runtime.open("cpu/quickstart") as runtime:
        seconds = time.perf_counter() - began
        print(f"{len(runtime.plan.variants)} executables loaded in {seconds:.2f} s; sealed")
        adapters = {}
        for slot, rank in ((0, 8), (1, 16), (5, 32)):
            adapters[slot] = _normal(rng, rank, 64), _normal(rng, rank, 64)
            a, b = adapters[slot]
            runtime.banks.put(slot, pack_arrays({("q_proj", 0): (a, b.T)}, runtime.plan))
        for rows in ([0, 1, 5, -1, 1], [5] * 37, [-1, -1]):
            slots = np.array(rows)
            x, base = _normal(rng, len(rows), 64), _normal(rng, len(rows), 64)
            y = runtime.apply("q_proj", x, slots, base)
            error = np.abs(y.numpy() - lora(x, base, adapters, slots)).max()
            print(f"{y.count:2} rows in a bucket of {y.array.shape[0]}: largest error {error:.0e}")
        try:
            jax.jit(lambda x: 2 * x)(jax.device_put(np.ones(7, np.float32)))
        except aot_lora.errors.RecompileError as error:
            print(error)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


if __name__ == "__main__":
    main()
