"""Every kernel against float32 numpy, at the shapes of real models and at any mix of adapters.

A new backend is a line in `BACKENDS`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from aot_lora import kernels
from aot_lora.kernels import blocks
from aot_lora.kernels.lora_expand import cases as expand_cases
from aot_lora.kernels.lora_expand import pallas_tpu as expand_tpu
from aot_lora.kernels.lora_expand import reference as expand_reference
from aot_lora.kernels.lora_expand import xla as expand_xla
from aot_lora.kernels.lora_shrink import cases as shrink_cases
from aot_lora.kernels.lora_shrink import pallas_tpu as shrink_tpu
from aot_lora.kernels.lora_shrink import reference as shrink_reference
from aot_lora.kernels.lora_shrink import xla as shrink_xla
from aot_lora.kernels.reference import lora, tolerance

BACKENDS: dict[str, tuple[ModuleType, ModuleType]] = {
    "xla": (shrink_xla, expand_xla),
    "pallas_tpu": (shrink_tpu, expand_tpu),
}
QUANTUM, D_SIZE, O_SIZE = 8, 32, 48
LAYERS, LAYER = 3, 1  # what a bank holds, and where the adapters of `serve` lie
NOBODY = -2  # Owns the lanes that pad: no row has it as its slot.

both_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.once), "bfloat16"]
)


def normal(rng: np.random.Generator, *shape: int, dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(jnp.dtype(dtype))


def assert_close(found: np.ndarray, expected: np.ndarray, *, reduction: int) -> None:
    """Equal but for rounding, relative to the norm."""
    error = np.linalg.norm(found.astype(np.float32) - expected.astype(np.float32))
    limit = tolerance(found.dtype.name, reduction=reduction)
    assert error <= limit * np.linalg.norm(expected.astype(np.float32))


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())


@pytest.fixture(params=BACKENDS, scope="module")  # Interpret mode is on until it ends.
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """A TPU's kernels run in TPU interpret mode, where memory nobody wrote is NaN."""
    interpreted = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams())
    with interpreted if request.param == "pallas_tpu" else nullcontext():
        yield request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# --- Each kernel alone, at the shapes of real models -------------------------------------------


@both_dtypes
@pytest.mark.parametrize(("tokens", "lanes", "d"), shrink_cases.CASES)
def test_shrink_is_the_reference(
    backend: str, dtype: str, tokens: int, lanes: int, d: int, rng: np.random.Generator
) -> None:
    count = lanes // QUANTUM
    x = normal(rng, tokens, d, dtype=dtype)
    a_bank = normal(rng, 2, count + 3, QUANTUM, d, dtype=dtype)
    blocks = rng.permutation(np.arange(count + 3, dtype=np.int32))[:count]
    owners = np.sort(rng.integers(0, 3, count, np.int32))
    slots = rng.integers(-1, 3, tokens, np.int32)

    masked = (x, a_bank, np.int32(1), blocks, owners, slots)
    for name, args in (("lora_shrink", masked), ("lora_shrink_single", masked[:4])):
        found = np.asarray(jax.jit(getattr(BACKENDS[backend][0], name))(*args))
        assert (found.shape, found.dtype) == ((tokens, lanes), x.dtype)
        assert_close(found, getattr(shrink_reference, name)(*args), reduction=d)


@both_dtypes
@pytest.mark.parametrize(("tokens", "lanes", "o"), expand_cases.CASES)
def test_expand_is_the_reference(
    backend: str, dtype: str, tokens: int, lanes: int, o: int, rng: np.random.Generator
) -> None:
    count = lanes // QUANTUM
    base, h = normal(rng, tokens, o, dtype=dtype), normal(rng, tokens, lanes, dtype=dtype)
    b_bank = normal(rng, 2, count + 3, QUANTUM, o, dtype=dtype)
    blocks = rng.permutation(np.arange(count + 3, dtype=np.int32))[:count]
    slots = rng.integers(-1, 3, tokens, np.int32)

    masked = (base, h, b_bank, np.int32(1), blocks, slots)
    for name, args in (("lora_expand", masked), ("lora_expand_single", masked[:5])):
        found = np.asarray(jax.jit(getattr(BACKENDS[backend][1], name))(*args))
        assert (found.shape, found.dtype) == ((tokens, o), base.dtype)
        assert_close(found, getattr(expand_reference, name)(*args), reduction=lanes)


# --- Both together, on adapters in banks --------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A batch and the banks that hold its adapters, packed by hand."""

    adapters: dict[int, tuple[np.ndarray, np.ndarray]]
    x: np.ndarray
    base: np.ndarray
    a_bank: np.ndarray
    b_bank: np.ndarray
    blocks: np.ndarray
    owners: np.ndarray
    slots: np.ndarray

    def expected(self) -> np.ndarray:
        return lora(self.x, self.base, self.adapters, self.slots)


