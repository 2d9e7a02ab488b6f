"""The parts of `sluice bench gpu`, in the order in which they run: the most important first, those that need vLLM last."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from benchmarks.gpu.case import Case

Figures: TypeAlias = Mapping[str, Any]
"""The results of one measurement: numbers, words, and tables of them; None if this device or machine cannot measure it."""

Measure: TypeAlias = Callable[[], Figures]
Measurements: TypeAlias = Iterator[tuple[str, Measure]]
"""Name and function of each measurement of a part. Each is made before the next is requested, so they may share objects."""


class NotRunError(Exception):
    """A measurement cannot be made on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        function: ``module:function`` of a function from a `Case` to its measurements.
        says: What it measures, for the list of parts.
        needs: Modules that it needs besides PyTorch, transformers and their dependencies.
        fresh: Whether its process must not have measured another part, because a library is set up once for a process.
    """

    name: str
    function: str
    says: str
    needs: tuple[str, ...] = ()
    fresh: bool = False

    def of(self, case: Case) -> Measurements:
        """Return its measurements.

        Raises:
            NotRunError: if a module that it needs is not installed.
        """
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                raise NotRunError(f"{module} is not installed")
        module, _, function = self.function.partition(":")
        measurements: Measurements = getattr(importlib.import_module(module), function)(case)
        return measurements


PARTS = (
    Part("start", "benchmarks.gpu.start:start", "a first step; the device's own speed; bfloat16 against float32"),
    Part("speed", "benchmarks.gpu.training:speed", "tokens/s, MFU and memory by length of the sequences"),
    Part("memory", "benchmarks.gpu.training:memory", "the estimate of memory against what is allocated, by settings"),
    Part(
        "transformers",
        "benchmarks.gpu.sampling:transformers",
        "the transformers engine: log-probabilities against the trainer, an update in flight, its pause",
    ),
    Part("run", "benchmarks.gpu.suite:whole_run", "a whole run on the device, with both engines", ("fastapi",)),
    Part("out-of-memory", "benchmarks.gpu.training:out_of_memory", "a batch that does not fit, and the steps after it"),
    Part("output-layer", "benchmarks.gpu.kernels:output_layer", "log-probabilities and gradients of the output layer"),
    Part("attention", "benchmarks.gpu.kernels:attention", "the varlen kernel against blocks: speed and differences"),
    Part("publish", "benchmarks.gpu.weights:publish", "weights to the host, compared with the version before"),
    Part("load", "benchmarks.gpu.weights:load", "a version to the device, and a swap there"),
    Part("tests", "benchmarks.gpu.suite:tests", "tests/gpu", ("pytest",)),
    Part("compile", "benchmarks.gpu.training:compiled", "the first of the lengths with compiled layers"),
    Part("vllm", "benchmarks.gpu.sampling:vllm", "vLLM: the same as of the transformers engine", ("vllm",), fresh=True),
    Part(
        "vllm-patch", "benchmarks.gpu.sampling:vllm_patch", "vLLM that takes changed values only", ("vllm",), fresh=True
    ),
)
"""Part n on the command line is the nth of these, from 1."""
