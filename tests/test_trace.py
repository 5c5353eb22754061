"""Fingerprints move with what a program does, and with nothing around it; what cannot be traced
says why.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gpus import H200
from jax.experimental import pallas as pl
from projecting import served
from syrupy.assertion import SnapshotAssertion

from aot_lora._jax_compat import mosaic_gpu
from aot_lora.config import load_config
from aot_lora.kernels.batch import Batch
from aot_lora.kernels.forms import FORMS
from aot_lora.lowering.canonical import canonical
from aot_lora.lowering.check import trace_all
from aot_lora.lowering.trace import Trace, prepare_tracing, trace
from aot_lora.plan import TargetSpec, Variant
from aot_lora.programs.catalog import Catalog
from aot_lora.programs.spec import Program
from aot_lora.targets.cuda import without_gpu

ROOT = Path(__file__).parents[1]

# --- What must not move it -----------------------------------------------------------------------

ENGINE = '''\
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from aot_lora import Program, kernels

NAMES = {"gate", "up", "down", "out", "query"}


def double(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2 + jnp.where(x_ref[...] > 0, 1.0, 0.0)


def xla(x):
    """Two named calls and a loop, each of which writes its own name or place into a trace."""
    inner = jax.jit(lambda y: jnp.tanh(y) @ y.T)
    return {name: jax.lax.fori_loop(0, 3, lambda i, y: inner(y), x) for name in sorted(NAMES)}


def mosaic(x):
    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def step(point, context, fn):
    return Program(fn=fn, args=(context.array(128, 128, dtype="float32"),))


xla_step = functools.partial(step, fn=xla)
mosaic_step = functools.partial(step, fn=mosaic)
'''

CONFIG = """\
model: {q_proj: [128, 128]}
target: {platform: tpu, topology: "v6e:1x1"}
lora: {ranks: [8], slots: [0], max_adapters: 1, dtype: float32}
tokens: {budget: 128, buckets: [128]}
programs: [{entry: "engine:xla_step"}, {entry: "engine:mosaic_step"}]
"""

TRACE = """
import json, sys
from aot_lora.config import load_config
from aot_lora.lowering.check import trace_all
lines, errors = trace_all(load_config(sys.argv[1]))
assert not errors, errors
print(json.dumps({name: line.fingerprint for name, line in lines["tpu v6e:1x1"].items()}))
"""


def traced_in(folder: Path, *, source: str = ENGINE, **changes: Any) -> dict[str, str]:
    """Fingerprints of the engine in `folder`, from a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "engine.py").write_text(source)
    (folder / "tpu.yaml").write_text(CONFIG)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", TRACE, str(folder / "tpu.yaml")],
        cwd=changes.get("cwd", folder),
        env={**environ, **changes.get("environ", {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("engine")
    return folder, traced_in(folder)


@pytest.mark.parametrize("moved", ["folder", "lines", "hash seed", "working directory"])
def test_surroundings_do_not_move_a_fingerprint(
    moved: str, first: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """CASES 28."""
    folder, before = first
    match moved:
        case "folder":
            after = traced_in(tmp_path / "another" / "place")
        case "lines":
            lined = ENGINE.replace("\n\n\ndef ", "\n\n\n# A comment.\n\n\ndef ")
            lined = lined.replace("    return", "\n    # Another.\n    return")
            after = traced_in(folder, source=lined)
        case "hash seed":
            after = traced_in(folder, environ={"PYTHONHASHSEED": "1"})
        case _:
            after = traced_in(folder, cwd=tmp_path)

    assert after == before


def test_a_changed_pallas_kernel_moves_its_own_fingerprint_only(
    first: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    """CASES 30; and what does not move above is not for want of looking."""
    before = first[1]
    after = traced_in(tmp_path, source=ENGINE.replace("x_ref[...] * 2", "x_ref[...] * 3"))

    assert {name for name in before if after[name] != before[name]} == {"mosaic_step/t128-l0"}


# --- What must move it ---------------------------------------------------------------------------

F32 = jax.ShapeDtypeStruct((4,), "float32")


def traced(fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Trace:
    prepare_tracing()
    program = Program(fn=fn, args=args, donate=donate)
    return trace(Variant(program="step", tokens=4), program, platform="cpu")


def line(one: Trace) -> tuple[str, str]:
    """What a lock holds of a trace."""
    return one.fingerprint, str(one.signature)


def add(x: Any, y: Any) -> Any:
    return x + y


BASE = traced(add, F32, F32)
CHANGED = {
    "code": traced(lambda x, y: x - y, F32, F32),
    "constant": traced(lambda x, y: x + y + 1, F32, F32),
    "shape": traced(add, *[jax.ShapeDtypeStruct((5,), "float32")] * 2),
    "dtype": traced(add, *[jax.ShapeDtypeStruct((4,), "bfloat16")] * 2),
    "weak type": traced(add, F32, jax.ShapeDtypeStruct((4,), "float32", weak_type=True)),
    "donation": traced(add, F32, F32, donate=(0,)),
    "python scalar": traced(add, F32, 1.0),
    "integer": traced(add, F32, jax.ShapeDtypeStruct((4,), "int32")),
    "results": traced(lambda x, y: {"sum": x + y}, F32, F32),
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_a_program_is_moves_its_line(change: str) -> None:
    assert line(CHANGED[change]) != line(BASE)


@pytest.mark.parametrize(
    ("change", "signature"),
    [
        ("code", "x: f32[4], y: f32[4] -> f32[4]"),
        ("dtype", "x: bf16[4], y: bf16[4] -> bf16[4]"),
        ("weak type", "x: f32[4], y: ~f32[4] -> f32[4]"),
        ("donation", "donated x: f32[4], y: f32[4] -> f32[4]"),
        ("integer", "x: f32[4], y: i32[4] -> f32[4]"),
        ("python scalar", "x: f32[4], y: ~f32[] -> f32[4]"),
    ],
)
def test_the_signature_names_the_argument_and_what_differs(change: str, signature: str) -> None:
    """CASES 29."""
    assert str(CHANGED[change].signature) == signature


@pytest.mark.parametrize("second", [F32, 1.0, np.ones(4, "float32")])
def test_the_variants_name_and_the_device_compiled_for_do_not(second: Any) -> None:
    program = Program(fn=add, args=(F32, second))
    on_device = trace(
        Variant(program="other", tokens=9), program, platform="cpu", device=jax.devices()[0]
    )

    assert line(on_device) == line(traced(add, F32, second))


# --- What cannot be traced -----------------------------------------------------------------------

USER = """\
from typing import NamedTuple

import jax
import jax.numpy as jnp

from aot_lora import Program


class Pair(NamedTuple):
    a: object
    b: object


def program(fn, *args):
    return lambda point, context: Program(fn=fn, args=args or (context.array(point.tokens),))


def printing(x):
    jax.debug.print("{}", x)
    return x


def looping_callback(x):
    same = lambda y: jax.pure_callback(lambda z: z, jax.typeof(y), y)
    return jax.lax.fori_loop(0, 3, lambda i, y: same(y), x)


def raises(point, context):
    raise ValueError("no such layer")


def wrong_return(point, context):
    return {"fn": printing}


def wrong_arguments():
    return None


not_a_function = 3
printed = program(printing)
called_back = program(looping_callback)
named_tuple = program(lambda x: Pair(x, x))
random_key = program(lambda key: key, jax.eval_shape(lambda: jax.random.key(0)))
raises_while_traced = program(lambda x: x if x[0] > 0 else -x)
wrong_shapes = program(lambda x: x + jnp.ones(3))
not_an_array = program(lambda x: "text")
wrong_donation = lambda point, context: Program(fn=jnp.sin, args=(context.array(4),), donate=(3,))
good = program(jnp.sin)
"""

BAD_PROGRAMS = [
    "absent",
    "called_back",
    "named_tuple",
    "not_a_function",
    "not_an_array",
    "printed",
    "raises",
    "raises_while_traced",
    "random_key",
    "wrong_arguments",
    "wrong_donation",
    "wrong_return",
    "wrong_shapes",
]


@pytest.fixture
def errors_of(
    write_config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """Traces an entry of a user's module beside `good`; returns what was wrong, for each point."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    unique = "user" + "".join(filter(str.isalnum, tmp_path.name))  # Modules are imported once.

    def errors_of(entry: str, *, source: str = USER) -> list[str]:
        (tmp_path / f"{unique}.py").write_text(source)
        path = write_config(
            target="[{platform: cpu}, {platform: tpu, topology: 'v6e:1x1'}]",
            programs=f"[{{entry: '{unique}:good'}}, {{entry: '{entry.replace('user', unique)}'}}]",
        )
        lines, errors = trace_all(load_config(path))
        traced = {name for found in lines.values() for name in found}
        assert {name.partition("/")[0] for name in traced} <= {"good"}
        return [str(e).replace(f"{tmp_path}/", "").replace(unique, "user") for e in errors.values()]

    return errors_of


@pytest.mark.parametrize("program", BAD_PROGRAMS)
def test_a_bad_user_program_says_which_variant_and_why_on_every_platform(
    program: str, errors_of: Callable[..., list[str]], snapshot: SnapshotAssertion
) -> None:
    errors = errors_of(f"user:{program}")
    own = [error for error in errors if " cannot be traced: " not in error]

    assert len(errors) == 2 * 3  # Two platforms, and lanes 0, 8 and 16; `good` was traced.
    assert errors[3:] == errors[:3]
    # What JAX says is JAX's to change, after its first line.
    assert (own or errors)[0].splitlines()[: None if own else 1] == snapshot


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def (", "SyntaxError: "),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_user_module_that_cannot_be_imported(
    source: str, why: str, errors_of: Callable[..., list[str]]
) -> None:
    errors = errors_of("user:step", source=source)

    assert errors[-1].startswith(f"programs: user:step: cannot import `user`: {why}")
    assert errors[-1].endswith("\n  next: import it in Python and mend what it raises")


def test_a_user_module_that_does_not_exist(errors_of: Callable[..., list[str]]) -> None:
    assert errors_of("no_such.aot:step")[-1].startswith(
        "programs: no_such.aot:step: cannot import `no_such.aot`: ModuleNotFoundError: "
    )


def test_the_kernels_lower_to_the_same_program_for_every_platform(tiny_config: Path) -> None:
    """So numbers checked on a CPU are those of the program that a TPU compiler is given.

    Bank writes move bits on a CPU; `test_kernels` holds both ways to the same bytes.
    """
    config = load_config(tiny_config)
    catalog = Catalog(config.plan, config.targets[0], config=config.path)
    for variant in config.plan.variants:
        program = catalog.program(variant)
        cpu, tpu, cuda = (
            trace(variant, program, platform=p).fingerprint for p in ("cpu", "tpu", "cuda")
        )
        assert tpu == cuda, variant.name
        assert (cpu == tpu) != variant.program.startswith("bank_"), variant.name


def test_a_module_that_changes_jax_config_is_refused_and_its_changes_are_taken_back(
    errors_of: Callable[..., list[str]],
) -> None:
    """What it sets is in no key, and would reach the programs that are traced after it."""
    change = "jax.config.update('jax_default_matmul_precision', 'highest')"
    errors = errors_of("user:step", source=f"import jax\n{change}\n")

    assert jax.config.jax_default_matmul_precision is None
    assert len(errors) == 2 * 2 * 3  # Both entries are in the module, and no point of it passes.
    assert all("it changes jax.config: jax_default_matmul_precision" in error for error in errors)
    assert "set JAX_DEFAULT_MATMUL_PRECISION in the environment" in errors[0]


def test_a_function_that_changes_jax_config_is_refused_too(
    errors_of: Callable[..., list[str]],
) -> None:
    change = "jax.config.update('jax_default_matmul_precision', 'highest')"
    errors = errors_of("user:step", source=USER + f"\ndef step(point, context):\n    {change}\n")

    assert jax.config.jax_default_matmul_precision is None
    assert len(errors) == 2 * 3
    assert all("it changes jax.config" in error for error in errors)


def test_each_target_is_traced(write_config: Callable[..., Path], tmp_path: Path) -> None:
    """A user's program may look at its target."""
    (tmp_path / "aims.py").write_text(
        "import jax.numpy as jnp\nfrom aot_lora import Program\n\n"
        "def step(point, context):\n"
        "    fn = jnp.sin if context.target.topology == 'v6e:1x1' else jnp.cos\n"
        "    return Program(fn=fn, args=(context.array(point.tokens),))\n"
    )
    targets = "[{platform: tpu, topology: 'v6e:1x1'}, {platform: tpu, topology: 'v5e:1x1'}]"
    path = write_config(target=targets, programs="[{entry: 'aims:step'}]")
    lines, errors = trace_all(load_config(path))

    assert not errors
    one, other = (set(lines[f"tpu {name}:1x1"].values()) for name in ("v6e", "v5e"))
    assert not one & other


# Its shrink is a Triton kernel: Mosaic GPU has no tiles of few rows.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="`extended`, a Mosaic GPU kernel, needs jax 0.11"
)
def test_a_mosaic_gpu_kernel_traced_twice_in_a_process_is_one() -> None:
    """jaxlib 0.11 counts them, in the kernel itself."""
    batch = served(128, (64,), 64, (256,), dtype="bfloat16", quantum=64)
    form = FORMS["extended"]

    def fingerprint() -> str:
        def step(x: Any, weights: Any, banks: Any, batch: Any) -> Any:
            made = form.prepare(Batch(*batch), quantum=64, most=1)
            return form.project(x, weights, banks, 0, made)

        args = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            (batch.x, batch.weights, batch.banks, tuple(batch.batch())),
        )
        target = TargetSpec("cuda", "h200", target_config=H200)
        variant = Variant(program="step", tokens=128)
        with without_gpu(target):
            return trace(variant, Program(fn=step, args=args), platform="cuda").fingerprint

    assert fingerprint() == fingerprint()


def gpu_kernel(way: str, factor: float, *, renamed: bool = False) -> Trace:
    """A kernel through Mosaic GPU or Triton, or the same with other names and lines."""
    from jax.experimental.pallas import mosaic_gpu, triton

    def scale(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * factor

    body = scale
    if renamed:

        def scale(rows_ref: Any, out_ref: Any) -> None:
            # A comment.
            scaled = rows_ref[...] * factor
            out_ref[...] = scaled

        body = scale
    x = jax.ShapeDtypeStruct((128,), "float32")
    if way == "Triton":
        params = triton.CompilerParams()
        kernel = pl.pallas_call(body, out_shape=x, compiler_params=params)
    else:
        kernel = mosaic_gpu.kernel(body, out_type=x)
    prepare_tracing()
    with without_gpu(TargetSpec("cuda", "h200", target_config=H200)):
        program = Program(fn=lambda x: kernel(x), args=(x,))
        return trace(Variant(program="step", tokens=128), program, platform="cuda")


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("way", "read"),
    [("Triton", "tt.func public @scale"), ("Mosaic", "stable_mosaic_gpu.gpu.launch")],
)
def test_names_in_a_gpu_kernel_do_not_move_it_and_its_code_does(way: str, read: str) -> None:
    first = gpu_kernel(way, 2.0)

    assert gpu_kernel(way, 2.0, renamed=True).line == first.line
    moved = gpu_kernel(way, 3.0).line
    assert moved.fingerprint != first.fingerprint
    assert {n for n, digest in moved.kernels.items() if first.line.kernels[n] != digest} == {
        "scale"
    }
    assert read in first.code.text


NUMBERED = """\
module @jit_step {
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = call @SECOND(%arg0) : (tensor<4xf32>) -> tensor<4xf32>
    %1 = call @FIRST(%0) : (tensor<4xf32>) -> tensor<4xf32>
    return %1 : tensor<4xf32>
  }
  func.func private @FIRST(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    return %arg0 : tensor<4xf32>
  }
  func.func private @SECOND(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.sine %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


@pytest.mark.parametrize(
    ("first", "second"), [("inner_3", "inner_12"), ('"<lambda>"', '"<lambda>_0"'), ("f1", "f0")]
)
def test_names_and_numbers_of_inner_functions_do_not_count(first: str, second: str) -> None:
    def text(one: str, other: str) -> str:
        named = NUMBERED.replace("@FIRST", f"@{one}").replace("@SECOND", f"@{other}")
        return canonical(named).text

    assert text(first, second) == text("inner", "other")
    swapped = NUMBERED.replace("@FIRST", "@X").replace("@SECOND", "@FIRST")
    assert canonical(swapped.replace("@X", "@SECOND")).text == canonical(NUMBERED).text
    called_other = NUMBERED.replace("call @SECOND", "call @FIRST")
    assert canonical(called_other).text != canonical(NUMBERED).text


def test_a_kernel_that_cannot_be_read_counts_as_its_bytes() -> None:
    def text(body: str) -> str:
        quoted = f"\\22body\\22: \\22{body}\\22"
        return (
            f'  %0 = stablehlo.custom_call @tpu_custom_call() {{backend_config = "{quoted}"}} : ()'
        )

    one, other = canonical(text("AAAA")), canonical(text("AAAB"))
    assert one.text != other.text
    assert one.kernels != other.kernels


def test_only_bytes_with_such_kernels_import_what_loading_them_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported: list[str] = []
    monkeypatch.setattr(mosaic_gpu.importlib, "import_module", imported.append)
    mosaic_gpu.ready_to_load(b"an executable")
    assert not imported
    mosaic_gpu.ready_to_load(b"..anonymous_mosaic_gpu..")
    assert imported == ["jax.experimental.mosaic.gpu.core"]
