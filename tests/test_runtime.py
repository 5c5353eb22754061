"""The runtime: opens only what fits, serves it right, and never traces or compiles."""

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Never

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from serving import (
    artifacts_in,
    edit_manifest,
    identity_of,
    manifest_of,
    store_of,
)

from aot_lora import Runtime, _jax_compat, errors
from aot_lora._jax_compat import hooks
from aot_lora.adapters import pack_arrays
from aot_lora.cli.main import run
from aot_lora.errors import CoverageError, OutOfPlanError, UnsupportedError
from aot_lora.kernels.reference import lora, tolerance
from aot_lora.plan import TargetSpec
from aot_lora.store import artifact as artifacts
from aot_lora.targets import identity

IN, OUT, LAYERS = 16, 24, 2
Weights = dict[tuple[str, int], tuple[np.ndarray, np.ndarray]]


@pytest.fixture
def copy(served: Path, tmp_path: Path) -> Path:
    return shutil.copytree(served.parent, tmp_path / "copy") / served.name


@pytest.fixture
def rt(served: Path) -> Iterator[Runtime]:
    with Runtime.open(served) as runtime:
        yield runtime


rng = np.random.default_rng(7)
START = rng.bit_generator.state


@pytest.fixture(autouse=True)
def seeded() -> None:
    rng.bit_generator.state = START


def floats(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def pair(rank: int) -> tuple[np.ndarray, np.ndarray]:
    return floats(rank, IN) / 5, floats(rank, OUT) / 5


def put(rt: Runtime, slot: int, weights: Weights) -> None:
    """Puts (A [r, D], B [r, O]) into a slot, by the road that files take."""
    packed = pack_arrays({place: (a, b.T) for place, (a, b) in weights.items()}, rt.plan)
    rt.banks.put(slot, packed)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    limit = tolerance("float32", reduction=256) * max(np.linalg.norm(expected), 1.0)
    assert np.linalg.norm(found - expected) <= limit


# --- Opening ------------------------------------------------------------------------------------


def test_a_fresh_process_serves_without_tracing_or_compiling(served: Path) -> None:
    code = """
import sys
import jax, numpy as np
events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
work = lambda: [e for e in events if "trace" in e or "mlir" in e or "compile" in e]
import aot_lora
rt = aot_lora.Runtime.open(sys.argv[1])
x, a, b = (np.ones(shape, np.float32) for shape in ((3, 16), (8, 16), (8, 24)))
from aot_lora.adapters import pack_arrays
rt.banks.put(0, pack_arrays({("up", 0): (a, b.T)}, rt.plan))
assert (rt.apply("up", x, np.array([0, -1, 0])).numpy()[:, 0] == [128, 0, 128]).all()
assert (rt.apply("up", x, np.array([0, 0, 0])).numpy() == 128).all()
rt.banks.reset(0)
found = rt.lookup("norm", tokens=3)
padded = jax.device_put(np.ones((found.tokens, 16), np.float32), rt.device)
assert np.allclose(np.asarray(found.executable(padded)), 1)
assert not work(), work()
rt.close()
jax.jit(lambda x: x + 1)(x)
assert len(work()) >= 3, "positive control: these events would be seen"
"""
    subprocess.run([sys.executable, "-c", code, served], check=True, timeout=120)


def test_every_variant_is_loaded(rt: Runtime) -> None:
    for program, most in (("step", 16), ("norm", 4)):
        for tokens in [bucket for bucket in rt.plan.tokens.buckets if bucket <= most]:
            for lanes in (0, *rt.plan.lanes.buckets):
                found = rt.lookup(program, tokens=tokens, lanes=lanes)
                assert (found.tokens, found.lanes) == (tokens, lanes)
                assert isinstance(found.executable, jax.stages.Compiled)


@pytest.mark.parametrize("position", [0, -1])
def test_a_variant_that_is_not_in_the_manifest_is_missed(copy: Path, position: int) -> None:
    dropped = manifest_of(copy).entries[position].variant
    edit_manifest(copy, lambda manifest: manifest["entries"].pop(position))

    with pytest.raises(CoverageError, match="1 of 43 variants are not in the manifest") as caught:
        Runtime.open(copy)
    assert caught.value.found == dropped
    assert caught.value.exit_code == errors.EXIT_CHECK
    assert run(["verify", str(copy)]) == errors.EXIT_CHECK


def no_load(*_: object) -> Never:
    raise AssertionError("bytes reached XLA")


@pytest.mark.parametrize(
    ("part", "value", "error", "found"),
    [
        ("device count", "4", UnsupportedError, "4 x cpu"),
        ("device kind", "TPU v4", UnsupportedError, "1 x TPU v4"),
        ("jaxlib", "0.1.0", errors.IntegrityError, "stored 0.1.0"),
        ("CPU features", "avx1024", errors.IntegrityError, "CPU features: here sha256:"),
    ],
)
def test_an_artifact_for_elsewhere_is_refused_before_the_load(
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    value: str,
    error: type[errors.AotLoraError],
    found: str,
) -> None:
    """Case 25, and any other part: loading such bytes can abort the process."""
    store = store_of(copy)
    digests: dict[str, str] = {}
    for path in artifacts_in(store.root):
        old = artifacts.unpack(path.read_bytes(), where=str(path))
        old.header.parts[part] = value
        data = artifacts.pack(old.header, old.raw())
        path.write_bytes(data)
        digests[path.stem] = artifacts.digest_of(data)
    edit_manifest(
        copy,
        lambda manifest: [
            entry.update(digest=digests[entry["key"]]) for entry in manifest["entries"]
        ],
    )
    monkeypatch.setattr(_jax_compat, "load", no_load)

    with pytest.raises(error) as caught:
        Runtime.open(copy)
    assert found in str(caught.value.found)
    assert str(caught.value.where).endswith(".aot")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda m: m.setenv("XLA_FLAGS", "--xla_cpu_x=1"), "XLA_FLAGS: here --xla_cpu_x=1"),
        (lambda m: m.setenv("JAX_ENABLE_X64", "1"), "JAX environment: here JAX_ENABLE_X64=1"),
        (
            lambda m: m.setattr(identity, "_version", lambda name, **_: f"9.9 of {name}"),
            "jaxlib: here 9.9 of jaxlib, stored ",
        ),
        (
            lambda m: m.setattr(identity, "cpu_features", lambda: "sse2 avx1024 " + "f" * 99),
            "CPU features: here avx1024",
        ),
    ],
    ids=["XLA flag", "JAX environment", "versions", "CPU"],
)
def test_another_host_is_a_miss_that_lists_what_differs(
    served: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
    line: str,
) -> None:
    """Case 26."""
    change(monkeypatch)
    monkeypatch.setattr(_jax_compat, "load", no_load)

    with pytest.raises(CoverageError) as caught:
        Runtime.open(served)
    assert "a warmup that differs in\n" in str(caught.value.found)
    assert line in str(caught.value.found)
    assert "plan: " not in str(caught.value.found)


