"""Which form a decoder's step adds its adapters by, and what it gives to that form."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from decoding import DECODER
from projecting import LAYER, Served, expected, is_right, served

from aot_lora import Context, Point, load_config
from aot_lora.config.tables import Row, Table
from aot_lora.decoder import chosen_lora, step_program
from aot_lora.decoder.lora import HEAD_SITES, LAYER_SITES, Site, tabled_lora
from aot_lora.kernels.choice import Choice
from aot_lora.kernels.forms import FORMS, PLAIN
from aot_lora.kernels.sizes import Sizes
from aot_lora.plan import TargetSpec

QKV, GATES = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class Recorder:
    """The plain form, which remembers what it was asked, given and tuned with."""

    def __init__(self) -> None:
        self.sizes: list[Sizes] = []
        self.prepared = 0
        self.projected: list[tuple[tuple[int, ...], dict[str, int]]] = []
        self.form = replace(PLAIN, name="recorded", prepare=self.prepare, project=self.project)

    def choose(self, sizes: Sizes) -> Choice:
        self.sizes.append(sizes)
        return Choice(form=self.form, reason="a test")

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        self.prepared += 1
        return PLAIN.prepare(*args, **kwargs)

    def project(self, x: Any, weights: Any, banks: Any, *rest: Any, **tuning: int) -> Any:
        self.projected.append((tuple(weight.shape[1] for weight in weights), tuning))
        return PLAIN.project(x, weights, banks, *rest)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setitem(FORMS, "recorded", found.form)
    return found


def stepped(given: Served, maker: Any, site: Site, names: Site) -> tuple[np.ndarray, ...]:
    """A site's projections, of which `names` have banks."""

    def step(batch: Any, x: Any, weights: Any, banks: Any) -> Any:
        own = {name: pair for name, pair in zip(site, banks, strict=True) if name in names}
        return maker(own, batch, [site])(site, x, weights, LAYER)

    found = jax.jit(step)(given.batch(), given.x, given.weights, given.banks)
    return tuple(map(np.asarray, found))


@pytest.mark.parametrize("names", [("q_proj", "v_proj"), ("k_proj",), QKV, ()], ids=str)
def test_modules_without_banks_are_projected_without_adapters(
    names: Site, recorder: Recorder
) -> None:
    given = served(6, (8, 16), 32, (32, 16, 48))
    maker = chosen_lora(recorder.choose, most=given.most, stacked=False)
    outputs = stepped(given, maker, QKV, names)
    plain = jax.jit(lambda x, weights: tuple(x @ w for w in weights))(given.x, given.weights)

    for name, found, right, base in zip(QKV, outputs, expected(given), plain, strict=True):
        if name in names:
            assert is_right(found, right, given)
            assert not is_right(np.asarray(base), right, given)
        else:
            assert found.tobytes() == np.asarray(base).tobytes()


def test_a_form_is_asked_about_and_given_only_what_has_banks(recorder: Recorder) -> None:
    given = served(6, (8, 16), 32, (32, 16, 48))
    stepped(
        given,
        chosen_lora(recorder.choose, most=given.most, stacked=False),
        QKV,
        ("q_proj", "v_proj"),
    )

    assert recorder.sizes == [replace(given.sizes(), o=(32, 48))]
    assert recorder.projected == [((32, 48), {})]


def test_a_site_without_banks_asks_for_no_form(recorder: Recorder) -> None:
    given = served(6, (8, 16), 32, (32, 16, 48))
    stepped(given, chosen_lora(recorder.choose, most=given.most, stacked=False), QKV, ())

    assert (recorder.sizes, recorder.prepared, recorder.projected) == ([], 0, [])


def test_a_batch_is_prepared_once_for_all_sites_of_a_form(recorder: Recorder) -> None:
    given = served(6, (8, 16), 32, (32, 16))
    banks = dict(zip(GATES, given.banks, strict=True))
    chosen_lora(recorder.choose, most=given.most, stacked=False)(
        banks, given.batch(), [GATES[:1], GATES[1:]]
    )

    assert len(recorder.sizes) == 2
    assert recorder.prepared == 1


# --- By a table ----------------------------------------------------------------------------------


def table(**us: float) -> Table:
    row = Row(tokens=8, lanes=16, d=32, o=64, us=us, tuning={"recorded": {"tile": 64}})
    return Table(hardware="h200", source="a test", rows=(row,))


@pytest.mark.parametrize(
    ("measured", "used"),
    [
        (table(recorded=1.0, laned=2.0), True),
        (table(recorded=2.0, laned=1.0), False),
        (table(), False),
        (None, False),
    ],
)
def test_a_table_names_the_form_and_its_tuning(
    measured: Table | None, used: bool, recorder: Recorder
) -> None:
    given = served(6, (8, 16), 32, (32, 16, 48))
    maker = tabled_lora(measured, "cpu", most=given.most, stacked=False)
    for found, right in zip(stepped(given, maker, QKV, QKV), expected(given), strict=True):
        assert is_right(found, right, given)

    assert recorder.projected == ([((32, 16, 48), {"tile": 64})] if used else [])


@pytest.mark.parametrize("used", [True, False])
def test_a_step_is_traced_with_the_form_of_its_hardwares_table(
    used: bool, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decoder.yaml").write_text(DECODER)
    plan = load_config(tmp_path / "decoder.yaml").plan
    asked: list[TargetSpec] = []

    def table_of(target: TargetSpec) -> Table:
        asked.append(target)
        return table(recorded=1.0 if used else 3.0, laned=2.0)

    monkeypatch.setattr("aot_lora.decoder.programs.table_of", table_of)
    context = Context(plan=plan, target=TargetSpec("cpu"))
    program = step_program(Point(tokens=24, lanes=48), context, decode_rows=4)
    jax.jit(program.fn).trace(*program.args)

    assert asked == [context.target]
    by = {module.name: module.o for module in plan.modules}
    sites = {tuple(by[name] for name in site) for site in (*LAYER_SITES, *HEAD_SITES)}
    assert {widths for widths, _ in recorder.projected} == (sites if used else set())
    assert recorder.prepared == (2 if used else 0)  # All rows, and those that are sampled.
