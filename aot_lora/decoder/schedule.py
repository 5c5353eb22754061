"""Which rows go into the next step: plain Python and numpy; nothing here runs on a device.

A request first runs its prompt, in chunks, and then decodes one token a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from aot_lora.decoder.attention import CHUNK


@dataclass(slots=True, kw_only=True)
class Request:
    """A prompt that is being answered.

    Args:
      prompt: its tokens; slot: its adapter's, or -1.
      temperature, seed: of its sampling.
      sequence: its place in the cache.
      done: tokens whose keys are in the cache.
      answer: tokens so far.
    """

    prompt: Sequence[int]
    slot: int
    temperature: float
    seed: int
    sequence: int = -1
    done: int = 0
    answer: list[int] = field(default_factory=list[int])

    @property
    def decodes(self) -> bool:
        """Whether its prompt is in the cache."""
        return self.done >= len(self.prompt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one step, before padding to its bucket.

    Args:
      prefill: whether there are chunks of prompts, so that `mixed_step` has to run.
      tokens, positions, sequences, slots: [rows] int32; -1 among positions is padding.
      sample: [S] int32, the row to sample for each sequence of the cache, or -1.
    """

    prefill: bool
    tokens: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    slots: np.ndarray
    sample: np.ndarray


def next_rows(active: Sequence[Request], *, sequences: int, budget: int) -> Rows:
    """Lays out a step, and counts what it will have run.

    Args:
      active: requests that hold a sequence, at least one; their `done` moves.
      sequences: of the cache; as many rows at the front belong to decoding requests.
      budget: most rows of a step.
    """
    waiting = [request for request in active if not request.decodes]
    decoding = [request for request in active if request.decodes]
    front = sequences if waiting else len(decoding)
    fields = {name: [0] * front for name in ("tokens", "sequences")}
    fields |= {name: [-1] * front for name in ("positions", "slots")}
    sample = np.full(sequences, -1, np.int32)

    def put(row: int, request: Request, token: int, position: int) -> None:
        values = (token, position, request.sequence, request.slot)
        for name, value in zip(("tokens", "positions", "sequences", "slots"), values, strict=True):
            fields[name][row] = value

    for row, request in enumerate(decoding):
        put(row, request, request.answer[-1], request.done)
        sample[request.sequence] = row
        request.done += 1
    end = front
    for request in waiting:
        while not request.decodes and (room := min(CHUNK, budget - end)) > 0:
            for name, filling in (
                ("tokens", 0),
                ("sequences", 0),
                ("positions", -1),
                ("slots", -1),
            ):
                fields[name] += [filling] * room
            taken = min(room, len(request.prompt) - request.done)
            for offset in range(taken):
                position = request.done + offset
                put(end + offset, request, request.prompt[position], position)
            request.done += taken
            if request.decodes:
                sample[request.sequence] = end + taken - 1
            end += room
    # The last chunk needs no padding of its own: the bucket brings it.
    used = 1 + max(row for row, position in enumerate(fields["positions"]) if position >= 0)
    arrays = {
        name: np.array(values[: max(used, front)], np.int32) for name, values in fields.items()
    }
    return Rows(prefill=bool(waiting), sample=sample, **arrays)
