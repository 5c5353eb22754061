"""A donated array that is used again is an exception, and never the end of the process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import donating
import jax
import numpy as np
import pytest

from aot_lora import Runtime
from aot_lora._jax_compat.donation import NEEDED
from aot_lora.errors import DonatedError


@pytest.mark.parametrize("devices", [1, 2])
def test_used_again_through_a_loaded_executable(devices: int) -> None:
    done = subprocess.run(
        [sys.executable, donating.__file__, str(devices)],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    of_jax = ("ValueError", "RuntimeError", "JaxRuntimeError", "XlaRuntimeError")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["case"] for one in found] == list(donating.CASES)
    for one in found:
        # `b` is not donated: JAX checks that.
        checked = NEEDED and devices > 1 and one["case"] != "deleted"
        assert one["raised"] in (("DonatedError",) if checked else of_jax), one
        assert one["after"] == [2.0] * 8, one


def test_used_again_as_the_base_or_rows_of_apply(served: Path) -> None:
    with Runtime.open(served) as rt:
        x = jax.device_put(np.ones((4, 16), np.float32), rt.device)
        base = jax.device_put(np.ones((4, 24), np.float32), rt.device)
        batch = rt.batch(np.full(4, -1))
        rt.apply("up", x, batch, base)
        base.delete()  # as the expand does that takes it over
        with pytest.raises(DonatedError, match="`base` was given away") as caught:
            rt.apply("up", x, batch, base)
        assert "a call that takes over an argument leaves nothing of it" in str(caught.value)
        x.delete()
        with pytest.raises(DonatedError, match="`x` was given away"):
            rt.apply("up", x, batch)
