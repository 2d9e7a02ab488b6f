"""Tensors on disk: each process writes the pieces it was given, any layout reads the ranges it needs.

Files are safetensors whose header says where each piece begins, in the form of torch.distributed.checkpoint's
HuggingFaceStorageWriter; its reader reshards. That writer is not used: its plan travels pickled between the processes, and
its one table of files wants every process to hold the same names.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from trainer_svc.checkpoint.pieces import Piece

__all__ = ["read_below", "read_tensors", "stored_tensors", "write_shards"]

# Each process reads by itself, on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FILE_BYTES = 4 << 30
"""About how many bytes of tensors one file gets."""


def write_shards(pieces: Mapping[Piece, torch.Tensor], directory: Path, rank: int) -> list[Path]:
    """Write the pieces of one process.

    Args:
        pieces: Contiguous CPU tensors.
        directory: Exists; the processes share it.
        rank: Number of this process, which its files' names begin with.

    Returns:
        The files.

    Raises:
        OSError: if the disk is full or not writable.
    """
    paths = []
    for number, part in enumerate(_parts(pieces)):
        path = directory / f"rank-{rank:05d}-{number:05d}.safetensors"
        places = {piece.name: {SAVED_OFFSETS_KEY: list(piece.offsets)} for piece in part}
        tensors = {piece.name: tensor for piece, tensor in part.items()}
        try:
            save_file(tensors, path, metadata={CUSTOM_METADATA_KEY: json.dumps(places)})
        except Exception as error:
            # safetensors has an exception of its own for a full disk.
            raise OSError(f"{path} could not be written: {error}") from error
        paths.append(path)
    return paths


def _parts(pieces: Mapping[Piece, torch.Tensor]) -> Iterator[dict[Piece, torch.Tensor]]:
    part: dict[Piece, torch.Tensor] = {}
    filled = 0
    for piece, tensor in pieces.items():
        if part and filled + tensor.nbytes > FILE_BYTES:
            yield part
            part, filled = {}, 0
        part[piece] = tensor
        filled += tensor.nbytes
    if part:
        yield part


def stored_tensors(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, global shapes and types of the tensors in a directory."""
    described = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: (each.size, each.properties.dtype) for name, each in described.items()}


def read_tensors(directory: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Read what each tensor needs into its memory.

    Args:
        directory: What `write_shards` filled, in whatever layout.
        into: Plain tensors or DTensors by name; what else the directory holds is not read.
    """
    dcp.load(dict(into), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)


def read_below(prefix: str, directory: Path) -> dict[str, torch.Tensor]:
    """The whole tensors whose names begin with a prefix, by what follows it."""
    stored = stored_tensors(directory).items()
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored if name.startswith(prefix)}
    read_tensors(directory, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
