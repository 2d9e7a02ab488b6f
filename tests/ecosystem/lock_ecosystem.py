"""Pin the environments of `make test-ecosystem`: write requirements/ecosystem-*.lock, with the newest releases, and print what changed.

Nothing is installed: pip and npm resolve only. Run it with the Python of the project, since pip resolves for the interpreter that runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
DEADLINE_S = 900
"""For one environment: wheels without separate metadata are downloaded to read what they need."""

BESIDE_OURS = {"ecosystem-ray"}
"""Environments that see the packages of .venv: their locks hold what they need beyond cpu.lock and dev.lock."""


def canonical(name: str) -> str:
    """Return the name as PyPI compares it."""
    return name.lower().replace("_", "-").replace(".", "-")


def read_lock(path: Path) -> dict[str, str]:
    """Return the versions of a lock by package; empty if there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = (line.partition("#")[0].strip().partition("==") for line in lines)
    return {canonical(name): version for name, _, version in pairs if version}


def resolve(names: Path) -> dict[str, str]:
    """Return the newest versions that fit `names` and each other, with all that they need."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        "-",
        "-r",
        str(names),
    ]
    ours: dict[str, str] = {}
    if names.stem in BESIDE_OURS:
        constraints = [REQUIREMENTS / "cpu.lock", REQUIREMENTS / "dev.lock"]
        command += [word for each in constraints for word in ("-c", str(each))]
        ours = {name: version for each in constraints for name, version in read_lock(each).items()}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S)
    found = (item["metadata"] for item in json.loads(done.stdout)["install"])
    versions = {canonical(each["name"]): each["version"] for each in found}
    return {name: versions[name] for name in sorted(versions.keys() - ours.keys())}


def lock_python(names: Path) -> None:
    """Write the lock of one environment, and print the differences to the present one."""
    lock = names.with_suffix(".lock")
    before, after = read_lock(lock), resolve(names)
    head = f"# All of {names.name} and what it needs. Written by `make ecosystem-latest`; installed with `pip install --no-deps -r`.\n"
    lock.write_text(head + "".join(f"{name}=={version}\n" for name, version in after.items()))
    print_changes(names.stem, before, after)


def lock_node(directory: Path) -> None:
    """Write package-lock.json of a folder anew, without addresses of a registry."""
    lock = directory / "package-lock.json"
    before = read_node_lock(lock)
    lock.unlink(missing_ok=True)
    command = [
        "npm",
        "install",
        "--package-lock-only",
        "--omit-lockfile-registry-resolved",
        "--no-audit",
        "--no-fund",
        "--loglevel=error",
    ]
    subprocess.run(command, cwd=directory, check=True, timeout=DEADLINE_S)
    print_changes(str(directory.relative_to(ROOT)), before, read_node_lock(lock))


def read_node_lock(path: Path) -> dict[str, str]:
    """Return the versions of a package-lock.json by the folder of the package; empty if there is no such file."""
    packages = json.loads(path.read_text())["packages"] if path.exists() else {}
    return {
        name.removeprefix("node_modules/"): each["version"]
        for name, each in packages.items()
        if name and "version" in each
    }


def print_changes(environment: str, before: dict[str, str], after: dict[str, str]) -> None:
    """Print the packages whose version changed."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    print(f"{environment}: {len(after)} packages, {len(changed)} changed", flush=True)
    for name in changed:
        print(f"  {name} {before.get(name, '-')} -> {after.get(name, '-')}")


def main() -> None:
    """Lock all environments."""
    for names in sorted(REQUIREMENTS.glob("ecosystem-*.txt")):
        lock_python(names)
    for package in sorted(ROOT.glob("*/**/package.json")):
        if "node_modules" not in package.parts and not package.parts[len(ROOT.parts)].startswith("."):
            lock_node(package.parent)


if __name__ == "__main__":
    main()
