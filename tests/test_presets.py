"""The presets: each loads, has a current lock, and has the shapes that the models have."""

import pytest

from aot_lora.config import load_config, preset_names
from aot_lora.config.presets import presets_root
from aot_lora.lowering.lock import read_lock
from aot_lora.plan import Module
from aot_lora.targets.identity import TPU_KINDS

# config.json of each model: hidden_size, num_attention_heads, num_key_value_heads, head_dim,
# intermediate_size, num_hidden_layers, vocab_size.
PUBLISHED = {
    "llama-3.1-8b": (4096, 32, 8, 128, 14336, 32, 128256),
    "llama-3.1-70b": (8192, 64, 8, 128, 28672, 80, 128256),
    "tiny": (64, 4, 2, 16, 128, 2, 256),
}
MINIMAL = """\
model: {model}
target: {{platform: cpu}}
lora: {{modules: {modules}, ranks: [8], slots: [1], max_adapters: 1}}
tokens: {{budget: 16, buckets: pow2}}
"""


def test_there_are_the_presets_that_the_readme_promises() -> None:
    assert preset_names() == (
        "cpu/quickstart",
        "gpu-h200/llama-3.1-8b",
        "tpu-v5e/llama-3.1-8b",
        "tpu-v6e/llama-3.1-8b",
    )


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_loads_without_a_warning_and_its_lock_is_of_its_plan(name: str) -> None:
    config = load_config(name)
    lock = read_lock(config.lock_path)
    variants = {variant.name for variant in config.plan.variants}

    assert config.warnings == ()
    assert lock.plan == config.plan.digest()
    assert {str(target): variants for target in config.targets} == {
        target: set(lines) for target, lines in lock.traces.items()
    }


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_found_by_name_by_file_and_by_its_path_in_the_checkout(name: str) -> None:
    ways = (name, f"{name}.yaml", f"buckets/{name}.yaml", presets_root() / f"{name}.yaml")

    assert len({load_config(way).path.resolve() for way in ways}) == 1


@pytest.mark.parametrize("name", [name for name in preset_names() if name.startswith("tpu-")])
def test_a_tpu_preset_is_for_the_tpu_that_its_folder_names(name: str) -> None:
    (target,) = load_config(name).targets
    kind = target.topology.partition(":")[0]

    assert name.startswith(f"tpu-{kind}/")
    assert kind in TPU_KINDS


@pytest.mark.parametrize("model", sorted(p.stem for p in (presets_root() / "models").iterdir()))
def test_module_shapes_are_those_of_the_published_model(model: str, tmp_path) -> None:
    hidden, heads, kv_heads, head, inner, layers, vocabulary = PUBLISHED[model]
    shapes = {
        "q_proj": (hidden, heads * head),
        "k_proj": (hidden, kv_heads * head),
        "v_proj": (hidden, kv_heads * head),
        "o_proj": (heads * head, hidden),
        "gate_proj": (hidden, inner),
        "up_proj": (hidden, inner),
        "down_proj": (inner, hidden),
    }
    expected = tuple(
        Module(name=n, d=d, o=o, layers=layers, split="d" if n in ("o_proj", "down_proj") else "o")
        for n, (d, o) in shapes.items()
    )
    path = tmp_path / "x.yaml"

    path.write_text(MINIMAL.format(model=model, modules="all-linear"))
    plan = load_config(path).plan
    assert (plan.modules, plan.layers) == (expected, layers)
    path.write_text(MINIMAL.format(model=model, modules="[lm_head, q_proj]"))
    assert load_config(path).plan.modules == (
        Module(name="lm_head", d=hidden, o=vocabulary, layers=1),
        expected[0],
    )
