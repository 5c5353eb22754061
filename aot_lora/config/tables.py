"""Measured kernels of each hardware, as ``buckets/devices/<hardware>.kernels.json`` has them."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from aot_lora.config import presets
from aot_lora.errors import ConfigError
from aot_lora.plan import TargetSpec


class Row(BaseModel):
    """What every form takes at one point.

    Args:
      tokens, lanes, d: sizes T, L and D.
      o: outputs O, summed over the projections that read the same rows.
      most: blocks of the largest adapter; forms that pad the others to it do not serve more.
      us: form -> microseconds, of base and adapters together.
      tuning: form -> its block sizes and the like, where it has any.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tokens: int
    lanes: int
    d: int
    o: int
    most: int = 0
    us: dict[str, float]
    tuning: dict[str, dict[str, int]] = {}


class Table(BaseModel):
    """All of one hardware. `source` says where the figures come from, in words."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    hardware: str
    source: str
    rows: tuple[Row, ...]

    def text(self) -> str:
        """The file: a row a line, so that changes read well."""
        rows = ",\n".join(f"  {row.model_dump_json()}" for row in self.rows)
        head = f'"hardware": {json.dumps(self.hardware)},\n"source": {json.dumps(self.source)}'
        return f'{{{head},\n"rows": [\n{rows}\n]}}\n'


def table_path(target: TargetSpec) -> Path | None:
    """The table of a target's hardware; None where there is none."""
    hardware = target.topology.partition(":")[0]
    path = presets.presets_root() / "devices" / f"{hardware}.kernels.json"
    return path if hardware and "/" not in hardware and path.is_file() else None


def table_of(target: TargetSpec) -> Table | None:
    """The table of a target's hardware; None where there is none.

    Raises:
      ConfigError: it is damaged.
    """
    path = table_path(target)
    return None if path is None else read_table(path)


def read_table(path: Path) -> Table:
    """Reads a table.

    Raises:
      ConfigError: it is damaged.
    """
    return _parsed(path.read_bytes(), path)


@cache
def _parsed(text: bytes, path: Path) -> Table:
    try:
        return Table.model_validate_json(text, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            "the table of kernels is damaged",
            where=str(path),
            found=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            next_step="make it again with `aot-lora bench --tune`",
        ) from None


def table_digest(target: TargetSpec) -> str:
    """SHA-256 of the target's table; empty where there is none."""
    path = table_path(target)
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
