"""Device memory of a plan: figures from the compiler, the cache that fits, and the refusal."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoding import DECODER
from gpus import H200
from serving import cli

from aot_lora import errors, load_config
from aot_lora.cli.main import run
from aot_lora.plan import TargetSpec, Variant
from aot_lora.plan.memory import Measured, add_up, cache_bytes, declared, largest_variants
from aot_lora.targets.hbm import hbm_bytes
from aot_lora.warmup import memory as fitting
from aot_lora.warmup.fewer import refuse_what_does_not_fit
from aot_lora.warmup.memory import MemoryReport, memory_report

MIB = 2**20
GIB = 2**30
BLOCKS = 17  # of the banks of the tiny decoder
V6E = 'target: {platform: tpu, topology: "v6e:1x1"}'


def decoder(folder: Path, **texts: str) -> Path:
    """A config of the tiny decoder; `texts` are lines in place of those with the same key."""
    path = folder / "decoder.yaml"
    lines = [line for line in DECODER.splitlines() if line.partition(":")[0] not in texts]
    path.write_text("\n".join([*lines, *(f"{key}: {text}" for key, text in texts.items()), ""]))
    return path


def figures(**bytes_: int) -> Measured:
    """What a step of the tiny decoder needs; zeros but for what is given."""
    zero = {"variant": Variant("step"), "weights": 0, "banks": 0, "cache": 0}
    return Measured(**{**zero, **bytes_})


def test_of_each_program_the_largest_is_measured_with_and_without_lanes(tmp_path: Path) -> None:
    plan = load_config(decoder(tmp_path)).plan
    assert [variant.name for variant in largest_variants(plan)] == [
        "lora_shrink/t24-l48-d48-n2",
        "lora_expand/t24-l48-o97-n1",
        "bank_write/l16-d32-o97-n1",
        "bank_reset/l16-d32-o97-n1",
        "mixed_step/t24-l0",
        "mixed_step/t24-l48",
        "decode_step/t24-l0",
        "decode_step/t24-l48",
    ]


def test_figures_add_up_to_the_worst_of_each_and_the_code_of_all(tmp_path: Path) -> None:
    plan = load_config(decoder(tmp_path)).plan
    base, lora, shrink = (
        figures(variant=Variant("mixed_step", 24, 0), weights=100, cache=50, temporaries=9, code=3),
        figures(variant=Variant("mixed_step", 24, 48), weights=100, cache=50, others=7, code=5),
        figures(variant=Variant("lora_shrink", 24, 48), outputs=4, code=1),
    )
    found = add_up(plan, [base, lora, shrink])

    assert (found.weights, found.cache, found.banks) == (100, 50, plan.bank_bytes)
    assert (found.temporaries, found.others, found.outputs) == (9, 7, 4)
    assert found.code == 2 * 3 + 4 * 5 + 12 * 1  # variants: of 2 buckets, of 2 x 2, of 2 x 2 x 3 D
    assert found.total == 100 + 50 + plan.bank_bytes + 9 + 7 + 4 + found.code


def test_the_cache_is_divided_over_the_mesh(tmp_path: Path) -> None:
    plan = load_config(decoder(tmp_path)).plan
    assert plan.cache is not None
    # k and v, layers, sequences, length, heads, head_dim, float32
    assert cache_bytes(plan, length=48) == 2 * 2 * 4 * 48 * 2 * 8 * 4


@pytest.mark.once
def test_a_cpu_has_figures_and_no_known_memory(tmp_path: Path) -> None:
    done = cli("plan", decoder(tmp_path), "--memory", "--format", "json")
    assert done.returncode == errors.EXIT_OK, done.stderr

    found = json.loads(done.stdout)["memory"]["cpu"]
    plan = load_config(decoder(tmp_path)).plan
    assert found["cache"] == cache_bytes(plan, length=48)
    assert found["banks"] == plan.bank_bytes
    assert found["weights"] == 4 * _weights(tmp_path)
    assert found["temporaries"] > 0
    written = declared(plan)
    assert [found[key] for key in ("weights", "banks", "cache")] == [
        written.weights,
        written.banks,
        written.cache,
    ]
    assert (found["device"], found["share"], found["fits"]) == (None, None, True)
    assert "largest_kv_length" not in found


def test_without_a_decoder_the_weights_of_the_modules_are_declared(tiny_config: Path) -> None:
    plan = load_config(tiny_config).plan
    assert declared(plan).weights == 4 * (16 * 16 + 32 * 16)
    assert (declared(plan).cache, declared(plan).measured) == (0, ())


def _weights(folder: Path) -> int:
    import jax
    import numpy as np

    from aot_lora.decoder import random_weights

    return sum(
        np.size(x) for x in jax.tree.leaves(random_weights(load_config(decoder(folder)).plan, 0))
    )


def test_a_plan_without_a_decoder_shows_its_programs(
    write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    done = cli("plan", write_config(), "--memory")
    assert done.returncode == errors.EXIT_OK, done.stderr
    assert "memory of each device, cpu" in done.stdout
    assert "the device's memory is unknown on this host" in done.stdout
    assert "kv_cache" not in done.stdout


class Device:
    """A device of so many bytes, and a compiler that needs temporaries for each 128 tokens.

    `held`: weights, and the banks as the tests' config has them.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, size: int, *, held: int, step: int, silent: bool
    ) -> None:
        self.size, self.held, self.step, self.silent = size, held, step, silent
        self.lengths: list[int] = []
        self.blocks: list[int] = []
        monkeypatch.setattr(fitting, "measure_all", self._measure)
        monkeypatch.setattr(fitting, "hbm_bytes", lambda _: size)

    def needs(self, plan: Any, length: int) -> int:
        """All bytes at a length."""
        banks = plan.bank_bytes - plan.bank_bytes // plan.bank_blocks * BLOCKS
        return self.held + banks + cache_bytes(plan, length=length) + self.step * length // 128

    def _measure(self, config: Any, target: Any, variants: Any) -> list[Measured]:
        plan = config.plan
        length = plan.cache.length
        self.lengths.append(length)
        self.blocks.append(plan.bank_blocks)
        cache = cache_bytes(plan, length=length)
        held = self.held - plan.bank_bytes // plan.bank_blocks * BLOCKS
        if not self.silent and self.needs(plan, length) > self.size:
            return [figures(weights=held, cache=cache, refused="Ran out of memory")]
        return [figures(weights=held, cache=cache, temporaries=self.step * length // 128)]


@pytest.mark.parametrize("silent", [False, True], ids=["the compiler refuses", "it does not"])
@pytest.mark.parametrize("written", [100, 128, 1024, 1_000_000])
@pytest.mark.parametrize("step", [0, 5_000, 200_000])
def test_the_longest_cache_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, step: int, silent: bool
) -> None:
    config = load_config(decoder(tmp_path, kv_cache=f"{{sequences: 4, length: {written}}}"))
    device = Device(monkeypatch, 16 * MIB, held=3 * MIB, step=step, silent=silent)
    report = memory_report(config, TargetSpec("tpu", "v6e:1x1"))

    assert report.length is not None
    fits = [n for n in range(0, 20_000, 128) if device.needs(config.plan, n) <= 16 * MIB]
    assert report.exact
    assert report.length == fits[-1]
    assert report.length in device.lengths
    assert len(device.lengths) <= 11
    assert report.fits == (device.needs(config.plan, written) <= 16 * MIB)


def test_where_nothing_fits_the_length_is_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(decoder(tmp_path))
    Device(monkeypatch, 2 * MIB, held=3 * MIB, step=0, silent=False)
    report = memory_report(config, TargetSpec("tpu", "v6e:1x1"))

    assert (report.length, report.at_length, report.fits) == (0, None, False)
    with pytest.raises(errors.PlanError, match="nothing fits: weights, the banks of one adapter"):
        refuse_what_does_not_fit(config, report)


def test_more_than_the_share_is_refused_with_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(
        decoder(
            tmp_path,
            kv_cache="{sequences: 4, length: 6400}",
            limits="{hbm_fraction: 0.5}",
        )
    )
    Device(monkeypatch, 16 * MIB, held=3 * MIB, step=0, silent=False)
    report: MemoryReport = memory_report(config, TargetSpec("tpu", "v6e:1x1"))

    assert not report.fits
    with pytest.raises(errors.PlanError) as caught:
        refuse_what_does_not_fit(config, report)
    text = str(caught.value)
    assert caught.value.exit_code == errors.EXIT_USAGE
    assert "limits.hbm_fraction 0.5: 50% of 0.02 GiB" in text
    assert text.partition("next: ")[2].splitlines() == [
        "`kv_cache: {sequences: 4, length: 5120}` fits; "
        "so should `kv_cache: {sequences: 3, length: 6400}`",
        "    or `limits: {hbm_fraction: 0.58}` allows it",
    ]


def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str, *, silent: bool, **texts: str
) -> tuple[list[str], Device, Any]:
    """The changes named for 16 MiB, 3 of them held with banks of 17 blocks."""
    path = decoder(tmp_path, **texts)
    path.write_text(path.read_text().replace("  max_adapters: 4\n", lora))
    config = load_config(path)
    device = Device(monkeypatch, 16 * MIB, held=3 * MIB, step=5_000, silent=silent)
    report = memory_report(config, TargetSpec("tpu", "v6e:1x1"))
    with pytest.raises(errors.PlanError) as caught:
        refuse_what_does_not_fit(config, report)
    return str(caught.value.next_step).split("\n    or "), device, config.plan


