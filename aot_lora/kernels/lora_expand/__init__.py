"""lora_expand: reference, xla, cases."""
