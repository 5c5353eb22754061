"""The layout of steps: each token runs once, in order, in chunks of one sequence."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aot_lora.decoder.attention import CHUNK
from aot_lora.decoder.schedule import Request, next_rows


@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    budget=st.integers(6, 500),
    count=st.integers(1, 4),
)
def test_every_token_runs_once_and_in_order(lengths: list[int], budget: int, count: int) -> None:
    sequences = 5
    requests = [
        Request(prompt=range(n), slot=i, temperature=0.0, seed=0, sequence=i)
        for i, n in enumerate(lengths)
    ]
    ran: list[list[int]] = [[] for _ in requests]
    active = list(requests)
    while active:
        rows = next_rows(active, sequences=sequences, budget=budget)
        assert len(rows.tokens) <= budget
        real = rows.positions >= 0
        assert real[-1] or len(rows.tokens) == sequences, "no padding behind the last row"
        for row in np.flatnonzero(real):
            ran[rows.sequences[row]].append(int(rows.positions[row]))
            assert rows.slots[row] == rows.sequences[row]
        # Decode rows each of a sequence of their own, then chunks of one sequence.
        front = rows.sequences[:sequences][real[:sequences]]
        assert len(set(front)) == len(front)
        if rows.prefill:
            for start in range(sequences, len(rows.tokens), CHUNK):
                chunk = slice(start, start + CHUNK)
                assert real[start], "the first row says whose chunk it is"
                assert len(set(rows.sequences[chunk][real[chunk]])) == 1
        else:
            assert len(rows.tokens) == len(active)
        for request in active:
            row = rows.sample[request.sequence]
            assert (row >= 0) == request.decodes
            if row >= 0:
                assert rows.positions[row] == request.done - 1
                request.answer.append(0)
        active = [request for request in active if len(request.answer) < count]

    assert ran == [list(range(n + count - 1)) for n in lengths]
