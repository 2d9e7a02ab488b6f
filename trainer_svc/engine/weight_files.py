"""Weights that stay in their files until the process knows which part of them it keeps.

transformers can leave a model on disk, with its parameters on the "meta" device, and report their files. While such a model is
checked, each module reads its own weights when it runs (`streaming`). Afterwards a process reads only its part (`read_weights`).
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

from trainer_svc.engine.finite import unfit_weights
from trainer_svc.parallel.sharding import local_slice

ON_DISK = {"": "disk"}
"""The `device_map` with which transformers leaves a model in its files."""


class Place(NamedTuple):
    """A safetensors file, and the name of a tensor in it."""

    file: str
    name: str


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files of a model's weights, by the names of its parameters; tied parameters have the same place."""

    places: Mapping[str, Place]

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the same files for renamed parameters; `names` maps old names to new ones."""
        return type(self)({names.get(name, name): place for name, place in self.places.items()})

    def read(self, name: str, offsets: tuple[int, ...], sizes: torch.Size) -> torch.Tensor:
        """Read a box of a tensor, in the precision of the file."""
        place = self.places[name]
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        with safe_open(place.file, framework="pt") as file:
            part: torch.Tensor = file.get_slice(place.name)[box or ...]
            return part

    def unfit(self) -> list[str]:
        """Return the names of weights that are not finite. Reads all files, one tensor at a time."""
        names = []
        for name, place in self.places.items():
            with safe_open(place.file, framework="pt") as file:
                names += unfit_weights([(name, file.get_tensor(place.name))])
        return sorted(names)

    def hold(self, model: PreTrainedModel) -> bool:
        """Return whether the files hold all unread weights of a model in the right shapes; a missing value head is accepted."""
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
    """Load a model with its weights on the "meta" device, except for a new value head, which starts at 0 on the CPU.

    Args:
        load: Calls `from_pretrained` with the options that it is given. It may raise ValueError or ImportError.

    Returns:
        The model and the files of its weights. None if the weights cannot stay in their files: transformers combines several
        tensors into one (fused experts), weights are quantised or missing, or the files are not safetensors.
    """
    logging.getLogger("accelerate.big_modeling").addFilter(_not_about_disk)
    try:
        model = load(device_map=ON_DISK)
    except (ImportError, ValueError):
        return None  # the caller reads the whole model then, which succeeds or raises the reason
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
    return "offloaded to the" not in record.getMessage()  # the warning that weights were left on disk, as intended


def _release(model: PreTrainedModel) -> None:
    """Remove accelerate's hooks from a model."""
    remove_hook_from_submodules(model)
    del model.hf_device_map
    for module in model.modules():
        if vars(module).get("forward") == MethodType(type(module).forward, module):
            del module.forward


@contextmanager
def streaming(model: PreTrainedModel, files: WeightFiles) -> Iterator[None]:
    """Let each module read its weights when it runs, all into the same memory, and compute on the CPU."""
    unread = {name: _unread(module) for name, module in model.named_modules()}
    largest = max(sum(each.numel() for each in own.values()) for own in unread.values())
    buffer = torch.empty(largest)
    hooks = []
    for name, module in model.named_modules():
        if own := unread[name]:
            inner = any(_unread(child) for child in module.modules() if child is not module)
            enter = partial(_enter, files, f"{name}." if name else "", own, None if inner else buffer)
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
    buffer: torch.Tensor | None,
    module: torch.nn.Module,
    _: object,
) -> None:
    """Read a module's weights into the buffer. If other modules run inside it, the buffer is None: read into new memory."""
    start = 0
    for name, unread in own.items():
        end = start + unread.numel()
        weight = torch.empty(unread.shape) if buffer is None else buffer[start:end].view(unread.shape)
        weight.copy_(files.read(prefix + name, (0,) * unread.ndim, unread.shape))
        setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
        start = end


def _leave(own: dict[str, torch.nn.Parameter], module: torch.nn.Module, *_: object) -> None:
    for name, unread in own.items():
        setattr(module, name, unread)


@torch.no_grad()  # type: ignore[untyped-decorator]
def read_weights(module: torch.nn.Module, files: WeightFiles, device: torch.device, *, below: str = "") -> None:
    """Read this process's part of the parameters that are on the "meta" device; for DTensors only the local slice."""
    for name, parameter in module.named_parameters(prefix=below):
        if not parameter.is_meta:
            continue
        _become(parameter, torch.empty_like(parameter, device=device))
        local, offsets = local_slice(parameter)
        if local.numel():
            local.copy_(files.read(name, offsets, local.shape))


def _become(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Replace a parameter's tensor in place; modules and FSDP keep their references to the parameter."""
    torch.utils.swap_tensors(parameter, torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad))
