"""The plan for people, as tables, and for programs, as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, fields

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from sluice.plan.plan import COMPUTES, Part, Place, Plan, relay_flags

RENDEZVOUS, RANK = "FIRST_NODE:PORT", "NODE"
"""What stands in a command for what the engine knows: the address of a part's first node, and the number of a node."""


def commands(plan: Plan, settings: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the command of each part, with the same settings for all."""
    return {
        each.name: (
            *each.command(settings, rank=RANK, rendezvous=RENDEZVOUS),
            *(relay_flags("WEIGHTSYNC:PORT", "THIS_NODE:PORT", "relay") if each.name == "relay" else ()),
        )
        for each in plan.parts
    }


def as_json(plan: Plan, settings: Sequence[str]) -> str:
    """Return the plan as JSON; parts and places have the fields of the classes, parts also a ``command``."""
    words = commands(plan, settings)
    whole = {each.name: getattr(plan, each.name) for each in fields(plan) if each.repr}
    whole["machines"] = [asdict(each) for each in plan.machines.each]
    whole["parts"] = [asdict(each) | {"command": words[each.name]} for each in plan.parts]
    whole["places"] = [asdict(each) for each in plan.places]
    return json.dumps(whole, indent=2) + "\n"


def print_tables(plan: Plan, settings: Sequence[str], console: Console) -> None:
    """Print what is started, where, and by which commands."""
    instances = sum(each.count for each in plan.parts)
    within = max(each.start_s for each in plan.parts)
    console.print(
        f"{plan.run} on {plan.machines}: {instances} instances, each must serve within {within:g} s", highlight=False
    )
    if plan.shares_devices:
        console.print("rollout and trainer share the GPUs", style="yellow")
    if plan.idle:
        console.print(plan.idle, style="yellow", highlight=False)
    console.print(_parts(plan), _places(plan), highlight=False)
    for name, words in commands(plan, settings).items():
        console.print(f"{name:>12}  {shlex.join(words)}", highlight=False, soft_wrap=True, markup=False)


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
    table.caption = "each: GPUs, and memory on each by estimate; + may be scaled while the run lasts; drain: seconds after SIGTERM; disk: needs one that outlives it"
    table.caption_justify = "left"
    return table


def _size(part: Part) -> str:
    if part.name not in COMPUTES:
        return "-"
    size = f"{part.processes} GPU{'s' * (part.processes > 1)}" if part.devices else f"{part.processes} on CPU"
    size += "" if part.device_gb is None else f", {part.device_gb:.0f} GB"
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
