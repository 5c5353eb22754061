"""Which form serves each site of a decoder's steps, known before anything is traced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aot_lora.config.tables import table_of
from aot_lora.decoder.lora import HEAD_SITES, LAYER_SITES, Site
from aot_lora.decoder.weights import decoder_of, layers_apart
from aot_lora.kernels.choice import Choice, choose
from aot_lora.kernels.sizes import Sizes
from aot_lora.plan import Module, Plan, TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteChoice:
    """The form of a site at a point.

    Args:
      modules: of the site, those with banks.
      sizes: on one device.
      choice: the form, its tuning and why.
    """

    modules: Site
    sizes: Sizes
    choice: Choice


def site_choices(plan: Plan, target: TargetSpec) -> Iterator[SiteChoice]:
    """The form of every site of the steps at every point with lanes.

    Raises:
      ProgramError: the plan has no decoder or no cache; ConfigError: the hardware's table is
        damaged.
    """
    table, by = table_of(target), {module.name: module for module in plan.modules}
    sampled = decoder_of(plan)[1].sequences
    for site in (*LAYER_SITES, *HEAD_SITES):
        modules = [by[name] for name in site if name in by]
        if not modules:
            continue
        for tokens in (sampled,) if site in HEAD_SITES else plan.tokens.buckets:
            for lanes in plan.lanes.buckets:
                stacked = site in LAYER_SITES and not layers_apart(target.platform)
                sizes = _sizes(plan, modules, tokens, lanes, stacked=stacked)
                choice = choose(table, sizes, target.platform)
                names = tuple(module.name for module in modules)
                yield SiteChoice(modules=names, sizes=sizes, choice=choice)


def _sizes(plan: Plan, modules: list[Module], tokens: int, lanes: int, *, stacked: bool) -> Sizes:
    widths = [plan.widths(module) for module in modules]
    return Sizes(
        tokens=tokens,
        lanes=lanes,
        d=widths[0][0],
        o=tuple(o for _, o in widths),
        quantum=plan.quantum,
        most=plan.most_blocks,
        dtype=plan.dtype,
        stacked=stacked,
    )
