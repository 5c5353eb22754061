"""A config's patterns come from somebody else: they match in bounded time or are refused."""

import time
from pathlib import Path

import pytest
from adapter_checks import one_module, read_refusal

NESTED, OVERLAPPING = r"(a|b|.|[a-z])*\d\d\d$", r"(?:[a-z._0-9]|[a-z._0-9])+(?<=\d)"


@pytest.mark.parametrize(
    ("field", "source"),
    [
        ("target_modules", NESTED),
        ("target_modules", OVERLAPPING),
        ("exclude_modules", OVERLAPPING),
        ("rank_pattern", NESTED),
    ],
)
def test_a_pattern_that_takes_long_is_refused(source: str, field: str, tmp_path: Path) -> None:
    """`re` takes longer than the universe has for them."""
    value = {source: 4} if field == "rank_pattern" else source
    start = time.perf_counter()
    text = read_refusal(one_module(tmp_path / "a", **{field: value}))
    assert "takes too long to match" in text
    assert time.perf_counter() - start < 10
