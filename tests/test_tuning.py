"""Measuring forms at a point, and the table that is made of it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from aot_lora import load_config
from aot_lora.config.tables import Row, Table, read_table
from aot_lora.kernels.forms import FORMS, PLAIN, Form
from aot_lora.plan import ROW_MODULES, DecoderShape, Module, Plan, build_plan
from aot_lora.tuning.measure import Point, Timed, measure, slots_of
from aot_lora.tuning.table import candidates, merged, points, ranks_of, row_of, sites_of, text_of

TINY = Point(tokens=4, d=32, o=(32, 16), ranks=(8, 16), layers=2, dtype="float32")

SQUARE = replace(TINY, tokens=32, o=(32,))  # So that few shapes are compiled.


def quick(forms: Mapping[str, Any]) -> Timed:
    return measure(SQUARE, forms, platform="cpu", rounds=1, ms=0.1)


def changed(project: Any, **fields: Any) -> Form:
    """The plain form with its results changed."""

    def run(*args: Any) -> Any:
        return tuple(project(one) for one in PLAIN.project(*args))

    return replace(PLAIN, project=run, **fields)


# --- Measuring -----------------------------------------------------------------------------------


def test_each_form_has_a_time_or_the_reason_why_not() -> None:
    wanted = candidates(tuple(FORMS))
    timed = quick(wanted)
    reasons = {name: form.supports(SQUARE.sizes, "cpu") for name, (form, _) in wanted.items()}

    assert timed.refused == {name: reason for name, reason in reasons.items() if reason}
    assert set(timed.forms) == set(wanted) - set(timed.refused)
    assert {"laned", "one_hot", "gather", "ragged"} == set(timed.forms)
    assert {"one_launch", "one_launch#1", "extended"} <= set(timed.refused)
    assert all(us > 0 for us in (timed.base, timed.link, *timed.forms.values()))


@pytest.mark.parametrize("wrong", [lambda y: y + 1, lambda y: y * jnp.nan], ids=["off", "nan"])
def test_a_form_that_computes_something_else_is_no_form(wrong: Any) -> None:
    with pytest.raises(ArithmeticError, match=r"wrong at Point\(tokens=32, .*: off by .*, at most"):
        quick({"laned": (PLAIN, {}), "wrong": (changed(wrong), {})})


def test_rounding_is_no_difference() -> None:
    assert quick({"near": (changed(lambda y: y * (1 + 1e-7)), {})}).forms.keys() == {"near"}


def test_a_form_that_fails_is_left_out_with_what_it_said() -> None:
    def fail(error: type[Exception], _: Any) -> Any:
        raise error("no such tile")

    errors = ValueError, NotImplementedError
    failing = {str(n): (changed(partial(fail, error)), {}) for n, error in enumerate(errors)}
    timed = quick({"laned": (PLAIN, {}), **failing})

    assert timed.refused == {
        "0": "ValueError: no such tile",
        "1": "NotImplementedError: no such tile",
    }
    assert timed.forms.keys() == {"laned"}


def test_tunings_reach_the_form() -> None:
    seen: list[int] = []

    def project(*args: Any, tile: int) -> Any:
        seen.append(tile)
        return PLAIN.project(*args)

    quick({"tiled": (replace(PLAIN, project=project), {"tile": 64})})

    assert set(seen) == {64}


@pytest.mark.parametrize(
    ("ranks", "block", "quantum", "counts"),
    [
        ((16, 24), 0, 8, [2, 3]),
        ((16, 24), 16, 16, [1, 2]),
        ((64, 64), 0, 64, [1, 1]),
        ((64,), 16, 16, [4]),
    ],
)
def test_a_point_is_of_whole_blocks(
    ranks: tuple[int, ...], block: int, quantum: int, counts: list[int]
) -> None:
    point = replace(TINY, ranks=ranks, block=block)

    assert (point.quantum, point.counts) == (quantum, counts)
    assert point.sizes.lanes == sum(counts) * quantum
    assert (point.sizes.quantum, point.sizes.most) == (quantum, max(counts))
    assert (point.sizes.tokens, point.sizes.d, point.sizes.o) == (4, 32, (32, 16))
    assert point.sizes.dtype == "float32"


def test_a_chain_is_longer_than_what_a_cache_holds() -> None:
    wide = replace(TINY, layers=0, d=4096, dtype="bfloat16")

    assert [replace(wide, o=o).depth for o in ((1024,), (4096,), (4096, 1024, 1024), (14336,))] == [
        8, 4, 3, 2,
    ]  # fmt: skip
    assert [replace(wide, o=(4096,), tokens=n).turns for n in (16, 2048)] == [8, 4]


def test_few_rows_are_mixed_and_many_come_in_runs() -> None:
    few, many = (slots_of(replace(TINY, tokens=n, ranks=(8,) * 5)) for n in (128, 129))

    assert (np.diff(few) < 0).any()
    assert (np.diff(many) >= 0).all()
    assert set(few.tolist()) == set(many.tolist()) == set(range(5))


# --- The points of a plan ------------------------------------------------------------------------

DECODER = DecoderShape(
    hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=128, norm_eps=1e-5,
    rope_theta=1e4,
)  # fmt: skip
HEAD = Module(name="lm_head", d=64, o=128, layers=1)
SHAPES = {
    "q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64),
    "gate_proj": (64, 96), "up_proj": (64, 96), "down_proj": (96, 64),
}  # fmt: skip


def plan_of(*names: str, **changes: Any) -> Plan:
    layers = changes.get("layers", 2)
    modules = tuple(
        Module(name=name, d=SHAPES[name][0], o=SHAPES[name][1], layers=layers,
               split="d" if name in ROW_MODULES else "o")
        for name in names or SHAPES
    )  # fmt: skip
    asked: dict[str, Any] = {
        "token_buckets": (16, 1024),
        "slots": (0, 1, 4),
        "ranks": (8, 32),
        "modules": (*modules, HEAD),
        "layers": 2,
        "dtype": "float32",
        "quantum": 16,
        "max_adapters": 4,
        "resident_lanes": 128,
        "with_lora": True,
        "user": (),
    }
    return build_plan(**{**asked, **changes})


def names_of(plan: Plan) -> list[tuple[str, ...]]:
    return [tuple(module.name for module in site) for site in sites_of(plan)]


def test_modules_of_a_decoder_that_read_the_same_rows_are_one_site() -> None:
    assert names_of(plan_of(decoder=DECODER)) == [
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("gate_proj", "up_proj"),
        ("down_proj",),
    ]
    assert names_of(plan_of("down_proj", "v_proj", "q_proj", decoder=DECODER)) == [
        ("q_proj", "v_proj"),
        ("down_proj",),
    ]


@pytest.mark.parametrize("layers", [1, 2])
def test_without_a_decoder_each_module_of_the_layers_is_a_site(layers: int) -> None:
    found = names_of(plan_of("down_proj", "q_proj", layers=layers))

    assert found[:2] == [("down_proj",), ("q_proj",)]
    assert found[2:] == ([("lm_head",)] if layers == 1 else [])  # Like the rest, one layer.


@pytest.mark.parametrize(
    ("lanes", "ranks"),
    [
        (16, (8,)),  # A quantum holds it.
        (32, (32,)),
        (64, (8,) * 4),
        (128, (32,) * 4),
        (48, (48,)),  # No bucket of the plan: one adapter.
    ],
)
def test_lanes_are_those_of_as_many_adapters_as_can_be(lanes: int, ranks: tuple[int, ...]) -> None:
    plan = plan_of()

    assert ranks_of(plan, lanes) == ranks
    assert replace(TINY, ranks=ranks, block=plan.quantum).sizes.lanes == lanes


def test_a_plan_has_a_point_for_each_bucket_and_size() -> None:
    plan = plan_of("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", decoder=DECODER)
    found = list(points(plan, (16, 1024), (32, 64)))

    assert [(p.tokens, p.sizes.lanes, p.d, p.o) for p in found] == [
        (tokens, lanes, *site)
        for tokens in (16, 1024)
        for lanes in (32, 64)
        for site in ((64, (64, 32, 32)), (64, (64,)), (64, (96,)))
    ]
    assert {(p.block, p.dtype) for p in found} == {(16, "float32")}


def test_sites_of_the_same_sizes_are_one_point() -> None:
    plan = plan_of("gate_proj", "up_proj", "down_proj")

    assert [(p.d, p.o) for p in points(plan, (16,), (32,))] == [(64, (96,)), (96, (64,))]


def test_points_of_a_mesh_are_those_of_one_device() -> None:
    plan = plan_of("q_proj", "k_proj", "v_proj", "o_proj", decoder=DECODER, tp=2)

    assert [(p.d, p.o) for p in points(plan, (16,), (32,))] == [(64, (32, 16, 16)), (32, (64,))]


# --- The table -----------------------------------------------------------------------------------

TIMED = Timed(
    base=11.0,
    link=1.0,
    forms={"laned": 21.0, "one_launch": 31.0, "one_launch#2": 13.5, "one_launch#3": 14.0},
    refused={"extended": "why", "extended#1": "why"},
)


def test_a_row_has_the_best_tuning_of_each_form() -> None:
    assert row_of(TINY, TIMED) == Row(
        tokens=4,
        lanes=24,
        d=32,
        o=48,
        most=2,
        us={"laned": 20.0, "one_launch": 12.5},
        tuning={"one_launch": dict(FORMS["one_launch"].tunings[2])},
    )


def test_candidates_are_every_tuning_by_number() -> None:
    found = candidates(("laned", "one_launch"))

    numbered = [f"one_launch#{n}" for n in range(1, len(FORMS["one_launch"].tunings))]
    assert list(found) == ["laned", "one_launch", *numbered]
    assert found["one_launch#2"] == (FORMS["one_launch"], FORMS["one_launch"].tunings[2])


def test_a_point_is_told_in_a_line() -> None:
    assert text_of(TINY, TIMED) == (
        "t4 l24 d32 o32+16: base 10.0 us; laned +100.0%; one_launch +200.0%; one_launch#2 +25.0%; "
        "one_launch#3 +30.0%; not extended: why"
    )


def row(tokens: int, us: float, *, lanes: int = 64) -> Row:
    tuning = {"one_launch": {"splits": 4}}
    return Row(tokens=tokens, lanes=lanes, d=64, o=64, us={"one_launch": us}, tuning=tuning)


def table(*rows: Row, source: str = 'a "test"') -> Table:
    return Table(hardware="h200", source=source, rows=rows)


def test_what_is_measured_again_replaces_its_row_alone() -> None:
    old = table(row(16, 1.0), row(64, 2.0), row(16, 3.0, lanes=128))

    found = merged(merged(old, row(64, 5.0)), row(4, 6.0))

    assert found.rows == (row(4, 6.0), row(16, 1.0), row(16, 3.0, lanes=128), row(64, 5.0))
    assert merged(table(), row(4, 6.0)).rows == (row(4, 6.0),)


@pytest.mark.parametrize("rows", [(), (row(16, 1.25),), (row(16, 1.25), row(64, 2.0))])
def test_a_table_is_written_a_row_a_line_and_read_back(
    rows: tuple[Row, ...], tmp_path: Path
) -> None:
    path = tmp_path / "h200.kernels.json"
    path.write_text(table(*rows).text(), encoding="utf-8")

    assert read_table(path) == table(*rows)
    lines = [line for line in table(*rows).text().splitlines() if '"tokens"' in line]
    assert len(lines) == len(rows)
    assert [Row.model_validate_json(line.strip(" ,")) for line in lines] == list(rows)


def test_a_table_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "h200.kernels.json"
    for rows in ((row(16, 1.0),), (row(16, 2.0),)):
        path.write_text(table(*rows).text(), encoding="utf-8")
        assert read_table(path).rows == rows


def test_presets_have_points() -> None:
    plan = load_config("cpu/quickstart").plan

    assert list(points(plan, plan.tokens.buckets[:1], plan.lanes.buckets[:1]))
