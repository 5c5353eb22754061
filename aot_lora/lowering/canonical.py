"""StableHLO as what it does: kernels readable, and nothing that only names or counts."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from aot_lora.lowering.lock import AROUND

# One chip needs no mesh, but naming its device makes JAX write an empty one.
_EMPTY_MESH = re.compile(r"^ *sdy\.mesh @empty_mesh = .*\n", re.MULTILINE)
_EMPTY_SHARDING = re.compile(r"sdy\.sharding = #sdy\.sharding<@empty_mesh, \[[^>]*\]>(?:, )?")
_EMPTY_ATTRIBUTES = re.compile(r" \{\}(?=[,)])")
# A function's own name, which no call needs; then functions in it are numbered to tell them apart.
_MODULE = re.compile(r"^module @\S+", re.MULTILINE)
_PRIVATE = re.compile(r'^  func\.func private (@"[^"]*"|@[\w.$-]+)', re.MULTILINE)
_SYMBOL = re.compile(r'@"[^"]*"|@[\w.$-]+')
# Kernels: for TPUs base64 within JSON within MLIR, for GPUs bytes.
_TPU_BODY = re.compile(r"\\22body\\22: \\22([A-Za-z0-9+/=]+)\\22")
_TPU_LOCATIONS = re.compile(r"(?:, )?\\22debug_locations\\22: \\22[A-Za-z0-9+/=]*\\22")
_GPU_BODY = re.compile(r'"(ML\\EFR(?:[^"\\]|\\.)*)"')
_GPU_HASH = re.compile(r'kernel_hash = "(?:[^"\\]|\\.)*", ')  # of the body, with its names
_ESCAPE = re.compile(rb"\\(\\|[0-9A-F]{2})")
_NAME = re.compile(r'\b(?:kernel_)?name = "([^"]*)"|sym_name = "([^"]*)_mosaic_gpu"')
# Of a kernel's module, what says how it is stored and dumped, and its name, which is outside too.
_STORED = re.compile(r"(?:, )?(?:stable_mosaic\w*\.version|mosaic_gpu\.dump_basename)\b[^,}]*")
_KERNEL_MODULE = re.compile(r"^module(?: @\S+)?(?: attributes \{(?:, )?(.*?)\})? \{", re.MULTILINE)
_SSA = re.compile(r"%\w+(?:#\d+|:\d+)?")
_ATTRIBUTES = re.compile(r" \{.*\}(?= :)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Canonical:
    """A lowered program as text that only what it does can change.

    Args:
      text: StableHLO; each kernel's module stands indented under its call.
      kernels: name -> digest of all kernels of that name, and of `AROUND`; empty without any.
    """

    text: str
    kernels: dict[str, str]


def canonical(stablehlo: str) -> Canonical:
    """Rewrites StableHLO printed without locations, traced under `prepare_tracing`.

    Shardings over the empty mesh do not count, so that naming a single device to compile for does
    not either. A kernel that cannot be read counts as its bytes.
    """
    text = _EMPTY_SHARDING.sub("", _EMPTY_MESH.sub("", stablehlo))
    text = _MODULE.sub("module", _EMPTY_ATTRIBUTES.sub("", text))
    bodies: dict[int, str] = {}
    if _TPU_BODY.search(text) or _GPU_BODY.search(text):
        lines = text.split("\n")
        for at, line in enumerate(lines):
            lines[at], body = _opened(line)
            if body is not None:
                bodies[at] = body
        text = "\n".join(lines)
    text = _numbered(text)
    if not bodies:
        return Canonical(text=text, kernels={})
    lines = text.split("\n")
    kernels: dict[str, list[str]] = {}
    around = list(lines)
    for at, body in bodies.items():
        named = _NAME.search(lines[at]) or _NAME.search(body)
        name = (named[1] or named[2]) if named else "?"
        body = _plain(body)
        kernels.setdefault(name, []).append(_SSA.sub("%", lines[at]) + body)
        around[at] = _ATTRIBUTES.sub("", lines[at])
        lines[at] += "\n" + "\n".join("      " + line for line in body.splitlines())
    parts = {AROUND: around} | dict(sorted(kernels.items()))
    return Canonical(
        text="\n".join(lines),
        kernels={name: _digest("\n".join(part)) for name, part in parts.items()},
    )


def _text_of(payload: bytes, *, of_tpu: bool) -> str | None:
    # Not above: torch_xla's graphs have no kernels, and where they are traced is no such JAX.
    from aot_lora._jax_compat.payloads import payload_text

    return payload_text(payload, of_tpu=of_tpu)


def _opened(line: str) -> tuple[str, str | None]:
    """A line without the kernel in it, and that kernel."""
    if found := _TPU_BODY.search(line):
        body = _text_of(base64.b64decode(found[1]), of_tpu=True)
        line = _TPU_LOCATIONS.sub("", line)
    elif found := _GPU_BODY.search(line):
        body = _text_of(_ESCAPE.sub(_byte, found[1].encode()), of_tpu=False)
        line = _GPU_HASH.sub("", line)
    else:
        return line, None
    return (line, "") if body is None else (line.replace(found[1], "..."), body)


def _byte(escape: re.Match[bytes]) -> bytes:
    return b"\\" if escape[1] == b"\\" else bytes([int(escape[1], 16)])


def _plain(body: str) -> str:
    def module(found: re.Match[str]) -> str:
        return f"module attributes {{{found[1]}}} {{" if found[1] else "module {"

    return _KERNEL_MODULE.sub(module, _STORED.sub("", body), count=1)


def _numbered(text: str) -> str:
    """Functions inside the program by the order in which they stand, not by their names."""
    names = {name: f"@f{at}" for at, name in enumerate(_PRIVATE.findall(text))}
    return _SYMBOL.sub(lambda found: names.get(found[0], found[0]), text) if names else text


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
