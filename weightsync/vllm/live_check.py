"""Compares the weights that a worker computes with, as they are in memory now, with a version's files.

For each copy that the model's loader makes, the part of the file is compared with its place in the model. On a CPU a linear
layer has no plain weight any more, but a kernel with a packed one inside. Multiplied with the columns of the identity, the kernel
gives its weights exactly: every product but one is zero.

The comparison runs in small pieces between the engine's steps, not beside them: a packed kernel keeps the addresses that it works
on, and must not run twice at a time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack

import torch
from safetensors import safe_open
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from weightsync.vllm.load_plan import LoadPlan, PlannedCopy

PACKED = "cpu_linear"
"""Attribute in which vLLM's CPU layers keep the kernel with the packed weight."""

_IDENTITY_COLUMNS = 32
"""Inputs per product; some milliseconds for the largest layers of today's models."""

_PIECE_BYTES = 8 << 20
"""Most bytes of a tensor that are compared at a time."""


class LiveCheck:
    """One comparison in progress.

    Args:
        model: The model that samples.
        plan: What its loader does.
        paths: The version's files.
        share: Fraction of the model's tensors to look at, above 0; `seed` chooses which.

    Attributes:
        different: Tensors of the version whose live values differ.
        unchecked: Tensors whose live form is not known here, such as quantised ones.
    """

    def __init__(self, model: torch.nn.Module, plan: LoadPlan, paths: Sequence[str], share: float, seed: int) -> None:
        self.different: set[str] = set()
        self.unchecked: set[str] = set()
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
            self.unchecked |= {name for name, reads in plan.reads.items() if reads and name not in copied}
        self._steps = self._run([(name, by_parameter[name]) for name in chosen])

    def advance(self, budget_s: float) -> bool:
        """Compare for so many seconds and at least one piece. Return whether all is compared."""
        end = time.perf_counter() + budget_s
        for _ in self._steps:
            if time.perf_counter() >= end:
                return False
        self.close()
        return True

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _run(self, parameters: Sequence[tuple[str, Sequence[PlannedCopy]]]) -> Iterator[None]:
        for parameter, copies in parameters:
            module, attribute = _owner(self._model, parameter)
            shape, dtype = self._plan.shapes[parameter]
            if not has_known_form(module):
                self.unchecked |= {copy.name for copy in copies}
                continue
            plain = getattr(module, attribute, None)
            looked = False
            if plain is not None and tuple(plain.shape) == shape:
                yield from self._compare(plain.detach(), copies, exact=True)
                looked = True
            if attribute == "weight" and PACKED in module.__dict__ and len(shape) == 2:
                values = torch.empty(shape, dtype=dtype)
                yield from _unpack(module, values)
                yield from self._compare(values, copies, exact=False)
                looked = True
            if not looked:
                self.unchecked |= {copy.name for copy in copies}

    def _compare(self, live: torch.Tensor, copies: Sequence[PlannedCopy], *, exact: bool) -> Iterator[None]:
        if not live.is_contiguous():
            self.unchecked |= {copy.name for copy in copies}
            return
        for copy in copies:
            found, wanted = copy.target.of(live), copy.source.of(self._tensors[copy.name])
            for rows in _pieces(found):
                expected = wanted[rows].to(device=live.device, dtype=live.dtype)
                if not (_same_bits if exact else _same_values)(found[rows], expected):
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
    """Whether its weights are as they were loaded, apart from packing. Other methods rearrange them."""
    method = getattr(module, "quant_method", None)
    return method is None or type(method) in {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}


def _pieces(tensor: torch.Tensor) -> Iterator[slice | tuple[()]]:
    if tensor.dim() == 0:
        yield ()
        return
    rows = max(1, _PIECE_BYTES * tensor.shape[0] // max(1, tensor.nbytes))
    yield from (slice(begin, begin + rows) for begin in range(0, tensor.shape[0], rows))


def _unpack(module: torch.nn.Module, values: torch.Tensor) -> Iterator[None]:
    """Recover the weight [outputs, inputs] of a packed kernel, some columns at a time."""
    inputs = values.shape[1]
    for begin in range(0, inputs, _IDENTITY_COLUMNS):
        count = min(_IDENTITY_COLUMNS, inputs - begin)
        identity = torch.zeros(count, inputs, dtype=values.dtype)
        identity[:, begin : begin + count].fill_diagonal_(1.0)
        values[:, begin : begin + count] = module.__dict__[PACKED](identity, module.weight, None).t()
        yield


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (found, expected))
    return bool(one.equal(other))


def _same_values(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether the values are equal, except for signs of zero and subnormal values, which a product may lose."""
    tiny = torch.finfo(expected.dtype).tiny
    return bool(((found == expected) | ((found.abs() < tiny) & (expected.abs() < tiny))).all())
