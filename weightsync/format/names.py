"""Names that reach the file system or a digest, checked before they do."""

from __future__ import annotations

import re

from sluice.versions import Version

__all__ = [
    "BadNameError",
    "check_shard",
    "check_tensor",
    "parse_run",
    "parse_version_directory",
    "run_resource",
    "version_directory",
]

_RUN = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_TENSOR = re.compile(r"[!-~]{1,512}")
_METADATA = "__metadata__"
_VERSION_DIRECTORY = re.compile(r"v(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
_PREFIX = "runs/"


class BadNameError(ValueError):
    """A name that is not allowed; the message says which are."""


def run_resource(run: str) -> str:
    """Return the resource name of a run: ``runs/{run}``."""
    return f"{_PREFIX}{run}"


def parse_run(resource: str) -> str:
    """Return the run's name in ``runs/{run}``.

    Raises:
        BadNameError: if it has another form.
    """
    run = resource.removeprefix(_PREFIX)
    if not resource.startswith(_PREFIX) or not _RUN.fullmatch(run):
        raise BadNameError(
            f"{resource!r} is not a run; expected runs/NAME, NAME of lower-case letters, digits, '.', '_', '-',"
            " beginning with a letter or digit, at most 63 characters"
        )
    return run


def check_shard(name: str) -> str:
    """Give the shard's name back.

    Raises:
        BadNameError: if it could leave its directory or be hidden in it.
    """
    if not _SHARD.fullmatch(name):
        raise BadNameError(
            f"{name!r} is not a shard name; allowed are letters, digits, '.', '_', '-', not beginning with '.',"
            " at most 128 characters"
        )
    return name


def check_tensor(name: str) -> str:
    """Give the tensor's name back.

    Raises:
        BadNameError: if it has blanks, which separate fields in a version's digest, or unprintable characters, or means
            something else in a safetensors file.
    """
    if name == _METADATA:
        raise BadNameError(f"{name} is no tensor name: safetensors keeps it for itself")
    if not _TENSOR.fullmatch(name):
        raise BadNameError(
            f"{name[:80]!r} is not a tensor name; allowed are 1 to 512 printable ASCII characters without blanks"
        )
    return name


def version_directory(version: Version) -> str:
    """Name of a version's directory: ``v{epoch}.{number}``."""
    return f"v{version}"


def parse_version_directory(name: str) -> Version | None:
    """Return the version that a directory's name stands for; None if it is no version's."""
    match = _VERSION_DIRECTORY.fullmatch(name)
    return Version(int(match[1]), int(match[2])) if match else None
