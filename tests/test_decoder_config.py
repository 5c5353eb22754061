"""How a config comes by a decoder, what is refused, and what its plan's identity depends on."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from decoding import DECODER
from serving import write

from aot_lora import errors, load_config
from aot_lora.config import preset_names
from aot_lora.plan import DecoderShape, KvCache, Module, RopeScaling, TargetSpec, Variant
from aot_lora.programs import sources
from aot_lora.programs.catalog import Catalog

STEPS = '[lora, {entry: "aot_lora.decoder:mixed_step"}, {entry: "aot_lora.decoder:decode_step"}]'
NAMED = """\
model: {model}
target: {{platform: cpu}}
lora: {{ranks: [8], slots: [0, 1], max_adapters: 1}}
tokens: {{budget: 32, buckets: pow2}}
kv_cache: {{sequences: 16, length: 2048}}
programs: {steps}
"""
LLAMA_3 = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)


@pytest.fixture
def decoder(tmp_path: Path) -> Callable[..., Path]:
    """Writes `DECODER` with texts replaced."""

    def made(*changes: tuple[str, str]) -> Path:
        text = DECODER
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        return write(tmp_path / "decoder.yaml", text)

    return made


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("llama-3.1-8b", (4096, 32, 8, 128, 14336, 128256, 1e-5, 500000.0, LLAMA_3)),
        ("llama-3.1-70b", (8192, 64, 8, 128, 28672, 128256, 1e-5, 500000.0, LLAMA_3)),
        ("tiny", (64, 4, 2, 16, 128, 256, 1e-5, 10000.0, None)),
    ],
)
def test_a_named_model_brings_its_decoder(tmp_path: Path, model: str, shape: tuple) -> None:
    """The numbers are of each model's config.json."""
    text = NAMED.format(model=model, steps=STEPS)
    plan = load_config(write(tmp_path / "named.yaml", text)).plan
    names = ("hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    names = (*names, "norm_eps", "rope_theta", "rope_scaling")

    assert plan.decoder == DecoderShape(**dict(zip(names, shape, strict=True)))
    assert plan.cache == KvCache(sequences=16, length=2048)
    assert Variant(program="mixed_step", tokens=16) in plan.variants


def test_a_plan_without_a_cache_has_no_decoder(tmp_path: Path) -> None:
    text = NAMED.format(model="tiny", steps="[lora]")
    without = text.replace("kv_cache: {sequences: 16, length: 2048}\n", "")

    assert load_config(write(tmp_path / "a.yaml", without)).plan.decoder is None
    assert all(load_config(name).plan.decoder is None for name in preset_names())


def test_a_written_out_decoder_brings_its_head_as_one_layer(decoder: Callable[..., Path]) -> None:
    assert load_config(decoder()).plan.modules[-1] == Module(name="lm_head", d=32, o=97, layers=1)
    linear = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head]"
    plan = load_config(decoder((linear, "all-linear"))).plan
    assert "lm_head" not in {module.name for module in plan.modules}


def test_the_cache_and_the_decoder_are_part_of_the_plans_digest(
    decoder: Callable[..., Path],
) -> None:
    changes = [
        ("norm_eps: 1.0e-5", "norm_eps: 1.0e-6"),
        ("length: 48", "length: 64"),
        ("factor: 8.0", "factor: 4.0"),
        ("original_length: 16", "original_length: 16}\n  tied: true #"),
    ]
    digests = {load_config(decoder(change)).plan.digest() for change in changes}
    assert len(digests | {load_config(decoder()).plan.digest()}) == 5


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (
            ("q_proj: [32, 32]", "q_proj: [32, 64]"),
            ["decoder.yaml:1:9: `q_proj` does not have", "expected: [32, 32], from `decoder:`"],
        ),
        (
            ("q_proj: [32, 32]", "qkv_proj: [32, 64]"),
            ["decoder.yaml:1:9: the decoder has no module `qkv_proj`"],
        ),
        (
            ("q_proj: [32, 32]", "lm_head: [32, 97]"),
            ["decoder.yaml:1:9: `lm_head` beside a decoder", "name it in lora.modules"],
        ),
        (("kv_heads: 2", "kv_heads: 3"), [":4:1: `decoder`: 3 kv_heads cannot be shared by 4"]),
        (("head_dim: 8", "head_dim: 7"), ["`decoder`: head_dim 7 is odd"]),
        (("high_freq_factor: 4.0", "high_freq_factor: 1.0"), ["`decoder.rope_scaling`: low_freq"]),
        (("vocab: 97", "vocabulary: 97"), ["unknown key `vocabulary`", "did you mean `vocab`?"]),
        (("length: 48", "lenght: 48"), ["unknown key `lenght`", "did you mean `length`?"]),
        (("sequences: 4", "sequences: 0"), ["`kv_cache.sequences` is not right"]),
        (("norm_eps: 1.0e-5", "norm_eps: 1e-5"), ["`decoder.norm_eps` is not right"]),
    ],
)
def test_a_decoder_that_contradicts_itself_is_refused_with_its_place(
    decoder: Callable[..., Path], change: tuple[str, str], lines: list[str]
) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        load_config(decoder(change))
    assert all(line in str(caught.value) for line in lines), str(caught.value)


