"""The examples as a stranger follows them: the commands of each README, in a folder of their own, and the model has learned."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

DEADLINE_S = 900
"""For all commands of one example; each takes two to five minutes alone."""

pytestmark = [pytest.mark.examples, pytest.mark.slow, pytest.mark.timeout(DEADLINE_S + 60)]

EXAMPLES = {
    "alphabet_sort": "",
    "arithmetic": "",
    "gsm8k": "",
    "hendrycks_math": "",
    "mcp": "environments",
    "reasoning_gym": "environments",
    "trl": "",
    "wiki_search": "",
    "wordle": "",
}
"""Each example, and which of the virtual environments of `make install-ecosystem` stands for the one that its README makes."""

SHORTEST = "arithmetic"
RECENT_COMMITS = 10
"""`make test-examples` trains all examples; `make test-ecosystem` trains the one that so many recent commits changed last."""


def recently_changed() -> list[str]:
    """Return the examples that the recent commits changed, the last changed one first."""
    log = ["git", "log", f"-{RECENT_COMMITS}", "--name-only", "--format="]
    paths = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    names = [path.split("/")[1] for path in paths if path.startswith("examples/")]
    return [name for name in dict.fromkeys(names) if name in EXAMPLES]


IN_ECOSYSTEM = next(iter(recently_changed()), SHORTEST)


def commands(name: str) -> list[str]:
    """Return the commands of a README: the lines of its indented blocks, without the remarks."""
    readme = (ROOT / "examples" / name / "README.md").read_text()
    return [line.strip() for line in readme.splitlines() if line.startswith("    ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all examples: some begin with the same model, which is made once."""
    made = tmp_path_factory.mktemp("examples")
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ecosystem] if name == IN_ECOSYSTEM else []) for name in EXAMPLES]
)
def test_the_commands_of_an_example_train_a_model(name: str, folder: Path) -> None:
    said = commands(name)
    assert sum("sluice rl " in each for each in said) == 1
    evaluation = said[-1]
    assert evaluation.startswith("sluice eval ")
    assert "--baseline" in evaluation
    for each in said[:-1]:
        if " -m venv " in each:
            made = folder / each.split(" -m venv ")[1].split()[0]
            theirs = ROOT / f".venv-ecosystem-{EXAMPLES[name]}"
            if not theirs.exists():
                pytest.skip(f"{theirs.name} is not there: run `make install-ecosystem`")
            made.symlink_to(theirs)
        else:
            follow(each, folder)
    follow(f"{evaluation} --output {name}.json", folder)
    gain = json.loads((folder / f"{name}.json").read_text())["gain"]
    print(f"{name}: gain {gain['mean']:+.3f}, 95% {gain['low']:+.3f} to {gain['high']:+.3f}")
    assert gain["low"] > 0
    run = tomllib.loads((ROOT / "examples" / name / "rl.toml").read_text())["run"]
    follow(f"sluice audit {run}", folder)


def follow(command: str, directory: Path) -> None:
    """Run a command as a shell does, with the programs of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        check=False,
        cwd=directory,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
