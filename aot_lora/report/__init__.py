"""One HTML file that shows a plan: values in, a page out. Reads nothing and compiles nothing."""

from aot_lora.report.facts import Finding, Held, MemoryFacts, PlanFacts, TargetFacts, TrafficFacts
from aot_lora.report.page import render

__all__ = [
    "Finding",
    "Held",
    "MemoryFacts",
    "PlanFacts",
    "TargetFacts",
    "TrafficFacts",
    "render",
]
