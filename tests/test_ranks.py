"""Rank bins: exact against every choice, read from folders and histograms, clear when they fail."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from aot_lora.adapters.ranks import read_ranks
from aot_lora.cli.main import run
from aot_lora.errors import (
    EXIT_INTEGRITY,
    EXIT_OK,
    EXIT_USAGE,
    AdapterError,
    AotLoraError,
    PlanError,
)
from aot_lora.plan.ranks import best, by_quantum, compare_ranks, quanta

HISTOGRAM = "rank,count\n8,500\n12,40\n24,100\n32,30\n64,200\n100,9\n256,2\n"


def arrays(found: dict[int, int]) -> tuple[Any, Any]:
    return np.array(list(found)), np.array(list(found.values()))


def adapter(folder: Path, **fields: Any) -> None:
    folder.mkdir(parents=True)
    value = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(value))


def asked(
    arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = EXIT_OK
) -> tuple[str, str]:
    assert run(["fit", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


# --- The optimum ---------------------------------------------------------------------------------


@given(
    found=st.dictionaries(st.integers(1, 90), st.integers(1, 30), min_size=1, max_size=7),
    count=st.integers(1, 4),
    multiple=st.sampled_from([1, 8, 16, 24]),
)
def test_no_bins_and_no_quantum_take_fewer_lanes(
    found: dict[int, int], count: int, multiple: int
) -> None:
    least: dict[int, int] = {}
    for quantum in quanta(multiple):
        lanes = {rank: -(-rank // quantum) * quantum for rank in found}
        last = max(lanes.values())
        least[quantum] = min(
            sum(
                n * min(b for b in (*chosen, last) if b >= lanes[rank]) for rank, n in found.items()
            )
            for size in range(count)
            for chosen in itertools.combinations(set(lanes.values()) - {last}, size)
        )

    tried = by_quantum(*arrays(found), count=count, multiple=multiple)
    chosen = best(tried)

    assert {policy.quantum: policy.binned_lanes for policy in tried} == least
    assert chosen.binned_lanes == min(least.values())
    for policy in tried:
        assert len(policy.ranks) <= count
        assert all(rank % policy.quantum == 0 for rank in policy.ranks)
        assert policy.real <= policy.owned_lanes <= policy.binned_lanes
        assert sum(use.steps for use in policy.used) == sum(found.values())


@pytest.mark.parametrize(
    ("multiple", "tried"),
    [
        (1, (1, 8, 16, 32, 64, 128)),
        (8, (8, 16, 32, 64, 128)),
        (64, (64, 128)),
        (24, (24,)),
        (256, (256,)),
    ],
)
def test_quanta_are_multiples_of_the_hardwares(multiple: int, tried: tuple[int, ...]) -> None:
    assert quanta(multiple) == tried


def test_of_equal_lanes_the_largest_quantum_is_chosen() -> None:
    found = best(by_quantum(np.array([64, 16]), np.array([3, 5]), count=4, multiple=8))

    assert (found.ranks, found.quantum, found.most_blocks) == ((16, 64), 16, 4)
    assert (found.waste, found.owned_waste) == (0.0, 0.0)


def test_with_equal_bins_the_fewer_owned_lanes_are_chosen() -> None:
    found = best(by_quantum(np.array([8, 64]), np.array([9, 1]), count=1, multiple=8))

    assert (found.ranks, found.quantum) == ((64,), 8)
    assert (found.binned_lanes, found.owned_lanes) == (640, 136)


def test_the_policies_and_their_order() -> None:
    found = compare_ranks(
        np.array([8, 40]), np.array([3, 1]), count=2, multiple=8, current=((8, 64), 8)
    )

    assert [(p.name, p.ranks, p.quantum, p.binned_lanes, p.owned_lanes) for p in found] == [
        ("all to the largest", (40,), 40, 160, 160),
        ("next of 16, 32, 64", (16, 32, 64), 16, 112, 96),
        ("current", (8, 64), 8, 88, 64),
        ("fit", (8, 40), 8, 64, 64),
    ]


@pytest.mark.parametrize(
    ("found", "asked_for", "said"),
    [
        ({}, {}, "there are no ranks to fit"),
        ({8: 0}, {}, "there are no ranks to fit"),
        ({0: 1}, {}, "a rank that cannot be\n  expected: 1 to 1,048,576\n  found: 0"),
        ({8: 1}, {"multiple": 0}, "lanes cannot be multiples of 0"),
        ({8: 1}, {"count": 0}, "no buckets were asked for"),
    ],
)
def test_what_cannot_be_fitted_is_said(
    found: dict[int, int], asked_for: dict[str, int], said: str
) -> None:
    ranks, counts = np.array(list(found), int), np.array(list(found.values()), int)
    with pytest.raises(PlanError) as caught:
        compare_ranks(ranks, counts, **{"count": 4, "multiple": 8, **asked_for})

    assert str(caught.value).startswith(said)


# --- What is read --------------------------------------------------------------------------------


def test_the_rank_of_an_adapter_is_its_largest(tmp_path: Path) -> None:
    adapter(tmp_path / "a")
    adapter(tmp_path / "b", rank_pattern={})
    adapter(tmp_path / "c", rank_pattern={"q_proj": 4, "layers.1.v_proj": 32})
    adapter(tmp_path / "d", r=16, rank_pattern={"q_proj": 4})
    (tmp_path / "logs").mkdir()
    (tmp_path / "README.md").write_text("not a folder")
    found = read_ranks(tmp_path)

    assert (found.ranks, found.counts, found.others) == ((8, 16, 32), (2, 1, 1), ("logs",))


def test_a_histogram_adds_up(tmp_path: Path) -> None:
    path = tmp_path / "ranks.csv"
    path.write_text("\ufeffRank, Count\r\n64,1\r\n\r\n8,2\r\n8,3\r\n16,0\r\n")
    found = read_ranks(path)

    assert (found.ranks, found.counts, found.others) == ((8, 64), (5, 1), ())


def test_folders_that_cannot_be_fitted_say_why(tmp_path: Path) -> None:
    empty, other, one = tmp_path / "empty", tmp_path / "other", tmp_path / "one"
    empty.mkdir()
    (other / "logs").mkdir(parents=True)
    adapter(one)
    expected = "\n  expected: subfolders with an adapter_config.json each"
    for folder, said in (
        (empty, f"{empty}: an empty folder{expected}"),
        (other, f"{other}: no adapter in this folder{expected}\n  found: logs"),
        (
            one,
            f"{one}: one adapter, not a folder of them{expected}\n  next: name the folder above it",
        ),
    ):
        with pytest.raises(AdapterError) as caught:
            read_ranks(folder)
        assert str(caught.value) == said


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"r": 0}, EXIT_INTEGRITY, "`r` is wrong"),
        ({"r": "8"}, EXIT_INTEGRITY, "`r` is wrong"),
        ({"rank_pattern": {"q": -1}}, EXIT_INTEGRITY, "`rank_pattern[q]` is wrong"),
        ({"r": 2**21}, EXIT_USAGE, "bad rank\n  expected: 1 to 1,048,576\n  found: 2,097,152"),
        ({"use_dora": True}, EXIT_USAGE, "use_dora True: DoRA"),
    ],
)
def test_an_adapter_with_a_bad_rank_is_named(
    fields: dict[str, Any], code: int, said: str, tmp_path: Path, capsys: Any
) -> None:
    adapter(tmp_path / "good")
    adapter(tmp_path / "bad", **fields)
    out, err = asked(["--ranks", str(tmp_path)], capsys, code)

    assert out == ""
    assert err.startswith(f"aot-lora: {tmp_path}/bad/adapter_config.json: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: no histogram of ranks\n  expected: the header rank,count\n  found: nothing"),
        ("8,3\n", ":1: no histogram of ranks\n  expected: the header rank,count\n  found: 8,3"),
        ("rank,count\n", ": no adapters in the histogram"),
        ("rank,count\n8,0\n", ": no adapters in the histogram"),
        ("rank,count\n8\n", ":2: a row that is no rank and count\n  expected: 2 values"),
        ("rank,count\n8,1\n0,1\n", ":3: bad rank\n  expected: an integer from 1 to 1,048,576"),
        ("rank,count\n8.5,1\n", ":2: bad rank"),
        (
            "rank,count\n,1\n",
            ":2: bad rank\n  expected: an integer from 1 to 1,048,576\n  found: n",
        ),
        ("rank,count\n1048577,1\n", ":2: bad rank"),
        ("rank,count\n8,-1\n", ":2: bad count\n  expected: an integer from 0 to 1,000,000,000"),
        ("rank,count\n8,1000000000\n8,1\n", ":3: bad count"),
        ("rank,count\n8,\xff\n", ": not UTF-8 text"),
    ],
)
def test_a_bad_histogram_names_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "ranks.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(AotLoraError) as caught:
        read_ranks(path)

    assert str(caught.value).startswith(f"{path}{said}")


def test_a_histogram_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(AotLoraError, match="cannot be read: No such file"):
        read_ranks(tmp_path / "none.csv")


# --- What is printed -----------------------------------------------------------------------------


def test_what_is_printed_for_people(
    tmp_path: Path,
    write_config: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    snapshot: SnapshotAssertion,
) -> None:
    path = tmp_path / "ranks.csv"
    path.write_text(HISTOGRAM)
    out, err = asked(["--ranks", str(path), "--config", str(write_config())], capsys)

    assert out.replace(f"{tmp_path}/", "") == snapshot
    assert err == (
        f"warning: the ranks of {tmp_path}/tiny.yaml end at 8, below the largest adapter's 256: "
        "they are not compared\n"
    )


def test_json_is_one_object_on_one_line(
    tmp_path: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    adapter(tmp_path / "all/a")
    adapter(tmp_path / "all/b", r=6)
    (tmp_path / "all/logs").mkdir()
    options = ["--config", str(write_config()), "--format", "json"]
    out, err = asked(["--ranks", str(tmp_path / "all"), *options], capsys)
    found: dict[str, Any] = json.loads(out)

    assert out.count("\n") == 1
    assert (found["adapters"], found["ranks"], found["quantum"]) == (2, [8], 8)
    assert [p["name"] for p in found["policies"]] == [
        "all to the largest", "next of 16", "current", "fit",
    ]  # fmt: skip
    assert [p["quantum"] for p in found["quanta"]] == [8, 16, 32, 64, 128]
    assert found["policies"][-1]["bins"] == [{"rank": 8, "adapters": 2, "waste": 0.1429}]
    assert err == "no adapter in 1 of the subfolders: logs\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing to fit to"),
        (["trace.csv", "--ranks", "x"], "TRAFFIC beside --ranks"),
        (["--ranks", "x", "--slots", "2", "--small"], "--slots, --small beside --ranks"),
        (["--ranks", "x", "--step-ms", "6"], "--step-ms beside --ranks"),
    ],
)
def test_what_does_not_go_together_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = asked(options, capsys, EXIT_USAGE)

    assert out == ""
    assert err.startswith(f"aot-lora: {said}\n")
