"""YAML -> frozen `Config`; finds presets. Imports no jax."""

from aot_lora.config.load import Config, load_config
from aot_lora.config.presets import find_config, preset_names

__all__ = ["Config", "find_config", "load_config", "preset_names"]
