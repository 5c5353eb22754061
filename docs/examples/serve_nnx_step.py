"""Serves the Flax NNX model of `nnx_step.yaml` from its store, without a compile.

aot-lora warmup docs/examples/nnx_step.yaml
python docs/examples/serve_nnx_step.py
"""

from pathlib import Path

import jax
import numpy as np
from flax import nnx
from nnx_step import Mlp, weights

import aot_lora
from aot_lora.adapters import pack_arrays
from aot_lora.kernels.reference import lora


def main() -> None:
    """Loads two adapters of different rank and runs three batches through the model."""
    rng = np.random.default_rng(0)
    model = weights(Mlp(nnx.Rngs(7)))  # before the seal: making weights compiles
    kernels = {name: np.asarray(model[name]["kernel"]) for name in ("up_proj", "down_proj")}
    with aot_lora.Runtime.open(Path(__file__).with_name("nnx_step.yaml")) as runtime:
        adapters = {0: _adapter(rng, 8), 3: _adapter(rng, 16)}
        for slot, pairs in adapters.items():
            made = {(name, 0): (a, b.T) for name, (a, b) in pairs.items()}
            runtime.banks.put(slot, pack_arrays(made, runtime.plan))
        for slots in ([0, 3, -1, 3, 0], [3] * 37, [-1, -1]):
            rows = np.array(slots)
            x = rng.standard_normal((len(rows), 64), np.float32)
            batch = runtime.batch(rows)
            found = runtime.lookup("step", tokens=batch.count, lanes=batch.lanes)
            padded = np.zeros((found.tokens, 64), np.float32)
            padded[: len(rows)] = x
            args = (model, jax.device_put(padded))
            with runtime.banks.reading() as banks:
                if batch.lanes:
                    args += (banks, batch.blocks, batch.owners, batch.slots)
                y = np.asarray(found.executable(*args))[: len(rows)]
            for name, kernel in kernels.items():  # by definition
                own = {slot: pairs[name] for slot, pairs in adapters.items()}
                x = lora(x, x @ kernel, own, rows)
                x = np.maximum(x, 0) if name == "up_proj" else x
            error = np.abs(y - x).max()
            print(f"{len(rows):2} rows in a bucket of {found.tokens}: largest error {error:.1e}")


def _adapter(rng: np.random.Generator, rank: int):
    shapes = {"up_proj": (64, 128), "down_proj": (128, 64)}
    return {
        name: tuple(rng.standard_normal((rank, n), np.float32) / n**0.5 for n in shape)
        for name, shape in shapes.items()
    }


if __name__ == "__main__":
    main()
