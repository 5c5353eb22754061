"""The GPU's kernels on the CPU: their numerics in interpret mode, and what each refuses.

Memory that nobody wrote is NaN there, so that reading it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from projecting import LAYER, Served, expected, is_right, poison, run, served

from aot_lora.kernels.batch import Batch
from aot_lora.kernels.blocks import NOBODY
from aot_lora.kernels.forms import FORMS, PLAIN, Form
from aot_lora.kernels.lora_project import mosaic_gpu, pallas_gpu
from aot_lora.kernels.lora_project.one_launch import EARLY
from aot_lora.kernels.lora_shrink import pallas_gpu as shrink
from aot_lora.kernels.lora_shrink import reference as shrink_reference
from aot_lora.kernels.sizes import Sizes

MIXED = (8, 128, 16, 32, 64)

prepared = jax.jit(shrink.prepare, static_argnames=("quantum", "most"))


def one_launch(**tuning: int) -> Form:
    """The form in interpret mode, in tiles that small matrices have several of."""
    small = {"block_d": 32, "block_o": 32, "splits": 2, "shrink_d": 32, **tuning}
    project = partial(pallas_gpu.one_launch, interpret=True, **small)
    return replace(FORMS["one_launch"], project=project)


def assert_right(form: Form, given: Served) -> None:
    """The definition's, with NaN in all that the batch has nothing to do with."""
    poison(given)
    for found, right in zip(run(form, given), expected(given), strict=True):
        assert (found.shape, found.dtype) == (right.shape, given.x.dtype)
        assert is_right(found, right, given)


# --- one_launch ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantum", "tokens", "splits", "dtype"),
    [
        (8, 1, 1, "float32"),
        (8, 5, 2, "bfloat16"),
        (8, 16, 2, "float32"),
        (8, 64, 1, "bfloat16"),
        (16, 1, 2, "bfloat16"),
        (16, 16, 1, "float32"),
        (64, 5, 1, "float32"),
        (64, 64, 2, "bfloat16"),
    ],
)
def test_one_launch_is_the_reference(quantum: int, tokens: int, splits: int, dtype: str) -> None:
    given = served(tokens, MIXED, 64, (64, 32), dtype=dtype, quantum=quantum)

    assert_right(one_launch(splits=splits), given)


def test_one_launch_without_adapters_is_the_base() -> None:
    given = served(6, (16,), 32, (32,), slots=[-1] * 6, quantum=16)
    bare = given._replace(banks=tuple((a * 0, b * 0) for a, b in given.banks))
    poison(given)

    assert (
        run(one_launch(splits=1), given)[0].tobytes()
        == run(one_launch(splits=1), bare)[0].tobytes()
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("given", "tuning"),
    [
        pytest.param(served(4, (), 64, (64,), slots=[-1] * 4, lanes=16), {}, id="no adapter"),
        pytest.param(served(8, (8, 16), 64, (32,), slots=[1] * 8), {}, id="one is not used"),
        pytest.param(served(8, (5, 17), 64, (32,)), {}, id="ranks of no whole quantum"),
        pytest.param(served(8, (8, 16), 64, (32,), lanes=128), {}, id="many padding lanes"),
        pytest.param(served(8, (96,), 64, (32,), quantum=48), {}, id="a quantum of three slices"),
        pytest.param(served(8, (24, 24), 64, (32,), quantum=24), {}, id="an odd quantum"),
        pytest.param(served(4, (16, 16), 64, (32,), slots=[0, 1, 7, -1]), {}, id="nobody's slot"),
        pytest.param(served(100, MIXED, 64, (32,)), {"shrink_t": 16}, id="many shrink tiles"),
        pytest.param(served(9, MIXED, 128, (32, 64, 96)), {"splits": 4}, id="three modules"),
        pytest.param(served(5, MIXED, 64, (32,)), {"shrink_t": 64}, id="a tile past the rows"),
        pytest.param(served(70, MIXED, 64, (32,)), {"block_t": 64}, id="two tiles of rows"),
        pytest.param(
            served(128, (64,) * 5, 64, (32, 64), slots=[4, 1, -1, 3] * 32),
            {"block_t": 64, "base_splits": 2, "shrink_t": 32, "ahead": 2},
            id="two tiles of rows, in parts",
        ),
        pytest.param(served(40, MIXED, 64, (32,)), {"shrink_l": 64}, id="wide shrink tiles"),
        pytest.param(served(9, MIXED, 64, (32,)), {"ahead": 4}, id="granules ahead"),
        pytest.param(served(9, MIXED, 128, (32, 64)), {"base_splits": 2}, id="parts of the base"),
        pytest.param(
            served(9, (8, 64), 128, (64,)), {"base_splits": 4}, id="four parts of the base"
        ),
        pytest.param(
            served(9, (64,) * 5, 128, (64,), slots=[4, 0, 2] * 3),
            {"base_splits": 4},
            id="fewer granules than parts",
        ),
        pytest.param(
            served(9, (64,) * 7, 128, (64, 32), slots=[6, 0, 2, 5, 1, 3, 4, -1, 6]),
            {"base_splits": 2, "ahead": 2},
            id="an odd number of turns in two parts",
        ),
    ],
)
def test_one_launch_bears_what_is_odd(given: Served, tuning: dict[str, int]) -> None:
    assert_right(one_launch(**tuning), given)


