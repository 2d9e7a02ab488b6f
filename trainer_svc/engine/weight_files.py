"""Weights that stay in their files until it is known which part of them this process keeps.

transformers and accelerate can leave a model on disk: its parameters are on the "meta" device, and each module reads its own
while it runs. That suffices to check a model; what a process keeps of it is then read by ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import NamedTuple, Self

import torch
from accelerate.hooks import remove_hook_from_submodules
from safetensors import safe_open
from transformers import PreTrainedModel

from trainer_svc.engine.local_part import local_part

__all__ = ["Place", "WeightFiles", "left_on_disk", "read_weights", "streaming"]

ON_DISK = {"": "disk"}
"""transformers' `device_map` for a model that stays in its files."""


class Place(NamedTuple):
    """Where a tensor lies: a safetensors file, and the tensor's name in it."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Where the weights of a model lie that have not been read.

    Attributes:
        places: By the names of the model's parameters; tied ones have the same place.
    """

    places: Mapping[str, Place]

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same for a model some of whose parameters have other names now, given by the old ones."""
        return type(self)({names.get(name, name): place for name, place in self.places.items()})

    def read(self, name: str, offsets: tuple[int, ...], sizes: torch.Size) -> torch.Tensor:
        """A box of a tensor, in the precision of the file.

        Args:
            name: The parameter's name in the model.
            offsets: Where the box begins, per dimension.
            sizes: Its extent, per dimension.
        """
        place = self.places[name]
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        with safe_open(place.file, framework="pt") as file:
            part: torch.Tensor = file.get_slice(place.name)[box or ...]
            return part

    def hold(self, model: PreTrainedModel) -> bool:
        """Whether the files hold all that a model has not read, in its shapes; but for a value head, which may be new."""
        shapes: dict[Place, torch.Size] = {}
        for path in {place.file for place in self.places.values()}:
            with safe_open(path, framework="pt") as file:
                shapes |= {Place(path, name): torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dictionary
        unread = {name: each.shape for name, each in model.named_parameters(remove_duplicate=False) if each.is_meta}
        return all(
            shape == shapes.get(self.places[name]) if name in self.places else name == "score.weight"
            for name, shape in unread.items()
        )


def left_on_disk(load: Callable[..., PreTrainedModel]) -> tuple[PreTrainedModel, WeightFiles] | None:
    """Load a model that reads the weights of each module while it runs.

    Args:
        load: Calls `from_pretrained` with the options that it is given, and raises ValueError or ImportError if that fails.

    Returns:
        The model and where its weights are; None where they cannot stay in their files: transformers makes some of them of
        several tensors (fused experts), they are quantised, the files are no safetensors, or lack some.
    """
    logging.getLogger("accelerate.big_modeling").addFilter(_not_about_disk)
    try:
        model = load(device_map=ON_DISK)
    except (ImportError, ValueError):
        return None  # read whole it loads, or says what is wrong
    places = {
        name: Place(entry["safetensors_file"], entry["weight_name"])
        for name, entry in model.get_input_embeddings()._hf_hook.weights_map.dataset.index.items()  # noqa: SLF001 - what accelerate reads from
    }
    files = WeightFiles(places)
    return (model, files) if getattr(model, "hf_quantizer", None) is None and files.hold(model) else None


def _not_about_disk(record: logging.LogRecord) -> bool:
    return "offloaded to the" not in record.getMessage()  # a warning that weights are where they were asked to be


@contextmanager
def streaming(model: PreTrainedModel) -> Iterator[None]:
    """Let the modules of a model from `left_on_disk` read their weights while they run; afterwards they no longer do."""
    parameters = [
        (module, name, each) for module in model.modules() for name, each in module.named_parameters(recurse=False)
    ]
    try:
        yield
    finally:
        remove_hook_from_submodules(model)
        del model.hf_device_map  # nothing is to know later that it was on disk
        for module, name, parameter in parameters:
            setattr(module, name, parameter)  # tied ones are one object again
        for module in model.modules():
            if vars(module).get("forward") == MethodType(type(module).forward, module):
                del module.forward


@torch.no_grad()  # type: ignore[untyped-decorator]
def read_weights(module: torch.nn.Module, files: WeightFiles, device: torch.device, *, below: str = "") -> None:
    """Read what this process has of the parameters that are on the "meta" device; a value head without a place becomes 0.

    Args:
        module: Plain parameters are read whole, of DTensors the local part.
        files: Where they are.
        device: Where they go.
        below: The module's name in the model.
    """
    for name, parameter in module.named_parameters(prefix=below):
        if not parameter.is_meta:
            continue
        empty = torch.nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, empty)  # it stays the object that modules share and FSDP knows
        local, offsets = local_part(parameter)
        if name not in files.places:
            local.zero_()
        elif local.numel():
            local.copy_(files.read(name, offsets, local.shape))
