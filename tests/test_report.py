"""`aot-lora report`: what the page says is what `plan` and the store say."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoding import DECODER
from pages import TRACE, elements, facts, facts_of, parsed, reported, table_of, tables, text
from serving import edit_manifest, store_of

from aot_lora import load_config
from aot_lora.cli.main import run
from aot_lora.errors import EXIT_OK, EXIT_USAGE
from aot_lora.plan.memory import Measured
from aot_lora.report import Held, render
from aot_lora.report.grid import MOST_LINES


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


# --- The numbers are those of `plan` -------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["plan", *map(str, arguments), "--format", "json"]) == EXIT_OK
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "preset", ["cpu/quickstart", "tpu-v6e/llama-3.1-8b", "gpu-h200/llama-3.1-8b"]
)
def test_the_numbers_of_a_plan(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = reported(preset, tmp_path, "--store", tmp_path / "none")
    plan = planned(capsys, preset)
    found = facts(tree)

    assert (found["Points"], found["Variants"]) == (plan["points"], plan["variants"])
    assert (found["Compiled"], found["Cold warmup"]) == (0, plan["seconds"])
    (estimated,) = (e for e in elements(tree, "data") if e.get("id") == "estimated-bytes")
    assert int(estimated.get("value", "")) == plan["bytes"]
    assert [row[:2] for row in table_of(tree, "Tokens|Padding, of all rows").values] == [
        (waste["bucket_tokens"], waste["waste"]) for waste in plan["waste"]
    ]


def test_the_numbers_of_a_trace(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--traffic", trace, "--sequences", 8)
    tree = reported("cpu/quickstart", tmp_path, *options)
    plan = planned(capsys, "cpu/quickstart", *options)
    uses = plan["traffic"]["tokens"]

    shown = table_of(tree, "Tokens|Steps")
    assert [(v[0], v[1], v[3], v[4], v[-1]) for v in shown.values] == [
        (u["bucket_tokens"], u["steps"], u["waste"], u["padding"], u["executables"]) for u in uses
    ]
    assert [v[5] for v in shown.values[:-1]] == [u["gain"] for u in uses[:-1]]
    assert shown.rows[-1][5] == "last bucket"
    real = sum(u["bucket_tokens"] * u["steps"] / (1 + u["waste"]) for u in uses)
    padded = sum(u["bucket_tokens"] * u["steps"] for u in uses)
    assert facts(tree)["Padding"] == pytest.approx(padded / real - 1, abs=1e-3)
    assert [lint["text"] for lint in plan["lints"]] == [
        text(e)[len("Lint ") :].strip() for e in elements(tree, "li") if e.get("class") == "lint"
    ]
    assert f"{plan['traffic']['requests']} requests of trace.csv" in text(tree)


@pytest.mark.parametrize("of", ["steps", "prompts"])
def test_a_trace_that_the_config_names_is_shown_unasked(
    of: str, trace: Path, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    fitted = f"{{fit: {trace.name}, count: 3, of: {of}, sequences: 4}}"
    config = write_config(tokens=f"{{budget: 64, buckets: {fitted}}}")
    shown = table_of(reported(config, tmp_path), f"Tokens|{of.capitalize()}")

    assert len(shown.rows) == 3
    assert sum(v[1] for v in shown.values) == 40 or of == "steps"


def test_the_numbers_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "decoder.yaml"
    config.write_text(DECODER)
    sizes = {
        "weights": 9000,
        "banks": 800,
        "cache": 700,
        "temporaries": 60,
        "code": 5,
        "outputs": 4,
    }
    variant = load_config(config).plan.variants[0]
    monkeypatch.setattr(
        "aot_lora.warmup.memory.measure_all", lambda *_: [Measured(variant=variant, **sizes)]
    )
    tree = reported(config, tmp_path, "--memory")
    found = planned(capsys, config, "--memory")["memory"]["cpu"]
    shown = {row[0]: values[0] for row, values in _budget(tree)}

    names = {"Weights": "weights", "Adapter banks": "banks", "KV cache": "cache",
             "Largest temporaries": "temporaries", "Code": "code", "Other arguments": "others",
             "Results": "outputs", "Total": "total"}  # fmt: skip
    assert shown == {name: found[key] for name, key in names.items() if found[key]}
    assert "By the compiler's own analysis" in text(tree)
    forms = table_of(tree, "Modules|Tokens")
    assert {row[3] for row in forms.rows} == {"laned"}


def _budget(tree: Any) -> list[tuple[tuple[str, ...], tuple[float, ...]]]:
    shown = table_of(tree, "Part|Bytes")
    return list(zip(shown.rows, shown.values, strict=True))


# --- What is compiled ----------------------------------------------------------------------------


def test_the_grid_says_what_is_compiled(served: Path, tmp_path: Path) -> None:
    tree = reported(served, tmp_path)
    plan = load_config(served).plan
    (grid,) = (table for table in tables(tree) if table.heads[-1] == "All")

    assert facts(tree)["Compiled"] == len(plan.variants)
    assert grid.heads[1] == "no adapters"
    assert [row[0] for row in grid.rows] == ["4", "16", "any: banks"]
    assert all(cell.startswith("✓") for row in grid.rows for cell in row[1:] if "✓" in cell)
    counts = [int(found) for row in grid.rows for found in re.findall(r"✓ (\d+)", row[-1])]
    assert sum(counts) == len(plan.variants)
    lines = [row for t in tables(tree) if t.heads[0] == "Variant" for row in t.rows]
    assert sorted(row[0] for row in lines) == sorted(v.name for v in plan.variants)
    assert {row[1] for row in lines} == {"✓ compiled"}
    # Variants that share a file were compiled once.
    assert {row[3].endswith(" s") for row in lines if ", of " not in row[4]} == {True}
    assert sum(row[3] == "" for row in lines) <= len(lines) - len({row[4][:8] for row in lines})


def test_a_file_that_is_gone_and_an_older_manifest_are_seen(served: Path, tmp_path: Path) -> None:
    shutil.copytree(served.parent, tmp_path, dirs_exist_ok=True)
    config = tmp_path / served.name
    before = facts(reported(config, tmp_path))["Compiled"]
    next(iter((tmp_path / "store/artifacts").rglob("*.aot"))).unlink()
    edit_manifest(config, lambda value: [e.pop("seconds") for e in value["entries"]])
    tree = reported(config, tmp_path)

    after = facts(tree)["Compiled"]
    assert before is not None
    assert after is not None
    assert after < before
    assert "have lost their files" in text(tree)
    assert "of workers" not in text(tree)
    assert any("◐" in cell for table in tables(tree) for row in table.rows for cell in row)


def test_without_a_warmup_the_page_says_what_to_run(tiny_config: Path, tmp_path: Path) -> None:
    tree = reported(tiny_config, tmp_path)

    assert facts(tree)["Compiled"] == 0
    assert "next: run `aot-lora warmup" in text(tree)
    assert store_of(tiny_config).root.exists() is False


def test_where_the_store_cannot_be_asked_the_state_is_unknown(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aot_lora.errors import UnsupportedError

    def missing(*_: object) -> None:
        raise UnsupportedError("libtpu is not installed")

    monkeypatch.setattr("aot_lora.cli.gather.WarmIdentity.of", missing)
    tree = reported(tiny_config, tmp_path)

    assert facts(tree)["Compiled"] is None
    assert "libtpu is not installed" in text(tree)
    assert "? unknown" in text(tree)


# --- Over limits, several targets, thousands -----------------------------------------------------


def test_a_plan_over_its_limits_is_drawn_and_then_refused(
    write_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(limits="{variants: 3}")
    tree = reported(config, tmp_path, code=EXIT_USAGE)

    assert "the plan has too many variants" in capsys.readouterr().err
    assert facts(tree)["Variants"] == 13
    assert [text(e)[:7] for e in elements(tree, "li") if e.get("class") == "refused"] == ["Refused"]


def test_memory_that_does_not_fit_is_refused_on_the_page_too(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_config()
    variant = load_config(config).plan.variants[0]
    figures = [Measured(variant=variant, weights=0, banks=2**30, cache=0, temporaries=7)]
    monkeypatch.setattr("aot_lora.warmup.memory.measure_all", lambda *_: figures)
    monkeypatch.setattr("aot_lora.warmup.memory.hbm_bytes", lambda _: 2**29)
    tree = reported(config, tmp_path, "--memory", code=EXIT_USAGE)

    assert "the plan needs more memory than a device may give it" in text(tree)
    assert "more than is allowed." in text(tree)
    assert "The model's weights are not in it" in text(tree)
    assert facts(tree)["Device memory"] == sum(v[0] for _, v in _budget(tree)[:-1])


def test_what_is_declared_alone_may_be_too_much(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(
        model="llama-3.1-70b",
        target='[{platform: tpu, topology: "v5e:1x1"}, {platform: cpu}]',
        lora="{ranks: [8], slots: [1], max_adapters: 1, dtype: bfloat16}",
    )
    tree = reported(config, tmp_path)

    assert "tpu v5e:1x1: weights, banks and cache alone take" in text(tree)
    assert {text(e) for e in elements(tree, "h3")} >= {"tpu v5e:1x1", "cpu"}
    assert "Device memory, tpu v5e:1x1" in facts(tree)


def test_two_thousand_variants_stay_below_two_megabytes(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(
        model="llama-3.1-8b",
        tokens="{budget: 2048, buckets: {step: 32}}",
        lora="{ranks: [8, 16, 64], slots: [1, 2, 4], max_adapters: 4, dtype: bfloat16}",
        limits="{variants: 10000, store_bytes: 80GiB}",
    )
    shown = facts_of(config)
    held = {v.name: Held(key=f"{n:040x}", bytes=10**6 + n, seconds=1.25 + n / 7)
            for n, v in enumerate(shown.plan.variants)}  # fmt: skip
    page = render(replace(shown, targets=(replace(shown.targets[0], held=held),)))

    assert len(held) > 2_000
    assert len(page.encode()) < 2_000_000
    (grid,) = (table for table in tables(parsed(page)) if table.heads[-1] == "All")
    assert len(grid.rows) <= 25


def test_more_than_can_be_read_is_counted_and_not_listed(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    config = write_config(
        tokens="{budget: 400, buckets: {step: 1}}",
        lora="{ranks: [8], slots: [1, 2, 3], max_adapters: 4, dtype: bfloat16}",
    )
    tree = reported(config, tmp_path, code=EXIT_USAGE)

    assert (facts(tree)["Variants"] or 0) > MOST_LINES
    assert not [table for table in tables(tree) if table.heads[0] == "Variant"]
    assert "too many for one page" in text(tree)
