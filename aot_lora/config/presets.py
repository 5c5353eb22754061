"""Finds presets and model shapes: the checkout's `buckets/` first, then package data."""

from __future__ import annotations

from pathlib import Path

from aot_lora.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_CHECKOUT = _PACKAGE.parent


def in_checkout() -> bool:
    """Whether this package runs from a checkout rather than from an installed wheel."""
    return (_CHECKOUT / "buckets").is_dir() and (_CHECKOUT / "pyproject.toml").is_file()


def presets_root() -> Path:
    """The folder that holds ``<hardware>/<model>.yaml`` and ``models/``."""
    return _CHECKOUT / "buckets" if in_checkout() else _PACKAGE / "_presets"


def preset_names() -> tuple[str, ...]:
    """Names such as ``tpu-v6e/llama-3.1-8b``, sorted."""
    root = presets_root()
    found = (path.relative_to(root).with_suffix("").as_posix() for path in root.glob("*/*.yaml"))
    return tuple(sorted(name for name in found if not name.startswith("models/")))


def find_config(name: str) -> Path:
    """Resolves a path, or a preset's name with or without ``buckets/`` and ``.yaml``.

    Raises:
      ConfigError: neither a file nor a preset.
    """
    path = Path(name)
    if path.is_file():
        return path
    stem = name.removeprefix("buckets/").removesuffix(".yaml")
    if stem in preset_names():
        return presets_root() / f"{stem}.yaml"
    raise ConfigError(
        "no such config",
        where=name,
        expected="a YAML file, or one of the presets " + ", ".join(preset_names()),
        found="a folder" if path.is_dir() else "nothing there",
        next_step="check the path, or name a preset",
    )


def default_store_root() -> Path:
    """``cache/`` of a checkout, else the user's cache folder."""
    if in_checkout():
        return _CHECKOUT / "cache"
    import platformdirs  # 4 ms, and only installations ask for it

    return Path(platformdirs.user_cache_dir("aot-lora"))
