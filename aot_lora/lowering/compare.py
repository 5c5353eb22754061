"""A lock against traces: what moved and why, what is missing, new or stale."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from aot_lora.lowering.lock import AROUND, Lock, LockLine, Traces
from aot_lora.lowering.signatures import differences

CODE = "code moved, signature did not"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A variant whose trace is not the locked one."""

    name: str
    locked: LockLine
    now: LockLine

    @property
    def cause(self) -> str:
        """What moved, in words that variants of other sizes share."""
        if self.locked.signature != self.now.signature:
            found = differences(self.locked.signature, self.now.signature)
            return "signature: " + "; ".join(one.what for one in found)
        old, new = self.locked.kernels, self.now.kernels
        if not old and not new:
            return CODE
        changed = [name for name in new if old.get(name) != new[name]]
        named = [
            f"kernel {name}" + (" (new)" if name not in old else "")
            for name in changed
            if name != AROUND
        ]
        named += [f"kernel {name} (gone)" for name in old if name not in new and name != AROUND]
        named += ["code around the kernels"] if AROUND in changed else []
        what = " and ".join(named) or "the tree of arguments or results"
        return f"{what} moved, signature did not"

    @property
    def detail(self) -> str:
        """What moved, with both sides; the signature alone where that did not."""
        if self.locked.signature == self.now.signature:
            return self.now.signature
        found = differences(self.locked.signature, self.now.signature)
        return "; ".join(one.detail for one in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Names are ``target variant``.

    Args:
      stable: as locked.
      moved: traced to something else.
      missing: in the plan that the lock was written for, but not in the lock.
      new: in today's plan, which is not the one the lock was written for, but not in the lock.
      stale: in the lock, but not in the plan.
      toolchain: ``jax 0.10.2 -> 0.12.0``, if something moved and the lock is of another version.
      options: likewise of JAX's options in the environment.
    """

    stable: tuple[str, ...]
    moved: tuple[Moved, ...]
    missing: tuple[str, ...]
    new: tuple[str, ...]
    stale: tuple[str, ...]
    toolchain: str = ""
    options: str = ""

    @property
    def holds(self) -> bool:
        """Whether the lock and the traces agree."""
        return not (self.moved or self.missing or self.new or self.stale)

    @property
    def of_another_config(self) -> bool:
        """Whether the lock and the plan have nothing in common."""
        return bool(self.stale and self.new) and not (self.stable or self.moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Variants of one fate for one reason.

    Args:
      kind: ``moved``, ``missing``, ``new`` or ``stale``.
      cause: why, of those that moved; else the program.
      names: of the variants, in the plan's order.
      detail: of the first of them.
    """

    kind: str
    cause: str
    names: tuple[str, ...]
    detail: str = ""


def compare(
    lock: Lock,
    traces: Traces,
    *,
    plan: str,
    untraced: frozenset[str] = frozenset(),
    jax: str = "",
    options: str = "",
) -> Comparison:
    """Compares a lock with the traces of a plan.

    Args:
      lock: the lock.
      traces: target -> variant -> line.
      plan: the plan's digest.
      untraced: names of variants that could not be traced: neither stable nor stale.
      jax, options: what traced them, as of a `Lock`.
    """
    locked = _flat(lock.under(jax))
    now = _flat(traces)
    absent = tuple(name for name in now if name not in locked)
    same_plan = lock.plan == plan
    shared = [name for name in now if name in locked]
    moved = tuple(
        Moved(name=name, locked=locked[name], now=now[name])
        for name in shared
        if now[name] != locked[name]
    )
    return Comparison(
        stable=tuple(name for name in shared if now[name] == locked[name]),
        moved=moved,
        missing=absent if same_plan else (),
        new=() if same_plan else absent,
        stale=tuple(name for name in locked if name not in now and name not in untraced),
        toolchain=f"jax {lock.jax} -> {jax}" if moved and jax and lock.jax not in ("", jax) else "",
        options=_changed_options(lock.options, options) if moved and jax else "",
    )


def groups(found: Comparison) -> tuple[Group, ...]:
    """What does not hold, by kind and cause: a thousand variants are rarely as many reasons."""
    sorted_out: dict[tuple[str, str], list[str]] = {}
    details: dict[tuple[str, str], str] = {}
    moved = ((("moved", _cause(one, found)), one.name, one.detail) for one in found.moved)
    others = (
        ((kind, _program(name)), name, "")
        for kind in ("missing", "new", "stale")
        for name in getattr(found, kind)
    )
    for key, name, detail in chain(moved, others):
        sorted_out.setdefault(key, []).append(name)
        details.setdefault(key, detail)
    return tuple(
        Group(kind=kind, cause=cause, names=tuple(names), detail=details[kind, cause])
        for (kind, cause), names in sorted_out.items()
    )


def _cause(moved: Moved, found: Comparison) -> str:
    """Options may change what is traced in every way; a release only the code that it makes."""
    of_code = not moved.cause.startswith("signature: ")
    around = [f"options: {found.options}"] if found.options else []
    around += [f"toolchain: {found.toolchain}"] if found.toolchain and of_code else []
    return "; ".join([*around, moved.cause])


def _changed_options(locked: str, now: str) -> str:
    old, new = set(locked.split()), set(now.split())
    gone = [f"-{one}" for one in sorted(old - new)]
    return " ".join([*gone, *(f"+{one}" for one in sorted(new - old))])


def _program(name: str) -> str:
    return name.rpartition(" ")[2].partition("/")[0]


def _flat(traces: Traces) -> dict[str, LockLine]:
    return {
        f"{target} {name}": line for target, lines in traces.items() for name, line in lines.items()
    }
