"""Compares the weights that a worker computes with, as they are in memory now, with a version's files.

Repeats each copy that the model's loader makes as a comparison: the values in the file against those in the model. On a CPU a linear
layer has no plain weight any more, but a kernel with a packed one inside. Multiplied with the columns of the identity, the kernel
gives its weights exactly: every product but one is zero. Experts have packed weights too, but no kernel for one of them: there
the file's values are packed as vLLM packs them, and compared in that form.

The comparison runs in small pieces between the engine's steps, not at the same time: a packed kernel keeps the addresses that it
works on, so two calls of it must not overlap.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from safetensors import safe_open
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from weightsync.vllm.cpu_weights import (
    PACKED,
    PARTS_OF_EXPERTS,
    packed_expert,
    packing_of_experts,
    places_in_experts,
    unpacked,
)
from weightsync.vllm.load_plan import LoadPlan, PlannedCopy

_PACKED_ROWS = 32
"""Rows of an expert that vLLM packs as one group. Some of its kernels pack groups of 16 or 4, which makes no difference here."""

_NOT_COPIED = "weights that the model's loader does not copy as they are"

_PIECE_BYTES = 8 << 20
"""Most bytes of a tensor that are compared at a time."""


class LiveCheck:
    """One comparison in progress.

    Args:
        model: The model that samples.
        plan: The reads and copies of its loader.
        paths: The version's files.
        share: Fraction of the model's tensors to look at, above 0; `seed` chooses which.

    Attributes:
        different: Tensors of the version whose live values differ.
        unchecked: Tensors whose live form is not known here, such as quantised ones, by kind of layer.
    """

    def __init__(self, model: torch.nn.Module, plan: LoadPlan, paths: Sequence[str], share: float, seed: int) -> None:
        self.different: set[str] = set()
        self.unchecked: dict[str, set[str]] = {}
        self._model = model
        self._plan = plan
        self._files = ExitStack()
        self._tensors = _open(paths, self._files)
        by_parameter: dict[str, list[PlannedCopy]] = {}
        for copy in plan.copies:
            by_parameter.setdefault(copy.parameter, []).append(copy)
        chosen = sorted(by_parameter)
        if share < 1.0:
            chosen = random.Random(seed).sample(chosen, max(1, round(share * len(chosen))))  # noqa: S311 - no secret
        else:
            copied = {copy.name for copy in plan.copies}
            self._leave_out(_NOT_COPIED, [name for name, reads in plan.reads.items() if reads and name not in copied])
        self._steps = self._run([(name, by_parameter[name]) for name in chosen])

    def advance(self, budget_s: float) -> bool:
        """Compare for `budget_s` seconds, but at least one piece. Return whether everything has been compared."""
        end = time.perf_counter() + budget_s
        for _ in self._steps:
            if time.perf_counter() >= end:
                return False
        self.close()
        return True

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _leave_out(self, kind: str, names: Iterable[str]) -> None:
        for name in names:
            self.unchecked.setdefault(kind, set()).add(name)

    def _run(self, parameters: Sequence[tuple[str, Sequence[PlannedCopy]]]) -> Iterator[None]:
        for parameter, copies in parameters:
            module, attribute = _owner(self._model, parameter)
            shape, dtype = self._plan.shapes[parameter]
            plain = getattr(module, attribute, None)
            unchecked = {copy.name for copy in copies}
            if has_known_form(module):
                if plain is not None and tuple(plain.shape) == shape and plain.is_contiguous():
                    yield from self._compare(plain.detach(), copies, exact=True)
                    unchecked = set()
                if attribute == "weight" and PACKED in module.__dict__ and len(shape) == 2:
                    values = torch.empty(shape, dtype=dtype)
                    yield from unpacked(module, values)
                    yield from self._compare(values, copies, exact=False)
                    unchecked = set()
            elif (packing := packing_of_experts(module)) and attribute in PARTS_OF_EXPERTS:
                places = places_in_experts(plain, shape, copies, PARTS_OF_EXPERTS[attribute])
                for copy, place in places.items():
                    yield from self._compare_packed(place, copy, packing)
                unchecked = {copy.name for copy in copies if copy not in places}
            self._leave_out(kind_of(module), unchecked)

    def _compare(self, live: torch.Tensor, copies: Sequence[PlannedCopy], *, exact: bool) -> Iterator[None]:
        for copy in copies:
            found, wanted = copy.target.of(live), copy.source.of(self._tensors[copy.name])
            for rows in _pieces(found):
                expected = wanted[rows].to(device=live.device, dtype=live.dtype)
                if not (_same_bits if exact else _same_values)(found[rows], expected):
                    self.different.add(copy.name)
                    break
                yield

    def _compare_packed(self, live: torch.Tensor, copy: PlannedCopy, packing: str) -> Iterator[None]:
        """Compare packed rows [rows, columns] of an expert with the tensor that was copied into them, which vLLM pads with zeros."""
        wanted = copy.source.of(self._tensors[copy.name])
        rows, columns = wanted.shape
        step = max(1, _PIECE_BYTES // (_PACKED_ROWS * live[0].nbytes)) * _PACKED_ROWS
        for begin in range(0, len(live), step):
            found = live[begin : begin + step]
            expected = torch.zeros_like(found)
            expected[: max(0, rows - begin), :columns] = wanted[begin : begin + step]
            if not _same_bits(found, packed_expert(expected, packing)):
                self.different.add(copy.name)
                break
            yield


def _open(paths: Sequence[str], stack: ExitStack) -> Mapping[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping; mapped, not read
    return tensors


def _owner(model: torch.nn.Module, parameter: str) -> tuple[torch.nn.Module, str]:
    """Return the module that computes with a parameter, without the wrappers of adapters."""
    *path, attribute = parameter.split(".")
    module = model
    for part in path:
        module = getattr(module, part)
        module = getattr(module, "base_layer", module)
    return module, attribute


def has_known_form(module: torch.nn.Module) -> bool:
    """Return whether a module's weights are as they were loaded, apart from packing. Other methods rearrange them."""
    method = getattr(module, "quant_method", None)
    return method is None or type(method) in {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


def kind_of(module: torch.nn.Module) -> str:
    """Return a description of a layer for operators: its class, and how it keeps its weights."""
    method = getattr(module, "quant_method", None)
    return type(module).__name__ if method is None else f"{type(module).__name__} ({type(method).__name__})"


def _pieces(tensor: torch.Tensor) -> Iterator[slice | tuple[()]]:
    if tensor.dim() == 0:
        yield ()
        return
    rows = max(1, _PIECE_BYTES * tensor.shape[0] // max(1, tensor.nbytes))
    yield from (slice(begin, begin + rows) for begin in range(0, tensor.shape[0], rows))


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (found, expected))
    return bool(one.equal(other))


def _same_values(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether the values are equal, except for signs of zero and subnormal values, which a product may lose."""
    tiny = torch.finfo(expected.dtype).tiny
    return bool(((found == expected) | ((found.abs() < tiny) & (expected.abs() < tiny))).all())
