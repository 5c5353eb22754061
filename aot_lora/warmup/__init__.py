"""The work list, its workers, resume and report."""

from aot_lora.warmup.run import Progress, Report, total, warmup

__all__ = ["Progress", "Report", "total", "warmup"]
