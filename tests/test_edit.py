"""`fit --write`: the buckets change, and nothing else of the file does."""

from typing import Any

import pytest
import yaml

from aot_lora.config.edit import with_buckets
from aot_lora.errors import ConfigError

HEAD = "# Ours.\nmodel: tiny   # small\n\n"
TAIL = "\n# The rest stays.\nlimits: {variants: 9}  # few\n"
NEW = "[16, 40, 64]"

CASES = {
    "one line": (
        "tokens: {budget: 64, buckets: pow2}  # of a step",
        f"tokens: {{budget: 64, buckets: {NEW}}}  # of a step",
    ),
    "smallest goes": (
        "tokens: {budget: 64, buckets: pow2, smallest: 16}",
        f"tokens: {{budget: 64, buckets: {NEW}}}",
    ),
    "smallest in front goes": (
        "tokens: {smallest: 16, budget: 64, buckets: pow2}",
        f"tokens: {{budget: 64, buckets: {NEW}}}",
    ),
    "the budget is the last bucket": (
        "tokens: {budget: 128, buckets: {step: 16}, prefill_chunk: 32}",
        f"tokens: {{budget: 64, buckets: {NEW}, prefill_chunk: 32}}",
    ),
    "a block": (
        "tokens:\n  # why so many\n  budget: 64  # tokens\n  buckets: pow2  # for now\n"
        "  smallest: 16  # rows of a tile\n  prefill_chunk: 32",
        f"tokens:\n  # why so many\n  budget: 64  # tokens\n  buckets: {NEW}  # for now\n"
        "  # rows of a tile\n  prefill_chunk: 32",
    ),
    "a block whose smallest has no comment": (
        "tokens:\n  smallest: 16\n  budget: 64\n  buckets: pow2",
        f"tokens:\n  budget: 64\n  buckets: {NEW}",
    ),
    "a list over lines": (
        "tokens:\n  budget: 64\n  buckets:  # measured\n  - 16\n  # most\n  - 32  # some\n"
        "  - 64  # few\n  # below",
        f"tokens:\n  budget: 64\n  # measured\n  # most\n  # some\n  buckets: {NEW}  # few\n"
        "  # below",
    ),
    "a mapping over lines": (
        "tokens:\n  budget: 64\n  buckets:\n    step: 16  # rows",
        f"tokens:\n  budget: 64\n  buckets: {NEW}  # rows",
    ),
    "braces over lines": (
        "tokens: {\n  budget: 64,  # tokens\n  buckets: pow2,\n  smallest: 16,  # rows\n}",
        f"tokens: {{\n  budget: 64,  # tokens\n  buckets: {NEW},\n  # rows\n}}",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_only_the_buckets_change(case: str, newline: str) -> None:
    before, after = ((HEAD + text + TAIL).replace("\n", newline) for text in CASES[case])

    assert with_buckets(before, "f.yaml", tokens=(16, 40, 64)) == after
    found: Any = yaml.safe_load(after)
    assert found["tokens"]["buckets"] == [16, 40, 64]


def test_writing_twice_changes_nothing_more() -> None:
    text = HEAD + CASES["a block"][0] + TAIL
    once = with_buckets(text, "f.yaml", tokens=(16, 40, 64))

    assert with_buckets(once, "f.yaml", tokens=(16, 40, 64)) == once


@pytest.mark.parametrize(
    "text",
    [
        "model: tiny\n",
        "[1]\n",
        "tokens: pow2\n",
        "base: &b {budget: 64, buckets: pow2}\ntokens: *b\n",
        "base: {budget: &n 128}\ntokens: {budget: *n, buckets: &l [16, 128]}\nmore: *l\n",
    ],
)
def test_a_file_that_cannot_be_changed_in_place_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="`tokens:` cannot be changed in place"):
        with_buckets(text, "f.yaml", tokens=(16, 64))


# --- Slots and ranks -----------------------------------------------------------------------------

LORA = {
    "one line": (
        "lora: {ranks: [8, 16], slots: [0, 1, 2], max_adapters: 4}  # few",
        "lora: {ranks: [16, 48], quantum: 8, slots: [0, 4], max_adapters: 4}  # few",
    ),
    "a quantum stands there": (
        "lora: {quantum: 16, ranks: [16], slots: [1], max_adapters: 4}",
        "lora: {quantum: 8, ranks: [16, 48], slots: [0, 4], max_adapters: 4}",
    ),
    "a block": (
        "lora:\n  # of ours\n  ranks: [8]  # measured\n  slots:\n  - 0  # the base\n  - 2\n"
        "  max_adapters: 4",
        "lora:\n  # of ours\n  ranks: [16, 48]  # measured\n  quantum: 8\n  # the base\n"
        "  slots: [0, 4]\n  max_adapters: 4",
    ),
    "ranks over lines, last": (
        "lora:\n  slots: [1]\n  max_adapters: 4\n  ranks:\n  - 8  # small\n  - 16  # large",
        "lora:\n  slots: [0, 4]\n  max_adapters: 4\n  # small\n  ranks: [16, 48]  # large\n"
        "  quantum: 8",
    ),
}


@pytest.mark.parametrize("case", LORA)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_slots_and_ranks_change_and_their_comments_stay(case: str, newline: str) -> None:
    before, after = ((HEAD + text + TAIL).replace("\n", newline) for text in LORA[case])
    change: Any = {"slots": (0, 4), "ranks": (16, 48), "quantum": 8}
    once = with_buckets(before, "f.yaml", **change)

    assert once == after
    assert with_buckets(once, "f.yaml", **change) == after


def test_all_axes_change_at_once() -> None:
    text = HEAD + CASES["one line"][0] + "\n" + LORA["a block"][0] + TAIL
    one = with_buckets(text, "f.yaml", tokens=(16, 40, 64), slots=(0, 4), ranks=(16, 48), quantum=8)
    by_one = with_buckets(text, "f.yaml", tokens=(16, 40, 64))
    by_one = with_buckets(by_one, "f.yaml", slots=(0, 4))

    assert with_buckets(by_one, "f.yaml", ranks=(16, 48), quantum=8) == one
    assert one == HEAD + CASES["one line"][1] + "\n" + LORA["a block"][1] + TAIL


@pytest.mark.parametrize(
    "text",
    [
        "model: tiny\n",
        "lora: {ranks: [8]}\n",
        "base: &b {ranks: [8], slots: [1]}\nlora: *b\n",
        "lora: {slots: &s [1], ranks: [8]}\nmore: *s\n",
    ],
)
def test_a_lora_section_that_cannot_be_changed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="`lora:` cannot be changed in place"):
        with_buckets(text, "f.yaml", slots=(0, 2))
