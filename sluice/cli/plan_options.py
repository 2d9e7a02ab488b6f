"""The flags of every command that makes a plan, and the plan that they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from sluice.config import RunConfig, seconds, whole_number
from sluice.plan import Machines, Plan, Purpose, make_plan
from sluice.plan.devices import arrange
from sluice.supervise.restart_policy import MOST_RESTARTS, START_S


def add_plan_options(parser: argparse.ArgumentParser, extra: Sequence[str] = ()) -> None:
    """Add the flags that `plan_with` reads. `extra` are the parts that may be added to the plan."""
    add = parser.add_argument
    add("--replicas", type=whole_number(1), help="rollout replicas (default: as many as the settings say)")
    add("--threads", type=whole_number(1), help="threads of each process that computes (default: the cores, divided)")
    add(
        "--max-restarts",
        type=whole_number(0),
        default=MOST_RESTARTS,
        metavar="N",
        help=f"most restarts of a part within ten minutes (default: {MOST_RESTARTS})",
    )
    add(
        "--start-deadline",
        type=seconds,
        default=START_S,
        metavar="S",
        help=f"seconds until a part must serve (default: {START_S:g})",
    )
    if extra:

        def part(text: str) -> tuple[str, int]:
            name, _, number = text.partition("=")
            if name not in extra:
                raise argparse.ArgumentTypeError(
                    f"{name!r} cannot be added: give {', '.join(extra)}, as PART or PART=N"
                )
            return name, whole_number(1, 1024)(number or "1")

        add(
            "--with",
            dest="extra",
            action="append",
            type=part,
            default=[],
            metavar="PART[=N]",
            help=f"add instances of a part that the settings do not need: {', '.join(extra)}",
        )


def plan_with(
    options: argparse.Namespace, config: RunConfig, machines: Machines, purpose: Purpose = Purpose.RUN
) -> Plan:
    """Make the plan that the flags ask for.

    Raises:
        ConfigError: if the run does not fit on the machines; with the numbers, and what to change.
    """
    return make_plan(
        config,
        machines,
        purpose=purpose,
        replicas=options.replicas,
        extra=dict(getattr(options, "extra", ())),
        threads=options.threads,
        start_s=options.start_deadline,
        most_restarts=options.max_restarts,
    )


Arranging = Callable[[RunConfig], tuple[RunConfig, Sequence[str]]]
"""Function with which `load_run` decides how a run uses the devices of its machines. Returns the settings and lines about the decisions."""


def arranging(
    options: argparse.Namespace,
    machines: Machines,
    *,
    flags: list[str] | None = None,
    notes: list[str] | None = None,
    divide: bool = True,
) -> Arranging:
    """Return the function that decides how the run uses the devices of the machines.

    Args:
        options: The options of `add_plan_options`.
        machines: Where the run starts.
        flags: Receives the decisions as flags, for services that read the settings again.
        notes: Receives lines about the decisions, for people.
        divide: Whether the run may take all GPUs of the machines, and whether both sides may use the same GPU.
    """

    def arranged(run: RunConfig) -> tuple[RunConfig, Sequence[str]]:
        found = arrange(run, machines, replicas=options.replicas, divide=divide)
        for into, new in ((flags, found.flags), (notes, found.notes)):
            if into is not None:
                into[:] = new
        return found.run, found.notes

    return arranged


def plan_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags that ask for the same plan again."""
    given = {"replicas": options.replicas, "threads": options.threads}
    given |= {"max-restarts": options.max_restarts, "start-deadline": options.start_deadline}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return [*flags, *(f"--with={name}={number}" for name, number in getattr(options, "extra", ()))]
