"""lora_project: the base projection and the expand in one pass over the output."""
