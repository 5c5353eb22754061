"""The decoder served: warmed up by the command line, sealed, token for token the definition."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from decoding import DECODER, Pairs, continued, logits, write_adapters
from serving import shared_folder, warm, write

from aot_lora import Context, Point, Runtime, errors, load_config
from aot_lora.decoder import Session, random_weights, step_program
from aot_lora.decoder.weights import take_apart
from aot_lora.plan import TargetSpec

PROMPTS = [
    [5, 90, 3],
    [11],
    list(range(40, 70)),  # more than one step has room for
    [7, 8, 9, 10, 11, 12, 13],
    [96, 0, 96],
    [1, 2],
]
COUNT = 9


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write(shared_folder(tmp_path_factory, "decoder") / "decoder.yaml", DECODER)
    warm(path)
    return path


@pytest.fixture(scope="module")
def weights(config: Path) -> dict[str, Any]:
    return random_weights(load_config(config).plan, 0)


@pytest.fixture
def session(config: Path, weights: dict[str, Any]) -> Iterator[Session]:
    with Runtime.open(config) as runtime:
        yield Session(runtime, weights)


@pytest.fixture
def adapters(session: Session, tmp_path: Path) -> dict[int, Pairs]:
    """The adapters of `write_adapters`, loaded, by slot."""
    runtime = session.runtime
    written = write_adapters(tmp_path, runtime.plan)
    return {runtime.adapters.load(tmp_path / name): pairs for name, pairs in written.items()}


def test_a_mixed_batch_is_each_adapter_alone_and_the_definition(
    session: Session, adapters: dict[int, Pairs], weights: dict[str, Any]
) -> None:
    plan = session.runtime.plan
    slots = [*adapters, -1, *list(adapters)[:2]]

    mixed = session.generate(PROMPTS, slots, COUNT)
    alone = [session.generate([p], [s], COUNT)[0] for p, s in zip(PROMPTS, slots, strict=True)]
    expected = [
        continued(plan.decoder, weights, prompt, COUNT, adapters.get(slot))
        for prompt, slot in zip(PROMPTS, slots, strict=True)
    ]

    assert mixed == alone == expected
    # A control: the adapters do change what is said, all of it.
    base = session.generate(PROMPTS, [-1] * len(PROMPTS), COUNT)
    differs = [ours != theirs for ours, theirs in zip(mixed, base, strict=True)]
    assert differs == [slot != -1 for slot in slots]


def test_a_batch_without_adapters_says_the_same_whatever_is_loaded(
    session: Session, weights: dict[str, Any], tmp_path: Path
) -> None:
    plan = session.runtime.plan
    before = session.generate(PROMPTS, [-1] * len(PROMPTS), COUNT)
    write_adapters(tmp_path, plan)
    slot = session.runtime.adapters.load(tmp_path / "large")
    mixed = session.generate([*PROMPTS, [3]], [-1] * len(PROMPTS) + [slot], COUNT)

    assert mixed[:-1] == before
    assert before == [continued(plan.decoder, weights, p, COUNT, None) for p in PROMPTS]


def test_sampling_repeats_by_seed_whatever_else_is_in_the_batch(session: Session) -> None:
    def draw(seeds: list[int]) -> list[list[int]]:
        prompts = [[5, 6, 7]] * len(seeds)
        return session.generate(
            prompts, [-1] * len(seeds), 8, temperatures=[1.0] * len(seeds), seeds=seeds
        )

    first, second, again = draw([1, 2, 1])
    assert first == again != second
    assert draw([2]) == [second]


def test_many_draws_follow_the_temperature(session: Session, weights: dict[str, Any]) -> None:
    prompt, warmth, draws = [5, 6, 7], 0.7, 600
    scores = logits(session.runtime.plan.decoder, weights, prompt, {})[-1] / warmth
    shares = np.exp(scores - scores.max())
    shares /= shares.sum()

    found = session.generate(
        [prompt] * draws,
        [-1] * draws,
        1,
        temperatures=[warmth] * draws,
        seeds=list(range(draws)),
    )
    counts = np.bincount(np.ravel(found), minlength=97)

    # Pearson's statistic over tokens that are expected often enough, the rest as one.
    often = shares * draws >= 5
    seen = np.append(counts[often], counts[~often].sum())
    expected = np.append(shares[often], shares[~often].sum()) * draws
    degrees = len(seen) - 1
    assert degrees >= 5
    statistic = ((seen - expected) ** 2 / expected).sum()
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5
    cold = session.generate([prompt], [-1], 1, temperatures=[1e-4], seeds=[9])
    assert cold == [[int(scores.argmax())]]


@pytest.mark.parametrize(
    ("prompts", "slots", "text"),
    [
        ([[]], [-1], "prompt 0 does not fit the cache"),
        ([[1] * 40], [-1], "expected: 1 to 39 tokens: kv_cache.length is 48"),
        ([[1], [97]], [-1, -1], "prompt 1 has tokens outside the vocabulary"),
        ([[1]], [2], "slot 2 of prompt 0 holds no adapter"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_before_anything_runs(
    session: Session, prompts: list[list[int]], slots: list[int], text: str
) -> None:
    with pytest.raises(errors.OutOfPlanError) as caught:
        session.generate(prompts, slots, 9)
    assert text in str(caught.value)


def test_layers_apart_are_as_layers_stacked(config: Path, weights: dict[str, Any]) -> None:
    """What a step for a GPU takes, on the CPU."""
    plan = load_config(config).plan
    point = Point(tokens=24, lanes=48)
    found: list[Any] = []
    for platform in ("cpu", "cuda"):
        context = Context(plan=plan, target=TargetSpec(platform))
        program = step_program(point, context, decode_rows=4)
        _, cache, rows, sampling, banks, batch = jax.tree.map(
            lambda a: np.zeros(a.shape, a.dtype), program.args
        )
        rows |= {
            "tokens": np.arange(24, dtype=np.int32),
            "positions": np.arange(24, dtype=np.int32),
        }
        rng = np.random.default_rng(3)
        banks = jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32) / 9, banks)  # noqa: B023
        batch |= {"blocks": np.arange(12, dtype=np.int32), "slots": np.zeros(24, np.int32)}
        own = weights if platform == "cpu" else take_apart(weights)
        tokens, after = jax.jit(program.fn)(own, cache, rows, sampling, banks, batch)
        if platform == "cuda":
            after = {name: np.stack(layers) for name, layers in after.items()}
        found.append(jax.device_get((tokens, after)))
    stacked, apart = found
    assert np.array_equal(stacked[0], apart[0])
    for name in ("k", "v"):
        np.testing.assert_allclose(stacked[1][name], apart[1][name], atol=1e-5)
        assert stacked[1][name].any()