@pytest.mark.parametrize(("quantum", "ahead"), [(8, 1), (16, 1), (16, 2), (16, 4)])
def test_one_launch_takes_of_many_granules_those_that_are_used(quantum: int, ahead: int) -> None:
    given = served(16, (16,) * 12, 64, (32,), quantum=quantum, slots=[0, 9] * 8)
    lanes = prepared(given.batch(), quantum=quantum, most=given.most)

    assert lanes.wanted.shape[1] > EARLY
    assert lanes.counts.tolist() == [2]
    assert_right(one_launch(ahead=ahead), given)


@pytest.mark.parametrize("tokens", [1, 16, 17, 72, 128])
def test_one_launch_has_a_counter_for_each_tile_that_is_shrunk(tokens: int) -> None:
    given = served(tokens, (16, 64), 64, (32,))
    made = pallas_gpu.prepare(given.batch(), quantum=given.quantum, most=given.most)
    tiles = pallas_gpu.tile_rows(tokens) // 16 * (made.rows.shape[1] // 16)

    assert made.parts.shape == (pallas_gpu.MOST_MODULES * tiles,)


def test_one_launch_counts_on_from_call_to_call() -> None:
    given = served(8, (16, 64), 64, (32, 64))
    form = one_launch(splits=2)
    made = form.prepare(given.batch(), quantum=given.quantum, most=given.most)
    outputs, after = form.project(given.x, given.weights, given.banks, LAYER, made)

    assert made.done.tolist() == made.before.tolist() == [0]
    assert after.done.tolist() == after.before.tolist() != [0]
    assert not after.parts.any()
    again, _ = form.project(given.x, given.weights, given.banks, LAYER, after)
    assert [one.tobytes() for one in again] == [one.tobytes() for one in outputs]


@pytest.mark.parametrize("tuning", [{"block_t": 32}, {"ahead": 3}, {"ahead": 8}])
def test_one_launch_refuses_what_a_batch_has_no_lists_for(tuning: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="not for block_t="):
        run(one_launch(**tuning), served(70, MIXED, 64, (32,)))


@pytest.mark.once
@pytest.mark.parametrize("number", range(len(pallas_gpu.TUNINGS)))
def test_every_tuning_of_one_launch_serves_all_that_it_does_not_refuse(number: int) -> None:
    given = served(3, (64,), 1024, (64, 192), dtype="bfloat16", quantum=64)

    assert not FORMS["one_launch"].supports(given.sizes(), "cuda")
    project = partial(pallas_gpu.one_launch, interpret=True, **pallas_gpu.TUNINGS[number])
    assert_right(replace(FORMS["one_launch"], project=project), given)


