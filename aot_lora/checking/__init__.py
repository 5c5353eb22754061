"""What `aot-lora check` does with traces: cache them, divide them over processes, compare them."""
