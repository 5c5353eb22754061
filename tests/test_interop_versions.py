"""Which torch, torchax and torch_xla are refused, before any of them is imported."""

from __future__ import annotations

import sysconfig
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest

from aot_lora.errors import UnsupportedError
from aot_lora.interop import versions

GOOD = {"torch": "2.9.0", "torchax": "0.0.13", "torch_xla": "2.9.0"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that tests change; what is removed is not installed."""
    found = dict(GOOD)

    def version(package: str) -> str:
        if package not in found:
            raise PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: 1)
    return found


@pytest.mark.parametrize("torch", ["2.9.0", "2.12.1+cpu"])
def test_torchax_takes_the_torches_it_imports_on(installed: dict[str, str], torch: str):
    installed["torch"] = torch
    versions.require_torchax()


@pytest.mark.parametrize("torch", ["2.13.0+cpu", "2.8.0", "3.0.0"])
def test_torchax_on_another_torch(installed: dict[str, str], torch: str):
    installed["torch"] = torch
    with pytest.raises(UnsupportedError) as refused:
        versions.require_torchax()
    assert str(refused.value) == (
        "torchax 0.0.13 cannot be imported on this torch\n"
        "  expected: torch 2.9 to 2.12 with torchax 0.0.13\n"
        f"  found: torch {torch}\n"
        "  next: pip install 'torch>=2.9,<2.13'; on a host without a GPU take the wheel of "
        "PyTorch's CPU index"
    )


@pytest.mark.parametrize("missing", ["torch", "torchax"])
def test_torchax_is_missing(installed: dict[str, str], missing: str):
    del installed[missing]
    with pytest.raises(UnsupportedError, match=f"^{missing} is not installed"):
        versions.require_torchax()


def test_a_torchax_that_torch_xla_wrote_over(installed: dict[str, str]):
    versions.require_own_files(SimpleNamespace(__version__="0.0.13"))
    with pytest.raises(UnsupportedError, match="torch_xla's wheel brings its own") as refused:
        versions.require_own_files(SimpleNamespace(__version__="0.0.6"))
    assert "--force-reinstall --no-deps torchax==0.0.13" in str(refused.value.next_step)


def test_torch_xla_takes_its_own_pair(installed: dict[str, str]):
    installed["torch"] = "2.9.0+cpu"
    versions.require_torch_xla()


@pytest.mark.parametrize(
    ("package", "found", "says"),
    [
        ("torch", "2.12.0", "not the torch that works"),
        ("torch_xla", "2.8.1", "not the torch_xla that works"),
    ],
)
def test_torch_xla_of_another_pair(installed: dict[str, str], package: str, found: str, says: str):
    installed[package] = found
    with pytest.raises(UnsupportedError, match=says) as refused:
        versions.require_torch_xla()
    assert refused.value.found == f"{package} {found}"
    assert "torch==2.9.0 torch_xla==2.9.0" in str(refused.value.next_step)


def test_torch_xla_is_missing(installed: dict[str, str]):
    del installed["torch_xla"]
    with pytest.raises(UnsupportedError, match=r"^torch_xla is not installed"):
        versions.require_torch_xla()


def test_a_python_without_a_shared_library(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: 0)
    with pytest.raises(UnsupportedError, match="needs a Python with a shared library") as refused:
        versions.require_torch_xla()
    assert "--enable-shared" in str(refused.value.next_step)
