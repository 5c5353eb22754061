"""Block sizes of the TPU kernels where no tuned ones are given, and what they cost in VMEM."""

from __future__ import annotations

import math

VMEM_BYTES = 100 << 20
"""What a kernel may use. v5e and v6e have 128 MiB, v5p and tpu7x 64, v4 16 (jax's `TpuInfo`)."""

CHUNK_BYTES = 1 << 20
"""A copy ahead of the matmul: long enough to hide a grid step (0.35 us is 0.6 MB on a v6e)."""


def divisor(size: int, most: int, multiple: int = 128) -> int:
    """The largest divisor of `size` up to `most` that is a multiple of `multiple`, or `size`."""
    for value in range(most - most % multiple, 0, -multiple):
        if size % value == 0:
            return value
    return size


def fitted(caps: dict[str, int], tokens: int, d: int, o: int) -> dict[str, int]:
    """Block sizes at most those of a point nearby, that divide the sizes at hand.

    Args:
      caps: block_t, block_d and block_o, any of them.
      tokens, d, o: T, D and O.
    """
    whole = {"block_t": (tokens, 16), "block_d": (d, 128), "block_o": (o, 128)}
    return {
        name: size if size <= cap else divisor(size, cap, unit)
        for name, cap in caps.items()
        for size, unit in [whole[name]]
    }


def lane_unit(quantum: int) -> int:
    """Lanes that are whole bank blocks and whole registers."""
    return math.lcm(128, quantum)


def lanes_in_tile(lanes: int, quantum: int, most: int) -> int:
    """Lanes of one tile."""
    return lanes if lanes <= most else divisor(lanes, most, lane_unit(quantum))


def refused(size: dict[str, int], need_bytes: int, *rules: tuple[str, int, int]) -> str:
    """Why a kernel cannot take its block sizes; empty where it can.

    Args:
      size: by name.
      need_bytes: of VMEM.
      rules: (name, the whole that it has to divide, what it has to be a multiple of).
    """
    for name, whole, unit in rules:
        block = size[name]
        if whole % block or (block != whole and block % unit):
            expected = f"{whole} or a divisor of it that is a multiple of {unit}"
            return f"{name} is {block}, expected {expected}"
    if need_bytes <= VMEM_BYTES:
        return ""
    return f"the blocks take {need_bytes >> 20} MiB of VMEM, expected at most {VMEM_BYTES >> 20}"


