"""The config as strict models: unknown keys, wrong types and bad values are errors."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from aot_lora.plan import ROW_MODULES

_MOST = 2**31 - 1  # sizes and positions are int32 on the device
PositiveInt = Annotated[int, Field(ge=1, le=_MOST)]
NaturalInt = Annotated[int, Field(ge=0, le=_MOST)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]

TPU_TOPOLOGY = re.compile(r"(v4|v5e|v5p|v6e|tpu7x):[1-9]\d*(x[1-9]\d*){1,2}")
GPU_TOPOLOGY = re.compile(r"|[A-Za-z0-9][\w-]*|[^\x00]+\.txtpb")

# Keys of the design that this version refuses rather than ignores.
PLANNED = {
    "verify_key": "signed manifests are not supported yet",
}


class Strict(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TargetSection(Strict):
    """``{platform: tpu, topology: "v6e:1x1"}``, or ``{platform: cuda, topology: h200}``."""

    platform: Literal["cpu", "cuda", "tpu"]
    topology: str = ""

    @model_validator(mode="after")
    def _topology_fits(self) -> TargetSection:
        if self.platform == "cuda":  # its names are those of shipped files: `gpus` knows them
            if not GPU_TOPOLOGY.fullmatch(self.topology):
                raise ValueError(
                    "unknown topology, expected a GPU's name such as h200, or the .txtpb file of "
                    "a target config, or none for the GPU of the host"
                )
        elif self.platform == "cpu":
            if self.topology:
                raise ValueError("a cpu target has no topology")
        elif not TPU_TOPOLOGY.fullmatch(self.topology):
            raise ValueError(
                "unknown topology, expected one of v4, v5e, v5p, v6e, tpu7x with its chips, "
                'for instance "v6e:1x1" or "v5p:1x1x1"'
            )
        return self


class MeshSection(Strict):
    """How each program is divided over devices: tensor parallelism.

    `row_parallel`: the modules whose inputs are divided; of all others the outputs are.
    """

    tp: PositiveInt = 1
    row_parallel: list[str] = list(ROW_MODULES)


class LoraSection(Strict):
    """Which modules adapters may change, and how many adapters of which ranks."""

    modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    ranks: Annotated[list[PositiveInt], Field(min_length=1)]
    slots: Annotated[list[NaturalInt], Field(min_length=1)]
    max_adapters: PositiveInt
    resident_lanes: PositiveInt | None = None
    quantum: PositiveInt | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    @model_validator(mode="after")
    def _consistent(self) -> LoraSection:
        if self.quantum is not None and max(self.ranks) < self.quantum:
            raise ValueError(f"quantum {self.quantum} is above the largest rank {max(self.ranks)}")
        if max(self.slots) > self.max_adapters:
            raise ValueError(
                f"slots go up to {max(self.slots)}, above max_adapters {self.max_adapters}"
            )
        lanes = self.resident_lanes
        if lanes is not None and lanes < max(self.ranks):
            raise ValueError(
                f"resident_lanes {lanes} cannot hold one adapter of rank {max(self.ranks)}"
            )
        return self

    @property
    def lane_quantum(self) -> int:
        """Lanes per bank block: as given, else the greatest common divisor of the ranks."""
        return self.quantum or math.gcd(*self.ranks)


class StepBuckets(Strict):
    """``{step: 128}``: multiples of the step up to the budget."""

    step: PositiveInt


class FitBuckets(Strict):
    """``{fit: traffic.csv, count: 10}``: at most so many, fitted to a trace beside the config.

    `of`: the tokens of steps that a server of so many `sequences` would make of the trace, or those
    of its prompts. All but the budget are multiples of `multiple`; `small` allows powers of two
    below it. The plan and its identity hold the buckets, not the trace.
    """

    fit: Annotated[str, Field(pattern=r"^[^\x00]+$")]
    count: PositiveInt
    multiple: PositiveInt = 16
    small: bool = False
    of: Literal["steps", "prompts"] = "steps"
    sequences: PositiveInt = 256


def bucket_kind(value: Any) -> str:
    """The tag of the model of `MadeBuckets` that a mapping is meant as."""
    fitted: set[object] = {"fit", "count", "of"}
    return "<fit>" if isinstance(value, dict) and fitted & set(value) else "<step>"


# One of the two by its keys: an error is then about the one that was meant.
MadeBuckets = Annotated[
    Annotated[StepBuckets, Tag("<step>")] | Annotated[FitBuckets, Tag("<fit>")],
    Discriminator(bucket_kind),
]

_MOST_BUCKETS = 10_000  # Far above any real axis; without it a slip would fill the memory.


class TokensSection(Strict):
    """The tokens axis. The last bucket is the budget, whatever the policy."""

    budget: PositiveInt
    buckets: Literal["pow2"] | MadeBuckets | Annotated[list[PositiveInt], Field(min_length=1)]
    smallest: PositiveInt = 16
    prefill_chunk: PositiveInt | None = None

    @model_validator(mode="after")
    def _budget_holds(self) -> TokensSection:
        if isinstance(self.buckets, list):
            smallest, largest = min(self.buckets), max(self.buckets)
            if "smallest" in self.model_fields_set:
                raise ValueError("smallest has no meaning beside a written list of buckets")
        elif isinstance(self.buckets, FitBuckets):
            if "smallest" in self.model_fields_set:
                raise ValueError("smallest has no meaning beside fitted buckets")
            smallest = largest = 1 if self.buckets.small else self.buckets.multiple
        elif isinstance(self.buckets, StepBuckets):
            smallest = largest = self.buckets.step
            if (count := self.budget // smallest) > _MOST_BUCKETS:
                raise ValueError(
                    f"step {smallest} makes {count:,} buckets, expected at most {_MOST_BUCKETS:,}"
                )
        else:
            smallest = largest = self.smallest
        if self.budget < smallest:
            raise ValueError(f"budget {self.budget} is below the smallest bucket {smallest}")
        if largest > self.budget:
            raise ValueError(f"bucket {largest} is above the budget {self.budget}")
        chunk = self.prefill_chunk
        if chunk is not None and chunk > self.budget:
            raise ValueError(
                f"prefill_chunk {chunk} is above the largest bucket {self.budget}: "
                "each such chunk would be outside the plan"
            )
        return self


class ProgramEntry(Strict):
    """A user's own program: ``{entry: "my_engine.aot:decode_step"}``.

    `sources` are globs, from the config's folder, of files outside its package that it depends on.
    `max_tokens`: it is never called with more, so larger buckets are not compiled for it.
    """

    entry: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
    name: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None
    sources: list[Annotated[str, Field(pattern=r"^[^/\x00][^\x00]*$")]] = []
    max_tokens: PositiveInt | None = None

    @property
    def program_name(self) -> str:
        """What `Runtime.lookup` calls it: `name`, else the function's name."""
        return self.name or self.entry.partition(":")[2]