def test_what_the_batch_has_does_reach_the_result() -> None:
    given = served(8, (16, 64), 64, (32,), slots=[0, 1] * 4)
    given.banks[0][1][LAYER, given.blocks] = np.nan

    assert np.isnan(run(one_launch(), given)[0]).all()


# --- lora_shrink ---------------------------------------------------------------------------------


def shrunk(given: Served, **tuning: int) -> tuple[np.ndarray, np.ndarray, Any]:
    """h [M, T, L], which lanes lie in used granules [T, L], and lanes."""
    lanes = prepared(given.batch(), quantum=given.quantum, most=given.most)
    a_banks = tuple(a for a, _ in given.banks)
    small = {"block_t": 16, "block_d": 32, **tuning}
    h = jax.jit(partial(shrink.lora_shrink, interpret=True, **small))(
        given.x, a_banks, np.int32(LAYER), lanes
    )
    groups = np.arange(len(given.x)) // shrink.GROUP
    granules = np.repeat(np.asarray(is_read(lanes)), shrink.GRANULE, axis=1)
    return np.asarray(h, np.float32), granules[groups], lanes


def is_read(lanes: shrink.Lanes) -> jax.Array:
    """Whether a group reads a granule: [T / GROUP, L / GRANULE]."""
    places = jnp.arange(lanes.wanted.shape[1])
    taken = lanes.wanted[:, :, None] == places
    return (taken & (places[:, None] < lanes.counts[:, None, None])).any(1)


@pytest.mark.parametrize("cores", [1, 132])
@pytest.mark.parametrize(("block_l", "quantum"), [(16, 8), (16, 16), (32, 8), (64, 16), (64, 64)])
def test_the_shrink_is_exactly_zero_on_lanes_of_others(
    block_l: int, quantum: int, cores: int
) -> None:
    given = served(48, MIXED, 64, (32, 32), quantum=quantum)
    poison(given)
    h, read, lanes = shrunk(given, block_l=block_l, cores=cores)
    own = given.slots[:, None] == np.asarray(lanes.owners)[None, :]
    count = len(given.blocks) * quantum

    assert read[:, :count].all()
    for found, (a_bank, _) in zip(h, given.banks, strict=True):
        assert (found[~own & read] == 0).all()
        assert (found[own] != 0).any()
        right = shrink_reference.lora_shrink(
            given.x, a_bank, LAYER, given.blocks, given.owners, given.slots
        )
        assert is_right(found[:, :count], right, given)


@pytest.mark.parametrize("quantum", [16, 64])
def test_the_shrink_leaves_alone_what_a_group_does_not_use(quantum: int) -> None:
    # Two groups of 128 rows, each of an adapter of its own granule; nobody has the third.
    slots = [0] * shrink.GROUP + [1] * shrink.GROUP
    given = served(256, (64, 64, 64), 64, (32,), slots=slots, quantum=quantum)
    given.banks[0][0][LAYER, given.blocks[given.owners == 2]] = np.nan
    h, read, _ = shrunk(given, block_t=64)

    assert read[:128].sum() == read[128:].sum() == 128 * 64
    assert np.isfinite(h[0][read]).all()
    assert np.isnan(h[0][~read]).all()


def test_nan_of_a_granule_that_is_used_does_show() -> None:
    given = served(16, (64,), 64, (32,), slots=[0] * 16, quantum=16)
    given.banks[0][0][LAYER, given.blocks] = np.nan

    assert np.isnan(shrunk(given)[0]).all()


# --- prepare -------------------------------------------------------------------------------------


BLOCKS = 12  # However many adapters own: a shape is compiled once.


