"""Block sizes of the TPU kernels where no tuned ones are given, and what they cost in VMEM."""

from __future__ import annotations

VMEM_BYTES = 100 << 20
"""What a kernel may use. v5e and v6e have 128 MiB, v5p 96 and tpu7x 64, v4 16 (jax's `TpuInfo`)."""

CHUNK_BYTES = 1 << 20
"""A copy ahead of the matmul: long enough to hide a grid step (0.35 us is 0.6 MB on a v6e)."""


def divisor(size: int, most: int, multiple: int = 128) -> int:
    """The largest divisor of `size` up to `most` that is a multiple of `multiple`, or `size`."""
    for value in range(most - most % multiple, 0, -multiple):
        if size % value == 0:
            return value
    return size


def lanes_in_tile(lanes: int, quantum: int, most: int) -> int:
    """Lanes of one tile: whole blocks and whole registers, or all lanes."""
    multiple = 128
    while multiple % quantum:
        multiple += 128
    return lanes if lanes <= most else divisor(lanes, most, multiple)


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
