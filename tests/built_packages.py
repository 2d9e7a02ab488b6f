"""The wheels, built as `make wheels` does, and environments that hold one of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

BUILD_S = 300
"""Seconds for one command that builds or installs: registries are asked."""


def run(*argv: str | Path, cwd: Path = ROOT) -> str:
    """Run a command that builds or installs; return its output."""
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=BUILD_S, check=False)
    assert done.returncode == 0, f"{argv}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def build_wheels(folder: Path) -> Path:
    """Build the wheels of `sluice` and `sluice-client` from a copy of the tracked files; return their folder."""
    copy, wheels = folder / "source", folder / "dist"
    copy.mkdir()
    run(
        "sh",
        "-c",
        f'git ls-files -z | tar --null --files-from=- --create --file=- | tar --extract --directory="{copy}"',
    )
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        wheels,
        copy,
        copy / "sdk/python",
    )
    return wheels


def pip_of(folder: Path) -> list[str | Path]:
    """Make an empty environment; return the command that installs into it, by the pip of the tests: to copy pip takes seconds."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    return [sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-compile"]


def client_environment(wheels: Path, folder: Path) -> Path:
    """Make an environment with sluice-client and, from the registry, its requirements in the locked versions. Return its interpreter."""
    run(*pip_of(folder), "--constraint", ROOT / "requirements/cpu.lock", "--find-links", wheels, "sluice-client")
    return folder / "bin/python"


def full_environment(wheels: Path, folder: Path) -> Path:
    """Make an environment with the wheel of `sluice`. Its requirements come from the environment of the tests. Return its interpreter."""
    python = folder / "bin/python"
    run(*pip_of(folder), "--no-deps", *wheels.glob("sluice-*.whl"))
    (packages,) = folder.glob("lib/python*/site-packages")
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(ours) + "\n")
    return python
