"""Run as a process of its own: a donated array is given again, which has to be an exception.

python donating.py <devices>
"""

import json
import sys
from typing import Any

import jax
import numpy as np

from aot_lora import Program, _jax_compat
from aot_lora._jax_compat.placement import load_at, placement_of
from aot_lora.lowering.trace import trace
from aot_lora.plan import Variant
from aot_lora.programs.mesh import AXIS, mesh_of

CASES = ("again", "twice", "both donated", "in a tree", "deleted")


def run(case: str, count: int) -> dict[str, Any]:
    """The exception's type, and what still works after it."""
    mesh = mesh_of(jax.devices()[:count])
    sharding = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
        if mesh
        else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    abstract = jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)

    def load(fn: Any, args: Any, donate: tuple[int, ...]) -> Any:
        found = trace(
            Variant("step"),
            Program(fn=fn, args=args, donate=donate),
            platform="cpu",
            devices=count,
        )
        compiled = found.lowered.compile()
        raw = _jax_compat.serialize(compiled)
        if count == 1:
            return _jax_compat.load(raw, found.signature, jax.devices()[0])
        return load_at(raw, found.signature, placement_of(compiled))

    a, b = (jax.device_put(np.ones(8, np.float32), sharding) for _ in "ab")
    add = load(lambda x, y: x + y, (abstract, abstract), (0,))
    try:
        if case == "again":
            add(a, b)
            assert a.is_deleted()
            add(a, b)
        elif case == "twice":
            add(a, a)
        elif case == "both donated":
            load(lambda x, y: (x + y, x - y), (abstract, abstract), (0, 1))(a, a)
        elif case == "in a tree":
            load(lambda t, y: (t[0] + y, t[1] - y), ((abstract, abstract), abstract), (0,))(
                (a, a), b
            )
        elif case == "deleted":
            b.delete()
            add(a, b)
    except Exception as error:
        raised = type(error).__name__
    else:
        raised = "no exception"
    fresh = [jax.device_put(np.ones(8, np.float32), sharding) for _ in "ab"]
    return {"case": case, "raised": raised, "after": np.asarray(add(*fresh)).tolist()}


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(run(case, int(sys.argv[1]))), flush=True)
