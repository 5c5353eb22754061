"""What a file asks of the planner, kept so that it can be planned again with other buckets."""

from __future__ import annotations

import math
from dataclasses import dataclass

from aot_lora.config import schema
from aot_lora.config.yaml_nodes import Document
from aot_lora.errors import ConfigError
from aot_lora.plan import (
    LORA_PROGRAMS,
    Axis,
    DecoderShape,
    KvCache,
    Module,
    Plan,
    UserEntry,
    build_plan,
    round_up,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A config's file, and what was found for it elsewhere.

    Args:
      file: as validated; document: with the places.
      modules: with banks; layers: how many hold such modules; decoder: the model as one, if known.
    """

    file: schema.ConfigFile
    document: Document
    modules: tuple[Module, ...]
    layers: int
    decoder: DecoderShape | None

    def plan(
        self,
        *,
        tokens: tuple[int, ...],
        slots: tuple[int, ...],
        ranks: tuple[int, ...],
        quantum: int | None = None,
    ) -> Plan:
        """The plan of these buckets, which are sorted; all else is as the file says.

        Without `quantum` it is the file's, or else the greatest common divisor of the ranks.

        Raises:
          ConfigError: the user's programs do not go with them.
        """
        lora, cache = self.file.lora, self.file.kv_cache
        quantum = quantum or lora.quantum or math.gcd(*ranks)
        full = lora.max_adapters * round_up(max(ranks), quantum)
        return build_plan(
            token_buckets=tokens,
            slots=slots,
            ranks=ranks,
            modules=self.modules,
            tp=self.file.mesh.tp,
            layers=self.layers,
            dtype=lora.dtype,
            quantum=quantum,
            max_adapters=lora.max_adapters,
            resident_lanes=round_up(lora.resident_lanes or full, quantum),
            with_lora="lora" in self.file.programs,
            user=_user_entries(self.entries, tokens, self.document),
            # What nobody asked for is no part of the plan, nor of its digest.
            decoder=self.decoder if cache else None,
            cache=KvCache(sequences=cache.sequences, length=cache.length) if cache else None,
        )

    def quantum_beside(self, before: tuple[int, ...], after: tuple[int, ...]) -> int | None:
        """The quantum to write where `after` replace the ranks `before`, so that it stays."""
        quantum = math.gcd(*before)
        stays = self.file.lora.quantum is not None or math.gcd(*after) == quantum
        return None if stays else quantum

    @property
    def edges(self) -> list[int]:
        """The ``max_tokens`` of the user's programs that have one."""
        return [entry.max_tokens for entry in self.entries if entry.max_tokens is not None]

    @property
    def entries(self) -> list[schema.ProgramEntry]:
        """The user's own programs."""
        return [entry for entry in self.file.programs if isinstance(entry, schema.ProgramEntry)]

    def place(self, *path: str) -> str:
        """``file:line:column: limits.variants`` of a key, or of the deepest part that stands."""
        return f"{self.document.place(path)}: {'.'.join(path)}"


def _user_entries(
    entries: list[schema.ProgramEntry], token_buckets: tuple[int, ...], document: Document
) -> tuple[UserEntry, ...]:
    names = [entry.program_name for entry in entries]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(
                f"two programs are called `{name}`",
                where=document.place(("programs",)),
                next_step="give one of them a `name:`",
            )
        if name in LORA_PROGRAMS:
            raise ConfigError(
                f"`{name}` is the name of a program of aot-lora",
                where=document.place(("programs",)),
                next_step="give yours another `name:`",
            )
        most = entries[index].max_tokens
        if most is not None and most > token_buckets[-1]:
            raise ConfigError(
                f"max_tokens {most} of `{name}` is above the token budget",
                where=document.place(("programs",)),
                expected=f"at most {token_buckets[-1]}",
                next_step="lower it, or leave it out: then every token bucket is compiled",
            )
    axis = Axis(name="tokens", buckets=token_buckets)
    return tuple(
        UserEntry(
            name=entry.program_name,
            entry=entry.entry,
            max_tokens=None if entry.max_tokens is None else axis.bucket(entry.max_tokens),
        )
        for entry in entries
    )
