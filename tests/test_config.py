"""Reading a config: what is refused, where, in which words; and what is understood."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from aot_lora.config import load_config
from aot_lora.config.presets import default_store_root
from aot_lora.errors import EXIT_USAGE, ConfigError

GOOD = """\
model: {q_proj: [16, 16]}
target: {platform: cpu}
lora:
  ranks: [8]
  slots: [0, 2]
  max_adapters: 2
tokens: {budget: 64, buckets: pow2}
"""


def good(old: str = "", new: str = "", *, end: str = "") -> str:
    assert old in GOOD
    return GOOD.replace(old, new) + end


def tokens(text: str) -> str:
    return good("budget: 64, buckets: pow2", text)


BAD = {
    # What is no config at all.
    "broken syntax": "model: [1, 2\ntokens: }\n",
    "tab": "model:\n\t- a\n",
    "control character": "model: tiny\ntokens: \x07\n",
    "impossible date": tokens("budget: 2020-99-99"),
    "alias of itself": "model: &a [*a]\n",
    "two documents": GOOD + "---\n" + GOOD,
    "empty file": "",
    "a list": "- model: tiny\n",
    # Keys.
    "misspelt section": good("tokens:", "token:"),
    "misspelt key": good("max_adapters", "max_adapter"),
    "misspelt policy": tokens("budget: 64, buckets: {stp: 4}"),
    "unknown key": good(end="zzz: 1\n"),
    "key that is no string": good(end="1: 2\n"),
    "duplicate key": good(end="model: tiny\n"),
    "duplicate key in a section": good("  slots: [0, 2]", "  slots: [0, 2]\n  ranks: [16]"),
    "missing section": good("tokens: {budget: 64, buckets: pow2}\n"),
    "missing key": good("  max_adapters: 2\n"),
    "several at once": good("ranks: [8]", "ranks: []").replace("budget: 64", "budget: 0"),
    # Keys of the design that this version refuses.
    "fit to no trace": tokens("budget: 64, buckets: {fit: traffic.csv, count: 10}"),
    "fit without a count": tokens("budget: 64, buckets: {fit: traffic.csv, cont: 10}"),
    "fit of a step": tokens("budget: 64, buckets: {fit: traffic.csv, count: 10, step: 16}"),
    "fit of something else": tokens("budget: 64, buckets: {fit: t.csv, count: 1, of: words}"),
    "smallest beside a fit": tokens("budget: 64, buckets: {fit: t.csv, count: 1}, smallest: 8"),
    "budget below the multiple": tokens("budget: 8, buckets: {fit: t.csv, count: 1}"),
    "planned key": good(end="store: {verify_key: deploy.pub}\n"),
    "a fraction above one": good(end="limits: {hbm_fraction: 1.5}\n"),
    "mesh that divides no module": good(end="mesh: {tp: 3}\n"),
    "row-parallel module that is none": good(end="mesh: {tp: 2, row_parallel: [o]}\n"),
    "topology smaller than the mesh": good(
        "platform: cpu", 'platform: tpu, topology: "v6e:2x2"', end="mesh: {tp: 8}\n"
    ),
    "unknown miss policy": good(end="on_miss: wait\n"),
    # Types.
    "text for a number": good("ranks: [8]", "ranks: ['8']"),
    "fraction for a number": tokens("budget: 64.0, buckets: pow2"),
    "truth for a number": tokens("budget: true, buckets: pow2"),
    "nothing for a number": tokens("budget: null, buckets: pow2"),
    "number for a list": good("slots: [0, 2]", "slots: 2"),
    "unknown policy": tokens("budget: 64, buckets: pow3"),
    "bytes without a unit we know": good(end="limits: {store_bytes: 8GB}\n"),
    "shape of one size": good("[16, 16]", "[16]"),
    "size above int32": good("[16, 16]", "[16, 99999999999]"),
    "nothing to compile": good("slots: [0, 2]", "slots: [0]"),
    "source outside": good(end="programs: [{entry: 'a:b', sources: [/x.py]}]\n"),
    "store with a zero byte": good(end='store: {root: "a\\0b"}\n'),
    # Empty lists.
    "no ranks": good("ranks: [8]", "ranks: []"),
    "no slots": good("slots: [0, 2]", "slots: []"),
    "no buckets": tokens("budget: 64, buckets: []"),
    "no targets": good("{platform: cpu}", "[]"),
    "no programs": good(end="programs: []\n"),
    "max_tokens above the budget": good(end="programs: [{entry: 'a:b', max_tokens: 65}]\n"),
    "no modules": good("ranks: [8]", "ranks: [8]\n  modules: []"),
    "no model": good("{q_proj: [16, 16]}", "{}"),
    # Buckets and budgets; CASES 19, 22, 23.
    "bucket 0": tokens("budget: 64, buckets: [0, 16]"),
    "bucket -1": tokens("budget: 64, buckets: [16, -1]"),
    "bucket as text": tokens('budget: 128, buckets: ["128"]'),
    "rank 0": good("ranks: [8]", "ranks: [0]"),
    "slot -1": good("slots: [0, 2]", "slots: [-1]"),
    "budget below the smallest power": tokens("budget: 8, buckets: pow2"),
    "budget below the smallest bucket": tokens("budget: 8, buckets: [16, 32]"),
    "bucket above the budget": tokens("budget: 64, buckets: [16, 128]"),
    "prefill chunk above the buckets": tokens("budget: 2048, buckets: pow2, prefill_chunk: 4096"),
    "smallest beside a list": tokens("budget: 64, buckets: [16], smallest: 8"),
    "a slip of the step": tokens("budget: 1000000000, buckets: {step: 1}"),
    "14,368 variants": tokens("budget: 7183, buckets: {step: 1}").replace("[0, 2]", "[2]"),
    "too many bytes": good(end="limits: {store_bytes: 4MiB}\n"),
    # Names.
    "unknown platform": good("cpu", "gpu"),
    "unknown topology": good("{platform: cpu}", '{platform: tpu, topology: "v9:1x1"}'),
    "topology without chips": good("{platform: cpu}", '{platform: tpu, topology: "v6e:0x1"}'),
    "tpu without a topology": good("{platform: cpu}", "{platform: tpu}"),
    "cpu with a topology": good("{platform: cpu}", '{platform: cpu, topology: "v6e:1x1"}'),
    "unknown GPU": good("{platform: cpu}", "{platform: cuda, topology: h300}"),
    "GPU that is no name": good("{platform: cpu}", '{platform: cuda, topology: "../h200"}'),
    "no such target config": good("{platform: cpu}", "{platform: cuda, topology: my.txtpb}"),
    "second target": good("{platform: cpu}", "[{platform: cpu}, {platform: tpuu}]"),
    "unknown model": good("{q_proj: [16, 16]}", "llama-3.1-9b"),
    "model that is a path": good("{q_proj: [16, 16]}", "../models/tiny"),
    "unknown module": good("ranks: [8]", "ranks: [8]\n  modules: [q_proj, q_prj]"),
    "layers of a known model": good("{q_proj: [16, 16]}", "tiny\nlayers: 2"),
    "program without a function": good(end="programs: [lora, {entry: my_engine}]\n"),
    "two programs of one name": good(end="programs: [{entry: 'a:step'}, {entry: 'b:step'}]\n"),
    "program named as ours": good(end="programs: [{entry: 'a:lora_shrink'}]\n"),
    # One value against another.
    "slots above max_adapters": good("[0, 2]", "[0, 4]"),
    "quantum above the ranks": good("ranks: [8]", "ranks: [8]\n  quantum: 16"),
    "no room for one adapter": good("ranks: [8]", "ranks: [8]\n  resident_lanes: 4"),
}


def error_of(path: Path) -> str:
    """The text of the error, with the folder of the config left out."""
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.mark.usefixtures("known_costs")
@pytest.mark.parametrize("case", BAD)
def test_a_bad_config_says_where_and_what_to_do(
    case: str, write_config: Callable[..., Path], snapshot: SnapshotAssertion
) -> None:
    text = error_of(write_config(BAD[case], name="bad.yaml"))

    # An alias of itself has no place of its own.
    assert case == "alias of itself" or re.match(r"bad\.yaml:\d+:\d+: ", text)
    assert text == snapshot


def test_the_base_of_the_bad_configs_is_good(write_config: Callable[..., Path]) -> None:
    assert load_config(write_config(GOOD)).warnings == ()


def test_a_config_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"model: caf\xe9\n")

    assert error_of(path) == "bad.yaml: not UTF-8 text"


@pytest.mark.parametrize(("name", "found"), [("", "a folder"), ("absent", "nothing there")])
def test_a_config_that_is_no_file(tmp_path: Path, name: str, found: str) -> None:
    with pytest.raises(ConfigError, match=rf"no such config(.|\n)*cpu/quickstart(.|\n)*{found}"):
        load_config(tmp_path / name)


WARNED = {
    "unsorted tokens": tokens("budget: 512, buckets: [512, 128, 128, 256]"),  # CASES 19
    "unsorted ranks": good("ranks: [8]", "ranks: [16, 8]"),
    "unsorted slots": good("slots: [0, 2]", "slots: [2, 0]"),
    "budget added": tokens("budget: 40, buckets: [16, 32]"),
    "gap": tokens("budget: 49152, buckets: [4096, 8192, 49152]"),  # CASES 21
}


@pytest.mark.parametrize("case", WARNED)
def test_what_is_read_otherwise_than_written_is_said(
    case: str, write_config: Callable[..., Path], snapshot: SnapshotAssertion
) -> None:
    path = write_config(WARNED[case])
    config = load_config(path)
    (warning,) = config.warnings

    assert [warning.replace(f"{path.parent}/", ""), config.plan.tokens.buckets] == snapshot


@pytest.mark.parametrize("budget", [317, 586, 2000, 16640])
@pytest.mark.parametrize("policy", ["pow2", "{step: 128}", "[64, 100, 200, 300]"])
def test_the_last_bucket_is_the_budget(
    budget: int, policy: str, write_config: Callable[..., Path]
) -> None:
    """CASES 20."""
    config = load_config(write_config(tokens=f"{{budget: {budget}, buckets: {policy}}}"))

    assert config.plan.tokens.buckets[-1] == budget


def test_targets_named_twice_count_once(write_config: Callable[..., Path]) -> None:
    two = "[{platform: cpu}, {platform: tpu, topology: 'v6e:1x1'}, {platform: cpu}]"

    targets = load_config(write_config(target=two)).targets

    assert list(map(str, targets)) == ["cpu", "tpu v6e:1x1"]


def test_the_store_is_the_flag_then_the_variable_then_the_config_then_the_default(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured, plain = write_config(store="{root: here}"), write_config(GOOD, name="plain.yaml")
    roots = [load_config(plain).store_root, load_config(configured).store_root]
    monkeypatch.setenv("AOT_LORA_CACHE", str(tmp_path / "variable"))
    roots += [load_config(configured).store_root]
    roots += [load_config(configured, store=str(tmp_path / "flag")).store_root]

    below = [tmp_path / name for name in ("here", "variable", "flag")]
    assert roots == [default_store_root(), *below]


def test_a_relative_store_starts_at_the_config_and_a_relative_flag_at_the_caller(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_config(store="{root: ../beside}")
    monkeypatch.chdir("/")

    assert load_config(path).store_root == tmp_path.parent / "beside"
    assert load_config(path, store="flag").store_root == Path("/flag")
