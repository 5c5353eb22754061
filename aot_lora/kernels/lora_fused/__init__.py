"""lora_fused: the base projection and the expand in one pass over the output."""
