"""`aot_lora.jit` records an engine's own warm-up in one process and replays it in another."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitting import MESHED, drive, driven, write_engine
from serving import artifacts_in, shared_folder

import aot_lora
from aot_lora.errors import CheckFailed, ConfigError, CoverageError, RecompileError
from aot_lora.lowering.lock import read_lock

X = np.ones((2, 3), np.float32)
FOUR = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = write_engine(shared_folder(tmp_path_factory, "jit"))
    return folder, drive(folder, "record")


def test_a_replay_returns_what_jax_jit_does_without_a_trace_or_a_compile(
    recorded: tuple[Path, dict[str, Any]],
) -> None:
    folder, record = recorded
    plain, replay = drive(folder, "plain"), drive(folder, "replay")

    assert record["found"] == plain["found"]
    assert replay["found"] == plain["found"]
    assert replay["variants"] == record["variants"]
    assert replay["events"] == {"trace": 0, "compile/backend": 0}
    assert all(replay["control"].values())  # Positive control: the listener hears a plain jit.


def test_calls_are_told_apart_by_all_that_matters_and_by_nothing_else(
    recorded: tuple[Path, dict[str, Any]],
) -> None:
    names = [name.partition("/")[0] for name in recorded[1]["variants"]]
    # Two row counts times: two layers; a float, and an int, as scale; tanh. Arrays count alike
    # whether they are numpy's or JAX's, and scalars whatever their value.
    assert names.count("step") == 8
    assert names.count("engine.norm") == 3  # f32 (f64 is cast), a float, an int
    assert names.count("other.norm") == 1
    assert names.count("engine.outer") == 1  # what it calls is part of it
    assert names.count("engine.batched") == 2
    assert names.count("engine.Model._scale") == 2
    assert names.count("engine.Model.shifted") == 1
    assert len(names) == 18


def test_recording_again_compiles_nothing_and_locks_the_same(
    recorded: tuple[Path, dict[str, Any]],
) -> None:
    folder, first = recorded
    lock = folder / "store/recordings/engine.lock.json"
    before = lock.read_text()
    again = drive(folder, "record")
    assert first["compiled"] == len(first["variants"])
    assert again["compiled"] == 0
    assert lock.read_text() == before
    (lines,) = read_lock(lock).traces.values()
    assert set(lines) == set(first["variants"])


def test_a_mesh_of_four_devices(tmp_path: Path) -> None:
    write_engine(tmp_path, MESHED)
    record = drive(tmp_path, "record", **FOUR)
    plain, replay = drive(tmp_path, "plain", **FOUR), drive(tmp_path, "replay", **FOUR)
    assert record["found"] == plain["found"]
    assert replay["found"] == plain["found"]
    assert len(record["variants"]) == 4
    assert replay["events"] == {"trace": 0, "compile/backend": 0}

    done = driven(tmp_path, "replay", XLA_FLAGS="--xla_force_host_platform_device_count=8")
    assert "CoverageError" in done.stderr
    assert "device count: here 8, stored 4" in done.stderr


def test_the_environment_records_and_seals(tmp_path: Path) -> None:
    write_engine(tmp_path)
    store = {"AOT_LORA_CACHE": str(tmp_path / "store")}
    plain = drive(tmp_path, "plain")
    for value in ("record:env", "replay:env", "sealed:env"):
        assert drive(tmp_path, "plain", AOT_LORA_JIT=value, **store)["found"] == plain["found"]
    done = driven(tmp_path, "plain", AOT_LORA_JIT="seal:env", **store)
    assert "AOT_LORA_JIT is not understood" in done.stderr
    assert "'seal:env'" in done.stderr


@pytest.mark.once
def test_a_changed_source_is_refused_by_name(tmp_path: Path) -> None:
    write_engine(tmp_path, ONE)
    drive(tmp_path, "record")
    engine = tmp_path / "engine.py"
    engine.write_text(engine.read_text().replace("x + 1", "x + 2"))
    done = driven(tmp_path, "replay")
    assert "CoverageError" in done.stderr
    assert "a recording that differs in\n    source of engine: here " in done.stderr
    assert "AOT_LORA_JIT=record:engine" in done.stderr
    drive(tmp_path, "record")
    drive(tmp_path, "replay")


@pytest.mark.once
def test_a_changed_module_that_a_function_names_is_refused(tmp_path: Path) -> None:
    text = ONE.replace("donate_argnums=0", 'donate_argnums=0, sources=["kernels_of_mine"]')
    write_engine(tmp_path, text)
    drive(tmp_path, "record")
    (tmp_path / "kernels_of_mine/new.py").write_text("")
    assert "source of kernels_of_mine: here " in driven(tmp_path, "replay").stderr


def test_what_jax_has_in_its_own_cache_is_recorded_as_well(tmp_path: Path) -> None:
    write_engine(tmp_path, ONE)
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    plain = drive(tmp_path, "plain", **cache)
    assert list((tmp_path / "jax").iterdir())
    # Called before the recording, JAX has it in memory as well.
    engine = tmp_path / "engine.py"
    engine.write_text(engine.read_text() + "\n\nwarm_up()\n")
    assert drive(tmp_path, "record", **cache)["compiled"] == 1
    assert drive(tmp_path, "replay")["found"] == plain["found"]


@pytest.mark.once
def test_a_damaged_artifact_is_refused_and_mended_by_recording(tmp_path: Path) -> None:
    write_engine(tmp_path, ONE)
    drive(tmp_path, "record")
    (path,) = artifacts_in(tmp_path / "store")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert "IntegrityError" in driven(tmp_path, "replay").stderr
    assert drive(tmp_path, "record")["compiled"] == 1
    drive(tmp_path, "replay")


ONE = """\
import jax
import numpy as np
import aot_lora


