"""Swaps the weights of a Hugging Face model in place, from safetensors files mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rollout_svc.engines.base import EngineError
from rollout_svc.engines.base_model import TIED_HEAD, BaseModel

__all__ = ["InPlaceWeights"]


class InPlaceWeights:
    """The live tensors of a model under the names that its files use.

    Args:
        module: The model.
        base: What its files hold.

    Raises:
        EngineError: if the model's own names differ from those of the files, so that nothing can be copied by name.
    """

    def __init__(self, module: torch.nn.Module, base: BaseModel) -> None:
        live = module.state_dict()
        missing = sorted(base.shapes.keys() - live.keys())
        if missing:
            raise EngineError(
                f"the model's files have tensors that the loaded model does not name so: {missing[:3]} ({len(missing)}); "
                'use engine = "vllm"'
            )
        self._live = {name: live[name] for name in base.shapes}
        self._base = base
        self._device = next(iter(self._live.values())).device

    @property
    def base_paths(self) -> Sequence[Path]:
        """The model's own files."""
        return self._base.paths

    def check(self, paths: Sequence[Path]) -> None:
        """Compare the files' headers with the model, before anything is touched.

        Raises:
            EngineError: if they are not whole safetensors files with exactly the model's tensors.
        """
        seen: set[str] = set()
        with ExitStack() as stack:
            for name, file in _tensors(paths, stack):
                if name == TIED_HEAD and name not in self._live:
                    continue
                shape = tuple(file.get_slice(name).get_shape())
                expected = self._base.shapes.get(name)
                if shape != expected or name in seen:
                    raise EngineError(f"{name} of {list(shape)} is given; the model has {expected}; stage it again")
                seen.add(name)
        if seen != self._live.keys():
            raise EngineError(f"{sorted(self._live.keys() - seen)[:3]} are missing; stage the version again")

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def copy(self, paths: Sequence[Path]) -> None:
        """Copy the files into the model.

        Raises:
            EngineError: if a file cannot be read; the model may then hold parts of two versions.
        """
        with ExitStack() as stack:
            try:
                for name, file in _tensors(paths, stack):
                    if name in self._live:
                        self._live[name].copy_(file.get_tensor(name))
            except (SafetensorError, OSError, RuntimeError) as error:
                raise EngineError(f"the weights could not be copied: {error}") from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def names(self) -> list[str]:
        """Every tensor, sorted."""
        return sorted(self._live)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def differs(self, name: str, paths: Sequence[Path]) -> bool:
        """Whether a live tensor differs from the files in any bit, after the rounding that a copy does.

        Raises:
            EngineError: if no file has it.
        """
        live = self._live[name]
        with ExitStack() as stack:
            for given, file in _tensors(paths, stack):
                if given == name:
                    wanted = file.get_tensor(name).to(device=live.device, dtype=live.dtype)
                    return wanted.shape != live.shape or not torch.equal(_bits(live), _bits(wanted))
        raise EngineError(f"{name} is in none of the version's files; stage it again")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _tensors(paths: Sequence[Path], stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Every tensor's name with its open file.

    Raises:
        EngineError: if a file is not a whole safetensors file.
    """
    for path in paths:
        try:
            file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{path} is not a whole safetensors file: {error}; stage it again") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file
