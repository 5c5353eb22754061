"""A store in a folder: artifacts by key, manifests by identity, one writer at a time."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from aot_lora.errors import IntegrityError, StoreError
from aot_lora.store import artifact
from aot_lora.store.key import key_of
from aot_lora.store.manifest import (
    Entry,
    Manifest,
    dump_entry,
    dump_manifest,
    parse_journal,
    parse_manifest,
)

_CACHEDIR_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This folder is a cache made by aot-lora; backups may leave it out.\n"
)


class LocalStore:
    """Artifacts and manifests under one folder. Reading needs no write access.

    Args:
      root: the folder; made by the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def artifact_path(self, key: str) -> Path:
        """Where the artifact of a key is or would be."""
        return self.root / "artifacts" / key[:2] / f"{key}.aot"

    def manifest_path(self, identity: str) -> Path:
        """Where the manifest of a warmup is or would be."""
        return self.root / "manifests" / f"{identity}.json"

    def journal_path(self, identity: str) -> Path:
        """Where an unfinished warmup keeps what it has done."""
        return self.root / "manifests" / f"{identity}.journal"

    def read_artifact(self, key: str) -> bytes:
        """The bytes of an artifact file, unchecked.

        Raises:
          IntegrityError: there is none; StoreError: it cannot be read.
        """
        path = self.artifact_path(key)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise IntegrityError(
                "the artifact is missing",
                where=str(path),
                next_step="run `aot-lora warmup` with the same config",
            ) from None
        except OSError as error:
            raise _store_error(error, path) from None

    def read_entry(self, entry: Entry) -> artifact.Artifact:
        """The artifact that an entry names, checked against its digest.

        Raises:
          IntegrityError: missing, damaged, or other bytes than the entry names.
        """
        data = self.read_artifact(entry.key)
        where = str(self.artifact_path(entry.key))
        found = artifact.unpack(data, where=where)
        if found.digest != entry.digest:
            raise IntegrityError(
                "the artifact is another one than the manifest names",
                where=where,
                expected=f"SHA-256 {entry.digest[:16]}…",
                found=f"SHA-256 {found.digest[:16]}…",
                next_step="run `aot-lora warmup` with the same config",
            )
        return found

    def read(self, key: str) -> artifact.Artifact:
        """The artifact of a key, checked.

        Raises:
          IntegrityError: missing, damaged, or the artifact of another key.
        """
        where = str(self.artifact_path(key))
        found = artifact.unpack(self.read_artifact(key), where=where)
        if key_of(found.header.parts) != key:
            raise IntegrityError("the artifact is of another key than its name", where=where)
        return found

    def write_artifact(self, key: str, data: bytes) -> bytes:
        """Writes an artifact file whole or not at all; the first writer of a key wins.

        Returns:
          What is stored: `data`, or what another worker wrote for the same key before.

        Raises:
          StoreError: the disk is full, the store is read-only, ...
        """
        path = self.artifact_path(key)
        write_atomic(path, data, place=_link)
        return self.read_artifact(key)

    def set_aside(self, key: str) -> Path | None:
        """Moves a damaged artifact out of the way, into ``damaged/``.

        Returns:
          Where it went; None where there is none, or where another worker has mended it.
        """
        path = self.artifact_path(key)
        aside = self.root / "damaged" / path.name
        with suppress(IntegrityError):
            self.read(key)
            return None
        if not path.exists():
            return None
        try:
            aside.parent.mkdir(parents=True, exist_ok=True)
            path.replace(aside)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _store_error(error, path) from None
        return aside

    def read_manifest(self, identity: str) -> Manifest | None:
        """The manifest of a warmup, or None where it never finished.

        Raises:
          IntegrityError: it is damaged; StoreError: it cannot be read.
        """
        path = self.manifest_path(identity)
        try:
            return parse_manifest(path.read_bytes(), where=str(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _store_error(error, path) from None

    def manifests(self) -> dict[str, Manifest]:
        """All readable manifests by identity, newest first."""
        found: dict[str, Manifest] = {}
        with suppress(OSError):
            paths = [(path.stat().st_mtime, path) for path in self._manifest_files()]
            for _, path in sorted(paths, reverse=True):
                with suppress(IntegrityError):
                    found[path.stem] = parse_manifest(path.read_bytes(), where=str(path))
        return found

    def _manifest_files(self) -> list[Path]:
        return sorted((self.root / "manifests").glob("*.json"))

    def write_manifest(self, identity: str, manifest: Manifest) -> None:
        """Writes a manifest whole and forgets the journal behind it."""
        write_atomic(self.manifest_path(identity), dump_manifest(manifest))
        self.journal_path(identity).unlink(missing_ok=True)

    def read_journal(self, identity: str) -> tuple[Entry, ...]:
        """What an unfinished warmup had done."""
        try:
            return parse_journal(self.journal_path(identity).read_bytes())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise _store_error(error, self.journal_path(identity)) from None

    def append_journal(self, identity: str, entry: Entry) -> None:
        """Notes that a variant's artifact is written."""
        path = self.journal_path(identity)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as journal:
                journal.write(dump_entry(entry))
        except OSError as error:
            raise _store_error(error, path) from None

    @contextmanager
    def writing(self, *, on_wait: Callable[[], None] = lambda: None) -> Generator[None]:
        """Holds the store's writer lock; a second warmup waits and then finds the work done.

        Raises:
          StoreError: the store cannot be written.
        """
        tag = self.root / "CACHEDIR.TAG"
        lock = FileLock(self.root / ".writer.lock")
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if not tag.exists():
                tag.write_text(_CACHEDIR_TAG, encoding="utf-8")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                on_wait()
                lock.acquire()
        except OSError as error:
            raise _store_error(error, self.root) from None
        try:
            yield
        finally:
            lock.release()


def _link(temporary: Path, path: Path) -> None:
    """Gives the file its name unless another has it; two variants may share an executable."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # A file system without hard links.
        temporary.replace(path)


def write_atomic(
    path: Path, data: bytes, *, place: Callable[[Path, Path], object] = Path.replace
) -> None:
    """Writes a file whole or not at all: temp file in the same folder, fsync, rename.

    Args:
      path: its folder is made where need be.
      data: all of it.
      place: gives the temporary file its name.

    Raises:
      StoreError: the disk is full, the store is read-only, ...
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        place(temporary, path)
    except OSError as error:
        raise _store_error(error, path) from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _store_error(error: OSError, path: Path) -> StoreError:
    reasons = {
        errno.ENOSPC: ("the disk is full", "free some space and run the same command again"),
        errno.EDQUOT: ("the disk quota is used up", "free some space and run the command again"),
        errno.EROFS: ("the store is read-only", "name another one with --store"),
        errno.EACCES: ("no permission for the store", "check its owner, or name another --store"),
        errno.EEXIST: ("the store is not a folder", "name a folder with --store"),
        errno.ENOTDIR: ("the store is not a folder", "name a folder with --store"),
        errno.EPERM: ("no permission for the store", "check its owner, or name another --store"),
    }
    problem, step = reasons.get(
        error.errno or 0, (f"the store failed: {error.strerror or error}", "check the disk")
    )
    return StoreError(
        problem, where=str(path), next_step=f"{step}; everything already stored stays valid"
    )
