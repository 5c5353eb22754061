"""The ranks of many adapters: from a folder of them, or from a histogram."""

from __future__ import annotations

import csv
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from aot_lora.adapters.config import read_config
from aot_lora.adapters.files import CONFIG
from aot_lora.adapters.naming import listed, shown
from aot_lora.errors import AdapterError, ConfigError
from aot_lora.plan.ranks import MOST_RANK

_MOST_COUNT = 10**9
_HEADER = ["rank", "count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """How many adapters have which rank.

    Args:
      ranks: distinct, in order; counts: of each.
      others: subfolders that hold no adapter.
    """

    ranks: tuple[int, ...]
    counts: tuple[int, ...]
    others: tuple[str, ...] = ()


def read_ranks(path: Path) -> RankCounts:
    """Ranks of the adapters in a folder's subfolders, or of a CSV file ``rank,count``.

    Raises:
      ConfigError: a bad or empty file. AdapterError: a folder without adapters, or an adapter that
        cannot be served.
    """
    return _of_folder(path) if path.is_dir() else _of_file(path)


def _of_folder(folder: Path) -> RankCounts:
    where = str(folder)
    expected = f"subfolders with an {CONFIG} each"
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208  names suffice
    except OSError as error:
        raise AdapterError(f"cannot be read: {error.strerror}", where=where) from None
    if not names:
        raise AdapterError("an empty folder", where=where, expected=expected)
    if CONFIG in names:
        raise AdapterError(
            "one adapter, not a folder of them",
            where=where,
            expected=expected,
            next_step="name the folder above it",
        )
    found: Counter[int] = Counter()
    others: list[str] = []
    for name in names:
        if (folder / name / CONFIG).exists():
            found[_rank(folder / name / CONFIG)] += 1
        elif (folder / name).is_dir():
            others.append(name)
    if not found:
        raise AdapterError(
            "no adapter in this folder", where=where, expected=expected, found=listed(names)
        )
    return _sorted(found, tuple(others))


def _rank(path: Path) -> int:
    """The largest rank of any module; that of `r` too, though patterns may cover them all."""
    config, _ = read_config(path)
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank > MOST_RANK:
        raise AdapterError(
            "bad rank", where=str(path), expected=f"1 to {MOST_RANK:,}", found=f"{rank:,}"
        )
    return rank


def _of_file(path: Path) -> RankCounts:
    where = str(path)
    found: Counter[int] = Counter()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip().lower() for name in next(reader, [])]
            if header != _HEADER:
                raise ConfigError(
                    "no histogram of ranks",
                    where=f"{where}:1",
                    expected="the header rank,count",
                    found=shown(",".join(header)) or "nothing",
                )
            for row in reader:
                if row:
                    _add(row, found, f"{where}:{reader.line_num}")
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=where) from None
    except csv.Error as error:
        raise ConfigError(f"not valid CSV: {error}", where=where) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot be read: {reason}", where=where) from None
    if not found.total():
        raise ConfigError("no adapters in the histogram", where=where, expected="at least one")
    return _sorted(found, ())


def _add(row: list[str], found: Counter[int], where: str) -> None:
    if len(row) != 2:
        raise ConfigError(
            "a row that is no rank and count", where=where, expected="2 values", found=str(len(row))
        )
    rank = _number(row[0], "rank", 1, MOST_RANK, where)
    found[rank] += _number(row[1], "count", 0, _MOST_COUNT, where)
    if found[rank] > _MOST_COUNT:
        raise ConfigError(
            "bad count", where=where, expected=f"at most {_MOST_COUNT:,} adapters of one rank"
        )


def _number(text: str, name: str, least: int, most: int, where: str) -> int:
    text = text.strip()
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not least <= value <= most:
        raise ConfigError(
            f"bad {name}",
            where=where,
            expected=f"an integer from {least} to {most:,}",
            found=shown(text) or "nothing",
        )
    return value


def _sorted(found: Counter[int], others: tuple[str, ...]) -> RankCounts:
    ranks = tuple(sorted(rank for rank, count in found.items() if count))
    return RankCounts(ranks=ranks, counts=tuple(found[rank] for rank in ranks), others=others)
