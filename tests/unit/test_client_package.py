"""What is promised of the packages: the client needs grpcio and protobuf alone, and all packages are of one version."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from sluice.cli import packaged
from sluice.config import ConfigError

ROOT = Path(__file__).parents[2]
FULL = tomllib.loads((ROOT / "pyproject.toml").read_text())
CLIENT = tomllib.loads((ROOT / "sdk/python/pyproject.toml").read_text())

NEEDED = {"google", "grpc", "typing_extensions"}
"""Top-level modules of grpcio and protobuf, and of what grpcio requires."""

OPTIONAL = ("grpc_", "cython_runtime", "_cython", "__editable__", "__main__", "_distutils_hack", "sitecustomize")
"""How modules begin that grpcio imports where they are installed, that it is compiled with, or that belong to this environment."""


def test_the_client_imports_only_what_its_package_holds_and_requires() -> None:
    code = "import sys, sluice.agent, sluice.client, sluice.tuning; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    modules = set(loaded.stdout.split())
    held = {name.removesuffix(".__init__") for name in CLIENT["tool"]["setuptools"]["py-modules"]}
    ours = {name for name in modules if name == "sluice" or name.startswith("sluice.")}
    assert {name for name in ours if not name.startswith("sluice.v1")} == held
    foreign = {name.partition(".")[0] for name in modules - ours} - sys.stdlib_module_names - NEEDED
    assert not {name for name in foreign if not name.startswith(OPTIONAL)}


def test_the_packages_agree_in_version_and_requirements() -> None:
    package = json.loads((ROOT / "sdk/typescript/package.json").read_text())
    assert FULL["project"]["version"] == CLIENT["project"]["version"] == package["version"]
    assert FULL["project"]["requires-python"] == CLIENT["project"]["requires-python"]
    assert set(CLIENT["project"]["dependencies"]) < set(FULL["project"]["dependencies"])


def test_examples_and_contracts_are_copied_out_of_the_package(tmp_path: Path) -> None:
    target = tmp_path / "examples"
    assert packaged.run("examples", [str(target)]) == 0
    assert (target / "sums/env.py").read_text() == (ROOT / "examples/sums/env.py").read_text()
    with pytest.raises(ConfigError, match="nothing is overwritten"):
        packaged.run("examples", [str(target)])
    for _ in range(2):
        assert packaged.run("proto", [str(tmp_path)]) == 0
    copied = {path.name for path in (tmp_path / "sluice/v1").iterdir()}
    assert copied == {path.name for path in (ROOT / "proto/sluice/v1").iterdir()}
