"""Every form of lora_project against float32 numpy, and which one is chosen for a point."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from projecting import Served, expected, is_right, run, served

from aot_lora import errors
from aot_lora.config import tables
from aot_lora.kernels.choice import choose
from aot_lora.kernels.forms import FORMS, PLAIN, Form
from aot_lora.kernels.lora_project.cases import CASES
from aot_lora.kernels.sizes import Sizes
from aot_lora.plan import TargetSpec

both_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.once), "bfloat16"]
)


def assert_right(form: Form, given: Served) -> None:
    """Close to the definition; and rows without an adapter are bit for bit the base."""
    if reason := form.supports(given.sizes(), "cpu"):
        pytest.skip(reason)
    base = jax.jit(lambda x, weights: tuple(x @ weight for weight in weights))(
        given.x, given.weights
    )
    for found, right, plain in zip(run(form, given), expected(given), base, strict=True):
        assert (found.shape, found.dtype) == (right.shape, given.x.dtype)
        assert is_right(found, right, given)
        bare = given.slots == -1
        assert found[bare].tobytes() == np.asarray(plain)[bare].tobytes()


SIZES = Sizes(tokens=16, lanes=128, d=4096, o=(4096,), quantum=16, most=1, dtype="bfloat16")


@pytest.fixture(params=[name for name, form in FORMS.items() if not form.supports(SIZES, "cpu")])
def form(request: pytest.FixtureRequest) -> Form:
    """Every form that a CPU runs. `test_kernels_tpu` has the TPU's kernels, in interpret mode."""
    return FORMS[request.param]


@both_dtypes
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_a_form_is_the_reference(form: Form, case: Any, dtype: str) -> None:
    tokens, ranks, d, outputs = case
    if form.name == "gather" and d > 1000:
        tokens = 4  # It makes a copy of its adapter for each row.
    assert_right(form, served(tokens, ranks, d, outputs, dtype=dtype))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(served(1, (8,), 64, (64,), slots=[0]), id="one row"),
        pytest.param(served(4, (8,), 64, (64,), slots=[-1] * 4), id="no row has an adapter"),
        pytest.param(served(4, (), 64, (64,), slots=[-1] * 4, lanes=16), id="no adapter at all"),
        pytest.param(served(8, (8, 16), 64, (64,), slots=[0] * 8), id="one adapter is not used"),
        pytest.param(served(8, (5, 128, 17), 64, (96,)), id="ranks of no whole quantum"),
        pytest.param(served(8, (8, 16), 64, (64,), lanes=128), id="many padding lanes"),
        pytest.param(served(6, (8, 16), 72, (40, 24)), id="widths of no power of two"),
        pytest.param(
            served(8, (8, 8), 64, (64,), slots=[0, 1, 7, 9, -1, 0, 7, 1]),
            id="slots that own nothing",
        ),
    ],
)
def test_a_form_bears_what_is_odd(form: Form, given: Served) -> None:
    assert_right(form, given)


@both_dtypes
def test_nan_in_an_inactive_adapter_stays_there(form: Form, dtype: str) -> None:
    given = served(8, (8, 16), 64, (64,), dtype=dtype)
    clean = run(form, given)
    for pair in given.banks:
        for bank in pair:
            inactive = [n for n in range(1, bank.shape[1]) if n not in given.blocks]
            bank[:, inactive] = np.nan
    leaked = any(np.isnan(one.astype(np.float32)).any() for one in run(form, given))

    assert leaked == (form.name == "one_hot")  # Dense in what is resident: adapters must be finite.
    if not leaked:
        assert [one.tobytes() for one in run(form, given)] == [one.tobytes() for one in clean]


# --- Which one ----------------------------------------------------------------------------------


def table(*rows: dict[str, Any]) -> tables.Table:
    whole = {"hardware": "h200", "source": "a test", "rows": rows}
    return tables.Table.model_validate_json(json.dumps(whole), strict=False)


