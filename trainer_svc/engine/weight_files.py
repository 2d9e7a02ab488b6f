"""Weights that stay in their files until it is known which part of them this process keeps.

transformers can leave a model on disk: its parameters are on the "meta" device, and it says where they are. To check such a
model each module reads its own while it runs; what a process keeps of it is then read by ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
    """Load a model without its weights: they are on the "meta" device, but for a value head that is new, which begins at 0.

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
    if getattr(model, "hf_quantizer", None) is not None or not files.hold(model):
        return None
    for name, each in model.named_parameters():
        if name not in places and each.is_meta:
            _become(each, torch.zeros_like(each, device="cpu"))
    _release(model)
    return model, files


def _not_about_disk(record: logging.LogRecord) -> bool:
    return "offloaded to the" not in record.getMessage()  # a warning that weights are where they were asked to be


def _release(model: PreTrainedModel) -> None:
    """Take off all that accelerate put on a model."""
    remove_hook_from_submodules(model)
    del model.hf_device_map
    for module in model.modules():
        if vars(module).get("forward") == MethodType(type(module).forward, module):
            del module.forward


@contextmanager
def streaming(model: PreTrainedModel, files: WeightFiles) -> Iterator[None]:
    """Let modules read their weights while they run; those of one after the other lie in the same memory.

    Args:
        model: On the "meta" device; its modules run on the CPU.
        files: Where its weights are.
    """
    unread = {name: _unread(module) for name, module in model.named_modules()}
    largest = max(sum(each.numel() for each in own.values()) for own in unread.values())
    room = torch.empty(largest)
    hooks = []
    for name, module in model.named_modules():
        if own := unread[name]:
            inner = any(_unread(child) for child in module.modules() if child is not module)
            enter = partial(_enter, files, f"{name}." if name else "", own, None if inner else room)
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(partial(_leave, own)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for name, module in model.named_modules():
            _leave(unread[name], module)


def _unread(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return {name: each for name, each in module.named_parameters(recurse=False) if each.is_meta}


def _enter(
    files: WeightFiles,
    prefix: str,
    own: dict[str, torch.nn.Parameter],
    room: torch.Tensor | None,
    module: torch.nn.Module,
    _: object,
) -> None:
    """Read a module's weights: into the room, or where modules run inside of it into memory of its own."""
    start = 0
    for name, unread in own.items():
        end = start + unread.numel()
        weight = torch.empty(unread.shape) if room is None else room[start:end].view(unread.shape)
        weight.copy_(files.read(prefix + name, (0,) * unread.ndim, unread.shape))
        setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
        start = end


def _leave(own: dict[str, torch.nn.Parameter], module: torch.nn.Module, *_: object) -> None:
    for name, unread in own.items():
        setattr(module, name, unread)


@torch.no_grad()  # type: ignore[untyped-decorator]
def read_weights(module: torch.nn.Module, files: WeightFiles, device: torch.device, *, below: str = "") -> None:
    """Read what this process has of the parameters that are on the "meta" device.

    Args:
        module: Plain parameters are read whole, of DTensors the local part.
        files: Where they are.
        device: Where they go.
        below: The module's name in the model.
    """
    for name, parameter in module.named_parameters(prefix=below):
        if not parameter.is_meta:
            continue
        _become(parameter, torch.empty_like(parameter, device=device))
        local, offsets = local_part(parameter)
        if local.numel():
            local.copy_(files.read(name, offsets, local.shape))


def _become(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Give a parameter another tensor; it stays the object that modules share and FSDP knows."""
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad))
