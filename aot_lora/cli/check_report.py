"""What `aot-lora check` found: for people, as JSON, as JUnit, as annotations of GitHub."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aot_lora import errors
from aot_lora.cli.options import emit, note
from aot_lora.lowering.compare import Comparison, Group

if TYPE_CHECKING:
    from aot_lora.checking.processes import Failure
    from aot_lora.checking.twice import Differs
    from aot_lora.config import Config

FORMATS = ("human", "json", "github")
KINDS = ("stable", "moved", "missing", "stale", "new")
_NAMES = 3  # shown of each group
_GROUPS = 12
_ANNOTATIONS = 10  # GitHub shows no more of one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What became of one config.

    Args:
      name: its lock's file; the config's where that was not reached.
      config: None where it could not be read.
      found: against the lock; None where there was none to compare with.
      groups: what does not hold.
      failures: what could not be traced.
      differing: what two processes traced differently.
      diffs: of the first variant of some groups.
      left_alone: whether the lock was to be written, and was not.
      error: what stopped it.
    """

    name: str
    config: Config | None = None
    found: Comparison | None = None
    groups: tuple[Group, ...] = ()
    failures: Mapping[str, Failure] = field(default_factory=dict[str, "Failure"])
    differing: Sequence[Differs] = ()
    diffs: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    left_alone: bool = False
    error: errors.AotLoraError | None = None

    def with_diffs(self, diffs: Mapping[str, tuple[str, ...]]) -> Checked:
        """The same, with diffs."""
        return replace(self, diffs=diffs)

    @property
    def exit_code(self) -> int:
        """Of the command, if this were all."""
        if self.error:
            return self.error.exit_code
        if self.left_alone:
            return next(iter(self.failures.values())).error.exit_code
        bad = self.failures or self.differing or self.found is None or not self.found.holds
        return errors.EXIT_CHECK if bad else errors.EXIT_OK

    def counts(self) -> dict[str, int]:
        """Variants, and how many of each kind."""
        kinds = {kind: len(getattr(self.found, kind)) if self.found else 0 for kind in KINDS}
        traced = sum(count for kind, count in kinds.items() if kind != "stale")
        return {"variants": traced + len(self.failures), **kinds}


def default_format() -> str:
    """Annotations where GitHub runs the command, else for people."""
    return "github" if os.environ.get("GITHUB_ACTIONS") == "true" else "human"


def report(checked: Sequence[Checked], form: str, junit: Path | None) -> None:
    """Says all of it: data on stdout, the rest on stderr."""
    for one in checked:
        if one.error:
            note(f"aot-lora: {one.error}")
            continue
        if form != "json" and one.found:
            counts = one.counts()
            print(f"{one.name}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
        for line in _lines(one):
            note(line)
    if form == "json":
        for value in _json(checked):
            emit(value)
    if form == "github":
        for line in _annotations(checked):
            print(line)
    if junit is not None:
        from aot_lora.cli.junit import write_junit

        write_junit(checked, junit)
    sys.stdout.flush()


def _lines(one: Checked) -> list[str]:
    lines = _failures(one)
    if one.left_alone:
        return [*lines, "the lock is left as it was: some variants cannot be traced"]
    for each in one.differing:
        lines += [f"  traced twice, differs: {each.name}"]
        lines += [f"    because of {each.why}", f"    what differs: {each.what}"]
        lines += [f"      {line}" for line in each.diff]
    assert one.found is not None
    if one.found.of_another_config:
        lines.append("  the lock has nothing in common with this plan: is it another config's?")
    for group in one.groups[:_GROUPS]:
        lines += _group(group, one.diffs)
    if rest := one.groups[_GROUPS:]:
        count = sum(len(group.names) for group in rest)
        lines.append(f"  and {len(rest)} more causes, of {count} variants")
    if one.found.toolchain and not one.diffs:
        lines.append("  another JAX or other code? --diff --base REV traces both with this JAX")
    if not one.found.holds:
        config = one.config.path if one.config else one.name
        lines.append(
            f"  next: undo what moved them, or accept with `aot-lora check --update {config}`"
        )
    return lines


def _group(group: Group, diffs: Mapping[str, tuple[str, ...]]) -> list[str]:
    rest = len(group.names) - 1
    more = f" and {rest} more" if rest else ""
    if group.kind != "moved":
        return [f"  {group.kind} {group.names[0]}{more and f'{more} of {group.cause}'}"]
    lines = [f"  moved {group.names[0]}{more}: {group.cause}", f"    {group.detail}"]
    for name in group.names:
        if name in diffs:
            lines.append(f"    IR of {name}, base -> here:")
            same = "      none: traced with the JAX and the options of here, the base is the same"
            lines += [f"      {line}" for line in diffs[name]] or [same]
    return lines


def _failures(one: Checked) -> list[str]:
    """Each error once: a program that raises does so at most of its points."""
    alike: dict[str, list[str]] = {}
    for name, failure in one.failures.items():
        text = str(failure)
        where = failure.error.where or ""
        rest = text.removeprefix(f"{where}: ")
        alike.setdefault(rest, []).append(name)
    lines: list[str] = []
    for rest, names in alike.items():
        more = f", and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        lines.append(f"{', '.join(names[:_NAMES])}{more}: {rest}")
    return lines


def _json(checked: Sequence[Checked]) -> list[dict[str, Any]]:
    """An object for each finding, and one of totals at the end."""
    found: list[dict[str, Any]] = []
    totals: dict[str, Any] = dict.fromkeys(("variants", *KINDS), 0)
    for one in checked:
        if one.error:
            found.append({"lock": one.name, "error": str(one.error)})
        for name, failure in one.failures.items():
            found.append({"lock": one.name, "untraced": name, "error": str(failure)})
        for each in one.differing:
            found.append({"lock": one.name, "traced_twice": asdict(each)})
        for group in one.groups:
            diff = {name: one.diffs[name] for name in group.names if name in one.diffs}
            found.append({"lock": one.name, **asdict(group), "diffs": diff})
        for name, count in one.counts().items():
            totals[name] += count
    return [*found, totals]


def _annotations(checked: Sequence[Checked]) -> list[str]:
    """One for each cause, at the first line of the lock that it concerns."""
    lines: list[str] = []
    for one in checked:
        file = one.config.lock_path if one.config else Path(one.name)
        where = f"file={_property(_relative(file))}"
        if one.error:
            lines.append(f"::error {where},title=aot-lora check::{_message(str(one.error))}")
        for text in _failures(one):
            lines.append(f"::error {where},title=cannot be traced::{_message(text)}")
        for each in one.differing:
            text = f"{each.name} differs from trace to trace because of {each.why}: {each.what}"
            lines.append(f"::error {where},title=traced twice::{_message(text)}")
        for group in one.groups:
            count = f"{len(group.names)} {group.kind}"
            text = "\n".join(
                filter(None, [f"{count}: {group.cause}", group.detail, *group.names[:_NAMES]])
            )
            at = f"{where},line={_line_of(file, group.names[0])}"
            title = _property(f"aot-lora check: {count}")
            lines.append(f"::error {at},title={title}::{_message(text)}")
    return lines[:_ANNOTATIONS]


def _line_of(lock: Path, name: str) -> int:
    key = json.dumps(name.rpartition(" ")[2]) + ":"
    try:
        lines = lock.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 1
    return next((at for at, line in enumerate(lines, 1) if line.lstrip().startswith(key)), 1)


def _relative(path: Path) -> str:
    root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
    full = path.absolute()
    return (full.relative_to(root) if full.is_relative_to(root) else path).as_posix()


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
