"""The half of weight sync inside vLLM's workers: it loads staged safetensors files into the live model.

The files lie in shared memory and tensors are views of the mapping, so the only copy is the copy into the model. A version is
loaded in one of three ways, and prepared while the engine samples if that is possible:

* on a CPU, a second model is loaded beside the one that samples, and the two swap their weights (`NextModel`);
* on an accelerator, if the settings ask for it, only the values that changed are written (`Patch`);
* otherwise vLLM's layer-wise reload loads the files while the engine is paused.

Nothing here raises into vLLM: after an exception in one worker of several, the replies of the others would be off by one call.
Failures are kept, and the caller asks for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from weightsync.vllm.cpu_weights import NextModel, experts_packed_again, refresh_tied_head, why_no_swap
from weightsync.vllm.live_check import LiveCheck, has_known_form
from weightsync.vllm.load_plan import LoadPlan, Ranges, make_plan, normal

Answer: TypeAlias = tuple[str, Any]
"""A worker's answer: ("ok", value), ("pending", None), or a kind of failure and its reason."""

TIED_HEAD = "lm_head.weight"

_MOST_CHANGED = 0.2
"""If more than this fraction of a version changed, load it whole: a position and a value need three times the bytes of a value."""

_PIECE = 1 << 24
"""Elements that are compared at a time. Ranges that are at most this far apart are compared as one range."""

_PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed for mypy
    """Empty: nothing has to be agreed on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One whole version.

    Attributes:
        paths: Safetensors files that together hold every tensor once.
        names: Every tensor that must be in them, by Hugging Face name.
    """

    paths: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


class IncompleteFileError(Exception):
    """The files do not hold exactly the tensors that the model needs."""


class StagedFileEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """vLLM's weight-transfer engine for staged files. Tensors stay where CUDA graphs expect them."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    outcome: Answer = ("ok", 0.0)
    """Outcome of the last update: ("ok", seconds), ("refused", why; model untouched) or ("err", what went wrong)."""

    _next: NextModel | None = None
    _plan: LoadPlan | None = None
    _patch: Patch | None = None
    _loaded: list[str] | None = None
    """Files of the version that the model holds; None if that is not certain."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: files need no rendezvous."""

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` takes the model apart, after it has checked the files."""

    def prepare(self, paths: list[str], names: list[str], *, patch: bool) -> Answer:
        """Begin to build a version while the engine samples: ("ok", None), ("unsupported", why) or ("refused", why).

        On a CPU the first call builds the modules of the second model, which delays the engine's step; see `NextModel`.

        Args:
            paths: The version's files.
            names: Every tensor that must be in them.
            patch: On an accelerator, find the values that differ from the previous version; see `Patch`.
        """
        refused = self.check(paths, names)
        if refused[0] != "ok":
            return refused
        if patch and current_platform.is_cuda_alike():
            return self._begin_patch(paths)
        if self._next is None:
            why = why_no_swap(self.vllm_config, self.model)
            if why:
                return ("unsupported", why)
            self._next = NextModel(self.vllm_config, self.model, self._load)
        self._next.begin(paths, self._tensors)
        return ("ok", None)

    def prepared(self) -> Answer:
        """Return the outcome of `prepare`: ("pending", None), ("ok", seconds) or ("err", why)."""
        if self._patch is not None:
            return self._patch.outcome
        if self._next is None:
            return ("err", "nothing was prepared")
        outcome = self._next.outcome
        if outcome[0] == "err":
            self._next = None  # it may be half built: the next version starts from scratch
        return outcome

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load the files, or keep the error. `finish_weight_update` closes the session in both cases."""
        begun = time.perf_counter()
        paths = update_info.paths
        self.outcome = self.check(paths, update_info.names)
        if self.outcome[0] != "ok":
            return
        patch, self._patch = self._patch, None
        loaded, self._loaded = self._loaded, None
        try:
            if patch is not None and patch.leads(loaded, paths):
                patch.apply(self.model, self.device)
            elif self._next is not None and self._next.holds(paths):
                self._next.swap()
            else:
                self._load(self.model, paths)
            if current_platform.is_cuda_alike():
                torch.accelerator.synchronize()
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            self.outcome = ("err", f"{type(error).__name__}: {error}")
        else:
            self.outcome, self._loaded = ("ok", time.perf_counter() - begun), paths

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` left the model whole."""

    def shutdown(self) -> None:
        """Do nothing: no connection is open."""

    def forget_loaded(self) -> None:
        """Make the next load a whole one, because the model's weights were found to differ from the loaded files."""
        self._loaded = self._patch = None

    def check(self, paths: list[str], names: list[str]) -> Answer:
        """Check that the files hold every tensor of the model: ("ok", None) or ("refused", why). The model is not touched."""
        try:
            check_complete(paths, names, {TIED_HEAD} if self._tied else set())
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            return ("refused", str(error) or type(error).__name__)
        return ("ok", None)

    def plan(self, paths: list[str]) -> LoadPlan:
        """Return which parts of a version this worker's model reads, and where it puts them. Computed once.

        Raises:
            Exception: whatever the model raises when it is built without memory; see `weightsync.vllm.load_plan`.
        """
        if self._plan is None:
            plan = make_plan(self.vllm_config, self._tensors(paths))
            unread = {TIED_HEAD: ()} if self._tied else {}
            self._plan = LoadPlan(unread | dict(plan.reads), plan.copies, plan.shapes)
        return self._plan

    @property
    def _tied(self) -> bool:
        return bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))

    def _begin_patch(self, paths: list[str]) -> Answer:
        if self._loaded is None:
            return ("unsupported", "no version was loaded yet that a patch could be based on")
        plan = self.plan(paths)
        why = why_no_patch(self.model, plan)
        if why:
            return ("unsupported", why)
        self._patch = Patch(self._loaded, paths)
        self._patch.begin(self._tensors(self._loaded), self._tensors(paths), plan.reads)
        return ("ok", None)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _load(self, model: torch.nn.Module, paths: list[str]) -> None:
        with experts_packed_again(model):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(self._tensors(paths))
            except Exception:
                forget_buffered(model)
                raise
            finally:
                # After a failure, too: the next attempt must not count weights that this one buffered.
                finalize_layerwise_reload(model, self.model_config)
        refresh_tied_head(model)

    def _tensors(self, paths: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for path in paths:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if not (self._tied and name == TIED_HEAD):
                        yield name, file.get_tensor(name)


# --- changed values on an accelerator ---------------------------------------------------------------------------------

# Without a patch, a whole version crosses the bus to the device at every update, although few of its values are new. If the previous
# version is on the host, too, the two files are compared while the engine samples. The pause then consists only of the transfer of
# the values that differ, and of a pass over the device's own memory. vLLM's loader of checkpoint patches only works for models whose
# weights are copied unchanged; the load plan says whether they are.


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

    The comparison and the patches are tested on a CPU. With a model on a device, only tests marked ``gpu`` test them, which this
    project's own CI does not run. So a patch is used only if `rollout.patch_on_device` is set.

    Args:
        old: Files of the version that the model holds.
        new: Files of the wanted version.
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
        """Start to compare the tensors of both versions, but only the elements that the model reads."""

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
        """Wait for the comparison. Return whether this patch leads from the files `old` to the files `new`."""
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
    """Yield positions and values of the elements that differ in any bit, tensor by tensor.

    Args:
        old: Tensors of one version.
        new: Tensors of the other version.
        reads: Elements to compare, as in `weightsync.vllm.load_plan`; a tensor without an entry is compared whole.

    Raises:
        PatchError: if the tensors differ in name, type or shape, or in too many values, or if changed values are not
            floating-point numbers, or NaN, which the loader takes for "unchanged".
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


# --- calls of the engine ----------------------------------------------------------------------------------------------


class WorkerExtension:
    """Methods mixed into vLLM's worker, called by `collective_rpc`. They answer with an `Answer` and never raise."""

    weight_transfer_engine: Any
    model_runner: Any

    _live_check: LiveCheck | None = None

    def sluice_status(self) -> Answer:
        """Return the outcome of the last update."""
        engine = self.weight_transfer_engine
        return engine.outcome if engine is not None else ("err", "no weight-transfer engine is configured")

    def sluice_check(self, paths: list[str], names: list[str]) -> Answer:
        """Check that a version's files hold every tensor of the model: ("ok", None) or ("refused", why)."""
        answer: Answer = self.weight_transfer_engine.check(paths, names)
        return answer

    def sluice_prepare(self, paths: list[str], names: list[str], patch: bool = False) -> Answer:
        """Begin to build a version beside the one that samples; see `StagedFileEngine.prepare`."""
        try:
            answer: Answer = self.weight_transfer_engine.prepare(paths, names, patch=patch)
        except Exception as error:  # noqa: BLE001 - see the module's docstring
            return ("err", f"{type(error).__name__}: {error}")
        return answer

    def sluice_prepared(self) -> Answer:
        """Return the outcome of `sluice_prepare`."""
        answer: Answer = self.weight_transfer_engine.prepared()
        return answer

    def sluice_verify(self, paths: list[str], names: list[str], share: float, seed: int) -> Answer:
        """Begin to compare the live weights with a version's files; continue with `sluice_verified`."""
        refused = self.sluice_check(paths, names)
        if refused[0] != "ok":
            return refused
        if self._live_check is not None:
            self._live_check.close()
        engine = self.weight_transfer_engine

        def begin() -> None:
            self._live_check = LiveCheck(engine.model, engine.plan(paths), paths, share, seed)

        return _guarded(begin)

    def sluice_verified(self, budget_s: float) -> Answer:
        """Compare for `budget_s` seconds: ("pending", None), or ("ok", [tensors that differ, `LiveCheck.unchecked`])."""
        check = self._live_check
        if check is None:
            return ("err", "nothing is being compared")
        answer = _guarded(lambda: check.advance(budget_s))
        if answer[0] == "err":
            return answer
        if not answer[1]:
            return ("pending", None)
        if check.different:
            self.weight_transfer_engine.forget_loaded()
        return ("ok", [sorted(check.different), {kind: sorted(names) for kind, names in check.unchecked.items()}])

    def sluice_add_adapter(self, label: str, number: int, path: str) -> Answer:
        """Load a LoRA adapter beside the weights, which are not touched."""
        return _guarded(lambda: self.model_runner.add_lora(LoRARequest(label, number, path)))

    def sluice_zero_kv(self) -> Answer:
        """Zero the KV cache: a NaN in it would persist in reused blocks."""

        def zero() -> None:
            for cache in _tensors_in(self.model_runner.kv_caches):
                cache.zero_()

        return _guarded(zero)


def _guarded(work: Callable[[], Any]) -> Answer:
    """Run `work`, which must not raise into vLLM."""
    try:
        return ("ok", work())
    except Exception as error:  # noqa: BLE001 - see the docstring
        return ("err", f"{type(error).__name__}: {error}")


def forget_buffered(model: torch.nn.Module) -> None:
    """Discard the layers that a failed load left unfinished, so that they get their previous weights back.

    Otherwise vLLM would load the weights that it has buffered for such a layer, and fail at the same tensor now and at each later load.
    """
    for module in model.modules():
        info = get_layerwise_info(module)
        info.loaded_weights.clear()
        info.load_numel = 0


def check_complete(paths: list[str], wanted: list[str], optional: set[str]) -> None:
    """Compare the files' headers with the wanted names; `optional` names may be missing.

    If a part of a fused layer is missing, the model computes with uninitialised memory, so call this before anything else.

    Raises:
        IncompleteFileError: if tensors are missing, unknown or given twice, or a file cannot be read.
    """
    seen: set[str] = set()
    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise IncompleteFileError(f"{path} is not a whole safetensors file: {error}; stage it again") from error
        twice = seen.intersection(names)
        if twice:
            raise IncompleteFileError(f"{path} repeats {sorted(twice)[:3]}; stage the version again")
        seen.update(names)
    missing, unknown = sorted(set(wanted) - seen), sorted(seen - set(wanted) - optional)
    if missing or unknown:
        raise IncompleteFileError(
            f"tensors do not match the model: missing {missing[:3]} ({len(missing)}), unknown {unknown[:3]} ({len(unknown)})"
        )


def _tensors_in(nested: object) -> Iterator[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, list | tuple):
        for item in nested:
            yield from _tensors_in(item)
