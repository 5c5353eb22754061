"""`on_miss: background`: what is missing is compiled aside, and stays."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from serving import ENGINE, cli, edit_manifest, manifest_of, warm

from aot_lora import Runtime, load_config
from aot_lora.adapters import pack_arrays
from aot_lora.errors import IntegrityError, OutOfPlanError
from aot_lora.kernels.reference import lora
from aot_lora.store.misses import bucket_for, record_miss, widened

IN, OUT = 16, 24


@pytest.fixture
def config(served: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(served.parent, tmp_path / "copy") / served.name
    copy.write_text(copy.read_text() + "on_miss: background\n")
    return copy


def wait_for(condition: Callable[[], bool], runtime: Runtime, *, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert not runtime.metrics.background_failures.value, runtime._misses.failure
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def check(runtime: Runtime, rows: int) -> tuple[int, int]:
    """Serves a batch of `rows` with adapters of 200 lanes in all; returns its buckets."""
    rng = np.random.default_rng(3)
    held = {}
    for slot, rank in enumerate((8, 128)):
        held[slot] = (
            rng.standard_normal((rank, IN), np.float32) / 9,
            rng.standard_normal((rank, OUT), np.float32) / 9,
        )
        a, b = held[slot]
        runtime.banks.put(slot, pack_arrays({("up", 1): (a, b.T)}, runtime.plan))
    slots = np.arange(rows) % 3 - 1
    x, base = rng.standard_normal((rows, IN), np.float32), np.zeros((rows, OUT), np.float32)
    found = runtime.apply("up", x, slots, base, layer=1)
    np.testing.assert_allclose(found.numpy(), lora(x, base, held, slots), rtol=1e-4, atol=1e-4)
    return found.array.shape[0], runtime.batch(slots).lanes


def test_a_batch_beyond_the_plan_is_refused_once_and_served_later(config: Path) -> None:
    with Runtime.open(config) as runtime:
        with pytest.raises(OutOfPlanError) as refused:
            check(runtime, 17)
        assert refused.value.next_step == (
            "a bucket of 32 tokens is recorded and compiled in the background; "
            "send a smaller batch till then"
        )
        assert check(runtime, 16)[0] == 16  # serving goes on
        wait_for(lambda: 32 in runtime.plan.tokens.buckets, runtime)
        assert check(runtime, 17)[0] == 32
        assert runtime.lookup("step", tokens=30, slots=2).tokens == 32
        counts = runtime.metrics.snapshot()
        assert (counts["recorded_buckets"], counts["background_warmups"]) == (1, 1)

    with Runtime.open(config) as runtime:
        assert check(runtime, 17)[0] == 32
    assert warm(config)["traced"] == 0
    assert cli("verify", config).returncode == 0


@pytest.mark.once
def test_more_lanes_than_the_plan_has_become_a_bucket_of_the_banks_lanes(config: Path) -> None:
    config.write_text(config.read_text().replace("slots: [0, 1, 2]", "slots: [0, 1]"))
    warm(config)
    with Runtime.open(config) as runtime:
        with pytest.raises(OutOfPlanError, match="a bucket of 256 lanes is recorded"):
            check(runtime, 16)
        wait_for(lambda: 256 in runtime.plan.lanes.buckets, runtime)
        assert check(runtime, 16) == (16, 256)


def test_a_missing_variant_is_padded_up_until_it_is_compiled(config: Path) -> None:
    edit_manifest(
        config,
        lambda manifest: manifest.update(
            entries=[e for e in manifest["entries"] if not e["variant"].startswith("step/t4-")]
        ),
    )
    with Runtime.open(config) as runtime:
        assert runtime.lookup("step", tokens=3, slots=1).tokens == 16
        wait_for(lambda: runtime.metrics.background_warmups.value == 1, runtime)
        assert runtime.lookup("step", tokens=3, slots=1).tokens == 4
        assert runtime.metrics.misses.value == 1
    assert len(manifest_of(config).entries) == len(load_config(config).plan.variants)


def wait_for_failure(runtime: Runtime) -> str:
    end = time.monotonic() + 60
    while not runtime.metrics.background_failures.value and time.monotonic() < end:
        time.sleep(0.05)
    return runtime._misses.failure


@pytest.mark.once
def test_a_warmup_that_fails_is_tried_once_and_what_it_built_serves(config: Path) -> None:
    engine = config.parent / "engine.py"
    engine.write_text(
        ENGINE.replace("x, weights = ", "assert point.tokens < 17, 'too large'\n    x, weights = ")
    )
    warm(config)
    with Runtime.open(config) as runtime:
        with pytest.raises(OutOfPlanError):
            check(runtime, 17)
        assert "too large" in wait_for_failure(runtime)
        assert check(runtime, 17)[0] == 32  # the kernels could be compiled, the step could not
        for _ in range(2):
            with pytest.raises(OutOfPlanError, match="`step` has no executable that holds 32"):
                runtime.lookup("step", tokens=17)
        assert runtime.lookup("step", tokens=16).tokens == 16
        runtime.close()
        assert runtime.metrics.background_failures.value == 1


@pytest.mark.once
def test_a_server_takes_up_nothing_of_sources_that_changed_under_it(config: Path) -> None:
    with Runtime.open(config) as runtime:
        (config.parent / "engine.py").write_text(ENGINE + "# another\n")
        with pytest.raises(OutOfPlanError):
            check(runtime, 17)
        assert "the sources" in wait_for_failure(runtime)
        with pytest.raises(OutOfPlanError, match="that failed: the sources"):
            check(runtime, 17)
        assert runtime.plan.tokens.buckets == (4, 16)


@pytest.mark.once
def test_a_store_that_cannot_be_written_is_no_reason_to_stop(config: Path) -> None:
    with Runtime.open(config) as runtime:
        (load_config(config).store_root / "misses").write_text("in the way")
        with pytest.raises(OutOfPlanError):
            check(runtime, 17)
        assert "Not a directory" in wait_for_failure(runtime)
        assert check(runtime, 16)[0] == 16


@pytest.mark.once
def test_closing_ends_a_warmup_that_runs(config: Path) -> None:
    with Runtime.open(config) as runtime:
        with pytest.raises(OutOfPlanError):
            check(runtime, 128)
        misses = runtime._misses
        wait_for(lambda: misses._warmup is not None, runtime)
        warmup = misses._warmup
        assert warmup is not None
    assert warmup.poll() not in (None, 0)
    assert misses._thread is not None
    assert not misses._thread.is_alive()


@pytest.mark.parametrize(
    ("axis", "length", "bucket"),
    [
        ("tokens", 16, None),
        ("tokens", 17, 32),
        ("tokens", 100, 128),
        ("tokens", 128, 128),
        ("tokens", 129, None),
        ("lanes", 256, None),
        ("lanes", 257, 320),
        ("lanes", 321, None),
    ],
)
def test_the_bucket_for_a_length(config: Path, axis: str, length: int, bucket: int | None) -> None:
    assert bucket_for(load_config(config).plan, axis, length) == bucket  # pyright: ignore[reportArgumentType]


def test_the_record_counts_under_this_policy_alone(config: Path) -> None:
    loaded = load_config(config)
    assert widened(loaded).plan == loaded.plan
    record_miss(loaded, "tokens", 64)
    record_miss(loaded, "tokens", 32)
    assert widened(loaded).plan.tokens.buckets == (4, 16, 32, 64)
    assert len(widened(loaded).plan.variants) > len(loaded.plan.variants)
    config.write_text(config.read_text().replace("on_miss: background", "on_miss: pad_up"))
    other = load_config(config)
    assert widened(other) == other


@pytest.mark.parametrize("damage", ["", "[]", '{"ranks": [8]}', '{"tokens": [0]}', '{"tokens": 8}'])
def test_a_damaged_record_is_named(config: Path, damage: str) -> None:
    loaded = load_config(config)
    record_miss(loaded, "tokens", 32)
    (path,) = (loaded.store_root / "misses").iterdir()
    assert json.loads(path.read_text()) == {"tokens": [32]}
    path.write_text(damage)
    with pytest.raises(IntegrityError, match="record of missed buckets cannot be read") as error:
        Runtime.open(config)
    assert error.value.where == str(path)
