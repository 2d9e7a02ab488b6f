"""`sluice plan @ rl.toml`: what a run starts, where, in which order and by which commands; nothing is started."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from sluice.cli.plan_options import add_plan_options, arranging, plan_with
from sluice.config import ConfigError, Options, RunConfig, load_run
from sluice.config.decide import assume_devices, visible_devices
from sluice.plan import Machines, Plan, Purpose
from sluice.plan.local import this_machine
from sluice.plan.machines import add_machines_options, machines_of
from sluice.plan.plan import COMPUTES, EXTRA, Part, Place, relay_flags

Renderer = Callable[[Plan, RunConfig, Sequence[str], argparse.Namespace], None]
"""Prints a plan. It gets the plan, the settings from which it was made, the words that name these settings, and the flags."""


def run(argv: list[str]) -> int:
    """Print the plan.

    Returns:
        0.

    Raises:
        ConfigError: if a setting is wrong, or the run does not fit on the machines; with what to change.
    """
    options, settings = _parser().parse_known_args(argv)
    if options.machines:
        machines = machines_of(options.machines, options.cores)
        assume_devices(max(machines.devices), machines.device_bytes)
    else:
        here = this_machine(visible_devices(os.environ)).each[0]
        machines = Machines((replace(here, cores=options.cores or here.cores),))
    flags: list[str] = []
    if options.purpose is Purpose.RUN:
        divide = options.engine != "ray"  # a cluster is shared with others
        config = load_run(settings, arrange=arranging(options, machines, flags=flags, divide=divide))
    else:
        config = load_run(settings)
    if options.purpose is Purpose.TRAINING_API and options.engine not in ("table", "json"):
        raise ConfigError(
            f"--as {options.engine} starts runs: `sluice training-api` starts the training API on one machine, and the commands of"
            " --as table start its services elsewhere"
        )
    plan = plan_with(options, config, machines, options.purpose)
    RENDERERS[options.engine](plan, config, [*settings, *flags], options)
    return 0


def _table(plan: Plan, _: RunConfig, settings: Sequence[str], __: argparse.Namespace) -> None:
    print_tables(plan, settings, Console())


def _json(plan: Plan, _: RunConfig, settings: Sequence[str], __: argparse.Namespace) -> None:
    sys.stdout.write(as_json(plan, settings))


def _compose(plan: Plan, _: RunConfig, settings: Sequence[str], __: argparse.Namespace) -> None:
    from sluice.plan.compose import compose  # noqa: PLC0415 - each renderer brings what it alone needs

    sys.stdout.write(compose(plan, settings))


def _ray(plan: Plan, _: RunConfig, __: Sequence[str], ___: argparse.Namespace) -> None:
    from sluice.plan.ray import render  # noqa: PLC0415

    sys.stdout.write(render(plan))


def _slurm(plan: Plan, config: RunConfig, _: Sequence[str], options: argparse.Namespace) -> None:
    from sluice.cli.slurm import job_of  # noqa: PLC0415
    from sluice.plan.slurm import groups_of, script  # noqa: PLC0415

    sys.stdout.write(script(plan, groups_of(plan), job_of(config, plan, options)))


def _helm(plan: Plan, config: RunConfig, settings: Sequence[str], _: argparse.Namespace) -> None:
    from sluice.plan.helm import helm  # noqa: PLC0415

    sys.stdout.write(helm(plan, config, settings))


RENDERERS: Mapping[str, Renderer] = {
    "table": _table,
    "json": _json,
    "compose": _compose,
    "helm": _helm,
    "slurm": _slurm,
    "ray": _ray,
}
"""What `--as` prints, by its value."""


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice plan",
        usage="sluice plan @ rl.toml [--machines 4x4xH100-80] [--as ENGINE] [--key value ...]",
        description=__doc__,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--as", dest="engine", choices=list(RENDERERS), default="table", help="what to print (default: table)")
    add(
        "--for",
        dest="purpose",
        type=Purpose,
        choices=list(Purpose),
        default=Purpose.RUN,
        help="what it starts (default: run)",
    )
    add_machines_options(parser, "this one")
    add_plan_options(parser, EXTRA)
    return parser


RENDEZVOUS, RANK = "FIRST_NODE:PORT", "NODE"
"""Placeholders in a command for values that the engine knows: the address of a part's first node, and the number of a node."""


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
    """Return the plan as JSON. Parts and places have the fields of their classes; parts also have a ``command``."""
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
    console.print(_table_of_parts(plan), _table_of_places(plan), highlight=False)
    for name, words in commands(plan, settings).items():
        console.print(f"{name:>12}  {shlex.join(words)}", highlight=False, soft_wrap=True, markup=False)


def _table_of_parts(plan: Plan) -> RenderableType:
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


def _table_of_places(plan: Plan) -> RenderableType:
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
