"""Each program traced in two processes: does it come out the same, and if not, why not?"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from aot_lora.checking.child import hash_of
from aot_lora.checking.diff import diff, nature
from aot_lora.checking.processes import Request, Traced, merged, run_all
from aot_lora.config import Config
from aot_lora.lowering.canonical import canonical
from aot_lora.lowering.signatures import differences


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """A variant that two processes trace to two programs.

    Args:
      name: ``target variant``.
      why: what makes it differ, by experiment.
      what: what differs, by its signature or the two texts.
      diff: between those, to read.
    """

    name: str
    why: str
    what: str
    diff: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    seed: str
    folder: str


_FIRST, _SECOND = _Way("0", "one"), _Way("4294967295", "another")


def trace_twice(config: Config, *, store: str | None) -> tuple[Traced, tuple[Differs, ...]]:
    """Traces a plan in two processes with other hash seeds and working directories.

    Those that differ are traced three times more, each time with one thing changed back.

    Returns:
      What the first process traced, and what differs.
    """
    with tempfile.TemporaryDirectory(prefix="aot-lora-twice-") as work:
        root = Path(work)

        def run(label: str, way: _Way, names: Mapping[str, Sequence[str]] | None) -> Request:
            folder, cwd = root / label, root / way.folder
            folder.mkdir()
            cwd.mkdir(exist_ok=True)
            return Request(
                config=config.path,
                store=store or str(config.store_root),
                names=names,
                folder=folder,
                paths=(str(Path.cwd()),),
                cwd=cwd,
                environ={"PYTHONHASHSEED": way.seed},
            )

        first, second = run_all([run("a", _FIRST, None), run("b", _SECOND, None)])
        names = _differing(first, second)
        whole = merged(config, [first])
        whole = replace(whole, failures=second.failures | first.failures)
        if not names:
            return whole, ()
        again, seeded, moved = run_all(
            [
                run("again", _FIRST, names),
                run("seed", _Way(_SECOND.seed, _FIRST.folder), names),
                run("folder", _Way(_FIRST.seed, _SECOND.folder), names),
            ]
        )
        found: list[Differs] = []
        for target, variants in names.items():
            for name in variants:
                lines = [one.lines[target].get(name) for one in (first, again, seeded, moved)]
                if lines[0] != lines[1]:
                    why = "every process: time, randomness, a counter, or an object's address"
                elif lines[0] != lines[2]:
                    why = "the hash seed: the order of a set, or a hash()"
                elif lines[0] != lines[3]:
                    why = "the working directory: a relative path, or os.getcwd()"
                else:
                    why = "the process: not its hash seed or its directory alone"
                pair = [root / side / f"{hash_of(target, name)}.mlir" for side in ("a", "b")]
                text = [canonical(file.read_text(encoding="utf-8")).text for file in pair]
                one, other = (side.lines[target][name].signature for side in (first, second))
                what = (
                    "; ".join(difference.detail for difference in differences(one, other))
                    if one != other
                    else nature(*text)
                )
                found.append(Differs(name=f"{target} {name}", why=why, what=what, diff=diff(*text)))
        return whole, tuple(found)


def _differing(one: Traced, other: Traced) -> dict[str, list[str]]:
    names = {
        target: [n for n, line in lines.items() if other.lines[target].get(n, line) != line]
        for target, lines in one.lines.items()
    }
    return {target: found for target, found in names.items() if found}
