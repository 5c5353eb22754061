"""A key misses nothing that matters and feels nothing that does not; a miss names its part."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

import pytest
from gpus import H200 as H200_TEXT
from hypothesis import given
from hypothesis import strategies as st

from aot_lora.config import load_config
from aot_lora.errors import ConfigError, ProgramError, UnsupportedError
from aot_lora.plan import TargetSpec
from aot_lora.store.key import differences, key_of, shorten
from aot_lora.store.warm import WarmIdentity
from aot_lora.targets.identity import TPU_KINDS, cpu_features, identity

PARTS = st.dictionaries(st.text(max_size=8), st.text(max_size=80), max_size=5)


# --- Keys of named parts -------------------------------------------------------------------------


@given(PARTS, PARTS)
def test_equal_parts_and_only_those_have_equal_keys_and_no_differences(
    one: dict[str, str], other: dict[str, str]
) -> None:
    same = one == other

    assert (key_of(one) == key_of(other)) == same
    assert key_of(dict(reversed(one.items()))) == key_of(one)
    assert (differences(shorten(one), shorten(other)) == []) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"ab": "c"}, {"a": "bc"}),
        ({"a": "b", "c": "d"}, {"a": "b,c:d"}),
        ({"a": ""}, {}),
        ({"a": "x" * 70}, {"a": "x" * 71}),
    ],
)
def test_parts_are_framed(one: dict[str, str], other: dict[str, str]) -> None:
    assert key_of(one) != key_of(other)


def test_a_key_is_the_same_whether_its_long_parts_are_shortened_or_not() -> None:
    parts = {"CPU features": "avx512 " * 20, "jax": "0.10.2"}

    assert key_of(parts) == key_of(shorten(parts))
    assert all(len(value) <= 64 for value in shorten(parts).values())


def test_a_difference_says_what_is_here_and_what_was_stored() -> None:
    here = {"jax": "2", "XLA_FLAGS": "", "CPU features": "sse avx " + "x" * 80}
    there = {"jax": "1", "libtpu": "3", "CPU features": "sse avx512 " + "x" * 80}

    assert differences(here, there) == [
        "jax: here 2, stored 1",
        "XLA_FLAGS: here none, stored nothing",
        "CPU features: here avx, stored avx512",
        "libtpu: here nothing, stored 3",
    ]


# --- The identity of a target --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What an identity is made of, on a host on which everything is installed."""

    target: TargetSpec
    environ: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    features: str = "avx sse"
    gpu: str = "NVIDIA H200"


@pytest.fixture
def parts_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Host], dict[str, str]]:
    def parts(host: Host) -> dict[str, str]:
        monkeypatch.setattr(metadata, "version", lambda name: host.versions.get(name, "1"))
        monkeypatch.setattr("aot_lora.targets.identity.cpu_features", lambda: host.features)
        monkeypatch.setattr("aot_lora.targets.identity.gpu_name", lambda: host.gpu)
        return identity(host.target, environ=host.environ)

    return parts


CPU = Host(target=TargetSpec(platform="cpu"))
TPU = Host(target=TargetSpec(platform="tpu", topology="v6e:1x1"))
CUDA = Host(target=TargetSpec(platform="cuda"))
H200 = TargetSpec("cuda", "h200", target_config=H200_TEXT)
H200_HOST = Host(target=H200)

