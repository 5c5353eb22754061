"""Measures forms of lora_project on the device at hand, and makes the tables that choose them."""
