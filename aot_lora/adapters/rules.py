"""How PEFT relates a config's names to modules: which it targets, with which rank and alpha.

The rules of `check_target_module_exists` (src/peft/tuners/tuners_utils.py) and `get_pattern_key`
(src/peft/utils/other.py) of huggingface/peft 0.21, written anew.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import TypeVar

import regex
from regex import Pattern

from aot_lora.adapters.config import PeftConfig
from aot_lora.adapters.naming import listed, shown
from aot_lora.errors import AdapterError

_FIRST_NUMBERED = re.compile(r".*?\.[^.]*\.([0-9]+)\.")
_LONGEST = 4096  # unsloth writes patterns of several hundred characters
_MOST_SECONDS = (
    2.0  # for one adapter: somebody else's `(a+)+$` must not hang a server, and `re` can
)

Value = TypeVar("Value", int, float)
Test = Callable[[str], bool]


class Rules:
    """The rules of one config, compiled.

    Args:
      config: the config.
      where: its file.

    Raises:
      AdapterError: a pattern that is not valid or not taken.
    """

    def __init__(self, config: PeftConfig, *, where: str) -> None:
        self._config = config
        self._where = where
        self._seconds_left = _MOST_SECONDS
        self._ranks = self._compiled(config.rank_pattern or {})
        self._alphas = self._compiled(config.alpha_pattern or {})
        target, exclude = config.target_modules, config.exclude_modules
        self._all = isinstance(target, str) and target.lower() == "all-linear"
        self._target = self._pattern(target) if isinstance(target, str) and not self._all else None
        self._exclude = self._pattern(exclude) if isinstance(exclude, str) and exclude else None

    def rank_of(self, path: str) -> int:
        """The rank that the config gives a module."""
        return self._first(self._ranks, path, self._config.r)

    def alpha_of(self, path: str) -> float:
        """The alpha that the config gives a module."""
        return self._first(self._alphas, path, self._config.lora_alpha)

    def objection(self, path: str) -> str | None:
        """Why the config gives this module no adapter, or None where it does."""
        config, ends = self._config, _ends(path)
        excluded = config.exclude_modules
        if self._exclude is not None:
            if self._full(self._exclude, path):
                return f"exclude_modules is `{shown(str(excluded))}`"
        elif excluded and not ends.isdisjoint(excluded):
            return f"exclude_modules names {listed(ends.intersection(excluded))}"
        targets = config.target_modules
        if targets is None or self._all:  # None: PEFT went by the architecture, as we go by tensors
            return None
        if self._target is not None:
            matches = self._full(self._target, path)
            return None if matches else f"target_modules is `{shown(str(targets))}`"
        if path in targets:
            return None
        if ends.isdisjoint(targets):
            return f"target_modules is {listed(targets) or 'empty'}"
        return self._wrong_layer(path)

    def idle(self, paths: Iterable[str]) -> tuple[str, ...]:
        """What `target_modules` lists that none of `paths` is."""
        targets = self._config.target_modules
        if targets is None or isinstance(targets, str):
            return ()
        ends = {end for path in paths for end in _ends(path)}
        return tuple(sorted(set(targets) - ends))

    def _wrong_layer(self, path: str) -> str | None:
        layers, names = self._config.layers_to_transform, self._config.layers_pattern
        if layers is None or layers == []:
            return None
        if names:
            wanted = {names} if isinstance(names, str) else set(names)
            parts = path.split(".")
            # A number in last place is a module's name, not a layer's.
            numbers = [
                number
                for name, number in pairwise(parts[:-1])
                if name in wanted and number.isdigit()
            ]
            layer = int(numbers[0]) if numbers else None
        else:
            found = _FIRST_NUMBERED.match(path)
            layer = int(found[1]) if found else None
        chosen = [layers] if isinstance(layers, int) else layers
        return None if layer in chosen else f"layers_to_transform is {shown(str(layers))}"

    def _first(self, tests: list[tuple[Test, Value]], path: str, default: Value) -> Value:
        return next((value for test, value in tests if test(path)), default)

    def _compiled(self, patterns: Mapping[str, Value]) -> list[tuple[Test, Value]]:
        return [(self._suffix_test(source), value) for source, value in patterns.items()]

    def _suffix_test(self, source: str) -> Test:
        """Whether a path, or its end after a dot, matches `source`."""
        pattern = self._pattern(rf"(.*\.)?({source})$")
        return lambda path: self._full(pattern, path)

    def _pattern(self, source: str) -> Pattern[str]:
        if len(source) > _LONGEST:
            raise self._bad(f"a pattern of {len(source):,} characters")
        try:
            return regex.compile(source)
        except (regex.error, OverflowError, RecursionError, MemoryError) as error:
            raise self._bad(f"the pattern `{shown(source)}` is not valid: {error}") from None

    def _full(self, pattern: Pattern[str], path: str) -> bool:
        began = time.perf_counter()
        try:
            return pattern.fullmatch(path, timeout=max(self._seconds_left, 1e-6)) is not None
        except TimeoutError:
            raise self._bad(f"`{shown(pattern.pattern)}` takes too long to match") from None
        finally:
            self._seconds_left -= time.perf_counter() - began

    def _bad(self, problem: str) -> AdapterError:
        return AdapterError(
            problem,
            where=self._where,
            expected=f"regular expressions of at most {_LONGEST:,} characters, matched at once",
            next_step="write the names of the modules out",
        )


def _ends(path: str) -> frozenset[str]:
    """`path`, and what of it follows each dot."""
    return frozenset(path[match.end() :] for match in re.finditer(r"^|\.", path))
