"""Checks of the machine and of what is installed on it, without any settings."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from sluice.doctor.finding import Finding, ok, warning, wrong

IMPORT_S = 180.0
"""Seconds for a library to be imported: the first import of vLLM reads gigabytes."""

_SHOWN_CHARACTERS = 400

OPEN_FILES = 4096
"""Least limit of open files. A gateway with a thousand agents uses up a lower one."""

MOST_OPEN_FILES = 65_536
"""A higher limit of open files has no benefit here."""

GIB = 1 << 30
_MIB = 1 << 20

_TORCH = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": []}
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found["devices"].append([torch.cuda.get_device_name(index), free, total])
print(json.dumps(found))
"""


def check_machine() -> Iterator[Finding]:
    """Look at Python, packages, torch and its devices, compiler, cores, memory and limits."""
    yield check_python()
    yield from check_packages(metadata.requires("sluice") or [])
    yield from check_torch()
    yield check_compiler()
    yield check_memory()
    yield check_open_files()


def check_python() -> Finding:
    """Look at the interpreter."""
    wanted = metadata.metadata("sluice")["Requires-Python"]
    found = platform.python_version()
    if wanted and not SpecifierSet(wanted).contains(found, prereleases=True):
        return wrong(
            "python", f"{found} at {sys.executable}", f"Sluice needs {wanted}: make the environment with another one"
        )
    return ok("python", f"{found} at {sys.executable}")


def check_packages(requirements: Sequence[str]) -> Iterator[Finding]:
    """Look for each package that Sluice requires.

    Args:
        requirements: As the metadata of a package has them; those of extras are left out.
    """
    fine = 0
    for each in map(Requirement, requirements):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(each.name)
        except metadata.PackageNotFoundError:
            found = ""
        if found and each.specifier.contains(found, prereleases=True):
            fine += 1
        else:
            has = f"{each.name} {found} is installed" if found else f"{each.name} is not installed"
            yield wrong("packages", has, f'{sys.executable} -m pip install "{each.name}{each.specifier}"')
    if list(metadata.distributions(name="sluice-client")):
        both = "sluice and sluice-client are both installed, and hold the same files"
        pip = f"{sys.executable} -m pip"
        yield wrong(
            "packages", both, f"{pip} uninstall sluice-client, then {pip} install --force-reinstall --no-deps sluice"
        )
    yield ok("packages", f"sluice {metadata.version('sluice')}, and {fine} packages in the versions that it needs")


def check_torch() -> Iterator[Finding]:
    """Import torch in a process of its own, which may crash or hang, and look at its devices."""
    said, problem = _import(_TORCH)
    if problem:
        yield wrong("torch", problem, "install torch again, in a build that fits this machine (README, Install)")
        return
    found = json.loads(said.splitlines()[-1])
    build = f"built for CUDA {found['cuda']}" if found["cuda"] else "built for CPUs"
    yield ok("torch", f"{found['version']}, {build}")
    for name, free, total in found["devices"]:
        text = f"{name}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < total / 2:
            yield warning(
                "devices",
                text,
                "another process uses it: `nvidia-smi` shows which; end it, or choose others by CUDA_VISIBLE_DEVICES",
            )
        else:
            yield ok("devices", text)
    if not found["devices"]:
        yield _no_devices(bool(found["cuda"]))


def _no_devices(cuda_build: bool) -> Finding:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not Path("/dev/nvidiactl").exists():
        return ok("devices", "no NVIDIA device: everything runs on the CPU")
    if hidden is not None and hidden.strip() in {"", "-1"}:
        return warning("devices", f"CUDA_VISIBLE_DEVICES={hidden!r} hides all devices", "unset it to use them")
    if not cuda_build:
        return wrong(
            "devices",
            "there are NVIDIA devices, but this torch is built for CPUs",
            'install torch for CUDA: `pip install -e ".[gpu]"` in an environment of its own',
        )
    return wrong(
        "devices",
        "there are NVIDIA devices, but torch cannot use them",
        "the driver is older than this build of CUDA needs, or the container has no access: compare `nvidia-smi` with torch.version.cuda",
    )


def check_engine(library: str, extra: str) -> Finding:
    """Import the library of an engine in a process of its own.

    Args:
        library: Name to import.
        extra: The extra of this package that installs it.
    """
    said, problem = _import(f"import {library}; print(getattr({library}, '__version__', ''))")
    if problem:
        return wrong("engine", f"{library} cannot be imported: {problem}", f"{extra}, or choose another rollout.engine")
    if not said:
        return wrong(
            "engine", f"{library} has no version: what is imported is not the whole package", f"{extra}, again"
        )
    return ok("engine", f"{library} {said.splitlines()[-1]}")


def check_compiler() -> Finding:
    """Look for a compiler."""
    found = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    if found is None:
        return warning(
            "compiler", "there is no C++ compiler", "trainer.compile and some kernels of vLLM need one: install g++"
        )
    return ok("compiler", found)


def check_memory() -> Finding:
    """Look at cores and memory."""
    memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
    text = f"{cores} cores, {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < 2 * GIB:
        return warning("memory", text, "even the quickstart takes 2 GiB: end other programs")
    return ok("memory", text)


def check_open_files() -> Finding:
    """Look at the limit of open files and sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        found, most = f"a process may have {soft}", hard if hard > 0 else MOST_OPEN_FILES
        remedy = f"`ulimit -n {min(most, MOST_OPEN_FILES)}` before it starts"
        if most < OPEN_FILES:
            remedy = "let an administrator raise the hard limit (`LimitNOFILE=65536` of systemd, `--ulimit nofile=65536` of Docker, limits.conf)"
        return warning("open files", found, f"a service with many agents needs more: {remedy}")
    return ok("open files", f"a process may have {soft}")


def size_text(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / _MIB:.1f} MiB"


def _import(program: str) -> tuple[str, str]:
    """Run a program that imports something; return what it printed, and what went wrong."""
    try:
        command = (sys.executable, "-c", program)
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S, check=False)  # noqa: S603 - our own
    except subprocess.TimeoutExpired:
        return "", f"its import took longer than {IMPORT_S:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"its import ended with code {done.returncode}"]
        return "", lines[-1][:_SHOWN_CHARACTERS]
    return done.stdout.strip(), ""
