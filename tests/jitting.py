"""What the tests of `aot_lora.jit` share: an engine that warms itself up, in a child process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENGINE = """\
import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import aot_lora
import other


class Out(NamedTuple):
    hidden: jax.Array
    rest: object


@jax.tree_util.register_dataclass
@dataclass
class Batch:
    tokens: jax.Array
    kind: str = field(metadata={"static": True})


@functools.partial(
    aot_lora.jit, program="step", static_argnums=3, static_argnames="act", donate_argnums=(1,)
)
def step(weights, cache, x, layers, scale=2.0, *, act="relu"):
    for _ in range(layers):
        x = x @ weights["w"] * scale
        x = jnp.maximum(x, 0) if act == "relu" else jnp.tanh(x)
    return Out(x, (None, [x.sum()])), {"k": cache["k"] + x.sum(), "v": cache["v"]}


@aot_lora.jit
def norm(x):
    return x / 2


@aot_lora.jit
def batched(batch):
    return Batch(batch.tokens + (1 if batch.kind == "a" else 2), batch.kind)


@aot_lora.jit(sources=["kernels_of_mine"])
def outer(x):
    return norm(x) + 1


class Model:
    def __init__(self, by):
        self.by = by
        self.bound = aot_lora.jit(self._scale, key=f"by {by}")

    def _scale(self, x):
        return x * self.by

    @aot_lora.jit
    def shifted(tree, by):  # `self` is a pytree here
        return jax.tree.map(lambda x: x + by, tree)


def warm_up():
    found = []
    weights = jax.device_put({"w": np.full((4, 4), 0.5, np.float32), "none": None})
    for rows in (2, 4):
        x = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
        for call in range(2):
            cache = jax.device_put({"k": np.ones(3, np.float32), "v": [np.ones(2, np.int32)]})
            out, cache = step(weights, cache, x, 2)
            out, cache = step(weights, cache, jax.device_put(x), 1, scale=0.25)
            out, cache = step(weights, cache, jax.device_put(x), 1, scale=3 + call)
            out, cache = step(weights, cache, out.hidden, 2, 0.5 + call, act="tanh")
            found += [out, cache]
    found += [norm(x), other.norm(x), outer(x), norm(1.0), norm(2), norm(x.astype(np.float64))]
    found += [batched(Batch(np.ones(2, np.int32), kind)).tokens for kind in "ab"]
    found += [Model(3).bound(x), Model(4).bound(x), Model.shifted({"x": x}, 2)]
    return [(np.asarray(leaf).tolist(), str(leaf.dtype), leaf.weak_type, leaf.committed)
            for leaf in jax.tree.leaves(found)]
"""

OTHER = """\
import aot_lora


@aot_lora.jit
def norm(x):
    return x / 4
"""

# Four devices; arguments by placement, results by out_shardings or as JAX finds them.
MESHED = """\
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import aot_lora

mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
rows, columns = NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))


@aot_lora.jit
def product(x, w):
    return x @ w, w.sum()


placed = aot_lora.jit(lambda x: x + 1, program="placed", in_shardings=rows, out_shardings=columns,
                      donate_argnums=0)
alone = aot_lora.jit(lambda x: x * 2, program="alone")


def warm_up():
    x, w = np.arange(32, dtype=np.float32).reshape(4, 8), np.ones((8, 4), np.float32)
    found = []
    for _ in range(2):
        found += product(jax.device_put(x, rows), jax.device_put(w, columns))
        found += [placed(x), alone(x), alone(jax.device_put(x, jax.devices()[2]))]
    return [(np.asarray(leaf).tolist(), str(leaf.sharding), leaf.committed) for leaf in found]
"""

DRIVER = """\
import json
import os
import sys

import jax

events = []
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))

import aot_lora
import engine

mode, store = sys.argv[1:3]


def counted():
    return {word: sum(word in name for name in events) for word in ("trace", "compile/backend")}


def run():
    if mode == "plain":
        return {"found": engine.warm_up()}
    if mode == "record":
        with aot_lora.recording("engine", store) as session:
            found = engine.warm_up()
        return {"found": found, "variants": session.variants, "compiled": session.compiled}
    with aot_lora.replay("engine", store) as session:
        events.clear()
        found = {"found": engine.warm_up(), "events": counted(), "variants": session.variants}
        if hasattr(engine, "after"):
            found["after"] = engine.after()
    events.clear()
    jax.jit(lambda x: x - 3)(1.0)
    return {**found, "control": counted()}


print(json.dumps(run()))
"""


def write_engine(folder: Path, engine: str = ENGINE) -> Path:
    for name, text in (("engine", engine), ("other", OTHER), ("driver", DRIVER)):
        (folder / f"{name}.py").write_text(text)
    (folder / "kernels_of_mine").mkdir(exist_ok=True)
    (folder / "kernels_of_mine/__init__.py").write_text("")
    return folder


def drive(folder: Path, mode: str, **environ: str) -> dict[str, Any]:
    """Runs the engine in a process of its own: ``plain``, ``record`` or ``replay``."""
    done = driven(folder, mode, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def driven(folder: Path, mode: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "driver.py", mode, str(folder / "store")],
        cwd=folder,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
