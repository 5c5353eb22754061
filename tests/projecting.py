"""What the tests of forms share: a batch with its banks, and what has to come out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from aot_lora.kernels.batch import Batch
from aot_lora.kernels.blocks import NOBODY
from aot_lora.kernels.forms import Form
from aot_lora.kernels.lora_project.reference import lora_project
from aot_lora.kernels.reference import tolerance
from aot_lora.kernels.sizes import Sizes

LAYERS, LAYER = 2, 1


class Served(NamedTuple):
    """A batch with everything that a form is given."""

    x: np.ndarray
    weights: tuple[np.ndarray, ...]
    banks: tuple[tuple[np.ndarray, np.ndarray], ...]
    blocks: np.ndarray
    owners: np.ndarray
    slots: np.ndarray
    most: int
    quantum: int

    def batch(self) -> Batch:
        return Batch(*map(jnp.asarray, (self.blocks, self.owners, self.slots)))

    def sizes(self) -> Sizes:
        return Sizes(
            tokens=len(self.x),
            lanes=len(self.blocks) * self.quantum,
            d=self.x.shape[1],
            o=tuple(weight.shape[1] for weight in self.weights),
            quantum=self.quantum,
            most=self.most,
            dtype=self.x.dtype.name,
        )


def served(
    tokens: int,
    ranks: Sequence[int],
    d: int,
    outputs: Sequence[int],
    *,
    slots: Sequence[int] | None = None,
    lanes: int = 0,
    dtype: str = "float32",
    quantum: int = 8,
) -> Served:
    """Adapters of `ranks` in slots 0, 1, ... of banks with free blocks between; random rows."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(jnp.dtype(dtype))

    counts = [-(-rank // quantum) for rank in ranks]
    resident = 2 * sum(counts) + 2
    free = iter(rng.permutation(np.arange(1, resident)))
    own = [[int(next(free)) for _ in range(count)] for count in counts]
    banks = tuple(
        (normal(LAYERS, resident, quantum, d), normal(LAYERS, resident, quantum, o))
        for o in outputs
    )
    for a_bank, b_bank in banks:
        a_bank[:, 0], b_bank[:, 0] = 0, 0
        for found, rank in zip(own, ranks, strict=True):
            if rank % quantum:  # Lanes past the rank are zero, as `bank_write` leaves them.
                a_bank[:, found[-1], rank % quantum :] = 0
                b_bank[:, found[-1], rank % quantum :] = 0
    blocks = [block for found in own for block in found]
    owners = [slot for slot, found in enumerate(own) for _ in found]
    padding = max(lanes // quantum - len(blocks), 0)
    rows = rng.integers(-1, max(len(ranks), 1), tokens) if slots is None else np.asarray(slots)
    return Served(
        x=(rng.standard_normal((tokens, d), np.float32)).astype(jnp.dtype(dtype)),
        weights=tuple(normal(d, o) for o in outputs),
        banks=banks,
        blocks=np.array(blocks + [0] * padding, np.int32),
        owners=np.array(owners + [NOBODY] * padding, np.int32),
        slots=rows.astype(np.int32),
        most=max(counts, default=1),
        quantum=quantum,
    )


def run(form: Form, given: Served) -> tuple[np.ndarray, ...]:
    """One jitted step: the batch worked out, then the projections."""

    def step(batch: Batch, x: Any, weights: Any, banks: Any, layer: Any) -> Any:
        prepared = form.prepare(batch, quantum=given.quantum, most=given.most)
        return form.divided(form.project(x, weights, banks, layer, prepared), prepared)[0]

    found = jax.jit(step)(given.batch(), given.x, given.weights, given.banks, np.int32(LAYER))
    return tuple(np.asarray(one) for one in found)


def expected(given: Served) -> tuple[np.ndarray, ...]:
    """What every form has to make of it, in float32."""
    return lora_project(
        given.x, given.weights, given.banks, LAYER, given.blocks, given.owners, given.slots
    )


def is_right(found: np.ndarray, right: np.ndarray, given: Served) -> bool:
    """Whether one output differs from what is expected by rounding alone."""
    error = np.linalg.norm(found.astype(np.float32) - right)
    limit = tolerance(given.x.dtype.name, reduction=given.x.shape[1])
    return bool(error <= 2 * limit * np.linalg.norm(right))


def poison(given: Served) -> None:
    """NaN in every block that no adapter of the batch has, and in all of the other layer."""
    for pair in given.banks:
        for bank in pair:
            bank[:, np.setdiff1d(np.arange(1, bank.shape[1]), given.blocks)] = np.nan
            bank[1 - LAYER] = np.nan
