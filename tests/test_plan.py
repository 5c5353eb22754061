"""The planner: what folds, what is left out, and that a digest misses nothing."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_lora.plan import (
    Axis,
    DecoderShape,
    KvCache,
    Module,
    Plan,
    TargetSpec,
    UserEntry,
    Variant,
    build_plan,
    estimate,
    widen,
)

Q, K = (Module(name=name, d=64, o=o, layers=2) for name, o in (("q", 64), ("k", 32)))
STEP = UserEntry(name="step", entry="engine:step")


def make_plan(**changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "token_buckets": (16, 32),
        "slots": (0, 1, 2, 4, 8),
        "ranks": (16, 32, 64),
        "modules": (Q, K),
        "layers": 2,
        "dtype": "float32",
        "quantum": 16,
        "max_adapters": 8,
        "resident_lanes": 512,
        "with_lora": True,
        "user": (),
    }
    return build_plan(**{**asked, **changes})


def programs(plan: Plan) -> set[str]:
    return {variant.program for variant in plan.variants}


def of(plan: Plan, program: str) -> list[Variant]:
    return [variant for variant in plan.variants if variant.program == program]


def test_a_program_is_compiled_for_the_tokens_it_is_called_with() -> None:
    few = replace(STEP, name="few", max_tokens=16)
    plan = make_plan(user=(STEP, few))

    assert {variant.tokens for variant in of(plan, "few")} == {16}
    assert {variant.tokens for variant in of(plan, "step")} == {16, 32}
    assert {v.tokens for v in of(widen(plan, {"tokens": [8, 24]}), "few")} == {8, 16}


@pytest.mark.parametrize("point", [(8, 16), (4, 32), (2, 64)])
def test_points_that_need_as_many_lanes_share_their_variants(point: tuple[int, int]) -> None:
    slots, rank = point
    alone = make_plan(slots=(slots,), ranks=(rank,))

    assert alone.lanes.buckets == (128,)
    assert set(of(alone, "lora_shrink")) < set(of(make_plan(), "lora_shrink"))


def test_modules_of_equal_shape_share_their_variants() -> None:
    twin = replace(Q, name="o")

    assert make_plan(modules=(Q, K, twin)).variants == make_plan().variants


def test_a_batch_without_adapters_needs_no_lora_program() -> None:
    plan = make_plan(slots=(0,), user=(STEP,))

    assert [v.name for v in plan.variants] == ["step/t16-l0", "step/t32-l0"]
    assert plan.bank_bytes == 0


def test_without_one_among_the_slots_there_are_no_maskless_programs() -> None:
    masked = {"lora_shrink", "lora_expand", "bank_write", "bank_reset"}

    assert programs(make_plan(slots=(0, 2))) == masked
    assert programs(make_plan()) == masked | {"lora_shrink_single", "lora_expand_single"}


def test_a_user_program_covers_every_point_and_the_batch_without_adapters() -> None:
    plan = make_plan(slots=(0, 2), ranks=(16, 32), user=(STEP,), with_lora=False)

    assert [v.name for v in plan.variants] == [
        f"step/t{tokens}-l{lanes}" for tokens in (16, 32) for lanes in (0, 32, 64)
    ]


SIZES = st.sets(st.integers(min_value=1, max_value=200), min_size=1, max_size=4)
GRIDS = st.fixed_dictionaries(
    {
        "token_buckets": SIZES.map(sorted).map(tuple),
        "slots": st.sets(st.integers(min_value=0, max_value=9), min_size=1).map(sorted).map(tuple),
        "ranks": SIZES.map(sorted).map(tuple),
        "quantum": st.sampled_from([1, 8, 16]),
        "user": st.sampled_from([(), (STEP,)]),
    }
)


@given(GRIDS)
def test_every_point_has_its_variants_once_and_equal_input_gives_equal_plans(
    grid: dict[str, Any],
) -> None:
    plan = make_plan(**grid)
    names = [variant.name for variant in plan.variants]

    assert len(set(names)) == len(names)
    assert (make_plan(**grid), make_plan(**grid).digest()) == (plan, plan.digest())
    points = [(t, s, r) for t in plan.tokens.buckets for s in plan.slots for r in plan.ranks]
    assert len(points) == plan.points
    for tokens, slots, rank in points:
        if slots:
            lanes = plan.lanes.bucket(slots * plan.adapter_lanes.bucket(rank))
            assert slots * rank <= lanes < slots * (rank + plan.quantum)
            for dims in ("d64-n2", "o64-n2", "o32-n2"):
                program = "lora_shrink" if dims.startswith("d") else "lora_expand"
                assert f"{program}/t{tokens}-l{lanes}-{dims}" in names


# One changed value for each field of a plan; a new field without a line here fails.
CHANGED = {
    "tokens": Axis(name="tokens", buckets=(16, 48)),
    "slots": (0, 1),
    "ranks": (16, 32),
    "lanes": Axis(name="lanes", buckets=(16,)),
    "adapter_lanes": Axis(name="lanes", buckets=(16,)),
    "modules": (replace(Q, name="other"), K),
    "tp": 2,
    "layers": 3,
    "dtype": "bfloat16",
    "quantum": 8,
    "bank_blocks": 9,
    "max_adapters": 9,
    "with_lora": False,
    "user": (STEP,),
    "decoder": DecoderShape(
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=128,
        vocab=256,
        norm_eps=1e-5,
        rope_theta=10000.0,
    ),
    "cache": KvCache(sequences=4, length=64),
    "variants": (Variant(program="other"),),
}


@pytest.mark.parametrize("field", [field.name for field in fields(Plan)])
def test_the_digest_changes_with_each_field(field: str) -> None:
    plan = make_plan()

    assert replace(plan, **{field: CHANGED[field]}).digest() != plan.digest()


def test_bank_bytes_count_every_lane_of_every_layer() -> None:
    # 33 blocks of 16 lanes, D + O of both modules, 4 bytes, 2 layers.
    assert make_plan().bank_bytes == 33 * 16 * (64 + 64 + 64 + 32) * 4 * 2


def test_more_cores_take_less_time_and_no_fewer_bytes() -> None:
    one, four = (
        estimate(target=TargetSpec("tpu", "v6e:1x1"), variants=100, cores=cores) for cores in (1, 4)
    )

    assert one.seconds == pytest.approx(4 * four.seconds)
    assert one.store_bytes == four.store_bytes > 0


def test_steps_are_told_from_lora_programs_and_take_longer() -> None:
    plan = make_plan()
    others = (Variant("mixed_step", tokens=16), Variant("mixed_step", tokens=32))
    half = replace(plan, variants=(*plan.variants[:2], *others))

    assert [replace(plan, variants=()).step_share, plan.step_share, half.step_share] == [0, 0, 0.5]
    for target in (TargetSpec("cpu"), TargetSpec("tpu", "v6e:1x1"), TargetSpec("cuda")):
        none, some, all_ = (
            estimate(target=target, variants=100, cores=2, step_share=share)
            for share in (0.0, 0.5, 1.0)
        )
        assert 10 * none.seconds < all_.seconds
        assert some.seconds == pytest.approx((none.seconds + all_.seconds) / 2, abs=0.1)
        assert some.store_bytes == pytest.approx((none.store_bytes + all_.store_bytes) / 2)
