"""Where aot-lora meets the tools of others."""
