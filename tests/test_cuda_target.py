"""A GPU's target config: read, refused, compared with a GPU; what the tools of a build lack."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpus import H200, other, write_small

from aot_lora import load_config
from aot_lora.cli.main import run
from aot_lora.config.gpus import Gpu, gpu_of, names
from aot_lora.errors import ConfigError, ProgramError, UnsupportedError
from aot_lora.plan import TargetSpec, Variant
from aot_lora.runtime import load
from aot_lora.targets import cuda
from aot_lora.targets.environment import recording_environment, worker_environment
from aot_lora.warmup.autotune import autotune, merged
from aot_lora.warmup.compile import compile_lowered, compile_tuned
from aot_lora.warmup.job import Job
from aot_lora.warmup.run import _default_jobs

TARGET = TargetSpec("cuda", "h200", target_config=H200)
OTHERS = {
    "NVIDIA H100": other(': "NVIDIA H200"\nruntime', ': "NVIDIA H100"\nruntime'),
    "compute capability 10.0": other("major: 9\n", "major: 10\n"),
    "compute capability 9.1": other("major: 9\n", "major: 9 minor: 1\n"),
    "16 cores": other("core_count: 132", "core_count: 16"),
    "80.0 GiB": other("memory_size: 150109880320", "memory_size: 85899345920"),
}


# --- Reading -------------------------------------------------------------------------------------


def test_the_shipped_one_is_the_h200s() -> None:
    assert names() == ("h200",)
    assert gpu_of(H200) == Gpu(
        name="NVIDIA H200", compute_capability="9.0", cores=132, memory_bytes=150109880320
    )


def test_a_config_names_a_shipped_one_or_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus/own.txtpb").write_text(OTHERS["16 cores"])

    (shipped,) = load_config(write_small(tmp_path)).targets
    (own,) = load_config(
        write_small(tmp_path, "{platform: cuda, topology: gpus/own.txtpb}")
    ).targets

    assert shipped == TARGET
    assert (own.topology, gpu_of(own.target_config).cores) == ("gpus/own.txtpb", 16)
    assert (str(shipped), str(own)) == ("cuda h200", "cuda gpus/own.txtpb")
    assert shipped.deviceless
    assert not TargetSpec("cuda").deviceless


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("", "no device_description_str"),
        ("hello {", "no device_description_str"),
        (other("  core_count: 132\n", ""), "no gpu_device_info.core_count"),
        (other("core_count: 132", "core_count: many"), "many"),
        # The fields of another message do not count.
        (other("gpu_device_info {", "cpu_device_info {"), "no gpu_device_info"),
    ],
)
def test_a_file_that_is_no_target_config_is_refused(tmp_path: Path, text: str, lacks: str) -> None:
    (tmp_path / "own.txtpb").write_text(text)

    with pytest.raises(ConfigError, match=f"not a target config of a GPU(.|\n)*{lacks}") as error:
        load_config(write_small(tmp_path, "{platform: cuda, topology: own.txtpb}"))
    assert "small.yaml:2:" in str(error.value)


def test_autotuning_results_count_where_they_are_read(tmp_path: Path) -> None:
    targets = "[{platform: cuda, topology: h200}, {platform: cuda}]"
    config = write_small(tmp_path, targets)
    before = load_config(config).targets
    (tmp_path / "small.autotune.textproto").write_text("version: 3\n")
    after = load_config(config).targets

    assert before[0] != after[0]
    assert len(after[0].autotune) == 64
    assert before[1] == after[1]


# --- Compiling -----------------------------------------------------------------------------------


def test_workers_have_no_gpu_to_spoil_and_none_to_look_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("aot_lora.warmup.run.usable_cores", lambda: 7)
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    results = tmp_path / "with space.textproto"
    tuned = TargetSpec("cuda", "h200", target_config=H200, autotune="ab")

    assert (_default_jobs(TARGET), _default_jobs(TargetSpec("cuda"))) == (7, 1)
    assert worker_environment(TARGET)["JAX_PLATFORMS"] == "cpu"
    assert "XLA_FLAGS" not in worker_environment(TARGET, autotune=results)
    assert worker_environment(tuned, autotune=results)["XLA_FLAGS"] == (
        f"--xla_a=1 --xla_gpu_load_autotune_results_from='{results}'"
    )
    assert recording_environment(TargetSpec("cuda"), results) == {
        **worker_environment(TargetSpec("cuda")),
        "XLA_FLAGS": f"--xla_a=1 --xla_gpu_dump_autotune_results_to='{results}'",
    }


class Lowered:
    """Compiles as a compiler does that says `problem`; with `options`, `strict`."""

    def __init__(self, problem: str = "", strict: str = "") -> None:
        self.problem, self.strict = problem, strict

    def compile(self, compiler_options: dict[str, Any] | None) -> str:
        if problem := self.strict if compiler_options else self.problem:
            raise RuntimeError(problem)
        return "with results" if compiler_options else "without"


def test_without_ptxas_the_whole_warmup_stops_and_says_what_to_install() -> None:
    # As jaxlib 0.11.2 says it where neither the packages nor a toolkit are there.
    problem = "UNAVAILABLE: No PTX compilation provider is available. Neither ptxas/nvlink nor"

    with pytest.raises(UnsupportedError, match=r"ptxas and nvlink(.|\n)*aot-lora\[cuda-build\]"):
        compile_lowered(Variant("step"), Lowered(problem))
    with pytest.raises(ProgramError, match="make the point smaller"):
        compile_lowered(Variant("step"), Lowered("RESOURCE_EXHAUSTED"))


def test_results_that_xla_cannot_read_stop_the_whole_warmup() -> None:
    problem = "INVALID_ARGUMENT: Version mismatch in autotune results. Expected 3 but was 2"

    with pytest.raises(UnsupportedError, match=r"cannot be read(.|\n)*Expected 3 but was 2"):
        compile_tuned(Variant("step"), Lowered(strict=problem))


def test_a_matmul_without_a_result_is_compiled_all_the_same() -> None:
    lacks = "NOT_FOUND: No cached config found for HLO instr: %gemm_fusion"

    assert compile_tuned(Variant("step"), Lowered()) == ("with results", True)
    assert compile_tuned(Variant("step"), Lowered(strict=lacks)) == ("without", False)
    with pytest.raises(ProgramError, match="INTERNAL"):
        compile_tuned(Variant("step"), Lowered(strict="INTERNAL"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NotImplementedError("topology not implemented for cuda"), r"plugin(.|\n)*\[cuda-build\]"),
        (RuntimeError("FAILED_PRECONDITION: Failed to parse"), r"refuses(.|\n)*jax 0\.11 or newer"),
    ],
)
def test_what_the_plugin_cannot_do_is_said(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def refuse(**_: str) -> None:
        raise error

    monkeypatch.setattr(cuda.topologies, "get_topology_desc", refuse)

    with pytest.raises(UnsupportedError, match=says):
        cuda.topology_devices(TARGET)


# --- Recording -----------------------------------------------------------------------------------

ENTRY = """\
results {{
  device: "sm_9.0"
  hlo: "{hlo}"
  result {{
    run_time {{
      nanos: {nanos}
    }}
  }}
}}
"""


def test_results_of_several_processes_are_one_text_with_each_matmul_once() -> None:
    def text(*hlos: str, nanos: int = 1) -> str:
        return "version: 3\n" + "".join(ENTRY.format(hlo=hlo, nanos=nanos) for hlo in hlos)

    assert merged([text("b", "a"), text("a", "c", nanos=2)]) == (
        text("a", "b") + text("c", nanos=2).removeprefix("version: 3\n"),
        3,
    )
    assert merged([]) == merged([""]) == ("", 0)


def test_recording_wants_a_topology_to_record_for(tmp_path: Path) -> None:
    config = load_config(write_small(tmp_path, "{platform: cuda}"))

    with pytest.raises(ConfigError, match=r"without its GPU(.|\n)*found: cuda\n"):
        autotune(config)


def test_what_the_processes_wrote_lies_beside_the_config_and_is_all_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_small(tmp_path)
    jobs = list[Job]()

    def run_all(job: Job, _: Any, variants: list[Variant], workers: int) -> list[None]:
        assert workers == 1
        assert job.record is not None
        jobs.append(job)
        for name in ("1", "2"):  # a worker is replaced now and then
            text = "version: 3\n" + ENTRY.format(hlo=name, nanos=1)
            (job.record / f"{name}.textproto").write_text(text)
        return [None] * len(variants)

    monkeypatch.setattr("aot_lora.warmup.autotune.run_all", run_all)
    before = load_config(path).targets[0]

    assert run(["autotune", str(path), "--format", "json"]) == 0

    found = json.loads(capsys.readouterr().out)
    config = load_config(path)
    assert list(found) == ["variants", "results", "seconds", "path"]
    assert (found["variants"], found["results"]) == (len(config.plan.variants), 2)
    assert Path(found["path"]) == config.autotune_path == tmp_path / "small.autotune.textproto"
    assert config.autotune_path.read_text().count("results {") == 2
    assert (before.autotune, len(config.targets[0].autotune)) == ("", 64)
    assert {entry.name for entry in tmp_path.iterdir()} == {path.name, config.autotune_path.name}
    assert [str(job.target) for job in jobs] == ["cuda"]  # the GPU at hand is what is compiled for
    assert not jobs[0].record.exists()


def test_recording_without_a_gpu_writes_nothing(tmp_path: Path) -> None:
    config = load_config(write_small(tmp_path))

    with pytest.raises(UnsupportedError, match="no cuda device on this host"):
        autotune(config)
    assert not config.autotune_path.exists()


# --- Serving -------------------------------------------------------------------------------------


def test_the_gpu_of_the_target_config_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    drivers = other("150109880320\n", "150000000000\n")  # another driver keeps a little more
    for text in (H200, drivers):
        monkeypatch.setattr(cuda, "target_config_of", lambda _, text=text: text)
        cuda.check_gpus(TARGET, ["the GPU"])
    cuda.check_gpus(TargetSpec("cpu"), [])  # nothing is asked of other targets


@pytest.mark.parametrize("differs", OTHERS)
def test_another_gpu_is_refused_before_anything_is_loaded(
    differs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = load_config(write_small(tmp_path))
    device = SimpleNamespace(device_kind="NVIDIA H200")
    read = list[str]()
    monkeypatch.setattr(load, "find_entries", lambda *_: dict.fromkeys(NAMES, ENTRY_OF_ALL))
    monkeypatch.setattr(load, "_load", lambda *_: read.append("bytes"))
    monkeypatch.setattr(cuda, "target_config_of", lambda _: OTHERS[differs])

    with pytest.raises(UnsupportedError, match=f"not the one of the target config(.|\n)*{differs}"):
        load.load_all(config, config.targets[0], [device])
    assert read == []

    monkeypatch.setattr(cuda, "target_config_of", lambda _: H200)
    load.load_all(config, config.targets[0], [device])
    assert read == ["bytes"]


NAMES = ("bank_reset/l16-d512-o256-n1",)
ENTRY_OF_ALL = SimpleNamespace(key="k")
