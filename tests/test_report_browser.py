"""The page of `aot-lora report` in a real Chromium: it draws, loads nothing, and is accessible.

Skipped, and said so, where there is no Chromium or the extra `browser` is not installed.
`tools/test` brings both where it may.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aot_lora import load_config
from aot_lora.cli.gather import gather
from aot_lora.config.load import read
from aot_lora.plan.memory import Memory
from aot_lora.report import Finding, MemoryFacts, render

playwright = pytest.importorskip(
    "playwright.sync_api", reason="not run: no playwright, see the extra `browser`"
)
axe = pytest.importorskip(
    "axe_playwright_python.sync_playwright", reason="not run: no axe, see the extra `browser`"
)
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="not run: no Chromium, `apt install chromium`"
)

GIB = 2**30
WIDE, NARROW = 1200, 360


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def html(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything that one can have."""
    folder = tmp_path_factory.mktemp("report")
    trace = folder / "trace.csv"
    rows = (f"{at},{1 + 7 * at % 41},{5 + at % 9}\n" for at in range(40))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    facts = gather(load_config(served), traffic=trace, sequences=4, measured=())
    (target,) = facts.targets
    held = dict(list((target.held or {}).items())[5:])  # some points in part, one not at all
    memory = Memory(
        weights=9 * GIB, banks=2 * GIB, cache=4 * GIB, others=GIB // 9, outputs=GIB // 9,
        temporaries=GIB, code=GIB // 3, measured=("step/t16-l256",),
    )  # fmt: skip
    shown = replace(
        target,
        held=held,
        forms=(("up+gate", "4 to 16", "8", "laned (block=128)", "2 us, the least of 3"),),
        form_names={(4, 8): ("laned",), (16, 8): ("laned", "segments")},
        memory=MemoryFacts(memory=memory, device=16 * GIB, allowed=15 * GIB, longest=4096),
    )
    kinds = ("refused", "warning", "lint", "store")
    findings = [Finding(kind=kind, text=f"a {kind} finding", more=("next: ...",)) for kind in kinds]
    path = folder / "plan.html"
    path.write_text(render(replace(facts, targets=(shown,), findings=(*findings, *findings))))
    return path


class Opened:
    """A page in the browser, and what it said and asked for."""

    def __init__(self, browser: Any, html: Path, width: int = WIDE, scheme: str = "light") -> None:
        self.page = browser.new_page(
            viewport={"width": width, "height": 800}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(html.as_uri())

    def __call__(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_it_draws_and_nothing_is_wrong_with_it(
    width: int, scheme: str, browser: Any, html: Path, tmp_path: Path
) -> None:
    opened = Opened(browser, html, width, scheme)
    opened("document.querySelectorAll('details').forEach(e => e.open = true)")
    found = axe.Axe().run(opened.page)

    assert found.violations_count == 0, found.generate_report()
    assert len(found.response["passes"]) > 20
    assert opened.asked == [html.as_uri()]
    assert opened.said == []
    assert opened("document.documentElement.scrollWidth <= innerWidth")
    shown = opened("[...document.querySelectorAll('svg.chart')].map(e => e.clientWidth > 0)")
    assert shown == [width == WIDE, width == NARROW]
    back = opened("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (scheme == "light")
    picture = opened.page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
    assert len(picture) > 50_000  # a page in one colour has a tenth of it


def test_a_bare_page_has_no_fault_either(
    browser: Any, write_config: Callable[..., Path], tmp_path: Path
) -> None:
    targets = '[{platform: cpu}, {platform: tpu, topology: "v6e:1x1"}]'
    config = read(
        write_config(target=targets, limits="{variants: 3}", programs='[lora, {entry: "a:b"}]')
    )
    html = tmp_path / "bare.html"
    html.write_text(render(gather(config, traffic=None, sequences=None, measured=())))
    opened = Opened(browser, html)
    opened("document.querySelectorAll('details').forEach(e => e.open = true)")
    found = axe.Axe().run(opened.page)

    assert found.violations_count == 0, found.generate_report()
    assert opened.said == []


def test_a_page_with_a_fault_would_be_seen(browser: Any, html: Path) -> None:
    opened = Opened(browser, html)
    opened("document.documentElement.removeAttribute('lang')")

    assert [v["id"] for v in axe.Axe().run(opened.page).response["violations"]] == ["html-has-lang"]


def test_every_stop_of_the_tab_key_is_named_and_seen(browser: Any, html: Path) -> None:
    opened = Opened(browser, html)
    opened.page.keyboard.press("Tab")
    assert opened("document.activeElement.textContent") == "Skip to the plan"
    assert opened("document.activeElement.getBoundingClientRect().left >= 0")
    opened.page.keyboard.press("Enter")
    assert opened("document.activeElement.id") == "main"
    stops: list[str] = []
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        stop = opened("""(() => {
            const e = document.activeElement, style = getComputedStyle(e);
            return [e.tagName, e.getAttribute('aria-label') || e.textContent.trim(),
                    style.outlineStyle + ' ' + style.outlineWidth];
        })()""")
        if stop[0] == "BODY":
            break
        stops.append(stop[0])
        assert stop[1], stop
        assert stop[2] == "solid 3px", stop
    assert stops.count("SUMMARY") >= 4
    assert stops.count("DIV") >= 4  # tables that scroll


def test_a_folded_list_opens_by_key(browser: Any, html: Path) -> None:
    opened = Opened(browser, html)
    opened.page.focus("details.all > summary")
    opened.page.keyboard.press("Enter")

    assert opened("document.querySelector('details.all').open")


def test_the_policy_lets_nothing_in(browser: Any, html: Path) -> None:
    opened = Opened(browser, html)
    refused = opened("""new Promise(done => {
        const refused = [];
        document.addEventListener('securitypolicyviolation', event => {
            refused.push(event.effectiveDirective);
            if (refused.length === 4) done(refused.sort());
        });
        const add = (name, key, value) => {
            const element = document.createElement(name);
            element[key] = value;
            document.body.append(element);
        };
        add('img', 'src', 'http://localhost:9/x.png');
        add('script', 'textContent', 'window.ran = true');
        add('style', 'textContent', '* { color: red }');
        fetch('http://localhost:9/x').catch(() => {});
    })""")

    assert refused == ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert opened("window.ran") is None


def test_on_paper_the_long_lists_are_left_out(browser: Any, html: Path) -> None:
    opened = Opened(browser, html, NARROW)
    opened.page.emulate_media(media="print")

    assert not opened.page.is_visible("details.all")
    assert opened.page.is_visible("svg.chart.wide")
    assert opened.page.pdf(format="A4").startswith(b"%PDF")
