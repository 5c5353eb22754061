"""lora_project, projections that read the same rows with their adapters: reference, xla, cases.

`baselines` holds what published systems do, to be measured beside it.
"""
