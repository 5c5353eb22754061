"""The store in a folder: whole files or none, whatever the disk or the process does."""

import errno
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Never

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import artifacts_in, remount, tmpfs

from aot_lora.errors import EXIT_UNSUPPORTED, IntegrityError, StoreError
from aot_lora.signature import Signature
from aot_lora.store import Entry, LocalStore, Manifest, manifest
from aot_lora.store.artifact import Header, pack
from aot_lora.store.key import key_of

KEY = "ab" + "0" * 38
GOLDEN = Path(__file__).parent / "golden" / "manifest-1.json"
ENTRIES = tuple(
    Entry(variant=f"lora_shrink/t{t}-l8-d16", key=f"{t:040x}", digest=f"{t:064x}", bytes=t)
    for t in (8, 16, 32)
)
MANIFEST = Manifest(
    format=1, config="tiny.yaml", parts={"jax": "0.10.2", "plan": "ab"}, entries=ENTRIES
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def files(store: LocalStore) -> list[str]:
    return sorted(path.name for path in store.root.rglob("*") if path.is_file())


# --- Writing ------------------------------------------------------------------------------------


def test_a_kill_between_write_and_rename_leaves_nothing_to_see(store: LocalStore) -> None:
    code = (
        "import os, pathlib, signal, sys\n"
        "from aot_lora.store import LocalStore\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"LocalStore(pathlib.Path(sys.argv[1])).write_artifact({KEY!r}, b'data')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, store.root])

    assert done.returncode == -signal.SIGKILL
    assert not store.artifact_path(KEY).exists()
    with pytest.raises(IntegrityError, match="the artifact is missing"):
        store.read_artifact(KEY)
    assert store.write_artifact(KEY, b"data") == b"data"


def failing(code: int):
    def fail(*_: object) -> Never:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the store is read-only"),
        (errno.EACCES, "no permission for the store"),
        (errno.EIO, "the store failed: Input/output error"),
    ],
)
def test_a_write_that_fails_leaves_no_file_and_says_why(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, problem: str
) -> None:
    monkeypatch.setattr(os, "fsync", failing(code))

    with pytest.raises(StoreError) as caught:
        store.write_artifact(KEY, b"data")

    assert caught.value.problem == problem
    assert caught.value.exit_code == EXIT_UNSUPPORTED
    assert caught.value.where == str(store.artifact_path(KEY))
    assert "everything already stored stays valid" in str(caught.value)
    assert not files(store)


def test_the_first_writer_of_a_key_wins(store: LocalStore) -> None:
    assert store.write_artifact(KEY, b"first") == b"first"
    assert store.write_artifact(KEY, b"second") == b"first"
    assert files(store) == [f"{KEY}.aot"]


def test_a_file_system_without_hard_links_serves(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(errno.EPERM))

    assert store.write_artifact(KEY, b"data") == b"data"
    assert files(store) == [f"{KEY}.aot"]