def row(tokens: int, **us: float) -> dict[str, Any]:
    sizes = {"tokens": tokens, "lanes": 128, "d": 4096, "o": 4096, "most": SIZES.most}
    return {**sizes, "us": us}


def test_the_fastest_at_the_nearest_point_is_chosen() -> None:
    found = choose(table(row(16, laned=9.0, gather=3.0), row(4096, laned=1.0)), SIZES, "cuda")

    assert found.form is FORMS["gather"]
    assert found.reason == "3 us at t16-l128-d4096-o4096, the least of 2"


def test_a_form_that_cannot_serve_a_point_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = Form(
        name="narrow", prepare=PLAIN.prepare, project=PLAIN.project, supports=lambda *_: "D is odd"
    )
    monkeypatch.setitem(FORMS, "narrow", narrow)
    found = choose(table(row(16, narrow=1.0, ragged=2.0)), SIZES, "cuda")

    assert found.form is FORMS["ragged"]
    assert found.reason.endswith("the least of 2; not narrow: D is odd")


def test_a_nearer_point_whose_fastest_cannot_serve_says_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = replace(
        PLAIN,
        name="few",
        supports=lambda sizes, _: "more than 16 rows" if sizes.tokens > 16 else "",
    )
    monkeypatch.setitem(FORMS, "few", few)
    measured = table(row(16, few=1.0, laned=2.0), row(4096, ragged=1.0, laned=2.0))

    assert choose(measured, replace(SIZES, tokens=16), "cuda").form is few
    many = choose(measured, replace(SIZES, tokens=64), "cuda")
    assert many.form is FORMS["ragged"]
    assert many.reason.startswith("1 us at t4096")
    alone = choose(table(row(16, few=1.0, laned=2.0)), replace(SIZES, tokens=64), "cuda")
    assert alone.form is PLAIN


def test_what_pads_adapters_is_chosen_up_to_the_largest_it_was_measured_with() -> None:
    measured = table({**row(16, gather=1.0, laned=2.0), "most": 2})
    small, large = (replace(SIZES, most=most) for most in (2, 3))

    assert choose(measured, small, "cuda").form is FORMS["gather"]
    assert choose(measured, large, "cuda").form is PLAIN
    why = "; not gather: adapters of up to 3 blocks, measured with 2"
    assert choose(measured, large, "cuda").reason.endswith(why)


def test_tuning_comes_from_the_table() -> None:
    found = choose(table({**row(16, laned=1.0), "tuning": {"laned": {"block": 64}}}), SIZES, "cuda")

    assert found.tuning == {"block": 64}
    assert found.project().keywords == {"block": 64}


@pytest.mark.parametrize("measured", [None, table(), table(row(16, of_another_version=1.0))])
def test_without_a_measurement_it_is_plain_xla(measured: tables.Table | None) -> None:
    assert choose(measured, SIZES, "cuda").form is PLAIN


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "h200.kernels.json"
    path.write_text('{"hardware": "h200", "source": "", "rows": [{"tokens": 1}]}')

    with pytest.raises(errors.ConfigError, match=r"kernels.json.*damaged\n  found: rows.0.lanes"):
        tables.read_table(path)


def test_tables_in_the_tree_can_be_read() -> None:
    for path in (tables.presets.presets_root() / "devices").glob("*.kernels.json"):
        found = tables.read_table(path)
        assert found.hardware == path.name.partition(".")[0]
        assert {name for row in found.rows for name in row.us} <= set(FORMS)
        for row in found.rows:
            for name, tuning in row.tuning.items():
                accepted = inspect.signature(FORMS[name].project).parameters
                assert "tuning" in accepted or set(tuning) <= set(accepted), (path, row)
        target = TargetSpec(platform="cuda", topology=found.hardware)
        assert tables.table_of(target) is found
        assert len(tables.table_digest(target)) == 64
