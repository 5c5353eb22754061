"""Only `aot_lora._jax_compat` touches private JAX names: one place to mend for a new release."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "aot_lora"
PRIVATE = re.compile(r"jax(lib)?(\.\w+)*\._[a-z]\w*(\.\w+)*")


def private_names(source: str) -> list[str]:
    """Private names of jax or jaxlib that `source` imports, reaches for or spells in a string."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                names += [f"{module}.{alias.name}" for alias in node.names]
            case ast.Attribute():
                names.append(ast.unparse(node))
            case ast.Constant(value=str(value)):
                names.append(value)
            case _:
                pass
    return [name for name in names if PRIVATE.fullmatch(name)]


def test_only_the_compat_module_touches_private_jax() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "_jax_compat" and (names := private_names(path.read_text()))
    }
    assert not found


def test_each_way_to_touch_it_would_be_seen() -> None:
    seen = [
        "import jax._src.compiler",
        "from jax._src import compiler",
        "from jax import _src",
        "from jaxlib import _jax",
        "import jax\njax._src.compiler.compile_or_get_cached",
        "importlib.import_module('jax._src.compiler')",
    ]
    public = [
        "import jax.numpy as jnp",
        "from jax.experimental import topologies",
        "'''Notes on jax._src in prose.'''",
        "jax.__version__",
        "from ._jax_compat import guard",
    ]
    assert all(private_names(source) for source in seen)
    assert not any(private_names(source) for source in public)