# Part -> two hosts that differ in it; a part without a line here fails.
MATTERS = {
    "platform": (CPU, CUDA),
    "topology": (TPU, replace(TPU, target=TargetSpec(platform="tpu", topology="v6e:2x2"))),
    "device kind": (CUDA, replace(CUDA, gpu="NVIDIA A100")),
    **{
        package: (host, replace(host, versions={package: "2"}))
        for host, package in (
            (CPU, "jax"),
            (CPU, "jaxlib"),
            (TPU, "libtpu"),
            (CUDA, "jax-cuda12-plugin"),
            (CUDA, "jax-cuda12-pjrt"),
            (CUDA, "jax-cuda13-plugin"),
            (CUDA, "jax-cuda13-pjrt"),
        )
    },
    "XLA_FLAGS": (CPU, replace(CPU, environ={"XLA_FLAGS": "--xla_cpu_use_thunk_runtime=false"})),
    "LIBTPU_INIT_ARGS": (TPU, replace(TPU, environ={"LIBTPU_INIT_ARGS": "--xla_tpu_x=1"})),
    "JAX environment": (CPU, replace(CPU, environ={"JAX_ENABLE_X64": "1"})),
    "target config": (
        H200_HOST,
        replace(H200_HOST, target=replace(H200, target_config=H200.target_config + "# other\n")),
    ),
    "autotune results": (H200_HOST, replace(H200_HOST, target=replace(H200, autotune="ab12"))),
    "CPU features": (CPU, replace(CPU, features="avx avx512f sse")),
}
ALWAYS_ONE = {"device count"}


@pytest.mark.parametrize("part", MATTERS)
def test_each_part_changes_the_key_and_is_named(
    part: str, parts_of: Callable[[Host], dict[str, str]]
) -> None:
    one, other = map(parts_of, MATTERS[part])

    assert key_of(one) != key_of(other)
    for here, there in ((one, other), (other, one)):
        named = [line.partition(":")[0] for line in differences(shorten(here), shorten(there))]
        assert part in named if part == "platform" else named == [part]


def test_every_part_has_a_case(parts_of: Callable[[Host], dict[str, str]]) -> None:
    found = {part for host in (CPU, TPU, CUDA, H200_HOST) for part in parts_of(host)}

    assert found == set(MATTERS) | ALWAYS_ONE


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({}, {"XLA_FLAGS": "--xla_dump_to=/somewhere --xla_dump_hlo_as_text"}),
        ({}, {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}),
        ({"XLA_FLAGS": "--xla_a=1 --xla_b=2"}, {"XLA_FLAGS": " --xla_b=2  --xla_a=1"}),
        ({"XLA_FLAGS": "--xla_a=2"}, {"XLA_FLAGS": "--xla_a=1 --xla_a=2"}),
        ({}, {"LIBTPU_INIT_ARGS": "--xla_jf_dump_to=/somewhere"}),
        ({}, {"JAX_COMPILATION_CACHE_DIR": "/somewhere"}),
        ({}, {"JAX_PLATFORMS": "cpu", "JAX_LOG_COMPILES": "1", "JAX_TRACEBACK_FILTERING": "off"}),
        ({}, {"HOME": "/somewhere", "PATH": "/bin", "PYTHONHASHSEED": "1"}),
    ],
)
def test_what_cannot_change_an_executable_does_not_change_the_key(
    one: dict[str, str], other: dict[str, str], parts_of: Callable[[Host], dict[str, str]]
) -> None:
    """CASES 26."""
    found = [parts_of(replace(TPU, environ=environ)) for environ in (one, other)]

    assert found[0] == found[1]


def test_a_host_without_the_gpu_has_the_identity_of_one_with_it(
    parts_of: Callable[[Host], dict[str, str]],
) -> None:
    build, server = (parts_of(replace(H200_HOST, gpu=name)) for name in ("", "NVIDIA H200"))
    at_hand = [parts_of(replace(CUDA, gpu=name)) for name in ("", "NVIDIA H200")]

    assert build == server
    assert build["device kind"] == "NVIDIA H200"
    assert at_hand[0] != at_hand[1]  # what would be seen otherwise


def test_a_gpus_target_config_counts_by_its_text_and_not_by_its_name(
    parts_of: Callable[[Host], dict[str, str]],
) -> None:
    own = replace(H200_HOST, target=replace(H200, topology="gpus/own.txtpb"))

    assert parts_of(own) == parts_of(H200_HOST)


def test_of_a_flag_given_twice_the_last_counts(
    parts_of: Callable[[Host], dict[str, str]],
) -> None:
    found = [
        parts_of(replace(CPU, environ={"XLA_FLAGS": flags}))
        for flags in ("--xla_a=1 --xla_a=2", "--xla_a=2 --xla_a=1")
    ]

    assert found[0] != found[1]


