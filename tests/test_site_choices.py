"""What `plan` says of the forms of a decoder's steps, and that the steps use the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from aot_lora import load_config
from aot_lora.cli.main import run
from aot_lora.config.tables import Row, Table
from aot_lora.decoder import choices, lora, mixed_step, programs
from aot_lora.kernels.sizes import Sizes
from aot_lora.plan import TargetSpec
from aot_lora.programs.mesh import abstract_mesh
from aot_lora.programs.spec import Context, Point

CONFIG = """\
model: tiny
target: {platform: cpu}
mesh: {{tp: {tp}}}
lora: {{modules: [q_proj, v_proj, o_proj, up_proj, lm_head], ranks: [8], slots: [0, 2], \
max_adapters: 2, dtype: float32}}
tokens: {{budget: 16, buckets: [4, 16]}}
kv_cache: {{sequences: 4, length: 48}}
programs: [{{entry: "aot_lora.decoder:mixed_step"}}]
"""
TABLE = Table(
    hardware="tiny",
    source="a test",
    rows=(
        Row(tokens=4, lanes=16, d=64, o=64, most=2, us={"gather": 1.0, "laned": 2.0}),
        Row(tokens=16, lanes=16, d=64, o=64, most=2, us={"ragged": 1.0, "laned": 2.0}),
    ),
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    for module in (choices, programs):
        monkeypatch.setattr(module, "table_of", lambda _: TABLE)

    def made(tp: int) -> Path:
        path = tmp_path / "a.yaml"
        path.write_text(CONFIG.replace("{platform: cpu}", "{{platform: cpu}}").format(tp=tp))
        return path

    return made


@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_asks_for_the_forms_that_the_plan_shows(
    config: Callable[[int], Path], tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_config(config(tp))
    target = loaded.targets[0]
    shown = {one.sizes for one in choices.site_choices(loaded.plan, target)}
    asked: set[Sizes] = set()
    choose = lora.choose

    def recorded(table: Any, sizes: Sizes, platform: str) -> Any:
        asked.add(sizes)
        return choose(table, sizes, platform)

    monkeypatch.setattr(lora, "choose", recorded)
    context = Context(plan=loaded.plan, target=target, mesh=abstract_mesh(tp))
    for tokens in loaded.plan.tokens.buckets:
        program = mixed_step(Point(tokens=tokens, lanes=16), context)
        jax.jit(program.fn).trace(*program.args)

    assert asked == shown
    assert {sizes.stacked for sizes in asked} == {True, False}  # The head is no part of the stack.


def test_the_forms_of_a_gpus_steps_are_not_stacked(config: Callable[[int], Path]) -> None:
    plan = load_config(config(1)).plan
    found = choices.site_choices(plan, TargetSpec(platform="cuda"))

    assert not any(one.sizes.stacked for one in found)


def test_plan_shows_form_and_reason(
    config: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(config(1))]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "us at" in line]

    assert [line[:7] for line in lines if line[0] == "q_proj+v_proj"] == [
        ["q_proj+v_proj", "4", "16", "gather", "1", "us", "at"],
        ["q_proj+v_proj", "16", "16", "ragged", "1", "us", "at"],
    ]
    assert {line[0] for line in lines} == {"o_proj", "q_proj+v_proj", "up_proj", "lm_head"}

    assert run(["plan", str(config(1)), "--format", "json"]) == 0
    forms = json.loads(capsys.readouterr().out)["forms"]["cpu"]
    assert {one["form"] for one in forms} == {"gather", "ragged"}
    assert {tuple(one["modules"]) for one in forms} == {
        ("q_proj", "v_proj"),
        ("o_proj",),
        ("up_proj",),
        ("lm_head",),
    }
