"""The state of training on disk: which tensors it has, which rank writes which slice of them, and the files.

A state is flat tensors named ``<engine>.model.<name>``, ``<engine>.optimizer.<moment>.<name>``, ``<engine>.scalars.<name>`` and
``random.<device>.<rank>``. Each rank writes the slices that `share_out` gives it into safetensors files. Their header has the
offset of each slice, in the format of torch.distributed.checkpoint's HuggingFaceStorageWriter. The matching reader reads any
range, so a state loads on any number of ranks in any layout. The writer itself is not used, because ranks would exchange its
plan as pickles, and its table of files needs the same names on every rank.
"""

from __future__ import annotations

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from sluice.slices import TensorSlice, assign_slices
from sluice.v1 import weightsync_pb2
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.parallel.sharding import local_slice

POLICY = "policy"
"""Name of the policy's engine in a checkpoint, and of the engine of offline training."""

SCALARS = "scalars"


class LiveState(dict[str, torch.Tensor]):
    """The live tensors that a process has to save, by name. The first part of a name is the name of the tensor's engine."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], engines: Mapping[str, TrainEngine]) -> None:
        super().__init__(tensors)
        self._engines = engines

    def lend(self, read: Event) -> set[str]:
        """Keep some tensors unchanged until `read` is set, and return their names; these need no copy."""
        return {f"{prefix}.{name}" for prefix, engine in self._engines.items() for name in engine.lend(read)}


def training_state(engines: Mapping[str, TrainEngine], rank: int) -> LiveState:
    """Return the live tensors that a process has to save. The next step changes them. Names of engines must not contain a dot."""
    state: dict[str, torch.Tensor] = {}
    for prefix, engine in engines.items():
        state |= {f"{prefix}.{name}": tensor for name, tensor in engine.state_tensors().items()}
        for name, value in engine.state_scalars().items():
            kind = torch.float64 if isinstance(value, float) else torch.int64
            state[f"{prefix}.{SCALARS}.{name}"] = torch.tensor(value, dtype=kind)
    return LiveState(state | _random_state(rank), engines)


def restore_state(engines: Mapping[str, TrainEngine], directory: Path, rank: int) -> None:
    """Restore the state. It may have been written by any number of ranks in any layout.

    A rank whose random state is not in the checkpoint keeps its present one. Other engines in the checkpoint are not read.

    Raises:
        ValueError: if the checkpoint is of other engines, models or optimizers; the restored state is undefined then.
    """
    stored = stored_tensors(directory)
    into: dict[str, torch.Tensor] = {}
    scalars = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored.items() if _is_scalar(name)}
    for prefix, engine in engines.items():
        shapes = {
            name.removeprefix(f"{prefix}."): size
            for name, (size, _) in stored.items()
            if name.startswith(f"{prefix}.") and not _is_scalar(name)
        }
        if not shapes:
            raise ValueError(
                f"the checkpoint holds no {prefix!r}: resume with the settings that it was made with, or use a new run name"
            )
        into |= {f"{prefix}.{name}": tensor for name, tensor in engine.state_room(shapes).items()}
    random = {name: torch.empty_like(tensor) for name, tensor in _random_state(rank).items() if name in stored}
    read_tensors(directory, into | scalars | random)
    for prefix, engine in engines.items():
        head = f"{prefix}.{SCALARS}."
        engine.restore_scalars({key.removeprefix(head): scalars[key].item() for key in scalars if key.startswith(head)})
    _restore_random_state(random, rank)


def _is_scalar(name: str) -> bool:
    return name.split(".")[1] == SCALARS


def _random_state(rank: int) -> dict[str, torch.Tensor]:
    """Return the state of this process's CPU generator, and of its GPU's if it has one."""
    state = {f"random.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        state[f"random.cuda.{rank}"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(tensors: Mapping[str, torch.Tensor], rank: int) -> None:
    """Restore the random generators. A generator without a tensor keeps its state."""
    if (cpu := tensors.get(f"random.cpu.{rank}")) is not None:
        torch.set_rng_state(cpu)
    if torch.cuda.is_available() and (cuda := tensors.get(f"random.cuda.{rank}")) is not None:
        torch.cuda.set_rng_state(cuda)


# Which rank writes what.


def held_slices(tensors: Mapping[str, torch.Tensor]) -> dict[TensorSlice, torch.Tensor]:
    """Return the slices that this process holds. Their values are the live memory."""
    held: dict[TensorSlice, torch.Tensor] = {}
    for name, tensor in tensors.items():
        local, offsets = local_slice(tensor)
        if local.numel() or not tensor.numel():
            held[TensorSlice(name, tuple(tensor.shape), offsets, tuple(local.shape))] = local
    return held


def share_out(held: Sequence[Collection[TensorSlice]]) -> list[set[TensorSlice]]:
    """Decide which rank writes which of the slices that the ranks hold.

    Raises:
        ValueError: if the ranks together do not hold every tensor whole, or slices of a tensor overlap.
    """
    _check_cover(dict.fromkeys(each for slices in held for each in slices))
    return assign_slices([{each: each.elements for each in slices} for slices in held])


def _check_cover(slices: Collection[TensorSlice]) -> None:
    """Check that the slices cover every tensor once. In every layout of DTensors slices are cells of a grid, so counting values suffices."""
    found: dict[str, int] = defaultdict(int)
    shapes: dict[str, tuple[int, ...]] = {}
    for slice_ in slices:
        found[slice_.name] += slice_.elements
        if shapes.setdefault(slice_.name, slice_.shape) != slice_.shape:
            raise ValueError(
                f"{slice_.name!r} has shape {slice_.shape} on one rank and {shapes[slice_.name]} on another: give every rank the same model"
            )
    for name, count in found.items():
        if count != math.prod(shapes[name]):
            raise ValueError(
                f"the ranks hold {count} of the {math.prod(shapes[name])} values of {name!r}: save on all ranks of one layout"
            )


def encode_slices(slices: Collection[TensorSlice]) -> bytes:
    """Encode slices for the exchange between the ranks of one trainer."""
    return weightsync_pb2.Shard(tensors=[each.to_proto() for each in sorted(slices)]).SerializeToString()


def decode_slices(content: bytes) -> list[TensorSlice]:
    """Decode the result of `encode_slices`."""
    return [TensorSlice.from_proto(each) for each in weightsync_pb2.Shard.FromString(content).tensors]


# Files.

# Each rank reads on its own, without torch.distributed, on purpose.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FILE_BYTES = 4 << 30
"""Bytes of tensors after which a new file is started."""


def write_slices(slices: Mapping[TensorSlice, torch.Tensor], directory: Path, rank: int) -> list[Path]:
    """Write the slices of one process, contiguous CPU tensors, into a directory that all ranks share. Return the files.

    Raises:
        OSError: if the disk is full or not writable.
    """
    paths = []
    for number, part in enumerate(_parts(slices)):
        path = directory / f"rank-{rank:05d}-{number:05d}.safetensors"
        places = {slice_.name: {SAVED_OFFSETS_KEY: list(slice_.offsets)} for slice_ in part}
        tensors = {slice_.name: tensor for slice_, tensor in part.items()}
        try:
            save_file(tensors, path, metadata={CUSTOM_METADATA_KEY: json.dumps(places)})
        except Exception as error:
            # safetensors raises its own exception for a full disk.
            raise OSError(f"{path} could not be written: {error}") from error
        paths.append(path)
    return paths


def _parts(slices: Mapping[TensorSlice, torch.Tensor]) -> Iterator[dict[TensorSlice, torch.Tensor]]:
    part: dict[TensorSlice, torch.Tensor] = {}
    filled = 0
    for slice_, tensor in slices.items():
        if part and filled + tensor.nbytes > FILE_BYTES:
            yield part
            part, filled = {}, 0
        part[slice_] = tensor
        filled += tensor.nbytes
    if part:
        yield part


def stored_tensors(directory: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the global shape and dtype of every tensor in a directory, by name."""
    described = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return {name: (each.size, each.properties.dtype) for name, each in described.items()}


def read_tensors(directory: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Read each tensor (of a DTensor the range that this rank holds) from files that `write_slices` wrote in any layout."""
    dcp.load(dict(into), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)


def read_below(prefix: str, directory: Path) -> dict[str, torch.Tensor]:
    """Return the whole tensors whose names begin with a prefix, by their names without the prefix."""
    stored = stored_tensors(directory).items()
    tensors = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in stored if name.startswith(prefix)}
    read_tensors(directory, tensors)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