def serve(
    rng: np.random.Generator,
    ranks: Mapping[int, int],
    slots: Sequence[int],
    *,
    dtype: str = "float32",
    lanes: int | None = None,
) -> Served:
    """A batch of `slots` over adapters of `ranks`, padded to `lanes` where given.

    Adapters lie in the bank back to front, after block 0, with noise in every block between.
    """
    own: dict[int, list[int]] = {}
    lanes = lanes or sum(-(-rank // QUANTUM) * QUANTUM for rank in ranks.values())
    end = 1 + 2 * lanes // QUANTUM
    a_bank, b_bank = (
        normal(rng, LAYERS, end, QUANTUM, width, dtype=dtype) for width in (D_SIZE, O_SIZE)
    )
    a_bank[:, 0], b_bank[:, 0] = 0, 0
    adapters: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for slot, rank in ranks.items():
        a, b = normal(rng, rank, D_SIZE, dtype=dtype), normal(rng, rank, O_SIZE, dtype=dtype)
        adapters[slot] = (a, b)
        own[slot] = [end := end - 2 for _ in range(0, rank, QUANTUM)]
        for bank, rows in ((a_bank, a), (b_bank, b)):
            whole = np.zeros((len(own[slot]) * QUANTUM, rows.shape[1]), rows.dtype)
            whole[:rank] = rows
            bank[LAYER, own[slot]] = whole.reshape(-1, QUANTUM, rows.shape[1])
    blocks = [block for found in own.values() for block in found]
    owners = [slot for slot, found in own.items() for _ in found]
    padding = lanes // QUANTUM - len(blocks)
    return Served(
        adapters=adapters,
        x=normal(rng, len(slots), D_SIZE, dtype=dtype),
        base=normal(rng, len(slots), O_SIZE, dtype=dtype),
        a_bank=a_bank,
        b_bank=b_bank,
        blocks=np.array(blocks + [0] * padding, np.int32),
        owners=np.array(owners + [NOBODY] * padding, np.int32),
        slots=np.array(slots, np.int32),
    )


def run(backend: str, batch: Served) -> np.ndarray:
    shrink, expand = BACKENDS[backend]
    h = jax.jit(shrink.lora_shrink)(
        batch.x, batch.a_bank, LAYER, batch.blocks, batch.owners, batch.slots
    )
    return np.asarray(
        jax.jit(expand.lora_expand)(batch.base, h, batch.b_bank, LAYER, batch.blocks, batch.slots)
    )


def run_single(backend: str, batch: Served) -> np.ndarray:
    shrink, expand = BACKENDS[backend]
    h = jax.jit(shrink.lora_shrink_single)(batch.x, batch.a_bank, LAYER, batch.blocks)
    return np.asarray(
        jax.jit(expand.lora_expand_single)(batch.base, h, batch.b_bank, LAYER, batch.blocks)
    )


ALL_RANKS = {0: 8, 1: 16, 2: 32, 3: 64, 4: 128}


@both_dtypes
def test_mixed_ranks_in_one_batch_are_five_separate_unpadded_runs(
    backend: str, dtype: str, rng: np.random.Generator
) -> None:
    """CASES 18."""
    mixed = serve(rng, ALL_RANKS, [0, 1, 2, 3, 4, 4, 3, -1], dtype=dtype, lanes=256)
    together = run(backend, mixed)

    assert_close(together, mixed.expected(), reduction=128)
    for slot in ALL_RANKS:
        rows, lanes = mixed.slots == slot, mixed.owners == slot
        alone = replace(
            mixed,
            x=mixed.x[rows],
            base=mixed.base[rows],
            slots=mixed.slots[rows],
            blocks=mixed.blocks[lanes],
            owners=mixed.owners[lanes],
        )
        assert_close(together[rows], run_single(backend, alone), reduction=128)


@pytest.mark.once
@both_dtypes
@given(data=st.data())
def test_any_mix_of_adapters_is_the_reference(
    backend: str, dtype: str, data: st.DataObject
) -> None:
    rank = st.integers(min_value=1, max_value=24)
    ranks = data.draw(st.dictionaries(st.integers(0, 40), rank, min_size=4, max_size=4))
    slot = st.sampled_from([-1, *ranks])
    slots = data.draw(st.lists(slot, min_size=8, max_size=8))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch = serve(rng, ranks, slots, dtype=dtype, lanes=96)
    found = run(backend, batch)

    assert_close(found, batch.expected(), reduction=96)
    without = batch.slots == -1
    assert same_bits(found[without], batch.base[without])


@both_dtypes
def test_rows_without_an_adapter_are_the_base_bit_for_bit(
    backend: str, dtype: str, rng: np.random.Generator
) -> None:
    """CASES 14: a gather at -1 would read the last adapter, and -0.0 + 0.0 is another zero."""
    batch = serve(rng, {0: 8, 1: 16}, [-1, 0, -1, 1], dtype=dtype)
    batch.base[0, :4] = [-0.0, np.inf, -np.inf, np.nan]
    batch.base[2] = -0.0
    batch.x[2] = np.inf

    found = run(backend, batch)

    assert same_bits(found[[0, 2]], batch.base[[0, 2]])
    assert not np.array_equal(found[[1, 3]], batch.base[[1, 3]])


@both_dtypes
@pytest.mark.parametrize("slots", [[0, 0], [-1, -1], [0], [-1]])
def test_all_none_and_one_token(
    backend: str, dtype: str, slots: list[int], rng: np.random.Generator
) -> None:
    """CASES 17; an empty batch is one whose rows are all padding, so all -1."""
    batch = serve(rng, {0: 16}, slots, dtype=dtype, lanes=32)
    found = run(backend, batch)

    assert_close(found, batch.expected(), reduction=32)
    if slots[0] == -1:
        assert same_bits(found, batch.base)
    else:
        assert same_bits(found, run_single(backend, batch))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_an_adapter_that_is_not_in_the_batch_cannot_be_felt(
    backend: str, poison: float, rng: np.random.Generator
) -> None:
    batch = serve(rng, {0: 8, 1: 16}, [0, 1, -1], lanes=64)
    clean = run(backend, batch)
    others = np.setdiff1d(np.arange(1, batch.a_bank.shape[1]), batch.blocks)
    for bank in (batch.a_bank, batch.b_bank):
        bank[:, others] = poison
        bank[np.arange(LAYERS) != LAYER, 1:] = poison

    assert same_bits(run(backend, batch), clean)


# --- Writing banks -------------------------------------------------------------------------------


def written(batch: Served, blocks: Sequence[int], rank: int, rng: np.random.Generator) -> Any:
    """`batch` after slot 0 was given a new adapter of `rank` in `blocks`; zero pads the lanes."""
    lanes = len(blocks) * QUANTUM
    a = np.zeros((LAYERS, lanes, D_SIZE), batch.x.dtype)
    b = np.zeros((LAYERS, O_SIZE, lanes), batch.x.dtype)  # as files hold it
    a[:, :rank] = normal(rng, LAYERS, rank, D_SIZE, dtype="float32")
    b[:, :, :rank] = normal(rng, LAYERS, O_SIZE, rank, dtype="float32")
    scale = np.array([1.0, 0.5, 3.0], np.float32)
    banks = jax.jit(kernels.bank_write)(
        batch.a_bank, batch.b_bank, a, b, scale, np.array(blocks, np.int32)
    )
    return replace(
        batch,
        adapters={0: (a[LAYER, :rank], b[LAYER, :, :rank].T * scale[LAYER])},
        a_bank=np.asarray(banks[0]),
        b_bank=np.asarray(banks[1]),
    )


@pytest.mark.parametrize("rank", [8, 5])
def test_no_lane_of_a_slots_last_adapter_is_left(
    backend: str, rank: int, rng: np.random.Generator
) -> None:
    """CASES 15: rank 64, then a small one in the same slot and the same 64 lanes."""
    before = serve(rng, {0: 64}, [0, 0, -1])
    first = int(before.blocks[0])
    now = written(before, [first, *[0] * 7], rank, rng)
    now = replace(now, blocks=np.array([first, *[0] * 7], np.int32))

    assert_close(run(backend, now), now.expected(), reduction=64)
    assert_close(run_single(backend, now)[:2], now.expected()[:2], reduction=64)


def test_a_write_below_its_bucket_touches_only_its_own_blocks(
    rng: np.random.Generator,
) -> None:
    before = serve(rng, {0: 64}, [0])
    first = int(before.blocks[0])
    now = written(before, [first, 0, 0, 0], QUANTUM, rng)

    assert not now.a_bank[:, 0].any()
    assert not now.b_bank[:, 0].any()
    others = np.setdiff1d(np.arange(before.a_bank.shape[1]), [first])
    assert same_bits(now.a_bank[:, others], before.a_bank[:, others])
    assert same_bits(now.b_bank[:, others], before.b_bank[:, others])


def test_a_reset_leaves_zeros_in_its_blocks_and_the_rest_alone(
    rng: np.random.Generator,
) -> None:
    before = serve(rng, {0: 16, 1: 8}, [0])
    own = before.blocks[before.owners == 0]
    banks = jax.jit(kernels.bank_reset)(before.a_bank, before.b_bank, np.array([*own, 0], np.int32))

    for bank, old in zip(map(np.asarray, banks), (before.a_bank, before.b_bank), strict=True):
        assert not bank[:, own].any()
        others = np.setdiff1d(np.arange(bank.shape[1]), own)
        assert same_bits(bank[:, others], old[:, others])


@both_dtypes
def test_both_ways_to_write_a_bank_give_the_same_bytes(
    dtype: str, rng: np.random.Generator
) -> None:
    """A CPU moves bits; every other platform runs the plain updates."""
    bank = normal(rng, LAYERS, 6, QUANTUM, D_SIZE, dtype=dtype)
    lanes = normal(rng, LAYERS, 3 * QUANTUM, D_SIZE, dtype=dtype)
    where = np.array([4, 1, 0], np.int32)
    expected = bank.copy()
    expected[:, where] = lanes.reshape(LAYERS, 3, QUANTUM, D_SIZE)

    for way in (blocks.put_bits, blocks.put_each):
        assert same_bits(np.asarray(jax.jit(way)(bank, lanes, where)), expected)
