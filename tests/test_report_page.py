"""The page of `aot-lora report`: valid, whole, accessible, escaped; and where it is written."""

import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import TRACE, elements, facts_of, parsed, reported, tables, text
from syrupy.assertion import SnapshotAssertion

from aot_lora.cli.main import run
from aot_lora.errors import EXIT_OK, EXIT_USAGE
from aot_lora.report import Finding, Held, render

HOSTILE = "</title></style><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}<script>alert(1)</script>"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


# --- A good page ---------------------------------------------------------------------------------


@pytest.fixture
def page(served: Path, trace: Path, tmp_path: Path) -> Any:
    return reported(served, tmp_path, "--traffic", trace, "--sequences", 4)


def test_the_structure(page: Any, snapshot: SnapshotAssertion) -> None:
    outline = [(e.tag, text(e)) for e in elements(page) if e.tag in ("h1", "h2", "h3")]
    heads = [" | ".join(table.heads) for table in tables(page) if table.heads[0] != "Variant"]

    assert [outline, heads] == snapshot


def test_nothing_is_loaded_and_nothing_runs(page: Any) -> None:
    (policy,) = (e for e in elements(page, "meta") if "Policy" in e.get("http-equiv", ""))
    assert policy.get("content", "").startswith("default-src 'none'; style-src 'sha256-")
    assert not {e.tag for e in elements(page)} & {"script", "img", "link", "iframe", "form"}
    for element in elements(page):
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert name != "style"
            if "href" in name or name == "src":
                assert value.startswith("#")
    (style,) = elements(page, "style")
    assert not re.search(r"url\(|@import|https?:", style.text or "")


def test_it_reads_without_eyes(page: Any) -> None:
    (html,) = elements(page, "html")
    assert html.get("lang") == "en"
    ids = {e.get("id") for e in elements(page)}
    for element in elements(page, "a"):
        assert element.get("href", "")[1:] in ids
    first = elements(page, "a")[0]
    assert (first.get("class"), first.get("href")) == ("skip", "#main")
    for table in elements(page, "table"):
        assert all(cell.get("scope") in ("col", "row") for cell in elements(table, "th"))
    for svg in elements(page, "svg"):
        if svg.get("role") == "img":
            names = svg.get("aria-labelledby", "").split()
            assert len(names) == 2
            assert set(names) <= ids
    for region in (e for e in elements(page) if e.get("role") == "region"):
        assert (region.get("tabindex"), bool(region.get("aria-label"))) == ("0", True)


def test_hostile_names_stay_names(trace: Path, tmp_path: Path, tiny_config: Path) -> None:
    name = HOSTILE.replace("/", "_")
    folder = tmp_path / name[:80]
    folder.mkdir()
    config, hostile = folder / f"{name[:90]}.yaml", folder / f"{name[:90]}.csv"
    config.write_text(
        tiny_config.read_text()
        .replace("buckets: [8]", "buckets: pow2")
        .replace("budget: 8", "budget: 64")
    )
    hostile.write_text(trace.read_text())
    tree = reported(config, tmp_path, "--traffic", hostile)

    assert text(elements(tree, "h1")[0]) == f"Plan of {config.name}"
    assert hostile.name in text(tree)
    assert not elements(tree, "img") + elements(tree, "script")


def test_hostile_values_stay_values(tiny_config: Path) -> None:
    shown = facts_of(tiny_config)
    plan = replace(
        shown.plan, variants=tuple(v._replace(program=HOSTILE) for v in shown.plan.variants)
    )
    target = replace(
        shown.targets[0],
        name=HOSTILE,
        held={v.name: Held(key=HOSTILE, bytes=1, seconds=None) for v in plan.variants},
        forms=((HOSTILE,) * 5,),
        form_names={(8, 8): (HOSTILE,)},
    )
    page = render(
        replace(
            shown,
            plan=plan,
            targets=(target,),
            config=HOSTILE,
            store=HOSTILE,
            by=HOSTILE,
            programs=((HOSTILE,) * 3,),
            findings=(Finding(kind="lint", text=HOSTILE, more=(HOSTILE,)),),
        )
    )
    tree = parsed(page)

    assert not elements(tree, "img") + elements(tree, "script")
    assert not [a for e in elements(tree) for a in e.attrib if a.startswith("on")]
    assert "{{ 7 * 7 }}" in text(tree)
    assert text(elements(tree, "title")[0]) == " ".join(f"Plan of {HOSTILE}".split())


def test_whose_home_it_was_is_not_told(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for home, said in ((tmp_path, "~/store"), (Path("/"), str(tmp_path / "store"))):
        monkeypatch.setenv("HOME", str(home))
        assert f"Store: {said}." in text(reported(tiny_config, tmp_path))


# --- Where it goes -------------------------------------------------------------------------------


def test_stdout_and_summaries(
    tiny_config: Path, tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run(["report", str(tiny_config), "-o", "-"]) == EXIT_OK
    parsed(capsysbinary.readouterr().out.decode())
    target = tmp_path / "plan.html"
    assert run(["report", str(tiny_config), "-o", str(target), "--format", "json"]) == EXIT_OK
    (line,) = capsysbinary.readouterr().out.splitlines()
    found = json.loads(line)
    assert list(found) == ["path", "bytes", "points", "variants", "compiled", "findings"]
    assert (found["bytes"], found["variants"]) == (target.stat().st_size, 13)
    assert run(["report", str(tiny_config), "-o", str(target)]) == EXIT_OK
    assert b"plan.html: 3 points, 13 variants, 0 compiled, " in capsysbinary.readouterr().out


def test_what_is_there_is_replaced_whole_and_through_a_link(
    tiny_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "real.html", tmp_path / "plan.html"
    target.write_text("before")
    link.symlink_to(target)
    reported(tiny_config, tmp_path)
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    target.write_text("before")
    monkeypatch.setattr(Path, "write_bytes", full)
    assert run(["report", str(tiny_config), "-o", str(link)]) == EXIT_USAGE
    assert target.read_text() == "before"
    assert not list(tmp_path.glob(".*.new"))


def test_a_device_is_written_to_and_not_replaced(tiny_config: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    assert run(["report", str(tiny_config), "-o", str(pipe)]) == EXIT_OK
    reader.join(10)

    assert pipe.is_fifo()
    assert found[0].startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    ("output", "options", "said"),
    [
        ("", (), "the output is a folder\n  expected: a file's name\n  next: name"),
        ("none/plan.html", (), "none: no such folder\n  next: make it, or name another"),
        ("tiny.yaml", (), "tiny.yaml: the output is what the report is made of"),
        ("trace.csv", ("--traffic", "trace.csv"), "the output is what the report is made of"),
        ("-", ("--format", "json"), "-o -: both the page and its summary on stdout"),
        ("plan.html", ("--sequences", "3"), "--sequences needs a trace"),
        ("plan.html", ("--traffic", "none.csv"), "none.csv: cannot be read: No such file"),
        ("plan.html", ("--memory", "--nonsense"), "No such option"),
    ],
)
def test_what_is_refused(
    output: str,
    options: tuple[str, ...],
    said: str,
    tiny_config: Path,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = trace.read_text(), tiny_config.read_text()

    code = run(["report", str(tiny_config), "-o", output or str(tmp_path), *options])

    assert code == EXIT_USAGE
    assert said in capsys.readouterr().err
    assert (trace.read_text(), tiny_config.read_text()) == before
    assert not list(tmp_path.glob("*.html"))
