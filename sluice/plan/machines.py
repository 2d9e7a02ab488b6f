"""The machines of a plan: what they have, and how a flag or a file describes them. They need not exist yet."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sluice.config import ConfigError, whole_number

GB = 10**9

MOST_MACHINES = 4096

CORES_PER_DEVICE = 8
"""CPU cores per GPU to assume for a machine whose number of cores is not given. A machine without GPUs is assumed to have this many."""

_SHORT = re.compile(
    r"(?:(?P<nodes>\d+)x)?(?P<devices>\d+)(?:x(?P<kind>[A-Za-z][A-Za-wyz0-9.]*)(?:-(?P<gb>\d+(?:\.\d+)?))?)?"
)


@dataclass(frozen=True, slots=True)
class Machine:
    """What one machine has.

    Attributes:
        devices: GPUs; 0 for a machine that computes on the CPU.
        cores: CPU cores.
        kind: Name of its GPUs, such as ``H100``, for people.
        device_gb: Memory of each GPU in GB (10^9 bytes). None: unknown, and not checked.
        memory_gb: Main memory in GB. None: unknown, and not checked.
    """

    devices: int = 0
    cores: int = 1
    kind: str = ""
    device_gb: float | None = None
    memory_gb: float | None = None

    def __str__(self) -> str:
        """Return the machine in words: ``4 GPUs (H100, 80 GB) and 32 cores``."""
        cores = f"{self.cores} core{'s' * (self.cores > 1)}"
        memory = "" if self.device_gb is None else f"{self.device_gb:g} GB"
        gpu = ", ".join(filter(None, (self.kind, memory)))
        gpus = f"{self.devices} GPU{'s' * (self.devices > 1)}{f' ({gpu})' if gpu else ''} and " if self.devices else ""
        return f"{gpus}{cores}{'' if self.memory_gb is None else f', {self.memory_gb:g} GB'}"


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a run. Rollout replicas fill them from the first one, the trainer takes the last ones."""

    each: tuple[Machine, ...] = (Machine(),)

    @classmethod
    def alike(cls, nodes: int = 1, devices: int = 0, cores: int = 1, **memory: Any) -> Self:  # noqa: ANN401 - the other fields of `Machine`
        """Return `nodes` machines of one kind."""
        return cls((Machine(devices, cores, **memory),) * nodes)

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return len(self.each)

    @property
    def devices(self) -> tuple[int, ...]:
        """GPUs of each machine."""
        return tuple(machine.devices for machine in self.each)

    @property
    def device_bytes(self) -> int | None:
        """Memory in bytes of the smallest GPU; None if there is no GPU, or the memory of one is unknown."""
        each = [machine.device_gb for machine in self.each if machine.devices]
        return None if not each or None in each else int(min(filter(None, each)) * GB)

    @property
    def cores(self) -> tuple[int, ...]:
        """CPU cores of each machine."""
        return tuple(machine.cores for machine in self.each)

    def __str__(self) -> str:
        """Return the machines in words: ``4 machines of 4 GPUs and 32 cores each``."""
        kinds = [(machine, len(list(same))) for machine, same in groupby(self.each)]
        return ", ".join(
            f"{number} machines of {machine} each" if number > 1 else f"1 machine of {machine}"
            for machine, number in kinds
        )


class _Kind(BaseModel):
    """Machines of one kind in a file."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    nodes: int = Field(1, ge=1, le=MOST_MACHINES)
    devices: int = Field(0, ge=0, le=1024)
    cores: int | None = Field(None, ge=1, le=MOST_MACHINES)
    kind: str = Field("", pattern=r"^[\w. -]*$")
    device_gb: float | None = Field(None, gt=0)
    memory_gb: float | None = Field(None, gt=0)

    def machine(self, cores: int | None) -> Machine:
        cores = self.cores or cores or CORES_PER_DEVICE * max(1, self.devices)
        return Machine(self.devices, cores, self.kind, self.device_gb, self.memory_gb)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    machines: list[_Kind] = Field(min_length=1)


def machines_of(text: str, cores: int | None = None) -> Machines:
    """Return the machines that the value of ``--machines`` describes.

    Args:
        text: ``[NODESx]DEVICES[xKIND[-GB]]``, such as ``4x4xH100-80``, ``8xH100-80`` for one machine, ``3x0`` for three without GPUs; or the
            path of a TOML file with a table ``[[machines]]`` for each kind, whose keys are ``nodes`` and the fields of `Machine`.
        cores: CPU cores of each machine, if the file does not give them. None: `CORES_PER_DEVICE` for each GPU.

    Raises:
        ConfigError: if the text has neither form.
    """
    short = _SHORT.fullmatch(text)
    try:
        if short is not None:
            kind, gb = short["kind"] or "", short["gb"] and float(short["gb"])
            found = [
                _Kind(nodes=int(short["nodes"] or 1), devices=int(short["devices"]), kind=kind, device_gb=gb or None)
            ]
        else:
            found = _File.model_validate(tomllib.loads(Path(text).read_text(encoding="utf-8"))).machines
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"--machines {text}: {where}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--machines {text}: {reason}: give NODESxDEVICESxKIND-GB such as 4x4xH100-80, or a TOML file with tables [[machines]]"
        ) from error
    each = tuple(kind.machine(cores) for kind in found for _ in range(kind.nodes))
    if len(each) > MOST_MACHINES:
        raise ConfigError(f"--machines {text}: these are {len(each)} machines, more than {MOST_MACHINES}")
    return Machines(each)


def add_machines_options(parser: argparse.ArgumentParser, usual: str) -> None:
    """Add ``--machines`` and ``--cores``. `usual` describes the default machines."""
    parser.add_argument(
        "--machines",
        metavar="MACHINES",
        help=f"[NODESx]DEVICES[xKIND[-GB]] such as 4x4xH100-80, 8 or 3x0, or a TOML file (default: {usual})",
    )
    parser.add_argument(
        "--cores",
        type=whole_number(1, MOST_MACHINES),
        help=f"CPU cores of each machine, where no file says it (with --machines by default {CORES_PER_DEVICE} for each GPU)",
    )


def text_of(machines: Machines) -> str:
    """Return the TOML file of these machines, which `machines_of` reads."""
    lines = []
    for machine, same in groupby(machines.each):
        lines += [
            "[[machines]]",
            f"nodes = {len(list(same))}",
            f"devices = {machine.devices}",
            f"cores = {machine.cores}",
        ]
        lines += [f'kind = "{machine.kind}"'] if machine.kind else []
        lines += [
            f"{name} = {value:g}"
            for name in ("device_gb", "memory_gb")
            if (value := getattr(machine, name)) is not None
        ]
        lines.append("")
    return "\n".join(lines)


def in_words(each: Sequence[int]) -> str:
    """Return numbers of devices on each machine in words: ``8 (1 node of 8)``, ``20 (2 nodes of 8, 1 node of 4)``."""
    same = [(number, len(list(run))) for number, run in groupby(each)]
    listed = ", ".join(f"{nodes} node{'s' * (nodes > 1)} of {number}" for number, nodes in same)
    return f"{sum(each)} ({listed})"
