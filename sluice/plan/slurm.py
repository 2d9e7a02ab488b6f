"""A plan as a Slurm job: which nodes it asks for, its batch script, and the `srun` step of each part. Pure.

Nodes with the same requirements form a group. One group is a simple job; several groups are a heterogeneous job with one component for
each. The machines are only known when the job runs: `hosts_of` reads them from the job's variables.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from sluice.config import ConfigError
from sluice.plan.machines import Machine, Machines
from sluice.plan.plan import COMPUTES, Place, Plan

CONTROL = "control"
"""Role of a node on which nothing computes."""

CONTROL_CORES = 8
"""Most CPU cores to request for a node on which nothing computes."""

SIGNAL_S = 60
"""Seconds by which Slurm may send a signal too early or too late, including the time of `scontrol requeue`."""

_PICK_DEVICES = (
    'IFS=, read -ra all <<<"$CUDA_VISIBLE_DEVICES"; for one in ${1//,/ }; do mine=${mine:+$mine,}${all[one]:?}; done;'
    ' export CUDA_VISIBLE_DEVICES=$mine; shift; exec "$@"'
)
"""Shell program that restricts a part to its own devices among those that Slurm gives to the step. Its first argument is their indices in
that list."""


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes with the same requirements: the simple job, or a component of a heterogeneous job.

    Attributes:
        name: What its nodes do: ``rollout``, ``trainer``, ``control``, or several of them, such as ``rollout+trainer``.
        first: Number of its first node in the plan; the others follow.
        nodes: Number of nodes.
        devices: GPUs of each node.
        cores: CPU cores of each node.
        options: Further options of sbatch, such as ``--partition=gpu``.
    """

    name: str
    first: int
    nodes: int
    devices: int
    cores: int
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Contents of a job's script, besides its nodes.

    Attributes:
        log: File that the job writes its output to. Its folder must exist before the job starts.
        directory: Working directory, which relative paths of the settings start from.
        command: What the script runs.
        stop_s: Seconds that the run takes to stop.
    """

    log: Path
    directory: Path
    command: tuple[str, ...]
    stop_s: float


def with_control_node(plan: Plan) -> Plan:
    """Return the plan with all parts that compute nothing moved to an additional node, which becomes the first one."""
    places = tuple(
        replace(each, node=0 if each.part not in (*COMPUTES, "relay") else each.node + 1) for each in plan.places
    )
    control = Machine(cores=plan.machines.cores[0])
    return replace(plan, places=places, machines=Machines((control, *plan.machines.each)))


def groups_of(plan: Plan, options: Sequence[str] = ()) -> tuple[Group, ...]:
    """Divide the nodes into groups of consecutive nodes with the same requirements.

    Args:
        plan: The plan.
        options: Options of sbatch: ``--account=x`` for all groups, ``trainer:--partition=h100`` for the groups of the trainer.

    Raises:
        ConfigError: if an option names no group, or a node would run nothing.
    """
    empty = [node for node in range(plan.machines.nodes) if not plan.on_node(node)]
    if empty:
        raise ConfigError(
            f"of {plan.machines.nodes} nodes, {len(empty)} would run nothing ({', '.join(map(str, empty))}): ask for"
            f" {plan.machines.nodes - len(empty)}, or give the run more replicas or ranks"
        )
    roles_of = [_roles(plan, node) for node in range(plan.machines.nodes)]
    needs = [_need(plan, node, roles_of[node], options) for node in range(plan.machines.nodes)]
    groups: list[Group] = []
    for (need, _), members in groupby(
        range(plan.machines.nodes), key=lambda node: (needs[node], plan.machines.each[node].kind)
    ):
        nodes = list(members)
        name = "+".join(dict.fromkeys(role for node in nodes for role in roles_of[node]))
        groups.append(Group(name, nodes[0], len(nodes), *need))
    roles = {role for group in groups for role in group.name.split("+")}
    for option in options:
        role, option_itself = _role_of(option)
        if not option_itself.startswith("-"):
            raise ConfigError(f"--sbatch {option}: write an option of sbatch, such as --sbatch=--partition=gpu")
        if role and role not in roles:
            raise ConfigError(
                f"--sbatch {option}: the job has no nodes for {role!r}; it has {', '.join(sorted(roles))} (--control-node"
                f" adds a node for {CONTROL})"
            )
    return tuple(groups)


def _roles(plan: Plan, node: int) -> list[str]:
    """Return the names of the parts that compute on a node, or `CONTROL` if none does."""
    here = {each.part for each in plan.on_node(node)}
    return [name for name in COMPUTES if name in here] or [CONTROL]


def _need(plan: Plan, node: int, roles: Sequence[str], options: Sequence[str]) -> tuple[int, int, tuple[str, ...]]:
    """Return the devices and cores that a node needs, and its options of sbatch."""
    devices = max((number + 1 for each in plan.on_node(node) for number in each.devices), default=0)
    cores = plan.machines.cores[node]
    cores = min(cores, CONTROL_CORES) if roles == [CONTROL] else cores
    return devices, cores, tuple(text for role, text in map(_role_of, options) if not role or role in roles)


def _role_of(option: str) -> tuple[str, str]:
    """Split ``trainer:--partition=x``; the role of ``--partition=x`` is empty."""
    role, colon, rest = option.partition(":")
    return (role, rest) if colon and not option.startswith("-") else ("", option)


def script(plan: Plan, groups: Sequence[Group], job: Job) -> str:
    """Return the batch script of a plan."""
    lines = [
        "#!/bin/bash",
        f"# Run {plan.run} of Sluice. `sluice slurm rl` submits this script, and writes the file of settings that it names.",
        f"#SBATCH --job-name=sluice-{plan.run}",
        f"#SBATCH --output={_quoted(job.log)}",
        "#SBATCH --open-mode=append",
        f"#SBATCH --chdir={_quoted(job.directory)}",
        "#SBATCH --requeue",
        f"#SBATCH --signal=B:USR1@{math.ceil(job.stop_s) + SIGNAL_S}",
    ]
    for number, group in enumerate(groups):
        if number:
            lines += ["#SBATCH hetjob"]
        lines += [
            f"#SBATCH --nodes={group.nodes}",
            "#SBATCH --ntasks-per-node=1",
            f"#SBATCH --cpus-per-task={group.cores}",
        ]
        lines += [f"#SBATCH --gpus-per-node={group.devices}"] if group.devices else []
        lines += [f"#SBATCH {option}" for option in group.options]
    lines += ["", "# Each part is a step of srun, which this command starts, follows, drains and starts again:"]
    for group in groups:
        for node in range(group.first, group.first + group.nodes):
            lines += [f"#   node {node}: {', '.join(map(_described, plan.on_node(node)))}"]
    lines += ["trap '' USR1  # the command handles it, once it has begun", f"exec {shlex.join(job.command)}", ""]
    return "\n".join(lines)


def _quoted(path: Path) -> str:
    """Return a path as sbatch reads it: a percent sign would begin a pattern."""
    return '"' + str(path).replace("%", "%%") + '"'


def _described(place: Place) -> str:
    ports = "/".join(str(port.number) for port in place.ports)
    devices = f" on devices {','.join(map(str, place.devices))}" if place.devices else ""
    return f"{label(place)}{f' :{ports}' if ports else ''}{devices}"


def label(place: Place) -> str:
    """Return the name of a place: its instance, and on further nodes of the instance also their rank, as in ``trainer.1``."""
    return f"{place.instance}.{place.rank}" if place.rank else place.instance


@dataclass(frozen=True, slots=True)
class Host:
    """A node of a running job.

    Attributes:
        name: Its name in Slurm.
        address: Where the other nodes reach it.
        group: Number of its component; None in a simple job.
        job: The job, or the component's own job, that steps on this node belong to.
        devices: GPUs that the job has there.
        cores: CPU cores that the job has there.
    """

    name: str
    address: str
    group: int | None
    job: str
    devices: int
    cores: int


def hosts_of(
    groups: Sequence[Group],
    variables: Mapping[str, str],
    names: Callable[[str], Sequence[str]],
    address: Callable[[str], str],
) -> list[Host]:
    """Return the nodes of the running job, in the order of the plan.

    Args:
        groups: The groups that the job requested.
        variables: Environment variables of the batch script.
        names: Expands a list of nodes, such as ``n[0-2]``.
        address: Returns the address of a node.

    Raises:
        ConfigError: if this is not a Slurm job, or its nodes differ from the plan's.
    """
    several = len(groups) > 1
    hosts: list[Host] = []
    for number, group in enumerate(groups):
        suffix = f"_HET_GROUP_{number}" if several else ""
        listed, job = variables.get(f"SLURM_JOB_NODELIST{suffix}"), variables.get(f"SLURM_JOB_ID{suffix}")
        if not listed or not job:
            raise ConfigError(
                f"SLURM_JOB_NODELIST{suffix} and SLURM_JOB_ID{suffix} are not set: this command is run by the batch script that"
                " `sluice slurm rl` submits"
            )
        found = names(listed)
        if len(found) != group.nodes:
            raise ConfigError(
                f"the job has {len(found)} nodes for {group.name} ({listed}), but the plan has {group.nodes}: submit it again with"
                " `sluice slurm rl`, without changing the script"
            )
        own = number if several else None
        hosts += [Host(name, address(name), own, job, group.devices, group.cores) for name in found]
    return hosts


def step(host: Host, place: Place, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command that starts a part as a step of the job on its node.

    Steps share the node (`--overlap`): each step sees all cores and devices of the node, and a part uses those that the plan gives it.
    Without this, Slurm would make a step wait for the memory or the cores of another step, without a deadline.
    """
    words = ["srun", f"--job-name={label(place)}"]
    words += [] if host.group is None else [f"--het-group={host.group}"]
    words += [f"--nodelist={host.name}", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1"]
    words += [
        f"--cpus-per-task={host.cores}",
        "--cpu-bind=none",
        "--overlap",
        "--mpi=none",
        "--unbuffered",
        "--input=none",
    ]
    words += [f"--gpus-per-node={host.devices}"] if host.devices else []
    if place.devices:
        command = ["bash", "-c", _PICK_DEVICES, "devices", ",".join(map(str, place.devices)), *command]
    return (*words, *command)