def test_dump_flags_and_cache_paths_do_not_matter(
    served: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    Runtime.open(served).close()


def test_a_changed_program_is_a_miss_that_says_so(copy: Path) -> None:
    module = copy.parent / "engine.py"
    module.write_text(module.read_text() + "\n# moved\n")

    with pytest.raises(CoverageError, match="source of engine: here"):
        Runtime.open(copy)


def test_a_target_that_this_host_lacks_is_refused(copy: Path) -> None:
    copy.write_text(copy.read_text().replace("{platform: cpu}", "{platform: cuda}"))
    if not any(device.platform == "gpu" for device in jax.devices()):
        with pytest.raises(UnsupportedError, match="no cuda device on this host") as caught:
            Runtime.open(copy)
        assert caught.value.exit_code == errors.EXIT_UNSUPPORTED


def test_the_first_target_that_fits_is_served(copy: Path) -> None:
    text = copy.read_text()
    both = '[{platform: tpu, topology: "v6e:1x1"}, {platform: cpu}]'
    copy.write_text(text.replace("{platform: cpu}", both))
    with Runtime.open(copy) as runtime:
        assert runtime.target == TargetSpec(platform="cpu")


def test_closing_lifts_the_seal_once(served: Path) -> None:
    before = hooks.compile_function()
    first, second = Runtime.open(served), Runtime.open(served)
    first.close()
    first.close()
    with pytest.raises(errors.RecompileError, match=r"sealed by Runtime.open\(.*served.yaml"):
        jax.jit(lambda x: x - 3)(np.ones(3))
    second.close()
    assert hooks.compile_function() is before


# --- Applying: against the definition, in float32 -----------------------------------------------


def check_apply(
    rt: Runtime, slots: list[int], adapters: dict[int, tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """Applies `up` of layer 1 to random rows and compares; returns (rows, base)."""
    x, base = floats(len(slots), IN), floats(len(slots), OUT)
    found = rt.apply("up", x, np.array(slots, np.int32), base, layer=1)
    assert found.count == len(slots)
    assert found.array.shape == (rt.plan.tokens.bucket(max(len(slots), 1)), OUT)
    assert_close(found.numpy(), lora(x, base, adapters, np.array(slots, np.int32)))
    without = np.array(slots) == -1
    np.testing.assert_array_equal(found.numpy()[without], base[without])
    return found.numpy()


def load(rt: Runtime, ranks: dict[int, int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    adapters = {slot: pair(rank) for slot, rank in ranks.items()}
    for slot, weights in adapters.items():
        put(rt, slot, {("up", 1): weights})
    return adapters


@pytest.mark.parametrize(
    "slots",
    [
        [-1, 0, -1, 1],  # case 14: a gather at -1 would read the last adapter
        [0, -1],
        [0, 0],  # case 17: one adapter for all
        [-1, -1],  # case 17: none
        [],
        [1],
        [-1],
        [0, 1, 2, -1, 2, 2, 1, 0, 0, -1, 1, 2, 0, 1, -1, 2],
        [7],
    ],
    ids=str,
)
def test_apply_is_the_definition(rt: Runtime, slots: list[int]) -> None:
    check_apply(rt, slots, load(rt, {0: 8, 1: 5, 2: 128, 7: 1}))


def test_mixed_ranks_in_one_batch_equal_separate_unpadded_runs(rt: Runtime) -> None:
    """Case 18."""
    adapters = load(rt, {0: 8, 1: 16, 2: 32, 3: 64, 4: 128})
    slots = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]
    random.Random(18).shuffle(slots)
    check_apply(rt, slots, adapters)
    for slot in adapters:
        check_apply(rt, [slot], adapters)


def test_no_stale_lane_contributes_after_a_smaller_rank(rt: Runtime) -> None:
    """Case 15."""
    load(rt, {0: 64, 1: 8})
    check_apply(rt, [0, 1, -1, 0], load(rt, {0: 8, 1: 24}))


def test_modules_and_layers_do_not_leak_into_each_other(rt: Runtime) -> None:
    weights = pair(8)
    put(rt, 0, {("up", 1): weights})
    x, slots = floats(2, IN), np.zeros(2, np.int32)
    for module, layer in (("up", 0), ("gate", 0), ("gate", 1)):
        assert not rt.apply(module, x, slots, layer=layer).numpy().any()
    assert rt.apply("up", x, slots, layer=1).numpy().any()

    put(rt, 0, {("gate", 0): weights})  # What was there contributes nothing any more.
    assert not rt.apply("up", x, slots, layer=1).numpy().any()


def test_a_batch_is_made_once_and_reused(rt: Runtime) -> None:
    adapters = load(rt, {0: 8, 1: 8})
    slots = np.array([1, 0, -1])
    batch = rt.batch(slots)
    for _ in range(2):
        x, base = floats(3, IN), floats(3, OUT)
        found = rt.apply("up", x, batch, base, layer=1).numpy()
        assert_close(found, lora(x, base, adapters, slots))


def test_a_base_on_the_device_is_donated_and_padding_is_counted(rt: Runtime) -> None:
    adapters = load(rt, {0: 8})
    slots, x, base = np.array([0, -1, 0]), floats(4, IN), floats(4, OUT)
    on_device = jax.device_put(base, rt.device)
    found = rt.apply("up", jax.device_put(x, rt.device), slots, on_device, layer=1)

    assert on_device.is_deleted()
    assert (found.array.shape, found.count, found.numpy().shape) == ((4, OUT), 3, (3, OUT))
    np.testing.assert_array_equal(np.asarray(found.array)[3:], base[3:])
    assert_close(found.numpy(), lora(x[:3], base[:3], adapters, slots))

    untouched = jax.device_put(base, rt.device)
    assert rt.apply("up", x[:2], np.array([-1, -1]), untouched).array is untouched


X3, S3 = np.ones((3, IN), np.float32), np.zeros(3, np.int32)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda rt: rt.apply("lm_head", X3, S3), "no bank for lm_head of layer 0"),
        (lambda rt: rt.apply("up", X3, S3, layer=2), "no bank for up of layer 2"),
        (lambda rt: rt.apply("up", X3[:, :8], S3), r"3 rows: float32\[3,16\]"),
        (lambda rt: rt.apply("up", X3[:2], S3), r"found: float32\[2, 16\]"),
        (lambda rt: rt.apply("up", X3.astype(np.float64), S3), r"found: float64\[3, 16\]"),
        (lambda rt: rt.apply("up", X3, S3, X3), "`base` does not fit the batch"),
        (lambda rt: rt.apply("up", jax.device_put(X3), S3), r"bucket's 4 rows: float32\[4,16\]"),
        (lambda rt: rt.apply("up", X3, S3 + 5), r"slots \[5\] hold no adapter"),
        (lambda rt: rt.apply("up", X3, S3 - 2), r"slots \[-2\] hold no adapter"),
        (lambda rt: rt.batch(S3.astype(np.float32)), "slots are not a row of integers"),
        (lambda rt: rt.batch(S3[None]), "slots are not a row of integers"),
        (lambda rt: rt.batch(np.zeros(17, np.int32)), "the nearest bucket is 16"),
        (lambda rt: rt.batch(np.array([0, 1, 2, 3])), "the nearest bucket is 256"),
    ],
)
def test_a_call_outside_the_plan_names_what_it_got(
    rt: Runtime, call: Callable[[Runtime], Any], text: str
) -> None:
    load(rt, {0: 8, 1: 128, 2: 120, 3: 8})
    with pytest.raises(OutOfPlanError, match=text):
        call(rt)
    check_apply(rt, [-1, -1], {})  # What is loaded goes on working.


# --- Banks --------------------------------------------------------------------------------------


def snapshot(rt: Runtime) -> tuple[object, ...]:
    arrays = [np.asarray(bank) for banks in rt.banks.arrays.values() for bank in banks]
    return dict(rt.banks.owned), [array.tobytes() for array in arrays]


@pytest.mark.parametrize(
    ("slot", "weights", "text"),
    [
        (8, {("up", 0): pair(8)}, "slot 8 is outside the plan\n  expected: 0 to 7"),
        (-1, {("up", 0): pair(8)}, "slot -1 is outside the plan"),
        (3, {("up", 0): pair(128)}, "the banks are full\n  expected: at most 64 lanes"),
        (1, {("up", 0): pair(128)}, "the banks are full\n  expected: at most 120 lanes"),
    ],
)
def test_a_put_outside_the_plan_changes_nothing(
    rt: Runtime, slot: int, weights: Weights, text: str
) -> None:
    adapters = load(rt, {0: 128, 1: 56, 2: 72})
    before = snapshot(rt)

    with pytest.raises(OutOfPlanError, match=text):
        put(rt, slot, weights)
    assert snapshot(rt) == before
    check_apply(rt, [0, 1, 0, -1], adapters)


def test_an_empty_slot_stays_empty_and_freed_blocks_serve_again(rt: Runtime) -> None:
    for _ in range(5):  # 640 lanes pass through banks of 320.
        load(rt, {0: 128})
        rt.banks.reset(0)
        rt.banks.reset(0)
    with pytest.raises(OutOfPlanError, match="hold no adapter"):
        rt.batch(np.array([0]))
    check_apply(rt, [3, 4, -1], load(rt, {3: 128, 4: 128}))


def test_any_order_of_puts_and_resets_is_a_dict(rt: Runtime) -> None:
    """The banks against a model: which slot holds which weights, nothing else."""

    class Banks(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.model: dict[int, tuple[np.ndarray, np.ndarray]] = {}
            for slot in list(rt.banks.owned):
                rt.banks.reset(slot)

        def lanes(self, *, without: int) -> int:
            ranks = [a.shape[0] for slot, (a, _) in self.model.items() if slot != without]
            return sum(-(-rank // 8) * 8 for rank in ranks)

        @rule(slot=st.integers(0, 7), rank=st.integers(1, 128))
        def put(self, slot: int, rank: int) -> None:
            weights = pair(rank)
            if self.lanes(without=slot) + -(-rank // 8) * 8 > 320:
                with pytest.raises(OutOfPlanError, match="the banks are full"):
                    put(rt, slot, {("up", 1): weights})
                return
            put(rt, slot, {("up", 1): weights})
            self.model[slot] = weights

        @rule(slot=st.integers(0, 7))
        def reset(self, slot: int) -> None:
            rt.banks.reset(slot)
            self.model.pop(slot, None)

        @invariant()
        def blocks_are_owned_once_and_block_0_never(self) -> None:
            owned = [block for blocks in rt.banks.owned.values() for block in blocks]
            assert len(set(owned)) == len(owned)
            assert 0 not in owned
            assert set(rt.banks.owned) == set(self.model)

        @invariant()
        def serves_what_the_model_holds(self) -> None:
            for slot in self.model:
                check_apply(rt, [slot, -1], self.model)
            if sum(-(-a.shape[0] // 8) * 8 for a, _ in self.model.values()) <= 256:
                check_apply(rt, [*self.model, -1], self.model)

    run_state_machine_as_test(
        Banks, settings=settings(max_examples=15, stateful_step_count=12, deadline=None)
    )


# --- Looking up ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "tokens", "lanes"),
    [
        ({"tokens": 1}, 4, 0),
        ({"tokens": 4, "slots": 1, "rank": 8}, 4, 8),
        ({"tokens": 5, "slots": 1, "rank": 9}, 16, 128),
        ({"tokens": 16, "slots": 2}, 16, 256),
        ({"tokens": 16, "slots": 2, "rank": 3}, 16, 16),
        ({"tokens": 3, "lanes": 17}, 4, 128),
        ({"tokens": 0}, 4, 0),
    ],
    ids=str,
)
def test_lookup_finds_the_smallest_bucket(
    rt: Runtime, asked: dict[str, int], tokens: int, lanes: int
) -> None:
    found = rt.lookup("step", **asked)
    assert (found.tokens, found.lanes) == (tokens, lanes)


@pytest.mark.parametrize(
    ("program", "asked", "text"),
    [
        ("step", {"tokens": 17}, "17 tokens are outside the plan\n(.*\n)*.*nearest bucket is 16"),
        ("step", {"tokens": -1}, "-1 tokens are outside the plan\n(.*\n)*.*nearest bucket is 4"),
        ("step", {"tokens": 1, "slots": 3}, "384 lanes are outside(.*\n)*.*bucket is 256"),
        ("step", {"tokens": 1, "slots": 1, "rank": 129}, "nearest bucket is 128"),
        (
            "norm",
            {"tokens": 5},
            "no executable for 16 tokens\n  expected: at most 4: its max_tokens",
        ),
        ("prefill", {"tokens": 1}, r"no program `prefill`\n  expected: one of \['norm', 'step'\]"),
    ],
)
def test_lookup_outside_the_plan_names_the_nearest_bucket(
    rt: Runtime, program: str, asked: dict[str, int], text: str
) -> None:
    with pytest.raises(LookupError, match=text) as caught:
        rt.lookup(program, **asked)
    assert isinstance(caught.value, OutOfPlanError)


def test_a_step_of_the_user_s_own_equals_its_definition(rt: Runtime) -> None:
    """Two layers of two projections, kernels inside, the batch's arrays from the runtime."""
    modules = ("up", "gate")
    adapters = {
        slot: {(name, layer): pair(rank) for name in modules for layer in range(LAYERS)}
        for slot, rank in ((0, 8), (3, 40))
    }
    for slot, weights in adapters.items():
        put(rt, slot, weights)
    shapes = {"up": (IN, OUT), "gate": (IN, OUT), "down": (OUT, IN)}
    layers = [{name: floats(*s) / 6 for name, s in shapes.items()} for _ in range(LAYERS)]
    slots, x = np.array([3, -1, 0]), floats(3, IN)

    batch = rt.batch(slots)
    found = rt.lookup("step", tokens=3, lanes=batch.lanes)
    assert (found.tokens, found.lanes) == (4, 128)
    padded = np.zeros((4, IN), np.float32)
    padded[:3] = x
    arrays = jax.device_put((padded, layers), rt.device)
    with rt.banks.reading() as banks:
        y = found.executable(*arrays, banks, (batch.blocks, batch.owners, batch.slots))

    for layer, w in enumerate(layers):
        up, gate = (
            lora(x, x @ w[name], {s: adapters[s][name, layer] for s in adapters}, slots)
            for name in modules
        )
        x = np.tanh(up * gate @ w["down"])
    assert np.abs(x).max() < 0.999, "saturated: such a test would see little"
    assert_close(np.asarray(y)[:3], x)


def test_the_identity_in_the_error_is_the_one_on_disk(copy: Path) -> None:
    store_of(copy).manifest_path(identity_of(copy)).unlink()
    with pytest.raises(CoverageError, match=identity_of(copy)) as caught:
        Runtime.open(copy)
    assert caught.value.found == "no finished warmup of this config"


def test_a_batch_made_before_its_slot_was_written_is_refused(rt: Runtime) -> None:
    """Its blocks may hold another adapter's weights by then."""
    load(rt, {0: 8, 1: 8})
    mine, both = rt.batch(np.array([0, 0])), rt.batch(np.array([0, 1]))
    x = floats(2, IN)
    put(rt, 1, {("up", 1): pair(8)})
    rt.apply("up", x, mine, layer=1)  # its own slot was not written

    with pytest.raises(OutOfPlanError, match="slot 1 was written since this batch was made"):
        rt.apply("up", x, both, layer=1)
    rt.banks.reset(0)
    with pytest.raises(OutOfPlanError, match="slot 0 was written since this batch was made"):
        rt.apply("up", x, mine, layer=1)


@pytest.mark.parametrize("weights", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(rt: Runtime, weights: float) -> None:
    a, b = pair(8)
    b[3, 5] = weights
    with pytest.raises(errors.AdapterError, match=r"not finite|NaN|infin"):
        put(rt, 0, {("up", 0): (a, b)})


# --- Misses -------------------------------------------------------------------------------------


def drop(copy: Path, *programs: str, tokens: int) -> None:
    """Takes variants out of the manifest, and lets the server pad up."""
    lost = [f"{program}/t{tokens}-" for program in programs]
    edit_manifest(
        copy,
        lambda manifest: manifest.update(
            entries=[e for e in manifest["entries"] if not e["variant"].startswith(tuple(lost))]
        ),
    )
    copy.write_text(copy.read_text() + "on_miss: pad_up\n")


def test_pad_up_serves_what_is_missing_from_the_next_bucket(copy: Path) -> None:
    drop(copy, "lora_shrink", "step", tokens=4)
    with Runtime.open(copy) as runtime:
        adapters = load(runtime, {0: 8, 1: 24})
        x, base = floats(3, IN), floats(3, OUT)
        for _ in range(2):
            found = runtime.apply("up", x, np.array([1, 0, -1]), base, layer=1)
            assert found.array.shape == (16, OUT)
            assert_close(found.numpy(), lora(x, base, adapters, np.array([1, 0, -1])))
        assert runtime.lookup("step", tokens=3, slots=1).tokens == 16
        assert runtime.lookup("norm", tokens=3).tokens == 4
        assert runtime.metrics.misses.value == 2  # each point once


def test_a_miss_that_nothing_larger_holds_is_an_error(copy: Path) -> None:
    drop(copy, "step", tokens=16)
    with Runtime.open(copy) as runtime:
        with pytest.raises(OutOfPlanError, match="no executable that holds 16 tokens"):
            runtime.lookup("step", tokens=5, slots=1)
        assert runtime.lookup("step", tokens=4, slots=1).tokens == 4


def test_a_store_without_bank_writes_is_refused_under_every_policy(copy: Path) -> None:
    edit_manifest(
        copy,
        lambda manifest: manifest.update(
            entries=[e for e in manifest["entries"] if "bank_write" not in e["variant"]]
        ),
    )
    copy.write_text(copy.read_text() + "on_miss: pad_up\n")
    with pytest.raises(CoverageError, match="2 of 4 variants are not in the manifest"):
        Runtime.open(copy)


def test_priming_runs_every_executable_once_and_serves_the_same(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    plain = jax.stages.Compiled.__call__

    def seen(self: Any, *arguments: Any, **named: Any) -> Any:
        ran.append("")
        return plain(self, *arguments, **named)

    copy.write_text(copy.read_text() + "priming: true\n")
    monkeypatch.setattr(jax.stages.Compiled, "__call__", seen)
    with Runtime.open(copy) as runtime:
        assert len(ran) == len(runtime.plan.variants)
        check_apply(runtime, [0, -1, 1], load(runtime, {0: 8, 1: 128}))