@pytest.mark.parametrize("silent", [False, True], ids=["the compiler refuses", "it does not"])
@pytest.mark.parametrize("written", [False, True], ids=["max_adapters", "resident_lanes"])
def test_the_most_resident_lanes_that_fit_are_found(
    written: bool, silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = "  max_adapters: 500\n" + "  resident_lanes: 8000\n" * written
    (change,), device, plan = refused(tmp_path, monkeypatch, lora, silent=silent)
    fits = [
        blocks
        for blocks in range(1, 2001)
        if device.needs(replace(plan, bank_blocks=blocks), 48) <= 16 * MIB
    ]

    assert fits[-1] in device.blocks
    if written:
        assert change == f"`resident_lanes: {4 * (fits[-1] - 1)}` in lora fits"
    else:
        assert change == f"`max_adapters: {(fits[-1] - 1) // 4}` in lora fits"


@pytest.mark.parametrize("silent", [False, True], ids=["the compiler refuses", "it does not"])
def test_where_neither_alone_is_enough_both_are_lowered(
    silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = "{sequences: 4, length: 64000}"
    (change,), device, plan = refused(
        tmp_path, monkeypatch, "  max_adapters: 500\n", silent=silent, kv_cache=cache
    )
    few = replace(plan, bank_blocks=1 + 3 * 4)
    longest = max(n for n in range(128, 64000, 128) if device.needs(few, n) <= 16 * MIB)

    assert change == (
        "`resident_lanes: 48` in lora and "
        f"`kv_cache: {{sequences: 4, length: {longest}}}` fit together"
    )


@pytest.mark.parametrize(
    ("lora", "length", "said"),
    [
        # (31.24 GiB - 49,152 of cache) / 16,912 a block of 4 lanes, less the block of zeros
        (9_000_000, 48, "lora.resident_lanes of at most 7933684"),
        # (31.24 GiB - 5 blocks) / 1,024 a token
        (16, 99_999_999, "a kv_cache.length of at most 32757431"),
        (9_000_000, 99_999_999, "fewer resident lanes and a shorter cache"),
    ],
)
def test_banks_and_a_cache_that_can_never_fit_are_refused_without_a_compile(
    lora: int, length: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = f"{{sequences: 4, length: {length}}}"
    path = decoder(tmp_path, kv_cache=cache, target=V6E.partition(": ")[2])
    lanes = f"  max_adapters: 4\n  resident_lanes: {lora}\n"
    path.write_text(path.read_text().replace("  max_adapters: 4\n", lanes))

    assert run(["plan", str(path)]) == errors.EXIT_USAGE
    captured = capsys.readouterr()
    assert "estimate of a cold warmup" in captured.out  # what is known is said first
    assert "the banks and the cache alone need more memory" in captured.err
    assert f"next: ask for {said}; `plan --memory` finds what fits" in captured.err


def test_a_fraction_above_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="hbm_fraction"):
        load_config(decoder(tmp_path, limits="{hbm_fraction: 1.5}"))


def test_the_table_knows_tpus_alone() -> None:
    assert hbm_bytes(TargetSpec("tpu", "v5e:2x2", 4)) == int(15.75 * GIB)
    assert hbm_bytes(TargetSpec("cuda", "h200", target_config=H200)) == 150109880320 * 3 // 4
    assert hbm_bytes(TargetSpec("cpu")) == hbm_bytes(TargetSpec("cuda")) == 0
