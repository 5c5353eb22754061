"""Who asked for a compile: the user's frames on this thread's stack, without JAX's and our own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import jax

_JAX = str(Path(jax.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep
_PYTHON = str(Path(os.__file__).parent) + os.sep
_INSTALLED = ("site-packages" + os.sep, "dist-packages" + os.sep)


def is_jax(place: str) -> bool:
    """Whether a file, or a place ``file:line``, is JAX's."""
    return place.startswith(_JAX)


def caller() -> tuple[str, str]:
    """The user's line that led here, ``file:line``, and the function of JAX that it called."""
    called = ""
    for frame in _frames():
        if not _is_library(frame.f_code.co_filename):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}", called
        name = frame.f_code.co_qualname
        # JAX's wrappers, as `reraise_with_filtered_traceback`, are closures.
        if is_jax(frame.f_code.co_filename) and "<locals>" not in name:
            called = name
    return "", called


def user_frames(most: int = 12) -> tuple[tuple[str, ...], str]:
    """The user's frames, the innermost first, each ``file:line function``, as `portable`; and the
    first of them that is in no installed package, else the first."""
    found: list[str] = []
    own = ""
    for frame in _frames():
        code = frame.f_code
        if not _is_library(code.co_filename):
            text = f"{portable(code.co_filename)}:{frame.f_lineno} {code.co_qualname}"
            if len(found) < most:
                found.append(text)
            if not own and not any(folder in code.co_filename for folder in _INSTALLED):
                own = text
    return tuple(found), own or next(iter(found), "")


def short_path(place: str) -> str:
    """A place as seen from the working directory."""
    return place.removeprefix(str(Path.cwd()) + os.sep)


def portable(place: str) -> str:
    """A file or place without what differs from machine to machine: relative to the working
    directory or to where packages are installed, else the file's name alone."""
    for folder in _INSTALLED:
        _, found, after = place.rpartition(folder)
        if found:
            return after
    short = short_path(place)
    return Path(short).name if Path(short).is_absolute() else short


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(file: str) -> bool:
    in_python = file.startswith((_PYTHON, "<frozen")) and "site-packages" not in file
    return file.startswith((_JAX, _OURS)) or in_python