_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def with_unit(value: Any) -> Any:
    """Bytes written as ``8GiB``, as an integer; anything but text as it is."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+) ?(KiB|MiB|GiB|TiB)", value)
    if match is None:
        raise ValueError("expected bytes as an integer, or as in 512MiB or 8GiB")
    return int(match[1]) * _UNITS[match[2]]


Bytes = Annotated[int, BeforeValidator(with_unit), Field(ge=1)]
OnMiss = Literal["error", "pad_up", "background"]


class LimitsSection(Strict):
    """What a plan may cost, all targets together.

    `seconds`: of a cold warmup, as estimated for the host; `plan` and `warmup` hold it.
    `hbm_fraction`: of each device's memory; `plan --memory` holds it.
    """

    variants: PositiveInt = 2000
    seconds: PositiveFloat | None = None
    store_bytes: Bytes = 8 * 2**30
    hbm_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0


class AdaptersSection(Strict):
    """How a server keeps adapters. No part of the plan: nothing is compiled for it.

    `mode`: ``static`` refuses an adapter that the banks have no room for; under ``swap`` the least
    recently used ones give way. `host_cache`: bytes of prepared adapters kept in memory.
    """

    mode: Literal["static", "swap"] = "static"
    host_cache: Bytes = 4 * 2**30


class StoreSection(Strict):
    """Where artifacts live; a relative path starts at the config file's folder."""

    root: Annotated[str, Field(pattern=r"^[^\x00]+$")] | None = None


Shape = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]
Modules = Annotated[dict[str, Shape], Field(min_length=1)]


class RopeScalingSection(Strict):
    """Llama 3's stretch of the rotary frequencies, as ``rope_scaling`` of its config.json."""

    factor: PositiveFloat
    low_freq_factor: PositiveFloat
    high_freq_factor: PositiveFloat
    original_length: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> RopeScalingSection:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {self.low_freq_factor} is not below "
                f"high_freq_factor {self.high_freq_factor}"
            )
        return self


class DecoderSection(Strict):
    """The model as a decoder of Llama's family, for the steps of `aot_lora.decoder`."""

    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate: PositiveInt
    vocab: PositiveInt
    norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    rope_scaling: RopeScalingSection | None = None
    tied: bool = False

    @model_validator(mode="after")
    def _heads_fit(self) -> DecoderSection:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.kv_heads} kv_heads cannot be shared by {self.heads} heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary positions turn pairs")
        return self


class KvCacheSection(Strict):
    """The cache of a decoder's keys and values: so many sequences of so many tokens."""

    sequences: PositiveInt
    length: PositiveInt


class ModelFile(Strict):
    """``buckets/models/<model>.yaml``: module shapes [D, O] and how many layers hold them."""

    layers: PositiveInt
    modules: Modules
    extra_modules: dict[str, Shape] = {}
    decoder: DecoderSection | None = None


class ConfigFile(Strict):
    """The whole file."""

    model: Annotated[str, Field(min_length=1)] | Modules
    layers: PositiveInt | None = None
    decoder: DecoderSection | None = None
    kv_cache: KvCacheSection | None = None
    target: TargetSection | Annotated[list[TargetSection], Field(min_length=1)]
    mesh: MeshSection = MeshSection()
    lora: LoraSection
    tokens: TokensSection
    programs: Annotated[list[Literal["lora"] | ProgramEntry], Field(min_length=1)] = ["lora"]
    limits: LimitsSection = LimitsSection()
    store: StoreSection = StoreSection()
    adapters: AdaptersSection = AdaptersSection()
    priming: bool = False
    on_miss: OnMiss = "error"
