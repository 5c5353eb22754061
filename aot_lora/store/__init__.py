"""Where artifacts and manifests live."""

from aot_lora.store.local import LocalStore
from aot_lora.store.manifest import Entry, Manifest

__all__ = ["Entry", "LocalStore", "Manifest"]
