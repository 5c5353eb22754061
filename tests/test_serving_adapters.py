"""Adapters in a runtime: loaded, replaced, swapped, shared between threads, never a compile."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from adapter_files import corrupt_adapters, write_adapter

from aot_lora import Runtime, errors
from aot_lora.kernels.reference import lora, tolerance
from aot_lora.runtime.gate import Gate

IN, OUT = 16, 24
Pair = tuple[np.ndarray, np.ndarray]


@pytest.fixture
def rt(served: Path) -> Iterator[Runtime]:
    with Runtime.open(served) as runtime:
        yield runtime


@pytest.fixture
def swapping(served: Path, tmp_path: Path) -> Iterator[Runtime]:
    config = shutil.copytree(served.parent, tmp_path / "copy") / served.name
    config.write_text(config.read_text() + "adapters: {mode: swap, host_cache: 1MiB}\n")
    with Runtime.open(config) as runtime:
        yield runtime


def adapter(folder: Path, rank: int, *, seed: int = 0) -> tuple[Path, Pair]:
    """A PEFT folder for `up` of layer 1, and its (A [r, D], B [r, O], scaled by alpha / r = 2)."""
    rng = np.random.default_rng((seed, rank))
    a, b = (rng.standard_normal((rank, width), np.float32) / 5 for width in (IN, OUT))
    weights = {"model.layers.1.mlp.up": (a, np.ascontiguousarray(b.T))}
    path = write_adapter(folder, weights, r=rank, lora_alpha=2 * rank, target_modules=["up"])
    return path, (a, 2 * b)


def check(rt: Runtime, slots: list[int], adapters: dict[int, Pair]) -> None:
    rng = np.random.default_rng(1)
    x, base = (rng.standard_normal((len(slots), width), np.float32) for width in (IN, OUT))
    found = rt.apply("up", x, np.array(slots), base, layer=1).numpy()
    expected = lora(x, base, adapters, np.array(slots))
    limit = tolerance("float32", reduction=256) * max(np.linalg.norm(expected), 1.0)
    assert np.linalg.norm(found - expected) <= limit


def test_folders_become_slots_and_serve_by_their_definition(rt: Runtime, tmp_path: Path) -> None:
    """CASES 4: ranks 1, 3 and 24 where the largest is 128."""
    found: dict[int, Pair] = {}
    for rank in (1, 3, 24):
        path, weights = adapter(tmp_path / str(rank), rank)
        found[rt.adapters.load(path)] = weights
    slots = sorted(found)
    check(rt, [slots[2], slots[0], -1, slots[1]], found)
    assert rt.metrics.snapshot()["loads"] == 3
    rt.adapters.unload(str(tmp_path / "3"))
    with pytest.raises(errors.OutOfPlanError, match="hold no adapter"):
        rt.batch(np.array([slots[1]]))
    check(rt, [slots[2], -1], found)


def test_the_same_files_are_not_written_twice_and_changed_ones_replace(
    rt: Runtime, tmp_path: Path
) -> None:
    path, first = adapter(tmp_path / "a", 8)
    slot = rt.adapters.load(path, name="sql")
    check(rt, [slot], {slot: first})
    assert rt.adapters.load(path, name="sql") == slot
    assert rt.metrics.loads.value == 1
    shutil.rmtree(path)
    path, second = adapter(tmp_path / "a", 16, seed=1)
    assert rt.adapters.load(path, name="sql") == slot
    check(rt, [slot, -1], {slot: second})
    with rt.adapters.use("sql"), pytest.raises(errors.CapacityError, match="`sql` is in use"):
        rt.adapters.unload("sql")


def test_a_full_bank_refuses_and_nothing_changes(rt: Runtime, tmp_path: Path) -> None:
    found: dict[int, Pair] = {}
    for seed in range(2):
        path, weights = adapter(tmp_path / str(seed), 128, seed=seed)
        found[rt.adapters.load(path)] = weights
    path, _ = adapter(tmp_path / "more", 128)
    with pytest.raises(errors.CapacityError, match="no room for adapter") as caught:
        rt.adapters.load(path)
    assert "mode: swap" in str(caught.value)
    check(rt, [0, 1, -1], found)


def test_idle_adapters_give_way_least_recently_used_first(
    swapping: Runtime, tmp_path: Path
) -> None:
    rt, found = swapping, {}
    for name in "abcd":
        path, found[name] = adapter(tmp_path / name, 128, seed=ord(name))
        rt.adapters.register(path, name=name)
    rt.adapters.load(tmp_path / "a", name="a", pin=True)
    with rt.adapters.use("b") as slot:
        check(rt, [slot], {slot: found["b"]})
        with pytest.raises(errors.CapacityError, match="in use or pinned"):
            rt.adapters.acquire("c")
    with rt.adapters.use("c") as slot:  # b is idle now; a is pinned
        assert set(rt.adapters.resident) == {"a", "c"}
        check(rt, [slot, -1, rt.adapters.resident["a"]], {slot: found["c"], 0: found["a"]})
    rt.adapters.prefetch(tmp_path / "b").result(timeout=30)
    rt.adapters.unpin("a")
    with rt.adapters.use("b"), rt.adapters.use("c"):
        assert set(rt.adapters.resident) == {"b", "c"}
    assert rt.metrics.evictions.value == 2
    assert rt.adapters.host.nbytes <= 2**20
    with pytest.raises(errors.OutOfPlanError, match="no adapter `z`"):
        rt.adapters.acquire("z")


def test_200_corrupt_adapters_disturb_nothing(rt: Runtime, tmp_path: Path) -> None:
    path, weights = adapter(tmp_path / "good", 40)
    slot = rt.adapters.load(path)
    shapes = {"up": (IN, OUT), "gate": (IN, OUT)}
    refused = 0
    for _, folder in corrupt_adapters(tmp_path / "bad", 7, 200, shapes=shapes, layers=2):
        try:
            rt.adapters.load(folder, name="bad")
        except errors.AdapterError:
            refused += 1
        else:
            rt.adapters.unload("bad")
    assert refused >= 180
    check(rt, [slot, -1, slot], {slot: weights})
    assert list(rt.adapters.resident) == [str(path)]


def test_a_request_that_does_not_fit_is_refused_alone(rt: Runtime, tmp_path: Path) -> None:
    for name, rank in (("a", 128), ("b", 120), ("c", 8)):
        rt.adapters.load(adapter(tmp_path / name, rank)[0], name=name)
    a, b, c = (rt.adapters.resident[name] for name in "abc")
    batch = rt.admission()
    batch.add(a, 3)
    batch.add(b)
    with pytest.raises(errors.CapacityError, match="no room for 1 adapters more"):
        batch.add(c)
    batch.add(-1, 12)
    with pytest.raises(errors.CapacityError, match="no room for 1 tokens more"):
        batch.add(a)
    assert batch.slots == [a] * 3 + [b] + [-1] * 12
    assert rt.batch(np.array(batch.slots)).lanes == 256
    with pytest.raises(errors.OutOfPlanError, match="at most 16 tokens"):
        rt.admission().add(a, 17)
    assert rt.metrics.not_admitted.value == 3


def test_one_writer_and_many_readers(rt: Runtime, tmp_path: Path) -> None:
    """Readers serve a slot that stays, while others come and go in the same banks."""
    path, weights = adapter(tmp_path / "stays", 24)
    slot = rt.adapters.load(path)
    others = [adapter(tmp_path / str(seed), 128, seed=seed)[0] for seed in range(2)]
    stop, failures = threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            while not stop.is_set():
                check(rt, [slot, -1, slot], {slot: weights})
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for turn in range(60):
        rt.adapters.load(others[turn % 2], name="changes")
    stop.set()
    for reader in readers:
        reader.join(timeout=60)
    assert not failures


def test_a_gate_keeps_a_writer_alone_and_readers_may_nest() -> None:
    gate, inside, seen = Gate(), [0], list[int]()

    def write() -> None:
        with gate.writing():
            seen.append(inside[0])

    with gate.reading(), gate.reading():
        writer = threading.Thread(target=write)
        writer.start()
        inside[0] = 1
        writer.join(timeout=0.05)
        assert writer.is_alive()
        inside[0] = 0
    writer.join(timeout=10)
    assert seen == [0]
    with gate.reading(), pytest.raises(RuntimeError, match="cannot write"), gate.writing():
        pass


def test_a_thread_that_reads_cannot_load_and_nothing_is_lost(
    swapping: Runtime, tmp_path: Path
) -> None:
    rt = swapping
    for seed in range(2):
        rt.adapters.load(adapter(tmp_path / str(seed), 128, seed=seed)[0], name=str(seed))
    before = rt.adapters.resident, dict(rt.banks.owned), rt.banks.free_lanes
    path, _ = adapter(tmp_path / "more", 128)
    with rt.banks.reading():
        with pytest.raises(RuntimeError, match="cannot write"):
            rt.adapters.load(path)
        with pytest.raises(RuntimeError, match="cannot write"):
            rt.adapters.unload("0")
        with pytest.raises(RuntimeError, match="cannot write"):
            rt.banks.reset(0)
    assert (rt.adapters.resident, dict(rt.banks.owned), rt.banks.free_lanes) == before


def test_two_that_acquire_at_once_share_what_the_first_loaded(
    swapping: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the host cache keeps nothing, so that each has read the files for itself."""
    rt = swapping
    monkeypatch.setattr(rt.adapters.host, "_budget_bytes", 0)
    rt.adapters.register(adapter(tmp_path / "a", 8)[0], name="a")
    plain = rt.adapters.host.get
    inside: list[int] = []

    def get(folder: Path) -> object:
        packed = plain(folder)
        if not inside:  # while the first reads, a second comes and is done
            inside.append(-1)
            inside.append(rt.adapters.acquire("a"))
        return packed

    monkeypatch.setattr(rt.adapters.host, "get", get)
    assert rt.adapters.acquire("a") == inside[1]
    assert rt.metrics.loads.value == 1
    rt.adapters.release("a")
    rt.adapters.release("a")


def test_prometheus_reads_what_the_runtime_counts(rt: Runtime) -> None:
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    from aot_lora.runtime.prometheus import MetricsCollector

    registry.register(MetricsCollector(rt.metrics))
    rt.batch(np.array([-1, -1, -1]))
    rt.lookup("norm", tokens=3)
    assert registry.get_sample_value("aot_lora_lookups_total") == 1
    assert registry.get_sample_value("aot_lora_rows_total") == 3
    assert registry.get_sample_value("aot_lora_padded_rows_total") == 4
    assert registry.get_sample_value("aot_lora_pad_waste_count") == 1
    assert registry.get_sample_value("aot_lora_pad_waste_bucket", {"le": "0.3"}) == 1
