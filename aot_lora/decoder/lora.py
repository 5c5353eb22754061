"""How a step adds adapters: a function it calls at each projection, so that it can be another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from aot_lora.config.tables import Table
from aot_lora.kernels.batch import Batch
from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.choice import Choice, choose
from aot_lora.kernels.sizes import Sizes
from aot_lora.plan import HEAD_MODULE

Site = tuple[str, ...]
"""Modules that read the same rows."""

LAYER_SITES: tuple[Site, ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
HEAD_SITES: tuple[Site, ...] = ((HEAD_MODULE,),)

Arrays = tuple[jax.Array, ...]
Lora = Callable[[Site, jax.Array, Arrays, Layer], Arrays]
"""(modules, x [T, D], weights [D, O] each, layer) -> x @ weight and each row's adapter, [T, O]."""

Banks = Mapping[str, tuple[jax.Array, jax.Array]]
LoraMaker = Callable[[Banks, Batch, Sequence[Site]], Lora]
"""(banks by module, a batch, the sites it is for) -> the function for such rows."""

Chooser = Callable[[Sizes], Choice]


def no_lora(site: Site, x: jax.Array, weights: Arrays, layer: Layer) -> Arrays:
    """A batch without adapters: the projections alone."""
    del site, layer
    return tuple(x @ weight for weight in weights)


def chosen_lora(chooser: Chooser, *, most: int, stacked: bool) -> LoraMaker:
    """Adapters by the form that `chooser` names for the sizes of each site.

    What a form needs of the batch is worked out once, before the layers.

    Args:
      chooser: sizes -> the form for them.
      most: blocks of the largest adapter there may be.
      stacked: whether the layers' weights lie in one stack.
    """

    def maker(banks: Banks, batch: Batch, sites: Sequence[Site]) -> Lora:
        with_banks = {site: tuple(name for name in site if name in banks) for site in sites}
        choices = {
            site: chooser(
                sizes_of(
                    batch,
                    [banks[name] for name in own],
                    most=most,
                    stacked=stacked and site in LAYER_SITES,
                )
            )
            for site, own in with_banks.items()
            if own
        }
        prepared: dict[str, Any] = {}
        for site, choice in choices.items():
            if choice.form.name not in prepared:
                quantum = banks[with_banks[site][0]][0].shape[2]
                prepared[choice.form.name] = choice.form.prepare(batch, quantum=quantum, most=most)

        # Traced and lowered once for all layers that are apart.
        projects = {site: jax.jit(choice.project()) for site, choice in choices.items()}

        def project(site: Site, x: jax.Array, weights: Arrays, layer: Layer) -> Arrays:
            if site not in choices:
                return no_lora(site, x, weights, layer)
            own, choice = with_banks[site], choices[site]
            by = dict(zip(site, weights, strict=True))
            form = choice.form
            outputs, prepared[form.name] = form.divided(
                projects[site](
                    x,
                    tuple(by[name] for name in own),
                    tuple(banks[name] for name in own),
                    layer,
                    prepared[form.name],
                ),
                prepared[form.name],
            )
            found = dict(zip(own, outputs, strict=True))
            return tuple(found[name] if name in found else x @ by[name] for name in site)

        return project

    return maker


def tabled_lora(table: Table | None, platform: str, *, most: int, stacked: bool) -> LoraMaker:
    """Adapters by what was measured for the hardware."""
    return chosen_lora(lambda sizes: choose(table, sizes, platform), most=most, stacked=stacked)


def sizes_of(
    batch: Batch, banks: Sequence[tuple[jax.Array, jax.Array]], *, most: int, stacked: bool
) -> Sizes:
    """The sizes of a site, on one device.

    Args:
      batch: of its rows.
      banks: of its modules, as divided.
      most: blocks of the largest adapter there may be.
      stacked: whether the weights lie in a stack of all layers.
    """
    a_bank = banks[0][0]
    quantum = a_bank.shape[2]
    return Sizes(
        tokens=batch.slots.shape[0],
        lanes=batch.blocks.shape[0] * quantum,
        d=a_bank.shape[3],
        o=tuple(b_bank.shape[3] for _, b_bank in banks),
        quantum=quantum,
        most=most,
        dtype=str(a_bank.dtype),
        stacked=stacked,
    )