def test_flags_in_a_file_count_by_what_they_are_not_by_where(
    tmp_path: Path, parts_of: Callable[[Host], dict[str, str]]
) -> None:
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_dump_to=/somewhere\n")

    found = parts_of(replace(CPU, environ={"XLA_FLAGS": str(tmp_path / "flags")}))

    assert found["XLA_FLAGS"] == "--xla_a=1"


def test_this_hosts_cpu_has_features() -> None:
    assert cpu_features() == " ".join(sorted(cpu_features().split())) != ""


def test_without_libtpu_a_tpu_target_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "libtpu":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)

    with pytest.raises(UnsupportedError, match=r"libtpu is not installed(.|\n)*aot-lora\[tpu\]"):
        identity(TPU.target)


ASK_LIBTPU = """
import os
from aot_lora.plan import TargetSpec
from aot_lora.targets.environment import worker_environment
from aot_lora.targets.identity import TPU_KINDS
targets = [TargetSpec(platform="tpu", topology=f"{name}:1x1") for name in TPU_KINDS]
os.environ.update(worker_environment(targets[0]))
from aot_lora.errors import UnsupportedError
from aot_lora.targets.devices import compile_devices
for target in targets:
    print(compile_devices(target)[0].device_kind)
try:
    compile_devices(TargetSpec(platform="tpu", topology="v6e:3x5"))
except UnsupportedError as error:
    print(error)
"""


@pytest.mark.tpu_compile
def test_tpu_kinds_are_what_libtpu_says_and_what_it_refuses_is_an_error() -> None:
    pytest.importorskip("libtpu")
    done = subprocess.run(
        [sys.executable, "-c", ASK_LIBTPU], capture_output=True, text=True, check=True
    )
    *kinds, where, found, _ = done.stdout.splitlines()

    assert kinds == list(TPU_KINDS.values())
    assert where == "target.topology: v6e:3x5: the installed libtpu refuses this topology"
    assert found.startswith("  found: ")


# --- The identity of a warmup --------------------------------------------------------------------

STEP = "def step(point, context):\n    return None\n"


@pytest.fixture
def checkout(tmp_path: Path, write_config: Callable[..., Path]) -> Path:
    """A config beside a user's package and a data file that its program depends on."""
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/__init__.py").write_text("")
    (tmp_path / "engine/step.py").write_text(STEP)
    (tmp_path / "weights.txt").write_text("1")
    entry = "{entry: 'engine.step:step', sources: ['*.txt']}"
    return write_config(programs=f"[lora, {entry}]").parent


def warm_identity(folder: Path) -> WarmIdentity:
    config = load_config(folder / "tiny.yaml")
    return WarmIdentity.of(config, config.targets[0])


def test_a_moved_checkout_has_the_same_identity(checkout: Path, tmp_path: Path) -> None:
    """Even into a folder that is called as the package."""
    before = warm_identity(checkout).parts
    moved = tmp_path / "engine" / "a checkout"
    shutil.copytree(checkout, moved, ignore=lambda folder, names: {"a checkout"} & set(names))

    assert warm_identity(moved).parts == before


def test_limits_and_comments_and_the_store_are_no_part_of_it(checkout: Path) -> None:
    before = warm_identity(checkout).identity
    with (checkout / "tiny.yaml").open("a") as config:
        config.write("# a comment\nlimits: {variants: 99}\n")

    assert warm_identity(checkout).identity == before


@pytest.mark.parametrize(
    ("file", "old", "new", "part"),
    [
        ("engine/step.py", "None", "1", "source of engine"),
        ("engine/__init__.py", "", "x = 1", "source of engine"),
        ("weights.txt", "1", "2", "source *.txt"),
        ("tiny.yaml", "budget: 8, buckets: [8]", "budget: 9, buckets: [8, 9]", "plan"),
    ],
)
def test_what_a_program_is_made_of_is_named_when_it_changes(
    file: str, old: str, new: str, part: str, checkout: Path
) -> None:
    before = warm_identity(checkout)
    (checkout / file).write_text((checkout / file).read_text().replace(old, new, 1))
    after = warm_identity(checkout)

    assert after.identity != before.identity
    (line,) = differences(shorten(after.parts), shorten(before.parts))
    assert line.startswith(part + ": ")