def shrink_sizes(tokens: int, lanes: int, d: int, quantum: int, itemsize: int) -> dict[str, int]:
    """Defaults of `lora_shrink`: block_t, block_l, block_d."""
    block_l = lanes_in_tile(lanes, quantum, 1024)
    block_t = tokens if tokens <= 512 else divisor(tokens, 512, 16)
    if tokens > block_t:  # The lanes are loaded once, and stay while tokens pass.
        return {"block_t": block_t, "block_l": block_l, "block_d": divisor(d, 8192)}
    most = max(128, CHUNK_BYTES // (block_l * itemsize))
    return {"block_t": block_t, "block_l": block_l, "block_d": divisor(d, most)}


def expand_sizes(tokens: int, lanes: int, o: int, quantum: int, itemsize: int) -> dict[str, int]:
    """Defaults of `lora_expand`: block_t, block_l, block_o."""
    block_l = lanes_in_tile(lanes, quantum, 1024)
    most = max(128, CHUNK_BYTES // (block_l * itemsize))
    block_t = tokens if tokens <= 512 else divisor(tokens, 512, 16)
    return {"block_t": block_t, "block_l": block_l, "block_o": divisor(o, min(2048, most))}


def matmul_vmem_bytes(rows: int, inner: int, columns: int, itemsize: int, *, added: bool) -> int:
    """VMEM of one step, everything twice as it is loaded ahead, and the float32 sum.

    Args:
      rows, inner, columns: of the step's matmul.
      itemsize: bytes of an element.
      added: whether a base of the result's shape is read too.
    """
    blocks = rows * inner + inner * columns + rows * columns * (2 if added else 1)
    return 2 * itemsize * blocks + 8 * rows * columns + 2 * 4 * 128 * rows


def segments_sizes(
    tokens: int, lanes: int, d: int, o: int, quantum: int, itemsize: int
) -> dict[str, int]:
    """Defaults of `lora_segments`: block_t, block_l, block_o."""
    few = tokens <= 256
    block_t = tokens if few else divisor(tokens, 256, 16)
    # Whole tiles are read. One register of lanes suits a block of tokens among others, which needs
    # few of them; one that has all the tokens needs most, and wide tiles fill the matrix unit.
    most = min(max(128, lanes // 4), 512) if few else 128
    block_l = lanes_in_tile(lanes, quantum, most)
    return {"block_t": block_t, "block_l": block_l, "block_o": divisor(o, 4096)}


def segments_vmem_bytes(size: dict[str, int], lanes: int, d: int, itemsize: int) -> int:
    """VMEM of `lora_segments`: both tiles, h of all lanes and the float32 sum."""
    rows, columns = size["block_t"], size["block_o"]
    tiles = 2 * size["block_l"] * (d + columns)
    blocks = 2 * rows * (d + 2 * columns) + rows * lanes
    return itemsize * (tiles + blocks) + 8 * rows * (columns + size["block_l"] + 128)


def fused_sizes(
    tokens: int, lanes: int, d: int, o: int, quantum: int, itemsize: int
) -> dict[str, int]:
    """Defaults of `lora_fused`: block_t, block_d, block_o."""
    block_t = tokens if tokens <= 512 else divisor(tokens, 512, 16)
    if tokens <= 128:  # Bytes decide: whole rows of W.
        return {"block_t": block_t, "block_d": divisor(d, 1024), "block_o": divisor(o, 4096)}
    most = 1024 if lanes <= 1024 else 512
    return {"block_t": block_t, "block_d": divisor(d, 2048), "block_o": divisor(o, most)}


def fused_vmem_bytes(size: dict[str, int], lanes: int, itemsize: int) -> int:
    """VMEM of `lora_fused`: x, W and h twice, the lanes of B once, the float32 sum."""
    rows, inner, columns = size["block_t"], size["block_d"], size["block_o"]
    blocks = 2 * (rows * (inner + columns + lanes) + inner * columns) + lanes * columns
    return itemsize * blocks + 12 * rows * columns + 8 * 128 * rows


# --- HBM traffic of a call: what its block sizes cost beyond reading everything once -------------


def shrink_hbm_bytes(tokens: int, lanes: int, d: int, itemsize: int, size: dict[str, int]) -> int:
    """Bytes that `lora_shrink` moves: x for each tile of lanes, A once or for each token block."""
    blocks_t, tiles = tokens // size["block_t"], lanes // size["block_l"]
    loads = blocks_t if size["block_d"] < d else 1
    return itemsize * (tiles * tokens * d + loads * lanes * d + tokens * lanes)


def expand_hbm_bytes(tokens: int, lanes: int, o: int, itemsize: int, size: dict[str, int]) -> int:
    """Bytes that `lora_expand` moves: h for each tile of columns, B as A above, the base twice."""
    blocks_t, tiles = tokens // size["block_t"], o // size["block_o"]
    loads = blocks_t if size["block_l"] < lanes else 1
    return itemsize * (tiles * tokens * lanes + loads * lanes * o + 2 * tokens * o)


def segments_hbm_bytes(tokens: int, read: int, d: int, o: int, itemsize: int) -> int:
    """Bytes that `lora_segments` moves; `read` is the lanes read, over all blocks of tokens."""
    return itemsize * (tokens * d + read * (d + o) + 2 * tokens * o)


def fused_hbm_bytes(
    tokens: int, lanes: int, d: int, o: int, itemsize: int, size: dict[str, int]
) -> int:
    """Bytes that `lora_fused` moves: W and B for each block of tokens, x for each of columns."""
    blocks_t, tiles = tokens // size["block_t"], o // size["block_o"]
    read = blocks_t * (d + lanes) * o + tokens * (tiles * d + lanes)
    return itemsize * (read + tokens * o)