@st.composite
def batches(draw: Any) -> tuple[Batch, int]:
    """A batch of a few adapters, and its quantum."""
    quantum = draw(st.sampled_from([8, 16, 24, 48, 64, 128]))
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    owners = [slot for slot, count in enumerate(counts) for _ in range(count)]
    blocks = draw(st.permutations(range(1, 1 + len(owners))))
    padding = BLOCKS - len(owners)
    # In runs, because some row of 128 at random would use every granule.
    runs = draw(st.lists(st.integers(-1, len(counts)), min_size=1, max_size=5))
    slots = np.repeat(np.array(runs, np.int32), 64)[: draw(st.sampled_from([5, 300]))]
    return Batch(
        np.array([*blocks, *[0] * padding], np.int32),
        np.array([*owners, *[NOBODY] * padding], np.int32),
        np.pad(slots, (0, -len(slots) % 60), constant_values=-1),
    ), quantum


@drawn(batches())
def test_each_group_wants_exactly_the_granules_that_its_rows_use(given: tuple[Batch, int]) -> None:
    batch, quantum = given
    lanes = jax.tree.map(np.asarray, prepared(batch, quantum=quantum, most=4))
    owners = np.repeat(batch.owners, quantum)
    count = len(owners)

    assert len(lanes.owners) % shrink.GRANULE == 0
    assert len(lanes.owners) - count < shrink.GRANULE
    assert (lanes.owners[:count] == owners).all()
    assert (lanes.owners[count:] == NOBODY).all()
    assert (lanes.rows[:count] // quantum == np.repeat(batch.blocks, quantum)).all()
    assert (lanes.rows[:count] % quantum == np.arange(count) % quantum).all()
    assert (lanes.rows[count:] == 0).all()
    assert len(lanes.counts) == -(-len(batch.slots) // shrink.GROUP)
    for group, number in enumerate(lanes.counts):
        rows = batch.slots[group * shrink.GROUP :][: shrink.GROUP]
        used = np.flatnonzero(np.isin(owners, rows))
        granules = sorted({int(lane) // shrink.GRANULE for lane in used})
        assert lanes.wanted[group, :number].tolist() == granules
    each = lanes.wanted.shape[1]
    pairs = [
        group * each + granule
        for group, number in enumerate(lanes.counts)
        for granule in lanes.wanted[group, :number]
    ]
    assert lanes.total.tolist() == [len(pairs)]
    assert lanes.used[: len(pairs)].tolist() == pairs


@pytest.mark.parametrize(
    ("quantum", "width"), [(8, 16), (16, 16), (24, 16), (32, 32), (48, 16), (64, 64), (128, 64)]
)
def test_a_slice_never_leaves_its_block(quantum: int, width: int) -> None:
    given = served(1, (quantum,) * 2, 16, (16,), quantum=quantum)
    lanes = prepared(given.batch(), quantum=quantum, most=1)
    bank = jnp.asarray(given.banks[0][0])
    layer, places, (flat,) = mosaic_gpu.side_by_side((bank,), LAYER, lanes)

    assert mosaic_gpu.slice_lanes(quantum) == width
    starts = layer * bank[0, :, :, 0].size + places[::width]
    found = np.concatenate([flat[start : start + width] for start in starts])
    right = given.banks[0][0][LAYER, given.blocks].reshape(-1, 16)
    assert (found[: 2 * quantum] == right).all()
    assert (found[2 * quantum :] == 0).all()


# --- extended ------------------------------------------------------------------------------------


def plain_shrink(
    x: jax.Array, a_banks: Any, layer: Any, lanes: shrink.Lanes, **tuning: int
) -> jax.Array:
    """The shrink without Triton, which Mosaic GPU's interpret mode has no use for.

    As of the kernel, what lies outside the granules of a group is NaN.
    """
    del tuning
    own = lanes.slots[:, None] == lanes.owners[None, :]
    inside = jnp.repeat(jnp.repeat(is_read(lanes), shrink.GRANULE, axis=1), shrink.GROUP, axis=0)
    found = []
    for bank in a_banks:
        _, blocks, quantum, d = bank.shape
        rows = bank.reshape(-1, d)[layer * blocks * quantum + lanes.rows]
        h = jnp.where(own, jnp.dot(x, rows.T, preferred_element_type=jnp.float32), 0)
        found.append(jnp.where(inside, h, jnp.nan).astype(x.dtype))
    return jnp.stack(found)


class Semaphores:
    """Semaphores as numbers in memory, which interpret mode has none of.

    A signal is counted for its warpgroup alone, so that two do not count at once. Cores run one
    after the other: a wait that takes long never ends, which makes all results NaN.
    """

    LONG = 20_000
    """Looks at a semaphore."""

    def __init__(self, counts: Any, *index: Any) -> None:
        self.counts, self.index = counts, index

    @property
    def at(self) -> Semaphores:
        return self

    def __getitem__(self, index: Any) -> Semaphores:
        index = index if isinstance(index, tuple) else (index, 0)
        return Semaphores(self.counts, *self.index, *index)

    def signal(self) -> None:
        own = (*self.index, lax.axis_index("warpgroup"))
        self.counts[own] = self.counts[own] + 1

    def wait(self, least: Any, *, decrement: bool) -> None:
        assert not decrement

        def signals() -> Any:
            return self.counts[*self.index, 0] + self.counts[*self.index, 1]

        found, _ = lax.while_loop(
            lambda state: (state[0] < least) & (state[1] < self.LONG),
            lambda state: (signals(), state[1] + 1),
            (signals(), 0),
        )

        @pl.when(found < least)
        def _() -> None:
            self.counts[*self.index, 0] = jnp.int32(-self.LONG)


def counting(kernel: Any) -> Any:
    """A kernel of Mosaic GPU whose semaphores are `Semaphores`."""

    def made(body: Any, **options: Any) -> Any:
        def counted(counts: Any, *refs: Any, **scratch: Any) -> None:
            arrays = iter(range(counts.shape[0]))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(pl, "get_global", lambda kind: Semaphores(counts, next(arrays)))
                patch.setattr(pl, "semaphore_signal", Semaphores.signal)
                patch.setattr(pl, "semaphore_wait", Semaphores.wait)
                body(*refs, **scratch)

        def call(*args: jax.Array) -> Any:
            counts = jax.new_ref(jnp.zeros((2, 4, 8, 2), jnp.int32))  # Arrays, groups, granules.
            results = kernel(counted, **options)(counts, *args)
            return jax.tree.map(partial(jnp.where, counts[...].min() < 0, jnp.nan), results)

        return call

    return made


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[np.ndarray, ...]]:
    """Runs `extended`; unless told, on a core that has no tile and shrinks, and one for each."""
    monkeypatch.setattr(mosaic_gpu, "lora_shrink", plain_shrink)
    monkeypatch.setattr(plgpu, "kernel", counting(plgpu.kernel))

    def call(given: Served, **tuning: int) -> tuple[np.ndarray, ...]:
        groups = -(-len(given.x) // shrink.GROUP)
        tiles = groups * sum(w.shape[1] for w in given.weights) // tuning.get("block_o", 256)
        options = {"cores": 1 + tiles, "ahead": 99, **tuning}
        project = partial(mosaic_gpu.extended, **options)
        with plgpu.force_gpu_interpret_mode():
            return run(replace(FORMS["extended"], project=project), given)

    return call


needs_interpret_mode = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"),
    reason="Mosaic GPU's interpret mode needs jax 0.11 or newer",
)


@needs_interpret_mode
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="shrinks first"),
        pytest.param({"cores": 1}, id="one core"),
        pytest.param({"parts": 2}, id="shrinks in parts"),
        pytest.param({"apart": 1, "cores": 2}, id="shrinks apart"),
    ],
)
@pytest.mark.parametrize(
    ("given", "tuning"),
    [
        pytest.param(
            served(200, (16, 64, 16), 128, (256, 512), dtype="bfloat16", quantum=16),
            {},
            id="two groups and two modules in quarters of granules",
        ),
        pytest.param(
            served(128, (64, 64, 64), 64, (256,), slots=[2] * 100 + [0] * 28, dtype="bfloat16",
                   quantum=64),
            {},
            id="whole granules, one of which nobody uses",
        ),
        pytest.param(
            served(128, (8, 24), 64, (256,), dtype="bfloat16"),
            {"block_o": 128, "stages": 2},
            id="blocks that are laid side by side, and narrow tiles",
        ),
        pytest.param(
            served(128, (16,), 64, (256,), slots=[-1] * 128, dtype="bfloat16", quantum=16),
            {},
            id="no row has an adapter",
        ),
    ],
)  # fmt: skip
def test_extended_is_the_reference(
    given: Served,
    tuning: dict[str, int],
    how: dict[str, int],
    interpreted: Callable[..., tuple[np.ndarray, ...]],
) -> None:
    poison(given)
    for found, right in zip(interpreted(given, **tuning, **how), expected(given), strict=True):
        assert (found.shape, found.dtype) == (right.shape, given.x.dtype)
        assert is_right(found, right, given)