@aot_lora.jit(donate_argnums=0)
def add(x):
    return x + 1


def warm_up():
    x = jax.device_put(np.ones(3, np.float32))
    return np.asarray(add(x)).tolist()


def after():
    x = jax.device_put(np.ones(3, np.float32))
    add(x)
    try:
        add(x)
    except (RuntimeError, ValueError) as error:
        return str(error)
"""


def test_a_donated_array_used_again_is_an_error(tmp_path: Path) -> None:
    write_engine(tmp_path, ONE)
    drive(tmp_path, "record")
    assert "delete" in drive(tmp_path, "replay")["after"]


# --- In this process ------------------------------------------------------------------------------


def test_without_a_session_it_is_jax_jit() -> None:
    def scaled(x: Any, n: int, *, by: float = 2.0) -> Any:
        """Scales."""
        return x * n * by

    ours = aot_lora.jit(scaled, static_argnums=1)
    theirs = jax.jit(scaled, static_argnums=1)
    np.testing.assert_array_equal(ours(X, 3), theirs(X, 3))
    np.testing.assert_array_equal(ours(X, n=3, by=1.0), theirs(X, n=3, by=1.0))
    assert ours.__wrapped__ is scaled
    assert ours.__doc__ == "Scales."
    assert ours.lower(X, 3).as_text() == theirs.lower(X, 3).as_text()
    assert ours.eval_shape(X, 3) == theirs.eval_shape(X, 3)
    assert str(ours.trace(X, 3).jaxpr) == str(theirs.trace(X, 3).jaxpr)
    ours.clear_cache()
    np.testing.assert_array_equal(jax.vmap(lambda x: ours(x, 2))(X), X * 4)
    np.testing.assert_array_equal(jax.grad(lambda x: ours(x, 2).sum())(X), X * 4)


def test_a_method_and_a_decorator_with_options() -> None:
    class Layer:
        @aot_lora.jit(static_argnums=0)
        def double(self, x: Any) -> Any:
            return x * 2

    np.testing.assert_array_equal(Layer().double(X), X * 2)


def test_an_unknown_call_is_refused_by_name(tmp_path: Path) -> None:
    traces: list[int] = []

    def step(weights: Any, x: Any, layers: int) -> Any:
        traces.append(layers)
        return x @ weights["w"] * layers

    ours = aot_lora.jit(step, program="step", key="test", static_argnums=2)
    weights = {"w": np.ones((3, 3), np.float32)}
    with aot_lora.recording("known", tmp_path) as session:
        ours(weights, X, 2)
        ours(weights, X[:1], 2)
    assert session.traced == 2
    traces.clear()
    with aot_lora.replay("known", tmp_path):
        np.testing.assert_array_equal(ours(weights, X, 2), X * 6)
        for call, differs in (
            ((weights, np.ones((4, 3), np.float32), 2), "x: f32[4,3], shape was [2,3]"),
            ((weights, X.astype(np.int32), 2), "x: i32[2,3], dtype was f32"),
            ((weights, X, 3), "layers: static value 3, was 2"),
            (([weights["w"]], X, 2), "weights[0]: f32[3,3], was not there"),
            ((weights, 1.0, 2), "x: a Python float, was an f32["),
            (
                (weights, jax.device_put(X, jax.devices()[0]), 2),
                "x: committed to cpu:0, was uncommitted",
            ),
        ):
            with pytest.raises(RecompileError) as caught:
                ours(*call)
            text = str(caught.value)
            assert text.startswith("replay of recording `known`: refused to trace `step`"), text
            assert differs in text.replace("weights['w']", "weights"), text
            assert "as recorded: layers=2, weights['w']: f32[3,3], x: f32[" in text
            assert "AOT_LORA_JIT=record:known" in text
        with pytest.raises(RecompileError, match="refused to lower `step`"):
            ours.lower(weights, X, 2)
        with pytest.raises(RecompileError, match="no call of this program was"):
            aot_lora.jit(step, program="new", key="test", static_argnums=2)(weights, X, 2)
        with pytest.raises(RecompileError, match="replay of recording"):
            jnp.arange(977) * 3  # The seal holds for all of JAX.
        with aot_lora.allow_compile("a test"):
            np.testing.assert_array_equal(ours(weights, X, 4), X * 12)
        traces.clear()
        with pytest.raises(RecompileError, match="layers: static value 4, was 2"):
            ours(weights, X, 4)
    assert not traces
    ours(weights, X, 3)  # Plain again.
    assert traces


def test_an_option_of_jax_is_part_of_a_call(tmp_path: Path) -> None:
    ours = aot_lora.jit(lambda x: x @ x.T, program="square")
    with aot_lora.recording("options", tmp_path) as session:
        ours(X)
        with jax.default_matmul_precision("float32"):
            ours(X)
    assert len(session.variants) == 2
    with aot_lora.replay("options", tmp_path, seal=False):
        ours(X)
        jnp.arange(979) * 3  # Not sealed.
        with (
            jax.default_matmul_precision("bfloat16"),
            pytest.raises(
                RecompileError, match="jax_default_matmul_precision: 'bfloat16', was None"
            ),
        ):
            ours(X)


def test_sessions_do_not_nest_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    ours = aot_lora.jit(lambda x: x + 1, program="plus")

    def warm_up() -> None:
        with aot_lora.recording("bad", tmp_path):
            ours(X)
            with pytest.raises(ConfigError, match="is open already"):
                aot_lora.recording("other", tmp_path).__enter__()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        warm_up()
    with pytest.raises(CoverageError, match="no recording of this name"):
        aot_lora.replay("bad", tmp_path)
    with pytest.raises(ConfigError, match="not a name"):
        aot_lora.replay("a/b", tmp_path)
    ours(X)


def test_a_lock_that_does_not_hold_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "engine.lock.json"

    def record(by: int, rows: int, *, check: bool) -> None:
        ours = aot_lora.jit(lambda x: x * by, program="scale", key="any")
        with aot_lora.recording("lock", tmp_path / "store", lock=lock, check=check):
            ours(X[:rows])

    record(2, 1, check=False)
    record(2, 1, check=True)
    with pytest.raises(CheckFailed, match="code moved, signature did not"):
        record(3, 1, check=True)
    with pytest.raises(CheckFailed) as caught:
        record(2, 2, check=True)
    assert "not in the lock" in str(caught.value)
    assert "in the lock only" in str(caught.value)
