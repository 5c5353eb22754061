"""The decoder on a mesh: as on one device, and adapters exchange nothing that it would not."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from decoding import DECODER, write_adapters
from serving import cli, warm, write

from aot_lora import Runtime, errors, load_config
from aot_lora.decoder import Session, random_weights, specs

# Of the steps, which take seconds each to compile, those of one size: with adapters and without.
FEW = DECODER.replace("ranks: [4, 16]", "ranks: [16]").replace("buckets: [4, 24]", "buckets: [24]")
# Heads, widths and vocabulary that four devices can share.
SPLIT = (
    FEW.replace("kv_heads: 2", "kv_heads: 4")
    .replace("vocab: 97", "vocab: 96")
    .replace("k_proj: [32, 16], v_proj: [32, 16]", "k_proj: [32, 32], v_proj: [32, 32]")
)
PROMPTS = [[5, 90, 3], [11], list(range(40, 70)), [7, 8, 9, 10, 11], [95, 0, 95]]
COLLECTIVE = r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?[(]"


def answers(config: Path, folder: Path) -> list[list[int]]:
    with Runtime.open(config) as runtime:
        session = Session(runtime, random_weights(runtime.plan, 0))
        slots = [runtime.adapters.load(path) for path in sorted(folder.iterdir())]
        temperatures = [0.0, 0.0, 0.0, 0.0, 0.9]
        return session.generate(
            PROMPTS, [*slots, -1, slots[0]], 9, temperatures=temperatures, seeds=[0, 0, 0, 0, 5]
        )


@pytest.mark.once
def test_two_and_four_devices_say_what_one_says(tmp_path: Path) -> None:
    """For mixed ranks, on the devices that adapters were loaded onto; sampled, too."""
    alone = write(tmp_path / "tp1.yaml", SPLIT)
    write_adapters(tmp_path / "adapters", load_config(alone).plan)
    found: list[list[list[int]]] = []
    for tp in (1, 2, 4):
        config = write(tmp_path / f"tp{tp}.yaml", f"{SPLIT}mesh: {{tp: {tp}}}\n")
        warm(config, "--jobs", 2)
        found.append(answers(config, tmp_path / "adapters"))
        if tp == 4:
            check_collectives(config)
    assert found[0] == found[1] == found[2]


def check_collectives(config: Path) -> None:
    with Runtime.open(config) as runtime:
        counts: dict[str, set[tuple[str, ...]]] = {}
        for variant, executable in runtime._executables.loaded.items():
            if variant.program.endswith("_step"):
                found = tuple(re.findall(COLLECTIVE, executable.as_text()))
                counts.setdefault("with" if variant.lanes else "without", set()).add(found)
    # The embedding, two in a layer (the layers are one loop), and two to agree on the best token.
    assert counts == {"with": {("all-reduce",) * 5}, "without": {("all-reduce",) * 5}}


def test_the_weights_lie_in_parts(tmp_path: Path) -> None:
    config = write(tmp_path / "tp4.yaml", f"{SPLIT}mesh: {{tp: 4}}\n")
    plan = load_config(config).plan
    weights: Any = random_weights(plan, 0)
    parts = specs(plan, tp=4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("tp",))
    places = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), parts.weights)
    put = jax.device_put(weights, places)
    sizes = {
        jax.tree_util.keystr(path): leaf.addressable_shards[0].data.nbytes / leaf.nbytes
        for path, leaf in jax.tree_util.tree_flatten_with_path(put)[0]
    }
    whole = {name for name, share in sizes.items() if share == 1}
    assert whole == {"['layers']['input_norm']", "['layers']['post_norm']", "['norm']"}
    assert {share for name, share in sizes.items() if name not in whole} == {0.25}


@pytest.mark.parametrize(
    ("tp", "text"),
    [(3, "4 heads cannot be split over 3 chips"), (4, "2 kv_heads cannot be split over 4 chips")],
)
def test_chips_that_do_not_divide_the_heads_are_refused(tmp_path: Path, tp: int, text: str) -> None:
    plan = load_config(write(tmp_path / "decoder.yaml", DECODER)).plan

    with pytest.raises(errors.ProgramError) as caught:
        specs(plan, tp=tp)
    assert text in str(caught.value)
    assert f"found: tp={tp}" in str(caught.value)


@pytest.mark.once
def test_heads_that_a_mesh_does_not_divide_fail_their_programs_alone(tmp_path: Path) -> None:
    mesh = "mesh: {tp: 4}\n"
    text = FEW.replace("lm_head]", "down_proj]").replace("vocab: 97", "vocab: 96")
    done = cli("warmup", write(tmp_path / "odd.yaml", text + mesh), "--jobs", 2)

    assert done.returncode == 2
    assert "2 kv_heads cannot be split over 4 chips" in done.stderr
    assert re.search(r" [1-9]\d* compiled, 0 reused, 4 failed", done.stdout), done.stdout


def test_a_split_that_no_decoder_has_is_refused(tmp_path: Path) -> None:
    mesh = "mesh: {tp: 2, row_parallel: [o_proj]}\n"
    plan = load_config(write(tmp_path / "odd.yaml", SPLIT + mesh)).plan
    with pytest.raises(errors.ProgramError, match="a decoder does not split down_proj like that"):
        specs(plan, tp=2)