@needs_interpret_mode
def test_a_signal_that_one_warpgroup_does_not_give_shows(
    interpreted: Callable[..., tuple[np.ndarray, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = served(128, (64,), 64, (256,), slots=[0] * 128, dtype="bfloat16", quantum=64)
    signal = Semaphores.signal

    def of_the_first(self: Semaphores) -> None:
        pl.when(lax.axis_index("warpgroup") == 0)(partial(signal, self))

    monkeypatch.setattr(Semaphores, "signal", of_the_first)
    monkeypatch.setattr(Semaphores, "LONG", 10)  # The core that shrinks is done by then.
    (found,) = interpreted(given)

    assert np.isnan(found).all()


@needs_interpret_mode
def test_extended_adds_what_the_adapters_are(
    interpreted: Callable[..., tuple[np.ndarray, ...]],
) -> None:
    given = served(128, (64,), 64, (256,), slots=[0] * 128, dtype="bfloat16", quantum=64)
    bare = given._replace(slots=np.full(128, -1, np.int32))

    assert not is_right(interpreted(bare)[0], expected(given)[0], given)


@needs_interpret_mode
@pytest.mark.parametrize(("cores", "parts"), [(9, 1), (8, 2)])
def test_cores_without_a_tile_shrink_for_those_after_them(
    cores: int, parts: int, interpreted: Callable[..., tuple[np.ndarray, ...]]
) -> None:
    given = served(256, (64, 64), 64, (256, 512), dtype="bfloat16", quantum=64)
    poison(given)
    found = interpreted(given, cores=cores, parts=parts)

    for one, right in zip(found, expected(given), strict=True):
        assert is_right(one, right, given)


@needs_interpret_mode
@pytest.mark.usefixtures("interpreted")  # For what it patches.
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("quantum", [8, 16, 32, 64])
def test_shrinks_within_are_exactly_zero_on_lanes_of_others(quantum: int, parts: int) -> None:
    given = served(128, MIXED, 128, (256, 256), dtype="bfloat16", quantum=quantum)
    poison(given)
    lanes = prepared(given.batch(), quantum=quantum, most=given.most)
    with plgpu.force_gpu_interpret_mode():
        h, *_ = jax.jit(partial(mosaic_gpu.launch, cores=1, parts=parts))(
            given.x, given.weights, given.banks, np.int32(LAYER), lanes
        )
    h = np.asarray(h, np.float32)
    own = given.slots[:, None] == np.asarray(lanes.owners)[None, :]
    count = len(given.blocks) * quantum

    for found, (a_bank, _) in zip(h, given.banks, strict=True):
        read = np.repeat(np.asarray(is_read(lanes))[0], shrink.GRANULE)
        assert read[:count].all()
        assert (found[~own & read] == 0).all()
        assert (found[own] != 0).any()
        right = shrink_reference.lora_shrink(
            given.x, a_bank, LAYER, given.blocks, given.owners, given.slots
        )
        assert is_right(found[:, :count], right, given)


@needs_interpret_mode
@pytest.mark.parametrize("quantum", [16, 64])
def test_shrinks_within_leave_alone_what_a_group_does_not_use(
    quantum: int, interpreted: Callable[..., tuple[np.ndarray, ...]]
) -> None:
    # Two groups of 128 rows, each of an adapter of its own granule; nobody has the third.
    slots = [0] * shrink.GROUP + [1] * shrink.GROUP
    given = served(256, (64, 64, 64), 64, (256,), slots=slots, dtype="bfloat16", quantum=quantum)
    given.banks[0][0][LAYER, given.blocks[given.owners == 2]] = np.nan

    assert is_right(interpreted(given)[0], expected(given)[0], given)
    given.banks[0][0][LAYER, given.blocks[given.owners == 1]] = np.nan
    found = interpreted(given)[0]
    assert np.isfinite(found[: shrink.GROUP]).all()
    assert np.isnan(found[shrink.GROUP :]).all()


def test_there_are_no_more_cores_than_the_gpu_that_is_compiled_for_has() -> None:
    device = AbstractDevice(device_kind="NVIDIA H100 PCIe", num_cores=114, platform="gpu")
    assert shrink.multiprocessors() == 132
    with use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device)):
        assert shrink.multiprocessors() == 114


# --- What each refuses ---------------------------------------------------------------------------

FEW = Sizes(tokens=16, lanes=64, d=1024, o=(1024, 512), quantum=16, most=1, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "changes", "platform", "reason"),
    [
        ("one_launch", {}, "cuda", ""),
        ("one_launch", {"tokens": 128, "dtype": "float32", "o": (64,)}, "cuda", ""),
        ("one_launch", {}, "cpu", "it runs on a GPU"),
        ("one_launch", {}, "tpu", "it runs on a GPU"),
        ("one_launch", {"tokens": 129}, "cuda", "more than 128 rows"),
        ("one_launch", {"o": (64,) * 5}, "cuda", "more than 4 projections"),
        ("one_launch", {"d": 1536}, "cuda", "D is no multiple of 1,024"),
        ("one_launch", {"o": (64, 96)}, "cuda", "O none of 64"),
        ("extended", {}, "cuda", ""),
        ("extended", {"tokens": 4096, "d": 128, "dtype": "float16"}, "cuda", ""),
        ("extended", {}, "cpu", "it runs on a Hopper GPU"),
        ("extended", {"dtype": "float32"}, "cuda", "take 16-bit floats, not float32"),
        ("extended", {"d": 192}, "cuda", "D is no multiple of 128"),
        ("extended", {"o": (256, 128)}, "cuda", "O none of 256"),
        ("extended", {"o": (256,) * 5}, "cuda", "more than 4 projections"),
        ("one_launch", {"stacked": True}, "cuda", "copied out of the stack"),
        ("extended", {"stacked": True}, "cuda", "copied out of the stack"),
        ("tpu_fused", {"stacked": True}, "tpu", "copied out of the stack"),
        ("tpu_fused", {}, "tpu", ""),
        ("tpu_laned", {"stacked": True}, "tpu", ""),
    ],
)
def test_a_form_says_why_it_does_not_serve(
    name: str,
    changes: dict[str, Any],
    platform: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    found = FORMS[name].supports(replace(FEW, **changes), platform)

    assert reason in found
    assert bool(found) == bool(reason)


def test_extended_needs_a_jax_that_has_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))

    assert FORMS["extended"].supports(FEW, "cuda").startswith("it needs jax 0.11")


def test_the_plain_form_serves_them_all() -> None:
    assert not any(PLAIN.supports(FEW, platform) for platform in ("cpu", "cuda", "tpu"))
