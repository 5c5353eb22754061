"""The identity of a warmup: known from the config, the sources and the host, without tracing."""

from __future__ import annotations

from dataclasses import dataclass

from aot_lora.config import Config
from aot_lora.config.tables import table_digest
from aot_lora.plan import TargetSpec
from aot_lora.programs.sources import source_digests
from aot_lora.store.key import key_of
from aot_lora.targets.identity import identity


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmIdentity:
    """What a manifest is found by.

    Args:
      identity: a hash of `parts`.
      parts: plan, sources and target, by named part.
      target_parts: those of the target alone; they are part of each artifact's key too.
    """

    identity: str
    parts: dict[str, str]
    target_parts: dict[str, str]

    @classmethod
    def of(cls, config: Config, target: TargetSpec) -> WarmIdentity:
        """The identity of warming `config` for `target` on this host.

        Raises:
          UnsupportedError: a package that the target needs is missing; ProgramError: a user
          module is.
        """
        target_parts = identity(target)
        sources = source_digests(config.plan, config=config.path, extra=config.user_sources)
        # One manifest serves a plan and what servers missed: it is the written plan's.
        plan = {"plan": config.written_plan.digest()}
        if table := table_digest(target):
            plan["table of kernels"] = table
        parts = {**plan, **sources, **target_parts}
        return cls(identity=key_of(parts), parts=parts, target_parts=target_parts)
