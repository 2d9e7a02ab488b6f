"""How many processes each computing child of a run has, and which devices are its own. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sluice.config import ConfigError, RunConfig, allocation_of
from sluice.devices import VISIBLE

__all__ = ["Place", "place"]


MOST_PROCESSES = 1024
"""More computing processes of one machine than this are a slip of the pen."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a child gets.

    Attributes:
        processes: Processes that compute; each has its share of the cores, and a device where it has any.
        devices: Names of its devices; None leaves it those of the supervisor.
    """

    processes: int
    devices: tuple[str, ...] | None = None


def place(run: RunConfig, replicas: Sequence[str], devices: Sequence[str]) -> Mapping[str, Place]:
    """Share out processes and devices.

    With an allocation, and where there are enough devices without one, every child gets its own: replicas first, then the
    trainer, or the same ones for both where the allocation says so. Otherwise the children share what there is.

    Args:
        run: The run's settings.
        replicas: Names of the rollout children.
        devices: Names of the CUDA devices; none on a CPU, where nothing is shared out.

    Returns:
        A place for each replica and for ``trainer``.

    Raises:
        ConfigError: if the allocation, or the trainer alone, takes more devices than there are, or a side asks for CUDA where
            there is none.
    """
    allocation = allocation_of(run)
    processes = dict.fromkeys(replicas, _engine_processes(run)) | {"trainer": _trainer_processes(run)}
    if sum(processes.values()) > MOST_PROCESSES:
        raise ConfigError(
            f"the trainer takes {processes['trainer']} processes and {len(replicas)} replicas the rest of {sum(processes.values())}: one"
            f" machine is given at most {MOST_PROCESSES}; take fewer, or start the services apart, on several machines"
        )
    if not devices:
        _refuse_cuda(run)
        return {child: Place(count) for child, count in processes.items()}
    wants = {child: 0 if _on_cpu(run, child) else count for child, count in processes.items()}
    rollout = sum(wants[child] for child in replicas)
    shared = allocation is not None and allocation.shared
    needed = max(rollout, wants["trainer"]) if shared else rollout + wants["trainer"]
    if needed > len(devices):
        if allocation is None and wants["trainer"] <= len(devices):
            return {child: Place(count) for child, count in processes.items()}
        source = "trainer.parallel" if allocation is None else f"the allocation {allocation}"
        raise ConfigError(
            f"{source} takes {needed} devices, but there are {len(devices)} ({VISIBLE}={','.join(devices)}): take fewer,"
            " or start the services apart, on several machines"
        )
    places: dict[str, Place] = {}
    taken = 0
    for child in replicas:
        places[child] = Place(processes[child], tuple(devices[taken : taken + wants[child]]) or None)
        taken += wants[child]
    begin = 0 if shared else taken
    places["trainer"] = Place(processes["trainer"], tuple(devices[begin : begin + wants["trainer"]]) or None)
    return places


def _refuse_cuda(run: RunConfig) -> None:
    for name in ("trainer", "rollout"):
        if getattr(run.section(name), "device", None) == "cuda":
            raise ConfigError(f"{name}.device is cuda, but there is no CUDA device here: set it to auto or cpu")


def _trainer_processes(run: RunConfig) -> int:
    """Product of the axes; `dp_shard = -1` takes what is left, which is 1 where nothing else says how many there are."""
    parallel = run.trainer.parallel
    return math.prod((parallel.dp_replicate, max(1, parallel.dp_shard), parallel.tp, parallel.cp, parallel.pp))


def _engine_processes(run: RunConfig) -> int:
    if run.rollout.engine != "vllm":
        return 1
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    return math.prod(int(run.rollout.engine_args.get(name, 1)) for name in names)


def _on_cpu(run: RunConfig, child: str) -> bool:
    return bool((run.trainer if child == "trainer" else run.rollout).device == "cpu")
