"""Tests that fail when they compile: a fixture, a marker and an option. Loads no jax unasked.

`forbid_compile` (fixture)
    The test may not compile from where the fixture is set up: earlier fixtures may. A refusal that
    the code under test swallows fails the test as well.
`@pytest.mark.compiles(max=N)`
    The test itself, without its fixtures, may compile at most N programs, hits of JAX's persistent
    cache included.
`--aot-lora-lock PATH`
    Each compile of the run, in tests, in their fixtures and while they are collected, must be one
    that a lock of `aot-lora capture` holds, however often.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aot_lora.capture.lock import CaptureLock
    from aot_lora.capture.watch import Watched

_MARKER = "compiles(max): the test fails if it compiles more than `max` programs (aot-lora)."
_refusals: pytest.StashKey[list[Watched]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --aot-lora-lock."""
    group = parser.getgroup("aot-lora", "compiles of JAX")
    group.addoption(
        "--aot-lora-lock",
        metavar="PATH",
        help="fail tests that compile something else than this lock of `aot-lora capture` holds",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker, and reads the lock where one is named."""
    config.addinivalue_line("markers", _MARKER)
    given = config.getoption("aot_lora_lock")
    if given is None:
        return
    from aot_lora.capture.lock import read
    from aot_lora.errors import AotLoraError

    path = config.invocation_params.dir / given
    config.option.aot_lora_lock = str(path)  # for workers of pytest-xdist
    try:
        lock = read(path)
    except AotLoraError as error:
        raise pytest.UsageError(f"--aot-lora-lock: {error}") from None
    config.pluginmanager.register(_Lock(lock, given))


@pytest.fixture
def forbid_compile(request: pytest.FixtureRequest) -> Generator[None]:
    """Refuses every compile of this test, in any thread, from here to the fixture's teardown."""
    from aot_lora.capture.watch import watch
    from aot_lora.runtime import guard

    with guard.forbid_compile(f"forbid_compile of {request.node.name}"), watch() as seen:
        request.node.stash[_refusals] = seen
        yield


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Refuses a marker that means nothing before the test's fixtures run."""
    _limit(item)
    return (yield)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Counts what the test compiles, and looks for swallowed refusals."""
    limit = _limit(item)
    if limit is None:
        result = yield
    else:
        from aot_lora.capture.watch import watch

        with watch() as seen:
            try:
                result = yield
            except BaseException:  # What failed on its own says so first.
                if text := _too_many(seen, limit):
                    item.add_report_section("call", "compiles", text)
                raise
        if text := _too_many(seen, limit):
            pytest.fail(text, pytrace=False)
    swallowed = [one.refusal for one in item.stash.get(_refusals, []) if one.refusal]
    if swallowed:
        text = f"forbid_compile refused {_count(swallowed, 'compile')}, and the test went on:"
        pytest.fail("\n".join([text, *swallowed]), pytrace=False)
    return result


def _limit(item: pytest.Item) -> int | None:
    marker = item.get_closest_marker("compiles")
    if marker is None:
        return None
    limit = marker.kwargs.get("max")
    right = not marker.args and list(marker.kwargs) == ["max"]
    if not right or not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        words = [*map(repr, marker.args), *(f"{k}={v!r}" for k, v in marker.kwargs.items())]
        pytest.fail(
            f"{item.nodeid}: the marker `compiles` is not understood\n"
            "  expected: @pytest.mark.compiles(max=N), with N a whole number, 0 or more\n"
            f"  found: @pytest.mark.compiles({', '.join(words)})",
            pytrace=False,
        )
    return limit


def _too_many(seen: Sequence[Watched], limit: int) -> str:
    made = [one for one in seen if not one.refusal]
    if len(made) <= limit:
        return ""
    head = f"{_count(made, 'program')} compiled, @pytest.mark.compiles(max={limit}) allows {limit}:"
    return "\n".join([head, *_numbered([one.lines() for one in made])])


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}" + ("" if len(items) == 1 else "s")


def _numbered(items: Sequence[Sequence[str]]) -> list[str]:
    lines: list[str] = []
    for number, (first, *rest) in enumerate(items, 1):
        lines += [f"  {number}. {first}", *(f"     {line}" for line in rest)]
    return lines


class _Lock:
    """Holds each phase of each test against the lock, from jax's import on."""

    def __init__(self, lock: CaptureLock, name: str) -> None:
        from aot_lora.capture.bootstrap import when_jax_is_imported

        self._lock = lock
        self._held = lock.counts()
        self._name = name
        self._seen: list[Watched] = []
        self._open = ExitStack()
        self._open.callback(when_jax_is_imported(self._begin))

    def _begin(self) -> None:
        import jax

        from aot_lora.capture.watch import watch

        # As under `aot-lora capture`: kernels carry source paths and lines otherwise.
        limit = "jax_traceback_in_locations_limit"
        self._open.callback(jax.config.update, limit, getattr(jax.config, limit))
        jax.config.update(limit, 0)
        self._seen = self._open.enter_context(watch())

    def pytest_unconfigure(self) -> None:
        """Leaves jax as it was."""
        self._open.close()

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        """Fixtures, and what was compiled before there was a test to blame."""
        if text := self._take("while tests were collected, or between them"):
            pytest.fail(text, pytrace=False)
        return (yield from self._phase(item, "setup", "by the test's fixtures"))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        """The test."""
        return (yield from self._phase(item, "call", "by the test"))

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        """Its fixtures' ends."""
        return (yield from self._phase(item, "teardown", "as the test's fixtures ended"))

    def _phase(self, item: pytest.Item, when: str, by: str) -> Generator[None]:
        try:
            result = yield
        except BaseException:  # What failed on its own says so first.
            if text := self._take(by):
                item.add_report_section(when, "compiles", text)
            raise
        if text := self._take(by):
            pytest.fail(text, pytrace=False)
        return result

    def _take(self, by: str) -> str:
        """What the lock does not hold of the compiles since the last time; "" for nothing."""
        seen = self._seen[:]
        del self._seen[: len(seen)]
        seen = [one for one in seen if not one.refusal]
        if not seen:
            return ""
        from aot_lora.capture.reasons import new
        from aot_lora.capture.records import key

        unheld = {key(one.fields): one for one in seen if key(one.fields) not in self._held}
        if not unheld:
            return ""
        lines = [line.fields for line in self._lock.compiles]
        told = [new(one.fields, lines, "compiled").lines() for one in unheld.values()]
        versions = (
            ""
            if _jax_version() in self._lock.jax
            else (
                f"\n  the lock is of jax {', '.join(self._lock.jax)}, this run of {_jax_version()}"
            )
        )
        return "\n".join(
            [
                f"{_count(told, 'program')} compiled {by}, not in the lock {self._name}:",
                *_numbered(told),
                "  next: undo what compiles them, or accept with"
                f" `aot-lora capture -o {self._name} -- python -m pytest ...`{versions}",
            ]
        )


def _jax_version() -> str:
    import jax

    return jax.__version__
