"""`sluice bench NAME`: every benchmark prints what it measures and ends with one line of JSON."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from sluice.config import Command, ConfigError
from sluice.telemetry import configure_logging

BENCHMARKS = {
    "adversary": (
        "benchmarks.adversary",
        "honest agents beside one that sends large prompts, half requests and made-up keys: their latency, memory",
    ),
    "rollout": ("benchmarks.rollout", "tokens/s through Generate over gRPC against the engine used in process"),
    "async": ("benchmarks.async_levels", "wall-clock per step at max_staleness 0, 1, 2 and 4, with log-normal lengths"),
    "chaos": (
        "benchmarks.chaos",
        "runs whose services are killed, stopped, cut off and starved, and what became of them",
    ),
    "capture": (
        "benchmarks.capture.command",
        "agents of every dialect while services are killed: each token sampled, captured, given and trained once",
    ),
    "dialects": ("benchmarks.dialects", "CPU time of a gateway's own work for a request of each dialect"),
    "e2e": ("benchmarks.e2e", "the quickstart's task against TRL: time to a reward, seconds and CPU a step"),
    "fuzz": (
        "benchmarks.fuzz.command",
        "hostile input for every RPC, HTTP route and parser, and hostile clients: findings, memory before and after",
    ),
    "gateway": (
        "benchmarks.gateway",
        "requests at a gateway against vLLM's own server; what it adds in CPU time, latency and memory",
    ),
    "gpu": (
        "benchmarks.gpu.command",
        "one device, in parts: speed, memory, kernels, engines, weights; appends to one file of JSON",
    ),
    "orchestrator": (
        "benchmarks.orchestrator",
        "episodes/s and episodes in flight of one orchestrator, simulated around it",
    ),
    "environment": (
        "benchmarks.environment",
        "scores and steps a second of an environment's processes, and their start",
    ),
    "environment-faults": (
        "benchmarks.environment_faults",
        "a run whose environments hang, crash, leak and answer garbage, and what is counted of it",
    ),
    "pause": ("benchmarks.pauses", "a request that lives through updates, and the pause against an in-place copy"),
    "rotation": ("benchmarks.rotation", "calls made and lost while certificates, authority and token are replaced"),
    "scale": (
        "benchmarks.scale",
        "fleets of up to 10,240 replicas on paper, with measured costs: seconds, messages, bytes, the first limit",
    ),
    "trainer": (
        "benchmarks.trainer",
        "one GRPO update against TRL and a plain loop; two processes against one; memory",
    ),
    "weightsync": ("benchmarks.weightsync", "the weight path: transfers, deltas, speed under updates, fan-out"),
}
"""Module and one line per benchmark; the module has ``run(argv) -> Mapping``, whose ``ratios`` are the result."""


def run(argv: list[str]) -> int:
    """Run one benchmark and print its JSON line; return 1 if the line names `failures`."""
    if not argv or argv[0] in {"--help", "-h"}:
        width = max(map(len, BENCHMARKS))
        print("usage: sluice bench NAME [ARGUMENTS]\n")
        print("\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in BENCHMARKS.items()))
        return 0
    name, *arguments = argv
    if name not in BENCHMARKS:
        raise ConfigError(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    configure_logging("bench", "warning")  # a line per call would be measured too
    result: Mapping[str, Any] = importlib.import_module(BENCHMARKS[name][0]).run(arguments)
    print(json.dumps({"bench": name, **result}))
    return 1 if result.get("failures") else 0


COMMAND = Command("bench", "measure a part of the system side by side with its alternative", run)
