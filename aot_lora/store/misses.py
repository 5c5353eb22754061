"""Buckets that servers missed, kept beside the artifacts: the next warmup brings them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from aot_lora.config import Config
from aot_lora.errors import IntegrityError, StoreError
from aot_lora.plan import Plan, WideAxis, widen
from aot_lora.store.local import LocalStore, write_atomic

_Buckets = dict[WideAxis, list[Annotated[int, Field(gt=0, lt=2**31)]]]
_RECORD = TypeAdapter(_Buckets)
_MOST_TIMES = 8  # A recorded token bucket is at most so many times the largest of the config.


def widened(config: Config) -> Config:
    """A config with the buckets that its servers missed, if its `on_miss` is ``background``.

    Raises:
      IntegrityError: the record is damaged. StoreError: it cannot be read.
    """
    if config.on_miss != "background":
        return config
    return replace(config, plan=widen(config.written_plan, _read(_path(config))))


def bucket_for(plan: Plan, axis: WideAxis, length: int) -> int | None:
    """The bucket to record for a length above a plan's largest: that one, doubled until it holds.

    Args:
      plan: as written.
      axis: which one.
      length: tokens or lanes of the batch that did not fit.

    Returns:
      None for a length that fits, or that none may hold: above eight times the token budget, or
      above the lanes of the banks.
    """
    largest = bucket = getattr(plan, axis).buckets[-1]
    resident = (plan.bank_blocks - 1) * plan.quantum
    most = resident if axis == "lanes" else _MOST_TIMES * largest
    if not largest < length <= most:
        return None
    while bucket < length:
        bucket *= 2
    return min(bucket, most)


def record_miss(config: Config, axis: WideAxis, bucket: int) -> None:
    """Records a bucket for the next warmup.

    Args:
      config: of the server.
      axis, bucket: from `bucket_for`.

    Raises:
      StoreError: the store cannot be written. IntegrityError: the record is damaged.
    """
    path = _path(config)
    with LocalStore(config.store_root).writing():
        found = _read(path)
        found[axis] = sorted({*found.get(axis, ()), bucket})
        write_atomic(path, _RECORD.dump_json(found) + b"\n")


def _path(config: Config) -> Path:
    return config.store_root / "misses" / f"{config.written_plan.digest()}.json"


def _read(path: Path) -> _Buckets:
    try:
        return _RECORD.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StoreError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except ValidationError as error:
        raise IntegrityError(
            "the record of missed buckets cannot be read",
            where=str(path),
            found=str(error.errors(include_url=False)[0]["msg"]),
            next_step="remove the file; servers record what they miss again",
        ) from None
