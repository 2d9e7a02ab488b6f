"""What one worker's model reads of a version, and where it puts it, found by running its loader on a model without memory.

The model is built once more on the meta device, where a copy moves nothing, and is given tensors that are mapped and not
read. That takes as long as building the modules, so it is done once per worker, and never while the engine is paused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from weightsync.vllm.read_recorder import Copy, Ranges, ReadRecorder, Region

__all__ = ["LoadPlan", "PlanError", "PlannedCopy", "make_plan"]

_PREFIX = "sluice_plan"
"""Keeps the layers of the model without memory apart in vLLM's registry of layers."""


class PlanError(Exception):
    """The model's loader could not be observed."""


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """A part of a checkpoint's tensor (`name`, `source`) and its place in one of the model's own (`parameter`, `target`)."""

    name: str
    source: Region
    parameter: str
    target: Region


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a worker's model does with the tensors of a version.

    Attributes:
        reads: Ranges of elements that it reads, by tensor; every tensor is named.
        copies: Copies straight into one of its parameters or buffers. A parameter that several modules share is named once
            for each.
        shapes: Shape and type of each of those parameters as the loader sees them.
    """

    reads: Mapping[str, Ranges]
    copies: tuple[PlannedCopy, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@torch.no_grad()  # type: ignore[untyped-decorator]
def make_plan(vllm_config: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> LoadPlan:  # noqa: ANN401 - VllmConfig
    """Run the model's loader and record its reads and copies.

    Args:
        vllm_config: The engine's configuration, in a worker that has loaded its model.
        tensors: A version's tensors in files that are mapped; of their bytes, none are used.

    Raises:
        PlanError: if the loader's reads could not be noted.
        Exception: whatever the model raises when it is built on the meta device or given these tensors.
    """
    with _model_beside(vllm_config, _PREFIX, torch.device("meta")) as model:
        recorder = ReadRecorder()
        with recorder:
            model.load_weights(recorder.watch(tensors))
        if recorder.failure:
            raise PlanError(recorder.failure)
        owners: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in _tensors_of(model):
            owners.setdefault(Copy.storage_key(tensor), []).append((name, tensor))
        copies = [
            PlannedCopy(copy.name, copy.source, parameter, _within(tensor, copy.target))
            for copy in recorder.copies
            for parameter, tensor in owners.get(copy.storage, ())
        ]
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _tensors_of(model)}
        return LoadPlan(recorder.reads(), tuple(copies), {copy.parameter: shapes[copy.parameter] for copy in copies})


@contextmanager
def _model_beside(vllm_config: Any, prefix: str, device: torch.device) -> Iterator[torch.nn.Module]:  # noqa: ANN401
    """Build a second model of a worker, and leave nothing of it in vLLM's registries. Its layers must never run."""
    layers = vllm_config.compilation_config.static_forward_context
    known, rotary = set(layers), dict(rotary_embedding._ROPE_DICT)  # noqa: SLF001 - embeddings shared between models
    try:
        with set_default_torch_dtype(vllm_config.model_config.dtype), device:
            model = initialize_model(vllm_config=vllm_config, prefix=prefix)
        yield model
    finally:
        for name in set(layers) - known:
            del layers[name]
        rotary_embedding._ROPE_DICT.clear()  # noqa: SLF001
        rotary_embedding._ROPE_DICT.update(rotary)  # noqa: SLF001


def _tensors_of(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _within(tensor: torch.Tensor, target: Region) -> Region:
    return Region(target.offset - tensor.storage_offset(), target.sizes, target.strides)
