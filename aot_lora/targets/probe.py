"""Whether this host compiles for a target: a child process compiles one addition for it.

`python -m aot_lora.targets.probe PLATFORM [TOPOLOGY]` is that child; it prints what is in the way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from aot_lora.config import gpus
from aot_lora.errors import AotLoraError
from aot_lora.plan import TargetSpec
from aot_lora.targets.environment import worker_environment


def target_of(platform: str, topology: str = "") -> TargetSpec:
    """A target as a config of one device would name it, with a shipped GPU's target config."""
    if platform != "cuda" or not topology:
        return TargetSpec(platform, topology)
    text = gpus.read(topology, config=Path("here"), where=topology)
    return TargetSpec(platform, topology, target_config=text)


def obstacle(target: TargetSpec) -> str:
    """Why this host does not compile for a target, in one line; empty where it does."""
    done = subprocess.run(
        [sys.executable, "-m", "aot_lora.targets.probe", target.platform, target.topology],
        env={**os.environ, **worker_environment(target)},
        text=True,
        capture_output=True,
        check=False,
    )
    if not done.returncode:
        return ""
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines() or ["it ended without a word"]
    return lines[0] if done.stdout.strip() else lines[-1]


def _compile_one(target: TargetSpec) -> None:
    import jax
    from jax.sharding import SingleDeviceSharding

    from aot_lora.targets.devices import compile_devices

    device = compile_devices(target)[0]
    x = jax.ShapeDtypeStruct((8, 128), jax.numpy.float32, sharding=SingleDeviceSharding(device))
    traced = jax.jit(lambda x: x + 1).trace(x)
    traced.lower(lowering_platforms=(target.platform,)).compile()


def main(platform: str, topology: str = "") -> int:
    """Compiles for a target, and prints why it cannot be done."""
    try:
        _compile_one(target_of(platform, topology))
    except AotLoraError as error:
        print(": ".join(filter(None, (error.problem, error.found))))
        return error.exit_code
    except Exception as error:
        print(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
