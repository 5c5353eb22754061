"""What a decoder step needs to know of its model and its cache. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

COLUMN_MODULES = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW_MODULES = ("o_proj", "down_proj")
HEAD_MODULE = "lm_head"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's stretch of the rotary frequencies.

    Args:
      factor: by which low frequencies are slowed.
      low_freq_factor, high_freq_factor: `original_length` over these bounds the wavelengths
        between which the two kinds blend.
      original_length: positions that the model was first trained on.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A Llama-family decoder, as far as its step depends on it. `Plan.layers` says how many layers.

    Args:
      hidden: width of the residual stream.
      heads, kv_heads: query heads, and the key and value heads that they share.
      head_dim: width of a head.
      intermediate: width inside the MLP.
      vocab: rows of the embedding.
      norm_eps: of RMSNorm.
      rope_theta: base of the rotary frequencies; rope_scaling: their stretch, if any.
      tied: whether the embedding is the output head as well.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied: bool = False

    def modules(self) -> dict[str, tuple[int, int]]:
        """Projection -> (D inputs, O outputs): those of a layer, then ``lm_head``."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
            HEAD_MODULE: (self.hidden, self.vocab),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Sizes of the cache of keys and values.

    Args:
      sequences: how many it holds at once.
      length: tokens of each.
    """

    sequences: int
    length: int
