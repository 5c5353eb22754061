"""`verify --execute`: every LoRA executable against its float32 definition."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from serving import cli

from aot_lora import Runtime, load_config
from aot_lora.plan import Variant
from aot_lora.runtime.prove import prove


def test_every_lora_variant_is_proven_from_the_command_line(served: Path) -> None:
    done = cli("verify", served, "--execute", "--format", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    names = {v.name for v in load_config(served).plan.variants}
    assert report["wrong"] == 0
    assert set(report["error"]) | set(report["unproven"]) == names
    assert {name.partition("/")[0] for name in report["unproven"]} == {"step", "norm"}
    table = cli("verify", served, "--execute")
    assert f"{report['executed']} of {report['executed']} variants are right" in table.stdout
    assert f"{len(report['unproven'])} were not run" in table.stdout


@pytest.mark.parametrize(
    ("program", "lanes", "dims"),
    [
        ("lora_expand", 128, (("o", 24), ("n", 2))),
        ("lora_expand_single", 8, (("o", 24), ("n", 2))),
        ("bank_write", 128, (("d", 16), ("o", 24), ("n", 2))),
        ("bank_reset", 8, (("d", 16), ("o", 24), ("n", 2))),
    ],
)
def test_a_wrong_executable_is_found(
    served: Path, program: str, lanes: int, dims: tuple[tuple[str, int], ...]
) -> None:
    """The positive control: one executable whose results are one percent off, or not zero."""
    tokens = 4 if program.startswith("lora") else 0
    variant = Variant(program, tokens, lanes, dims)
    with Runtime.open(served) as runtime:
        loaded: Any = runtime._executables.loaded
        right = loaded[variant]

        def wrong(*arguments: Any) -> Any:
            found = jax.tree.map(np.asarray, right(*arguments))
            return jax.device_put(jax.tree.map(lambda one: one * 1.01 + 0.01, found))

        loaded[variant] = wrong
        worst = {proof.variant: proof for proof in prove(runtime) if proof.error > proof.limit}
    assert variant.name in worst