def test_a_decoder_beside_a_named_model_is_refused(tmp_path: Path) -> None:
    section = DECODER[DECODER.index("decoder:") : DECODER.index("kv_cache")]
    text = NAMED.format(model="tiny", steps="[lora]") + section

    with pytest.raises(errors.ConfigError, match="`decoder` beside a named model"):
        load_config(write(tmp_path / "a.yaml", text))


def test_a_cache_for_no_decoder_is_refused(tmp_path: Path) -> None:
    text = NAMED.format(model="{q_proj: [16, 16]}", steps="[lora]")

    with pytest.raises(errors.ConfigError, match="expected: a `decoder:` section with its sizes"):
        load_config(write(tmp_path / "a.yaml", text))


@pytest.mark.parametrize("program", ["mixed_step", "decode_step"])
def test_a_step_without_a_cache_says_what_to_add(
    decoder: Callable[..., Path], program: str
) -> None:
    config = load_config(decoder(("kv_cache: {sequences: 4, length: 48}\n", "")))
    catalog = Catalog(config.plan, TargetSpec(platform="cpu"), config=config.path)

    with pytest.raises(errors.ProgramError) as caught:
        catalog.program(Variant(program=program, tokens=4))
    assert "expected: `kv_cache: {sequences: .., length: ..}` in the config" in str(caught.value)
    assert "next: add `kv_cache:`" in str(caught.value)


# --- Whose sources count ------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of aot-lora's sources that stands for the running one, to change."""
    copy = shutil.copytree(Path(sources.__file__).parents[1], tmp_path / "aot_lora")
    monkeypatch.setattr(sources, "_PACKAGE", copy)
    return copy


def test_the_decoders_sources_count_only_for_plans_that_use_it(
    decoder: Callable[..., Path], tiny_config: Path, package: Path
) -> None:
    used, unused = load_config(decoder()), load_config(tiny_config)

    def digests() -> list[dict[str, str]]:
        return [
            sources.source_digests(one.plan, config=one.path, extra=()) for one in (used, unused)
        ]

    before = digests()
    assert set(before[0]) == {"source of aot_lora", "source of aot_lora.decoder"}
    assert set(before[1]) == {"source of aot_lora"}
    for file, moves in {
        "decoder/rope.py": True,
        "plan/decoder.py": True,
        "cli/main.py": False,
        "runtime/runtime.py": False,
    }.items():
        (package / file).write_text((package / file).read_text() + "\n")
        after = digests()
        assert (after[0] != before[0], after[1] != before[1]) == (moves, False), file
        before = after


def test_another_aot_lora_beside_the_config_is_not_taken_for_this_one(
    decoder: Callable[..., Path], tmp_path: Path
) -> None:
    config = load_config(decoder())
    expected = sources.source_digests(config.plan, config=config.path, extra=())
    (tmp_path / "aot_lora").mkdir()
    (tmp_path / "aot_lora/__init__.py").write_text("raise SystemExit\n")

    assert sources.source_digests(config.plan, config=config.path, extra=()) == expected
    catalog = Catalog(config.plan, config.targets[0], config=config.path)
    assert catalog.program(Variant(program="decode_step", tokens=4)).donate == (1,)
    assert str(tmp_path) not in sys.path  # worker processes inherit it


def test_an_own_module_that_does_not_exist_is_named(decoder: Callable[..., Path]) -> None:
    config = load_config(decoder(("aot_lora.decoder:mixed_step", "aot_lora.decodr:mixed_step")))

    with pytest.raises(errors.ProgramError, match="aot-lora has no module `aot_lora"):
        sources.source_digests(config.plan, config=config.path, extra=())
