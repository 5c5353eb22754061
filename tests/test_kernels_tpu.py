"""The TPU kernels beyond what `test_kernels` asks of every backend.

Numerics run in TPU interpret mode, where memory nobody wrote is NaN; that the kernels are kernels
is the real compiler's word, for every TPU it knows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from aot_lora.kernels import batch as kernel_batch
from aot_lora.kernels.blocks import NOBODY
from aot_lora.kernels.forms import FORMS
from aot_lora.kernels.lora_expand import pallas_tpu as expand
from aot_lora.kernels.lora_expand import reference as expand_reference
from aot_lora.kernels.lora_fused import cases as fused_cases
from aot_lora.kernels.lora_fused import pallas_tpu as fused
from aot_lora.kernels.lora_fused import reference as fused_reference
from aot_lora.kernels.lora_fused import xla as fused_xla
from aot_lora.kernels.lora_project.reference import lora_project
from aot_lora.kernels.lora_segments import cases as segments_cases
from aot_lora.kernels.lora_segments import pallas_tpu as segmented
from aot_lora.kernels.lora_segments import reference as segments_reference
from aot_lora.kernels.lora_segments import xla as segments_xla
from aot_lora.kernels.lora_segments.segments import segments
from aot_lora.kernels.lora_shrink import pallas_tpu as shrink
from aot_lora.kernels.lora_shrink import reference as shrink_reference
from aot_lora.kernels.reference import tolerance
from aot_lora.kernels.sizes import Sizes
from aot_lora.kernels.tpu_sizes import segments_sizes
from aot_lora.plan import TargetSpec
from aot_lora.targets.environment import worker_environment

QUANTUM, LAYER = 8, np.int32(1)
MIXED = (8, 16, 32, 64, 128)

both_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.once), "bfloat16"]
)


@pytest.fixture(autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator[None]:
    """Interpret mode; a copy is done when it is waited for, or as soon as it is started."""
    mode = getattr(request, "param", "on_wait")
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode)):
        yield


whenever_copies_are_done = pytest.mark.parametrize(
    "interpreted", ["eager", "on_wait"], indirect=True
)


class Batch:
    """Adapters of some ranks in banks of two layers, with NaN wherever the batch has nothing."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        slots: Any,
        *,
        d: int = 128,
        o: int = 256,
        lanes: int = 0,
        dtype: str = "float32",
    ) -> None:
        self.rng = np.random.default_rng(0)
        self.dtype = dtype
        count = max(lanes, sum(ranks)) // QUANTUM
        owners = [slot for slot, rank in enumerate(ranks) for _ in range(rank // QUANTUM)]
        used = len(owners)
        self.owners = np.array(owners + [NOBODY] * (count - used), np.int32)
        self.blocks = np.zeros(count, np.int32)
        self.blocks[:used] = self.rng.permutation(np.arange(1, 2 * count, dtype=np.int32))[:used]
        self.slots = np.array(slots, np.int32)
        tokens = len(self.slots)
        self.x, self.base = self.normal(tokens, d), self.normal(tokens, o)
        self.a_bank, self.b_bank = (self.bank(2 * count, width) for width in (d, o))

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(jnp.dtype(self.dtype))

    def bank(self, blocks: int, width: int) -> np.ndarray:
        bank = self.normal(2, blocks, QUANTUM, width)
        bank[0] = np.nan
        bank[:, np.setdiff1d(np.arange(blocks), self.blocks)] = np.nan
        bank[:, 0] = 0
        return bank

    def expected_h(self) -> np.ndarray:
        return shrink_reference.lora_shrink(
            self.x, self.a_bank, 1, self.blocks, self.owners, self.slots
        )

    def expected(self) -> np.ndarray:
        return segments_reference.lora_segments(
            self.base, self.x, self.a_bank, self.b_bank, 1, self.blocks, self.owners, self.slots
        )


def close(found: Any, expected: np.ndarray, *, reduction: int) -> bool:
    found = np.asarray(found)
    error = np.linalg.norm(found.astype(np.float32) - expected)
    return error <= tolerance(found.dtype.name, reduction=reduction) * np.linalg.norm(expected)


def same_bits(one: Any, other: Any) -> bool:
    return np.asarray(one).tobytes() == np.asarray(other).tobytes()


# --- Block sizes change nothing but time --------------------------------------------------------

SHRINK_SIZES = (
    {"block_t": 16, "block_l": 128, "block_d": 128},
    {"block_t": 16, "block_l": 128, "block_d": 512},
    {"block_t": 32, "block_l": 256, "block_d": 256},
)
EXPAND_SIZES = (
    {"block_t": 16, "block_l": 128, "block_o": 128},
    {"block_t": 16, "block_l": 256, "block_o": 128},
    {"block_t": 32, "block_l": 128, "block_o": 512},
)


@pytest.fixture(scope="module")
def mixed() -> Batch:
    """Ranks 8 to 128 in one batch, none padded to the largest: 248 lanes of 256."""
    return Batch(MIXED, [*range(5), -1, 17] * 4 + [4] * 4, d=512, o=512, lanes=256)


@pytest.mark.once
@whenever_copies_are_done
@pytest.mark.parametrize("sizes", SHRINK_SIZES)
def test_shrink_in_any_blocks(mixed: Batch, sizes: dict[str, int]) -> None:
    args = (mixed.x, mixed.a_bank, LAYER, mixed.blocks, mixed.owners, mixed.slots)
    found = np.asarray(jax.jit(partial(shrink.lora_shrink, **sizes))(*args))

    assert close(found, mixed.expected_h(), reduction=512)
    lanes = np.repeat(mixed.owners, QUANTUM)
    assert not found[mixed.slots[:, None] != lanes].any()


@pytest.mark.once
@whenever_copies_are_done
@pytest.mark.parametrize("sizes", EXPAND_SIZES)
def test_expand_in_any_blocks(mixed: Batch, sizes: dict[str, int]) -> None:
    h = mixed.expected_h()
    args = (mixed.base, h, mixed.b_bank, LAYER, mixed.blocks, mixed.slots)
    found = np.asarray(jax.jit(partial(expand.lora_expand, **sizes))(*args))

    assert close(found, expand_reference.lora_expand(*args), reduction=256)
    without = mixed.slots < 0
    assert same_bits(found[without], mixed.base[without])


# --- Segments ------------------------------------------------------------------------------------


def run_segments(module: Any, batch: Batch, block_t: int, **sizes: int) -> np.ndarray:
    arrays = (batch.base, batch.x, batch.a_bank, batch.b_bank)
    indices = (batch.blocks, batch.owners, batch.slots)
    return np.asarray(_segments(module, block_t, tuple(sizes.items()), *arrays, *indices))


@partial(jax.jit, static_argnums=(0, 1, 2))  # Here, so that equal shapes are compiled once.
def _segments(
    module: Any,
    block_t: int,
    sizes: tuple[tuple[str, int], ...],
    *args: Any,
) -> Any:
    base, x, a, b, blocks, owners, slots = args
    listed = segments(blocks, owners, slots, block_t)
    return module.lora_segments(base, x, a, b, LAYER, listed, slots, **dict(sizes))


RUNS = [0] * 20 + [-1] * 20 + [1] * 10 + [4] * 20 + [2] * 3 + [3] * 7  # of 80 tokens


def test_segments_list_what_each_block_of_tokens_needs() -> None:
    batch = Batch((16, 8, 8), [-1, -1, 2, 0, 0, 0, 9, 1], lanes=40)
    found = segments(batch.blocks, batch.owners, batch.slots, 2)

    first, second, third, fourth, *_ = (int(block) for block in batch.blocks)
    assert found.length.tolist() == [0, 3, 2, 1]
    assert found.blocks.tolist() == [
        [0] * 5,
        [first, second, fourth, 0, 0],
        [first, second, 0, 0, 0],
        [third, 0, 0, 0, 0],
    ]
    assert found.owners[1].tolist() == [0, 0, 2, NOBODY, NOBODY]


@both_dtypes
@pytest.mark.parametrize("module", [segments_xla, segmented])
@pytest.mark.parametrize(("tokens", "lanes", "d", "o"), segments_cases.CASES)
def test_segments_are_the_reference(
    module: Any, dtype: str, tokens: int, lanes: int, d: int, o: int
) -> None:
    slots = np.sort(np.random.default_rng(1).integers(-1, 3, tokens))
    batch = Batch((8,) * (lanes // 8), slots, d=d, o=o, lanes=lanes, dtype=dtype)
    found = run_segments(module, batch, 16)

    assert close(found, batch.expected(), reduction=d)
    without = batch.slots < 0
    assert same_bits(found[without], batch.base[without])


@pytest.mark.once
@whenever_copies_are_done
@pytest.mark.parametrize("sizes", [{"block_l": 128, "block_o": 128}, {"block_o": 256}])
def test_segments_in_any_blocks_and_any_order(sizes: dict[str, int]) -> None:
    """The block of tokens without adapters stands between two that have some."""
    for slots in (RUNS, np.random.default_rng(1).permutation(RUNS)):
        batch = Batch(MIXED, slots, lanes=256)
        found = run_segments(segmented, batch, 16, **sizes)
        assert close(found, batch.expected(), reduction=128)


@pytest.mark.once
@whenever_copies_are_done
def test_segments_of_all_tokens_in_one_block_are_read_in_wide_tiles() -> None:
    """The last tile that is used is half full, the one after it is not read."""
    batch = Batch((64,) * 10, [*range(10), -1, 3], lanes=1024)
    tokens = len(batch.slots)
    assert segments_sizes(tokens, 1024, 128, 256, QUANTUM, 4)["block_l"] == 256
    assert close(run_segments(segmented, batch, tokens), batch.expected(), reduction=128)


@pytest.mark.parametrize(
    ("tokens", "lanes", "quantum", "block_l"),
    [
        (128, 128, 8, 128),
        (128, 512, 8, 128),
        (128, 1024, 64, 256),
        (256, 4096, 8, 512),
        (16, 768, 8, 128),  # 192 lanes would be no whole registers
        (512, 4096, 8, 128),
        (1000, 2048, 8, 128),  # one block, for want of a divisor
    ],
)
def test_a_tile_of_segments_is_a_quarter_of_the_lanes_where_tokens_are_few(
    tokens: int, lanes: int, quantum: int, block_l: int
) -> None:
    assert segments_sizes(tokens, lanes, 4096, 4096, quantum, 2)["block_l"] == block_l


def test_segments_read_no_block_of_an_adapter_absent_from_the_tokens() -> None:
    """Adapter 4 is in the batch and all NaN; only the tokens that have it may feel that.

    Its B would reach every row as 0 x NaN if its blocks were but masked.
    """
    batch = Batch(MIXED, RUNS, lanes=256)
    clean = run_segments(segmented, batch, 16, block_l=128, block_o=128)
    own = batch.blocks[batch.owners == 4]
    batch.a_bank[:, own] = np.nan
    batch.b_bank[:, own] = np.nan
    found = run_segments(segmented, batch, 16, block_l=128, block_o=128)

    has = np.repeat((batch.slots == 4).reshape(-1, 16).any(axis=1), 16)
    assert same_bits(found[~has], clean[~has])
    assert np.isnan(found[batch.slots == 4]).all()


def test_segments_copy_no_block_of_an_adapter_absent_from_the_tokens() -> None:
    """Adapter 4's blocks lie outside of the banks: interpret mode refuses to copy them."""
    without = Batch(MIXED, [slot for slot in RUNS if slot != 4], d=128, lanes=256)
    clean = run_segments(segmented, without, 20)
    without.blocks[without.owners == 4] = 10_000

    assert same_bits(run_segments(segmented, without, 20), clean)
    with_it = Batch(MIXED, [0] * 20 + [4] * 20, lanes=256)
    with_it.blocks[with_it.owners == 4] = 10_000
    reading = pltpu.InterpretParams(out_of_bounds_reads="uninitialized")
    with pltpu.force_tpu_interpret_mode(reading):  # An error would stay in the process.
        found = run_segments(segmented, with_it, 20)
    assert np.isnan(found[20:]).all()
    assert not np.isnan(found[:20]).any()


# --- Base projection and expand in one pass -----------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("module", [fused_xla, fused])
@pytest.mark.parametrize(("tokens", "lanes", "d", "o"), fused_cases.CASES)
def test_fused_is_the_reference(
    module: Any, dtype: str, tokens: int, lanes: int, d: int, o: int
) -> None:
    slots = np.random.default_rng(1).integers(-1, 3, tokens)
    batch = Batch((8,) * (lanes // 8), slots, d=d, o=o, lanes=lanes, dtype=dtype)
    h = batch.expected_h().astype(batch.x.dtype)
    args = (batch.x, batch.normal(d, o), h, batch.b_bank, LAYER, batch.blocks, batch.slots)

    found = jax.jit(module.lora_fused)(*args)
    assert close(found, fused_reference.lora_fused(*args), reduction=d + lanes)


def test_fused_in_blocks_leaves_rows_without_an_adapter_to_the_base() -> None:
    batch = Batch((16, 128), [0, -1, 1, 5] * 8, d=512, o=512)
    w, sizes = batch.normal(512, 512), {"block_t": 16, "block_d": 128, "block_o": 128}
    run = jax.jit(partial(fused.lora_fused, **sizes))
    h = batch.expected_h()
    rest = (LAYER, batch.blocks, batch.slots)
    found = np.asarray(run(batch.x, w, h, batch.b_bank, *rest))
    base = np.asarray(run(batch.x, w, np.zeros_like(h), batch.b_bank, *rest))

    args = (batch.x, w, h, batch.b_bank, *rest)
    assert close(found, fused_reference.lora_fused(*args), reduction=640)
    assert same_bits(found[batch.slots < 0], base[batch.slots < 0])


# --- As forms of lora_project ---------------------------------------------------------------------

TUNING = {
    "tpu_laned": {"shrink_t": 16, "shrink_d": 128, "expand_t": 16, "expand_o": 200},
    "tpu_segments": {"segments_o": 128},
    "tpu_fused": {"shrink_t": 16, "fused_t": 16, "fused_d": 128, "fused_o": 128},
}


@pytest.mark.parametrize(
    ("tuned", "dtype"),
    [pytest.param(False, "float32", marks=pytest.mark.once), (True, "bfloat16")],
)
@pytest.mark.parametrize("name", TUNING)
def test_a_form_is_the_reference(name: str, tuned: bool, dtype: str) -> None:
    """Two projections of one batch, as of a layer's site."""
    given = Batch(MIXED, [*range(5), -1, 17, 4] * 4, d=256, o=256, lanes=256, dtype=dtype)
    banks = ((given.a_bank, given.b_bank), (given.bank(64, 256), given.bank(64, 384)))
    weights = (given.normal(256, 256), given.normal(256, 384))
    form, tuning = FORMS[name], TUNING[name] if tuned else {}

    def run(batch: Any, x: Any, weights: Any, banks: Any) -> Any:
        prepared = form.prepare(batch, quantum=QUANTUM, most=16)
        return form.project(x, weights, banks, LAYER, prepared, **tuning)

    batch = kernel_batch.Batch(*map(jnp.asarray, (given.blocks, given.owners, given.slots)))
    found = jax.jit(run)(batch, given.x, weights, banks)
    expected = lora_project(given.x, weights, banks, 1, given.blocks, given.owners, given.slots)
    for one, right in zip(found, expected, strict=True):
        assert close(one, right, reduction=2 * 512)


@pytest.mark.parametrize("name", TUNING)
def test_a_form_says_what_it_cannot_serve(name: str) -> None:
    sizes = Sizes(tokens=16, lanes=128, d=4096, o=(4096, 1024), quantum=8, most=1, dtype="bfloat16")
    supports = FORMS[name].supports

    assert supports(sizes, "tpu") == ""
    assert supports(sizes, "cpu") == "it is a kernel for TPUs"
    narrow = replace(sizes, o=(4096, 1000))
    assert supports(narrow, "tpu").endswith("1000 are not multiples of 128")


# --- What the kernels refuse --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (shrink.supports(16, 128, 4096, 8, 2), ""),
        (shrink.supports(16, 128, 4000, 8, 2), ""),
        (
            shrink.supports(16, 128, 4096, 8, 2, block_d=96),
            "block_d is 96, expected 4096 or a divisor of it that is a multiple of 128",
        ),
        (
            shrink.supports(16, 384, 4096, 24, 2, block_l=128),
            "block_l is 128, expected 384 or a divisor of it that is a multiple of 384",
        ),
        (
            expand.supports(2048, 128, 4096, 8, 2, block_t=100),
            "block_t is 100, expected 2048 or a divisor of it that is a multiple of 8",
        ),
        (
            expand.supports(8192, 128, 14336, 8, 2, block_t=8192, block_o=14336),
            "the blocks take 1811 MiB of VMEM, expected at most 100",
        ),
        (segmented.supports(2048, 2048, 4096, 14336, 8, 2), ""),
        (
            segmented.supports(2048, 2048, 4096, 14336, 8, 2, block_o=1000),
            "block_o is 1000, expected 14336 or a divisor of it that is a multiple of 128",
        ),
        (fused.supports(8192, 2048, 4096, 14336, 16, 2), ""),
        (
            fused.supports(16, 128, 4096, 4096, 8, 2, block_d=512, block_o=4097),
            "block_o is 4097, expected 4096 or a divisor of it that is a multiple of 128",
        ),
    ],
)
def test_sizes_a_kernel_cannot_take(reason: str, text: str) -> None:
    assert reason == text


@pytest.mark.parametrize("tokens", [1, 16, 1000, 2048, 8192])
@pytest.mark.parametrize("lanes", [8, 128, 1152, 2048])
@pytest.mark.parametrize("width", [1024, 4096, 14336])
def test_default_sizes_are_supported(tokens: int, lanes: int, width: int) -> None:
    for module in (shrink, expand):
        assert module.supports(tokens, lanes, width, 8, 2) == ""
    for module in (segmented, fused):
        assert module.supports(tokens, lanes, 4096, width, 8, 2) == ""


# --- The real compiler ---------------------------------------------------------------------------


def compiled_forms(target: TargetSpec) -> dict[str, dict[str, Any]]:
    """What `compiling_tpu` says of each form, in a process of its own."""
    pytest.importorskip("libtpu")
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, **worker_environment(target), "PYTHONPATH": str(root)}
    script = root / "tests" / "compiling_tpu.py"
    done = subprocess.run(
        [sys.executable, script, target.topology], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["form"]: line for line in map(json.loads, done.stdout.splitlines())}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("kind", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_the_real_compiler_takes_every_form(kind: str) -> None:
    """No program holds a copy of a bank (64 MiB or more), and the expand is in place."""
    chip = "1x1" if kind in ("v5e", "v6e") else "1x1x1"
    forms = compiled_forms(TargetSpec(platform="tpu", topology=f"{kind}:{chip}"))

    assert len(forms) == 8
    assert all(form["kernel"] and form["temporary_bytes"] < 2**20 for form in forms.values())
    aliased = {name for name, form in forms.items() if form["aliased_bytes"]}
    assert aliased == {name for name in forms if name.startswith(("expand", "segments"))}


@pytest.mark.tpu_compile
def test_the_real_compiler_takes_every_form_on_a_mesh() -> None:
    forms = compiled_forms(TargetSpec(platform="tpu", topology="v6e:2x2", devices=4))

    assert sorted(forms) == ["tpu_fused", "tpu_laned", "tpu_segments"]
    assert all(form["kernel"] and form["temporary_bytes"] < 2**20 for form in forms.values())
