"""Whatever is in an adapter's folder: it is refused in time, or it is whole. Nothing else."""

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from adapter_files import TINY_SHAPES, corrupt_adapters, random_weights, write_adapter

from aot_lora import load_config
from aot_lora.adapters import Packed, pack, read_adapter
from aot_lora.errors import AdapterError
from aot_lora.plan import Plan

COUNT = 200
SECONDS = 10  # the slowest takes less than one, on a core that others use as well


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Ends what hangs, even in a system call."""

    def late(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def load(folder: Path, plan: Plan) -> Packed:
    return pack(read_adapter(folder), plan)


def refusal(folder: Path, plan: Plan) -> AdapterError | None:
    """The error that an adapter is refused with; an accepted one has to be sound."""
    try:
        with limited(SECONDS):
            packed = load(folder, plan)
    except AdapterError as error:
        return error
    assert_finite(packed)
    return None


def assert_finite(packed: Packed) -> None:
    for module in packed.modules.values():
        for array in (module.a, module.b, module.scale):
            assert np.isfinite(array.astype(np.float32)).all()


def test_the_adapter_that_is_not_corrupted_is_accepted(tiny_config: Path, tmp_path: Path) -> None:
    weights = random_weights(TINY_SHAPES, layers=1, rank=4)

    assert_finite(load(write_adapter(tmp_path / "whole", weights), load_config(tiny_config).plan))


def test_a_corrupt_adapter_is_refused_or_harmless(tiny_config: Path, tmp_path: Path) -> None:
    plan = load_config(tiny_config).plan
    accepted: Counter[str] = Counter()
    for name, folder in corrupt_adapters(tmp_path, 0, COUNT):
        error = refusal(folder, plan)
        if error is None:
            accepted[name] += 1
            continue
        text = str(error).replace(str(tmp_path), "")
        assert str(folder) in str(error.where), name
        assert text.isascii(), name
        assert text.replace("\n", "").isprintable(), name
        assert len(text) < 1500, name

    assert accepted.total() <= COUNT // 10, accepted
    assert set(accepted) <= {"header bit"}, accepted  # one in the metadata or in white space
