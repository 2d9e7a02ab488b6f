"""The plan for people, as tables, and for programs, as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from sluice.plan.plan import COMPUTES, Machines, Part, Place, Plan

RENDEZVOUS, RANK = "FIRST_NODE:PORT", "NODE"
"""What stands in a command for what the engine knows: the address of a part's first node, and the number of a node."""

_RELAY = ("--upstream", "WEIGHTSYNC:PORT", "--advertise", "THIS_NODE:PORT", "--directory", "relay")
"""Flags of a relay: where it takes versions from, where others reach it, and a directory that is not the one of the weight service."""


def commands(plan: Plan, settings: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the command of each part, with the same settings for all."""
    return {
        each.name: (
            *each.command(settings, rank=RANK, rendezvous=RENDEZVOUS),
            *(_RELAY if each.name == "relay" else ()),
        )
        for each in plan.parts
    }


def as_json(plan: Plan, settings: Sequence[str]) -> str:
    """Return the plan as JSON; parts and places have the fields of the classes, parts also a ``command``."""
    words = commands(plan, settings)
    whole = {each.name: getattr(plan, each.name) for each in fields(plan) if each.repr}
    whole["machines"] = asdict(plan.machines)
    whole["parts"] = [asdict(each) | {"command": words[each.name]} for each in plan.parts]
    whole["places"] = [asdict(each) for each in plan.places]
    return json.dumps(whole, indent=2) + "\n"


def print_tables(plan: Plan, settings: Sequence[str], console: Console) -> None:
    """Print what is started, where, and by which commands."""
    instances = sum(each.count for each in plan.parts)
    within = max(each.start_s for each in plan.parts)
    console.print(
        f"{plan.run} on {describe(plan.machines)}: {instances} instances, each must serve within {within:g} s",
        highlight=False,
    )
    if plan.shares_devices:
        console.print("rollout and trainer share the GPUs", style="yellow")
    console.print(_parts(plan), _places(plan), highlight=False)
    for name, words in commands(plan, settings).items():
        console.print(f"{name:>12}  {shlex.join(words)}", highlight=False, soft_wrap=True, markup=False)


def describe(machines: Machines) -> str:
    """Return the machines in words."""
    nodes = "1 machine" if machines.nodes == 1 else f"{machines.nodes} machines"
    cores = f"{machines.cores} core{'s' * (machines.cores > 1)}"
    gpus = f"{machines.devices} GPU{'s' * (machines.devices > 1)} and " if machines.devices else ""
    return f"{nodes} of {gpus}{cores}" if machines.nodes == 1 else f"{nodes} of {gpus}{cores} each"


def _parts(plan: Plan) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("part", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("each", no_wrap=True)
    table.add_column("starts after", no_wrap=True)
    table.add_column("restart", no_wrap=True)
    table.add_column("drain", justify="right", no_wrap=True)
    table.add_column("disk", no_wrap=True)
    for part in plan.parts:
        table.add_row(
            part.name,
            f"{part.count}{'+' * part.scales}",
            _size(part),
            ",\n".join(part.waits_for) or "-",
            str(part.restart),
            f"{part.drain_s:g} s",
            "yes" if part.keeps_state else "-",
        )
    table.caption = (
        "+ may be scaled while the run lasts; drain: seconds after SIGTERM; disk: needs one that outlives it"
    )
    table.caption_justify = "left"
    return table


def _size(part: Part) -> str:
    if part.name not in COMPUTES:
        return "-"
    size = f"{part.processes} GPU{'s' * (part.processes > 1)}" if part.devices else f"{part.processes} on CPU"
    return f"{part.nodes} x {size}" if part.nodes > 1 else size


def _places(plan: Plan) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("machine", "instance", "GPUs", "ports"):
        table.add_column(title)
    for node in range(plan.machines.nodes):
        for number, place in enumerate(plan.on_node(node)):
            last = number == len(plan.on_node(node)) - 1
            table.add_row(str(node) if not number else "", *_row(plan, place), end_section=last)
    return table


def _row(plan: Plan, place: Place) -> tuple[str, str, str]:
    spans = plan.part(place.part).nodes > 1
    name = f"{place.instance} (node {place.rank})" if spans else place.instance
    ports = ", ".join(f"{each.number} {each.name}" for each in place.ports)
    return name, ", ".join(map(str, place.devices)), ports
