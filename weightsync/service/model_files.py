"""The small files beside the weights that make a version's directory loadable: config, generation config, tokenizer."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import structlog
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from sluice.host_files import remove_tree

__all__ = ["collect_model_files", "link_into"]

_SUFFIXES = {".json", ".txt", ".model", ".jinja"}
_NOT_OURS = {"manifest.json", "trainer_state.json"}
_WEIGHT_INDEX = ".index.json"
_MOST_BYTES = 256 << 20
"""Larger files are no configuration; the largest tokenizers have some 40 MB."""

log = structlog.get_logger(__name__)


def collect_model_files(model: str, target: Path) -> list[Path]:
    """Copy what belongs to a model besides its weights.

    Args:
        model: Hugging Face directory, or a hub id that is in this machine's hub cache; nothing is downloaded.
        target: Directory that receives the copies; emptied before.

    Returns:
        The copies, none where the model is not at hand: versions then hold weights alone.
    """
    remove_tree(target)
    source = _locate(model)
    if source is None and not model:
        log.info("versions will hold weights alone, because no base model is set")
        return []
    if source is None:
        log.warning(
            "versions will hold weights alone",
            model=model,
            remedy="set model to a directory that this host can read, or put the hub snapshot into its cache",
        )
        return []
    target.mkdir(parents=True)
    copies = [Path(shutil.copyfile(path, target / path.name)) for path in sorted(source.iterdir()) if _belongs(path)]
    for copy in copies:
        _sync(copy)
    return copies


def link_into(copies: list[Path], directory: Path) -> None:
    """Give a version's directory its own names for the collected files; bytes are copied only where links are unknown."""
    for copy in copies:
        try:
            os.link(copy, directory / copy.name)
        except OSError:  # some network file systems; if the disk is full, the copy says so
            _sync(Path(shutil.copyfile(copy, directory / copy.name)))


def _belongs(path: Path) -> bool:
    return (
        path.is_file()
        and path.suffix in _SUFFIXES
        and path.name not in _NOT_OURS
        and not path.name.endswith(_WEIGHT_INDEX)
        and path.stat().st_size <= _MOST_BYTES
    )


def _locate(model: str) -> Path | None:
    if not model:
        return None
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, OSError):  # a name that is no hub id, or nothing in the cache
        return None


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