def test_a_renamed_or_added_source_file_counts(checkout: Path) -> None:
    before = warm_identity(checkout).identity
    (checkout / "engine/step.py").rename(checkout / "engine/other.py")
    renamed = warm_identity(checkout).identity
    (checkout / "engine/more.py").write_text("")

    assert len({before, renamed, warm_identity(checkout).identity}) == 3


def test_a_user_module_that_does_not_exist(write_config: Callable[..., Path]) -> None:
    path = write_config(programs="[{entry: 'no_such_module_anywhere.aot:step'}]")

    with pytest.raises(ProgramError, match=r"no module `no_such_module_anywhere`(.|\n)*next: "):
        warm_identity(path.parent)


def test_sources_that_match_nothing(write_config: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(STEP)
    path = write_config(programs="[{entry: 'engine:step', sources: ['*.nothing']}]")

    with pytest.raises(ConfigError, match=r"`\*\.nothing` matches no file"):
        warm_identity(path.parent)


def test_a_neighbour_of_a_single_file_counts(write_config: Callable[..., Path]) -> None:
    path = write_config(programs="[{entry: 'alone:step'}]")
    (path.parent / "alone.py").write_text("import layers\n")
    neighbour = path.parent / "layers.py"
    neighbour.write_text("width = 1\n")
    before = warm_identity(path.parent).parts
    neighbour.write_text("width = 2\n")
    after = warm_identity(path.parent).parts
    assert [name for name in before if before[name] != after[name]] == ["source of alone"]


# --- The table of kernels ------------------------------------------------------------------------

KERNELS = "table of kernels"


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tables, with one of a v6e, on a host on which everything is installed."""
    monkeypatch.setattr(metadata, "version", lambda _: "1")
    monkeypatch.setattr("aot_lora.config.presets.presets_root", lambda: tmp_path)
    folder = tmp_path / "devices"
    folder.mkdir()
    text = '{"hardware": "v6e", "source": "a test", "rows": []}\n'
    (folder / "v6e.kernels.json").write_text(text)
    return folder


def identity_on(config: Path, topology: str) -> WarmIdentity:
    """For a chip of that name; for the CPU without one."""
    target = TargetSpec("tpu", f"{topology}:1x1") if topology else TargetSpec("cpu")
    return WarmIdentity.of(load_config(config), target)


def test_a_byte_of_the_hardwares_table_changes_the_identity(
    tiny_config: Path, tables: Path
) -> None:
    path = tables / "v6e.kernels.json"
    before = identity_on(tiny_config, "v6e")
    again = identity_on(tiny_config, "v6e")
    path.write_text(path.read_text() + " ")
    after = identity_on(tiny_config, "v6e")

    assert before.identity == again.identity != after.identity
    assert KERNELS in before.parts
    assert KERNELS not in before.target_parts
    (line,) = differences(shorten(after.parts), shorten(before.parts))
    assert line.startswith(f"{KERNELS}: ")


def test_a_table_that_is_removed_is_missed(tiny_config: Path, tables: Path) -> None:
    before = identity_on(tiny_config, "v6e")
    (tables / "v6e.kernels.json").unlink()
    after = identity_on(tiny_config, "v6e")

    assert KERNELS not in after.parts
    assert after.identity != before.identity


@pytest.mark.parametrize("topology", ["", "v5e"])
def test_a_target_without_a_table_feels_no_other(
    topology: str, tiny_config: Path, tables: Path
) -> None:
    before = identity_on(tiny_config, topology)
    (tables / "v6e.kernels.json").write_text("another")

    assert KERNELS not in before.parts
    assert identity_on(tiny_config, topology) == before
