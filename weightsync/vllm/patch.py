"""Writes only the values that changed into a model on an accelerator, through vLLM's loader of checkpoint patches.

Otherwise a whole version crosses the bus to the device at every update, though few of its values are new. Where the version
before lies on the host too, the two files are compared while the engine samples; the pause then holds only the transfer of the
values that differ and a pass over the device's own memory.

vLLM's loader asks for models whose weights are copied as they are; the load plan says whether they are. The comparison and the
patches are tested on a CPU; against a model on a device only by tests marked ``gpu``, which this project's own CI does not run.
So a patch is used only where `rollout.patch_on_device` asks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)

from weightsync.vllm.live_check import has_known_form
from weightsync.vllm.load_plan import LoadPlan, Ranges, normal

_MOST_CHANGED = 0.2
"""Share of a version beyond which it is loaded whole: a position and a value take three times a value's place."""

_PIECE = 1 << 24
"""Elements that are compared at a time; also the gap over which ranges are compared as one."""

_PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PatchError(Exception):
    """One version cannot be reached from the other by a patch."""


def why_no_patch(model: torch.nn.Module, plan: LoadPlan) -> str:
    """Return why a model cannot take patches; empty if it can."""
    copied = {copy.name for copy in plan.copies}
    other = sorted(name for name, ranges in plan.reads.items() if ranges and name not in copied)
    if other:
        return f"weights are not only copied: {other[:3]} ({len(other)})"
    strange = {type(module).__name__ for module in model.modules() if not has_known_form(module)}
    return f"layers keep weights in forms that are not known here: {sorted(strange)}" if strange else ""


class Patch:
    """The way from one version to another, found in a thread.

    Args:
        old: Files of the version that the model holds.
        new: Files of the version that is wanted.
    """

    def __init__(self, old: list[str], new: list[str]) -> None:
        self.outcome: tuple[str, Any] = ("pending", None)
        """("pending", None), ("ok", seconds) or ("err", why)."""
        self._ends = (old, new)
        self._patches: list[CheckpointWeightPatch] = []
        self._thread: threading.Thread | None = None

    def begin(
        self,
        old: Iterable[tuple[str, torch.Tensor]],
        new: Iterable[tuple[str, torch.Tensor]],
        reads: Mapping[str, Ranges],
    ) -> None:
        """Start to compare the tensors of both versions, as far as they are read."""

        def compare() -> None:
            begun = time.perf_counter()
            try:
                self._patches = list(differences(dict(old), new, reads))
            except Exception as error:  # noqa: BLE001 - nothing may be raised into vLLM; the caller asks for the outcome
                self.outcome = ("err", f"{type(error).__name__}: {error}")
            else:
                self.outcome = ("ok", time.perf_counter() - begun)

        self._thread = threading.Thread(target=compare, name="sluice-patch", daemon=True)
        self._thread.start()

    def leads(self, old: list[str] | None, new: list[str]) -> bool:
        """Whether it leads from one version's files to another's. Wait for the comparison."""
        if self._thread is not None:
            self._thread.join()
        return self._ends == (old, new) and self.outcome[0] == "ok"

    def apply(self, model: torch.nn.Module, device: torch.device) -> None:
        """Change the live weights in place.

        Raises:
            Exception: whatever the loader raises; the model then holds parts of two versions.
        """
        moved = [
            patch._replace(values=patch.values.to(device), indices=patch.indices.to(device)) for patch in self._patches
        ]
        load_checkpoint_weight_patches(model, moved, validate_unique_indices=False)


def differences(
    old: Mapping[str, torch.Tensor], new: Iterable[tuple[str, torch.Tensor]], reads: Mapping[str, Ranges]
) -> Iterator[CheckpointWeightPatch]:
    """Positions and values of what differs in any bit, tensor by tensor.

    Args:
        old: Tensors of one version.
        new: Those of the other.
        reads: Elements that matter, as in `weightsync.vllm.load_plan`; a tensor that is not named matters whole.

    Raises:
        PatchError: if the tensors differ in name, type or shape, are no floating-point numbers, hold NaN, which the loader
            takes for "unchanged", or differ in too much.
    """
    changed = elements = 0
    for name, tensor in new:
        before = old.get(name)
        if before is None or before.shape != tensor.shape or before.dtype != tensor.dtype:
            raise PatchError(f"{name} is another tensor than before")
        positions = _changed(before, tensor, reads.get(name, ((0, tensor.numel()),)))
        changed, elements = changed + positions.numel(), elements + tensor.numel()
        if changed > _MOST_CHANGED * max(elements, _PIECE):
            raise PatchError(f"{changed} of {elements} values have changed: loading them whole is cheaper")
        if not positions.numel():
            continue
        values = tensor.reshape(-1)[positions]
        if not tensor.is_floating_point() or bool(values.isnan().any()):
            raise PatchError(f"{name} has values that a patch cannot hold")
        narrow = torch.int32 if tensor.numel() < 1 << 31 else torch.int64
        yield CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, values, positions.to(narrow))


def _changed(before: torch.Tensor, after: torch.Tensor, ranges: Ranges) -> torch.Tensor:
    one, other = (each.reshape(-1).view(_PATTERNS[each.itemsize]) for each in (before, after))
    found = [torch.empty(0, dtype=torch.int64)]
    for first, last in normal(ranges, _PIECE):
        for begin in range(first, last, _PIECE):
            end = min(begin + _PIECE, last)
            found.append((one[begin:end] != other[begin:end]).nonzero().view(-1) + begin)
    return torch.cat(found)
