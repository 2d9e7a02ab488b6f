"""Directories that appear whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_directory"]


@contextmanager
def whole_directory(directory: Path) -> Iterator[Path]:
    """A directory beside the target to write into; it is renamed when the block ends, and removed if that raises.

    Raises:
        FileExistsError: if the target exists.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists: remove it or choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield staging
        for path in (staging, *staging.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # mkdtemp and safetensors write for the owner alone
        staging.rename(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