def test_a_real_full_disk_and_a_real_read_only_one(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", size="64k") as disk:
        store = LocalStore(disk)
        store.write_artifact(KEY, b"data")
        with pytest.raises(StoreError, match="the disk is full"):
            store.write_artifact("cd" + KEY[2:], bytes(100_000))
        assert artifacts_in(disk) == [store.artifact_path(KEY)]

        remount(disk, "ro")
        assert store.read_artifact(KEY) == b"data"
        with pytest.raises(StoreError, match="the store is read-only"):
            store.write_artifact("ef" + KEY[2:], b"data")
        with pytest.raises(StoreError, match=r"read-only|no permission"), store.writing():
            pass


def test_a_folder_in_the_place_of_the_store_s_files_is_an_error(store: LocalStore) -> None:
    store.artifact_path(KEY).mkdir(parents=True)

    with pytest.raises(StoreError, match="Is a directory"):
        store.read_artifact(KEY)


def test_the_second_writer_waits_for_the_first(store: LocalStore) -> None:
    waited: list[str] = []
    with store.writing(on_wait=lambda: waited.append("first")):
        code = (
            "import pathlib, sys\n"
            "from aot_lora.store import LocalStore\n"
            "say = lambda text: print(text, flush=True)\n"
            "with LocalStore(pathlib.Path(sys.argv[1])).writing(on_wait=lambda: say('waits')):\n"
            "    say('holds')\n"
        )
        second = subprocess.Popen(
            [sys.executable, "-c", code, store.root], stdout=subprocess.PIPE, text=True
        )
        assert second.stdout is not None
        assert second.stdout.readline() == "waits\n"
    assert second.communicate(timeout=60)[0] == "holds\n"
    assert not waited


# --- Setting aside ------------------------------------------------------------------------------


def test_set_aside_moves_the_file_and_knows_when_there_is_none(store: LocalStore) -> None:
    store.write_artifact(KEY, b"damaged")
    aside = store.set_aside(KEY)

    assert aside == store.root / "damaged" / f"{KEY}.aot"
    assert aside.read_bytes() == b"damaged"
    assert store.set_aside(KEY) is None


# --- Journal and manifest -----------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.sampled_from(ENTRIES), max_size=4), st.data())
def test_a_journal_cut_anywhere_keeps_the_lines_before(
    entries: list[Entry], data: st.DataObject
) -> None:
    lines = [manifest.dump_entry(entry) for entry in entries]
    journal = b"".join(lines)
    cut = data.draw(st.integers(0, len(journal)))
    ends = [sum(map(len, lines[: count + 1])) for count in range(len(lines))]
    whole = sum(end <= cut for end in ends)
    torn = journal[:cut]

    assert manifest.parse_journal(torn) == tuple(entries[:whole])
    afterwards = torn + manifest.dump_entry(ENTRIES[0])
    assert manifest.parse_journal(afterwards) == (*entries[:whole], ENTRIES[0])


def test_the_manifest_ends_the_journal(store: LocalStore) -> None:
    for entry in ENTRIES:
        store.append_journal("id", entry)
    assert store.read_journal("id") == ENTRIES

    store.write_manifest("id", MANIFEST)
    assert store.read_manifest("id") == MANIFEST
    assert store.read_journal("id") == ()


def test_a_manifest_of_format_1_stays_readable() -> None:
    assert manifest.parse_manifest(GOLDEN.read_bytes(), where=str(GOLDEN)) == MANIFEST
    assert asdict(MANIFEST)["format"] == manifest.FORMAT


def test_the_seconds_of_an_entry_are_kept_where_they_are_known() -> None:
    timed = (replace(ENTRIES[0], seconds=1.25), ENTRIES[1])

    assert manifest.parse_journal(b"".join(map(manifest.dump_entry, timed))) == timed


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "EOF"),
        (GOLDEN.read_bytes()[:-40], "EOF"),
        (b"\xff\xfe", "Invalid JSON"),
        (GOLDEN.read_bytes().replace(b'"format": 1', b'"format": 2'), "format 2, not 1"),
        (
            GOLDEN.read_bytes().replace(b'"config"', b'"new": 1, "config"'),
            "Unexpected keyword argument",
        ),
        (GOLDEN.read_bytes().replace(b'"bytes": 8', b'"bytes": "8"'), "valid integer"),
    ],
    ids=["empty", "truncated", "binary", "format", "unknown field", "wrong type"],
)
def test_a_damaged_manifest_is_named_and_never_half_read(
    store: LocalStore, data: bytes, found: str
) -> None:
    path = store.manifest_path("id")
    path.parent.mkdir(parents=True)
    path.write_bytes(data)

    with pytest.raises(IntegrityError) as caught:
        store.read_manifest("id")
    assert caught.value.where == str(path)
    assert found in str(caught.value.found)
    assert "it writes a new one" in str(caught.value)
    assert store.manifests() == {}


def test_a_whole_artifact_is_not_set_aside(store: LocalStore) -> None:
    """Another worker may have mended it in between."""
    parts = {"fingerprint": "1"}
    signature = Signature(
        function="f", inputs=(), outputs=(), donated=(), kept=(), in_tree="", out_tree=""
    )
    header = Header(variant="v/t1", parts=parts, signature=signature, raw_bytes=3)
    store.write_artifact(key_of(parts), pack(header, b"raw"))

    assert store.set_aside(key_of(parts)) is None
    assert store.read(key_of(parts)).raw() == b"raw"
