"""What the bench reads out of a compiled TPU program."""

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "tools" / "bench"

PROGRAM = """\
%fused_computation (p: bf16[8,128]) -> bf16[8,128] {
  %inner = bf16[8,128]{1,0} add(%p, %p), backend_config={"estimated_cycles":"1000"}
}

ENTRY %main (x: bf16[8,128], blocks: s32[8]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %blocks = s32[8]{0} parameter(1)
  %mask = s32[8]{0} broadcast(%blocks), backend_config={"estimated_cycles":"200"}
  %kernel = bf16[8,128]{1,0} custom-call(%mask, %x), backend_config={"estimated_cycles":"30"}
  ROOT %out = bf16[8,128]{1,0} fusion(%kernel), backend_config={"estimated_cycles":"4"}
}
"""


def test_cycles_of_data_are_counted_and_those_of_lists_and_masks_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import tpu_static

    assert tpu_static.estimated_cycles(PROGRAM) == 34
