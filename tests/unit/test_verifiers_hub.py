"""Environments of the Environments Hub are installed by the hub's own program; here is a small one in its place."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from sluice.environments.libraries.verifiers import install_from_hub
from sluice.errors import ConfigError


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that puts a shell script into the path as `prime`. Packages that it installs into the folder can be imported."""
    beside = tmp_path / "venv"
    (beside / "bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(beside))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def write(script: str) -> None:
        file = beside / "bin/prime"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    return write


def test_the_program_installs_beside_verifiers(program, tmp_path: Path) -> None:
    assert importlib.util.find_spec("toy_words") is None
    program(f'echo "$VIRTUAL_ENV $*" > {tmp_path}/said; echo "number = 7" > {tmp_path}/toy_words.py')
    install_from_hub("somebody/toy-words@1.2")
    said = (tmp_path / "said").read_text().split()
    options = ["--with", "pip", "--no-upgrade"]
    assert said == [str(tmp_path / "venv"), "env", "install", "somebody/toy-words@1.2", *options]
    assert importlib.import_module("toy_words").number == 7


def test_what_the_program_says_is_in_the_error(program) -> None:
    program('echo "no route to the hub" >&2; exit 3')
    with pytest.raises(ConfigError, match=r"(?s)ended with code 3: no route to the hub.*by hand"):
        install_from_hub("somebody/toy-words")


@pytest.mark.usefixtures("program")
def test_without_the_program_the_error_says_how_to_get_it() -> None:
    with pytest.raises(ConfigError, match=r"-m pip install prime"):
        install_from_hub("somebody/toy-words")
