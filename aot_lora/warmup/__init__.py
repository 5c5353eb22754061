"""The work list, its workers, resume and report."""

from aot_lora.warmup.run import Progress, Report, warmup

__all__ = ["Progress", "Report", "warmup"]
