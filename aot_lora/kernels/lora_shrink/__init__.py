"""lora_shrink: reference, xla, cases."""
