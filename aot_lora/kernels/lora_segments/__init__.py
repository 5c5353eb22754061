"""lora_segments: the pair of shrink and expand in one pass, for batches of many adapters."""
