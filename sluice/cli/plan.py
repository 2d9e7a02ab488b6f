"""`sluice plan @ rl.toml`: what a run starts, where, in which order and by which commands; nothing is started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from sluice.cli.plan_options import add_plan_options, arranging, plan_with
from sluice.config import ConfigError, Options, RunConfig, load_run
from sluice.config.decide import assume_devices, visible_devices
from sluice.plan import Machines, Plan, Purpose
from sluice.plan.local import this_machine
from sluice.plan.machines import add_machines_options, machines_of
from sluice.plan.plan import EXTRA

Renderer = Callable[[Plan, RunConfig, Sequence[str], argparse.Namespace], None]
"""Prints a plan; gets the settings that it was made of, the words that name them, and the flags."""


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
    from rich.console import Console  # noqa: PLC0415 - each renderer brings what it alone needs

    from sluice.plan.text import print_tables  # noqa: PLC0415

    print_tables(plan, settings, Console())


def _json(plan: Plan, _: RunConfig, settings: Sequence[str], __: argparse.Namespace) -> None:
    from sluice.plan.text import as_json  # noqa: PLC0415

    sys.stdout.write(as_json(plan, settings))


def _compose(plan: Plan, _: RunConfig, settings: Sequence[str], __: argparse.Namespace) -> None:
    from sluice.plan.compose import compose  # noqa: PLC0415

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
