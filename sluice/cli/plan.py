"""`sluice plan @ rl.toml`: what a run starts, where, in which order and by which commands; nothing is started."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence

from sluice.config import ConfigError, Options, RunConfig, load_run, seconds, whole_number
from sluice.config.decide import visible_devices
from sluice.plan import Machines, Plan, Purpose, make_plan
from sluice.plan.local import this_machine
from sluice.plan.plan import EXTRA
from sluice.supervise.restart_policy import MOST_RESTARTS, START_S

Renderer = Callable[[Plan, RunConfig, Sequence[str]], None]
"""Prints a plan; gets the settings that it was made of, and the words that name them."""


def run(argv: list[str]) -> int:
    """Print the plan.

    Returns:
        0.

    Raises:
        ConfigError: if a setting is wrong, or the run does not fit on the machines; with what to change.
    """
    options, settings = _parser().parse_known_args(argv)
    config = load_run(settings)
    here = this_machine(visible_devices(os.environ))
    machines = Machines(
        options.nodes, here.devices if options.devices is None else options.devices, options.cores or here.cores
    )
    if options.purpose is Purpose.TRAINING_API and options.engine not in ("table", "json"):
        raise ConfigError(
            f"--as {options.engine} starts runs: `sluice training-api` starts the training API on one machine, and the commands of"
            " --as table start its services elsewhere"
        )
    plan = make_plan(
        config,
        machines,
        purpose=options.purpose,
        replicas=options.replicas,
        extra=dict(options.extra),
        start_s=options.start_deadline,
        most_restarts=options.max_restarts,
    )
    RENDERERS[options.engine](plan, config, settings)
    return 0


def _table(plan: Plan, _: RunConfig, settings: Sequence[str]) -> None:
    from rich.console import Console  # noqa: PLC0415 - each renderer brings what it alone needs

    from sluice.plan.text import print_tables  # noqa: PLC0415

    print_tables(plan, settings, Console())


def _json(plan: Plan, _: RunConfig, settings: Sequence[str]) -> None:
    from sluice.plan.text import as_json  # noqa: PLC0415

    sys.stdout.write(as_json(plan, settings))


def _compose(plan: Plan, _: RunConfig, settings: Sequence[str]) -> None:
    from sluice.plan.compose import compose  # noqa: PLC0415

    sys.stdout.write(compose(plan, settings))


def _ray(plan: Plan, _: RunConfig, __: Sequence[str]) -> None:
    from sluice.plan.ray import render  # noqa: PLC0415

    sys.stdout.write(render(plan))


def _slurm(plan: Plan, config: RunConfig, _: Sequence[str]) -> None:
    from sluice.cli.slurm import job_of  # noqa: PLC0415
    from sluice.plan.slurm import groups_of, script  # noqa: PLC0415

    machines = plan.machines
    flags = [f"--nodes={machines.nodes}", f"--devices={machines.devices}", f"--cores={machines.cores}"]
    sys.stdout.write(script(plan, groups_of(plan), job_of(config, plan, flags)))


def _helm(plan: Plan, config: RunConfig, settings: Sequence[str]) -> None:
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


def _extra(text: str) -> tuple[str, int]:
    """Parse ``PART`` or ``PART=N``; a type for argparse."""
    name, _, number = text.partition("=")
    if name not in EXTRA:
        raise argparse.ArgumentTypeError(f"{name!r} cannot be added: give {', '.join(EXTRA)}, as PART or PART=N")
    return name, whole_number(1, 1024)(number or "1")


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice plan",
        usage="sluice plan @ rl.toml [--nodes N] [--devices N] [--as ENGINE] [--key value ...]",
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
    add("--nodes", type=whole_number(1, 4096), default=1, help="machines (default: 1)")
    add("--devices", type=whole_number(0, 1024), help="GPUs of each machine (default: those of this one)")
    add("--cores", type=whole_number(1, 4096), help="CPU cores of each machine (default: those of this one)")
    add("--replicas", type=whole_number(1), help="rollout replicas (default: as the settings say)")
    add(
        "--with",
        dest="extra",
        action="append",
        type=_extra,
        default=[],
        metavar="PART[=N]",
        help=f"add instances of a part that the settings do not need: {', '.join(EXTRA)}",
    )
    add("--start-deadline", type=seconds, default=START_S, metavar="S", help="seconds until a part must serve")
    add("--max-restarts", type=whole_number(0), default=MOST_RESTARTS, metavar="N", help="most in ten minutes")
    return parser
