"""The work list, its workers, resume and report."""

from aot_lora.warmup.run import Progress, Quiet, Report, warmup

__all__ = ["Progress", "Quiet", "Report", "warmup"]
