"""What `aot-lora plan --memory` says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aot_lora.cli.options import size, table
from aot_lora.config import Config
from aot_lora.plan.memory import Memory
from aot_lora.warmup.memory import MemoryReport


def as_json(report: MemoryReport) -> dict[str, Any]:
    """A report as the `memory` object has it, by target."""
    value = {
        **asdict(report.memory),
        "total": report.memory.total,
        "device": report.device or None,
        "share": _share(report.memory.total, report.device),
        "allowed": report.allowed or None,
        "fits": report.fits,
    }
    if report.length is not None:
        at = report.at_length
        value["largest_kv_length"] = report.length
        value["largest_kv_length_exact"] = report.exact
        value["total_at_largest"] = at.total if at else None
    return value


def show(config: Config, report: MemoryReport) -> None:
    """Prints a report for people."""
    plan, memory = config.plan, report.memory
    cache = plan.cache
    columns = ["as written" if cache is None else f"kv_cache.length {cache.length}"]
    found = [memory]
    if report.at_length is not None and cache and report.length != cache.length:
        columns.append(f"{report.length}")
        found.append(report.at_length)
    rows = [(name, *(_cell(one, key) for one in found)) for name, key in _ROWS.items()]
    if report.device:
        shares = (_percent(one, report.device) for one in found)
        rows.append(("of the device's", size(report.device)) + ("",) * (len(found) - 1))
        rows.append(("share", *shares))
    title = f"memory of each device, {report.target}"
    table(title, ("what", *columns), rows)
    print(f"compiled for it: {', '.join(memory.measured)}")
    print(
        f"code: of each program the largest one compiled times its variants ({len(plan.variants)} "
        "in all), an upper estimate; the rest by the compiler's analysis"
    )
    if not report.device:
        print("the device's memory is unknown on this host")
    if memory.refused:
        print(f"as written it does not compile: {memory.refused}")
    if report.length is not None and cache:
        more = "" if report.exact else "; more may fit"
        print(
            f"largest kv_cache.length that fits {size(report.allowed)} with {cache.sequences} "
            f"sequences: {report.length}, verified by compiling{more}"
        )


_ROWS = {
    "weights": "weights",
    "banks": "banks",
    "KV cache": "cache",
    "other arguments": "others",
    "results": "outputs",
    "largest temporaries": "temporaries",
    "code": "code",
    "total": "total",
}
_MISSING = ("others", "outputs", "temporaries", "code", "total")


def _cell(memory: Memory, key: str) -> str:
    if memory.refused and key in _MISSING:
        return "?"
    return size(getattr(memory, key))


def _percent(memory: Memory, device: int) -> str:
    return "above 100 %" if memory.refused else f"{100 * memory.total / device:.1f} %"


def _share(total: int, device: int) -> float | None:
    return round(total / device, 4) if device else None
