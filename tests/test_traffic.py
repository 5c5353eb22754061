"""Traces: what is read from them, and what a bad one is told."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aot_lora.config.traffic import read_traffic
from aot_lora.errors import EXIT_USAGE, ConfigError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = f"""{HEADER}
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BASE = '{"time": 1, "prompt_tokens": 3, "output_tokens": 4}\n'


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_the_columns_of_the_azure_traces_are_read(tmp_path: Path) -> None:
    for text in (AZURE, AZURE.replace("\n", "\r\n"), "\ufeff" + AZURE, AZURE + "\n\n"):
        found = read_traffic(written(tmp_path, text))

        assert found.prompts.tolist() == [374, 396]
        assert found.outputs.tolist() == [44, 109]
        assert found.seconds.tolist() == [0.0, pytest.approx(4.314579)]
        assert found.adapters is None


def test_json_lines_are_read_with_their_adapters(tmp_path: Path) -> None:
    text = (
        '{"time": 1.5, "prompt_tokens": 3, "output_tokens": 4, "adapter": "legal", "more": 1}\n'
        "\n"
        '{"time": 1.5, "prompt_tokens": 5, "output_tokens": 0, "adapter": null}\n'
        '{"timestamp": "2023-11-16T18:15:46Z", "input_tokens": 6, "completion_tokens": 7,'
        ' "lora_id": 12}\n'
        '{"time": 2e9, "prompt_tokens": 3, "output_tokens": 4, "adapter": "legal"}\n'
    )
    found = read_traffic(written(tmp_path, text))

    assert found.prompts.tolist() == [3, 5, 6, 3]
    assert found.outputs.tolist() == [4, 0, 7, 4]
    assert found.adapters is not None
    assert found.adapters.tolist() == [0, -1, 1, 0]


def test_a_column_of_adapters_may_be_empty_in_places(tmp_path: Path) -> None:
    text = "time,prompt_tokens,output_tokens,adapter\n1,2,3,a\n1,2,3,\n2,2,3,b\n"
    found = read_traffic(written(tmp_path, text))

    assert found.adapters is not None
    assert found.adapters.tolist() == [0, -1, 1]


def test_without_times_prompts_can_still_be_read(tmp_path: Path) -> None:
    path = written(tmp_path, "ContextTokens,GeneratedTokens\n5,6\n7,8\n")

    assert read_traffic(path, timed=False).prompts.tolist() == [5, 7]
    assert read_traffic(path, timed=False).part(1, 2).seconds.tolist() == [0.0]


NEEDED = "an integer from {} to 2,147,483,647"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", "", "an empty trace"),
        ("\n1,2,3\n", "", "a trace without a header"),
        (f"{HEADER}\n", "", "a trace of 0 requests\n  expected: at least 2: one half"),
        (f"{HEADER}\n1,2,3\n", "", "a trace of 1 requests\n  expected: at least 2: one half"),
        ("1,2,3\n4,5,6\n", ":1", "no prompt tokens\n  expected: one of contexttokens, prompt"),
        (
            "ContextTokens,GeneratedTokens\n5,6\n",
            ":1",
            "no time of each request\n  expected: one of timestamp, time, arrived_at\n"
            "  found: ContextTokens, GeneratedTokens\n  next: add it; without times only prompts",
        ),
        (
            f"{HEADER}\n1,2,3\n2,-2,3\n",
            ":3",
            f"bad prompt tokens\n  expected: {NEEDED.format(1)}\n  found: '-2'\n"
            "  next: remove the request, or mend it",
        ),
        (f"{HEADER}\n1,0,3\n", ":2", f"bad prompt tokens\n  expected: {NEEDED.format(1)}"),
        (
            f"{HEADER}\n1,,3\n",
            ":2",
            f"bad prompt tokens\n  expected: {NEEDED.format(1)}\n  found: no",
        ),
        (f"{HEADER}\n1,2,-1\n", ":2", f"bad output tokens\n  expected: {NEEDED.format(0)}"),
        (f"{HEADER}\n1,2.5,3\n", ":2", "bad prompt tokens"),
        (f"{HEADER}\n1,99999999999,3\n", ":2", "bad prompt tokens"),
        (f"{HEADER}\n1,2\n", ":2", "a row that does not match the header\n  expected: 3 values"),
        (f"{HEADER}\nnever,2,3\n", ":2", "bad time\n  expected: seconds, or a date such as 2023-"),
        (f"{HEADER}\n2023-13-16 18:15:46,2,3\n", ":2", "bad time"),
        (f"{HEADER}\nnan,2,3\n", ":2", "bad time"),
        (f"{HEADER}\n,2,3\n", ":2", "bad time\n  expected: seconds, or a date such as 2023-11-16"),
        (
            f"{HEADER}\n5,2,3\n4,2,3\n",
            ":3",
            "a request before the one above it\n  expected: times that never fall\n  found: 4\n"
            "  next: sort the trace by its times",
        ),
        (BASE + "[1]\n", ":2", "not a request\n  expected: an object such as"),
        (BASE + "{\n", ":2", "not valid JSON: "),
        (BASE + "[" * 200_000, ":2", "nested too deeply"),
        (BASE + '{"time": 1, "output_tokens": 4}\n', ":2", "no prompt tokens"),
        (BASE.replace("3", "true"), ":1", "bad prompt tokens"),
        (BASE.replace("3", "null"), ":1", "bad prompt tokens"),
        (BASE.replace("3", '"x"'), ":1", "bad prompt tokens"),
        (BASE.replace("1", "[]"), ":1", "bad time"),
        (b"\xff\xfe\n", "", "not UTF-8 text"),
    ],
)
def test_a_bad_trace_names_its_line(
    text: str | bytes, line: str, said: str, tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_traffic(path)

    assert str(caught.value).startswith(f"{path}{line}: {said}")
    assert caught.value.exit_code == EXIT_USAGE


def test_a_trace_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_traffic(tmp_path / "none.csv")


def test_a_hundred_thousand_requests_are_read_in_a_second_or_so(tmp_path: Path) -> None:
    rows: Any = np.random.default_rng(0).integers(1, 9000, (100_000, 2)).tolist()
    text = "".join(f"{at},{p},{o}\n" for at, (p, o) in enumerate(rows))
    path = written(tmp_path, f"{HEADER}\n{text}")
    start = time.perf_counter()

    assert len(read_traffic(path)) == 100_000
    assert time.perf_counter() - start < 5
