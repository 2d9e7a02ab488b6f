"""`sluice ray rl @ rl.toml`: run reinforcement learning on a Ray cluster, each process of the run in an actor of its own.

Run it on any node of the cluster, or submit it: `ray job submit --working-dir . -- sluice ray rl @ rl.toml`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import secrets
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sluice.certificates import issue_once
from sluice.cli.live_view import RunView
from sluice.cli.plan_options import add_plan_options, arranging, plan_with
from sluice.cli.rl import (
    EXIT_CODES,
    check_begins,
    check_run,
    claim,
    describe_finished,
    describe_resume,
    fork,
    report_outcome,
    view_of,
    write_settings,
)
from sluice.config import (
    ConfigError,
    Options,
    PeersConfig,
    RunConfig,
    SecurityConfig,
    ServerConfig,
    dump_toml,
    load_run,
    seconds,
)
from sluice.config.decide import assume_devices
from sluice.plan import Machine, Machines, Plan
from sluice.plan.machines import add_machines_options, machines_of
from sluice.plan.ray import left_over, render
from sluice.rpc.access import Access, check_exposure
from sluice.rpc.principals import new_token
from sluice.supervise.restart_policy import EXIT_SET_ASIDE
from sluice.supervise.supervisor import Outcome, run_until_signal

if TYPE_CHECKING:
    from sluice.ray.driver import Running

PLACE_S = 300.0
"""Seconds that Ray may take to reserve the resources of the run, unless a flag says otherwise. An autoscaler starts a node in minutes."""

CERTIFICATES = "certs"
"""Folder in the directory of the run, with the certificates of this start."""

_BEYOND_LOOPBACK = "0.0.0.0"
"""Stands for the address of a node, which is not known yet, in checks of exposed addresses. Both need the same protection."""


def run(argv: list[str]) -> int:
    """Run until the last step, or until Ctrl-C.

    Returns:
        0 after the last step, 1 if a part failed and was not restarted, 130 after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: if a setting is wrong, Ray is not installed, there is no cluster, or a node cannot run its part.
    """
    help_wanted = bool({"--help", "-h"} & set(argv))
    if argv[:1] != ["rl"] and not help_wanted:
        raise ConfigError("say what should run on Ray: `sluice ray rl @ rl.toml`; see `sluice ray rl --help`")
    parser = _parser()
    if help_wanted:
        print(parser.format_help())
    options, settings = parser.parse_known_args(argv[1:] if argv[:1] == ["rl"] else argv)
    if importlib.util.find_spec("ray") is None and not help_wanted:
        raise ConfigError("`sluice ray` needs Ray: pip install 'sluice[ray]', in the release that the cluster has")
    needs_cluster = not (help_wanted or ("--dry-run" in settings and options.machines))
    with _connected(options.address) if needs_cluster else contextlib.nullcontext():
        machines = _machines(options) if needs_cluster or options.machines else Machines()
        # This process decides the values of `auto`, for nodes that may have GPUs although its own machine has none.
        assume_devices(max(machines.devices), machines.device_bytes)
        notes: list[str] = []
        config = load_run(
            settings,
            arrange=arranging(options, machines, notes=notes, divide=False),
            check=lambda config: _check(config, plan_with(options, config, machines), options),
        )
        return _run(_absolute(config), options, machines, notes)


def _run(config: RunConfig, options: argparse.Namespace, machines: Machines, notes: Sequence[str]) -> int:
    from sluice.ray.driver import Running  # noqa: PLC0415 - needs Ray

    plan = plan_with(options, config, machines)
    if options.resume_from:
        fork(config, options.resume_from, resume=options.resume)
    resume = options.resume or bool(options.resume_from)
    with claim(config, resume=resume) as directory, _probe(directory) as probe:
        if resume and (done := describe_finished(config)):
            print(done)
            return 0
        given, made = config, _certificates(config, directory)
        if made is not None:
            config = config.model_copy(update={"security": _with_certificates(config.security, made)})
        makes_token = config.security.dispatcher_token_file is None and not Access(config.security).open
        running = Running(
            plan=plan,
            settings=dump_toml(given, redacted=False),
            dispatcher_token=new_token() if makes_token else "",
            certificates=made,
            probe=probe,
            directory=str(Path.cwd()),
            logs=directory / "logs",
            place_s=options.place_deadline,
            pin=options.pin,
        )
        console = Console()
        view = view_of(config, console, live=console.is_terminal and not options.plain, verbose=options.verbose)
        if resume:
            view.say(describe_resume(directory))
        for line in (*(f"decided: {note}" for note in notes), *filter(None, [left_over(plan)])):
            view.say(line)
        view.say(f"run {config.run}: placing {len(plan.places)} actors, logs in {directory / 'logs'}")
        began = time.monotonic()
        outcome = asyncio.run(_drive(running, view, config))
    report_outcome(view, outcome, config, time.monotonic() - began)
    return EXIT_SET_ASIDE if outcome.set_aside else EXIT_CODES[outcome.ending]


def _certificates(config: RunConfig, directory: Path) -> Path | None:
    """Make a folder of certificates for this start of the run. Return None if the settings name certificates or disable them."""
    if config.security.tls_cert is not None or config.security.insecure:
        return None
    folder = directory / CERTIFICATES
    issue_once(folder, [], datetime.now(UTC))
    return folder


def _with_certificates(security: SecurityConfig, folder: Path) -> SecurityConfig:
    from sluice.ray.part_actor import ANY_NODE  # noqa: PLC0415 - needs Ray

    given = security.model_dump(exclude_unset=True)
    return SecurityConfig.model_validate(given | {"certs_dir": folder, "tls_address_name": ANY_NODE})


async def _drive(running: Running, view: RunView, config: RunConfig) -> Outcome:
    """Run the actors, and show the run."""
    from sluice.ray.driver import RayRun  # noqa: PLC0415 - needs Ray

    follower: asyncio.Task[None] | None = None

    def on_peers(peers: PeersConfig) -> None:
        """Write the settings with the addresses, for other commands, and follow the orchestrator at its address."""
        nonlocal follower
        write_settings(config.model_copy(update={"peers": peers}))
        if follower is not None:
            follower.cancel()
        follower = asyncio.create_task(view.follow(peers.orchestrator, config.security))

    drawing = asyncio.create_task(view.keep_drawing())
    try:
        ray_run = RayRun(running, view, on_peers)
        return await run_until_signal(ray_run, lambda text: view.say(text, style="yellow"))
    finally:
        beside = [task for task in (drawing, follower) if task is not None]
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


def _check(config: RunConfig, plan: Plan, options: argparse.Namespace) -> list[str]:
    """Refuse settings that would make a part fail, before any part is placed. Return further lines for a dry run."""
    if config.security.tls_cert is not None:  # otherwise certificates and principals are made
        check_exposure(ServerConfig(host=_BEYOND_LOOPBACK), config.security)
    notes = [*check_run(config, plan), *render(plan, options.pin).splitlines(), *filter(None, [left_over(plan)])]
    check_begins(config, resume=options.resume or bool(options.resume_from))
    return notes


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to a cluster while the block lasts.

    Raises:
        ConfigError: if there is no such cluster.
    """
    import ray  # noqa: PLC0415 - an extra

    try:
        # Actors print nothing about the run: the driver shows what they report.
        ray.init(address=address, log_to_driver=False, logging_level="warning", configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no Ray cluster at {address!r} ({error}): run this on a node of one, name it with --address HOST:6379, or start one with"
            " `ray start --head`"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _machines(options: argparse.Namespace) -> Machines:
    """Return the machines to plan for: those in the options, or the cluster's nodes. If some nodes have GPUs, only these."""
    if options.machines:
        return machines_of(options.machines, options.cores)
    if options.cores:
        raise ConfigError(
            "--cores is for machines that --machines describes: without it the cluster says what its nodes have"
        )
    import ray  # noqa: PLC0415 - an extra

    alive = [each["Resources"] for each in ray.nodes() if each["Alive"]]
    at_work = [each for each in alive if each.get("CPU", 0) >= 1]  # a head node often offers no CPU
    nodes = [each for each in at_work if each.get("GPU", 0) >= 1] or at_work
    if not nodes:
        raise ConfigError(
            "no node of the cluster has a CPU to give: add nodes, or describe those that an autoscaler will add by --machines"
        )
    nodes.sort(key=lambda each: each.get("GPU", 0))  # the trainer takes the last ones
    return Machines(tuple(Machine(int(each.get("GPU", 0)), max(1, int(each.get("CPU", 0)))) for each in nodes))


def _absolute(config: RunConfig) -> RunConfig:
    """Return the settings with paths that mean the same on all nodes."""
    model = str(Path(config.model).resolve()) if Path(config.model).is_dir() else config.model
    return config.model_copy(update={"output_dir": config.output_dir.resolve(), "model": model})


@contextlib.contextmanager
def _probe(directory: Path) -> Iterator[tuple[str, str]]:
    """Write a file, by which an actor checks that it can see this directory. Remove the file at the end."""
    path, content = directory / ".seen-by-nodes", secrets.token_hex(16)
    path.write_text(content, encoding="utf-8")
    try:
        yield str(path), content
    finally:
        path.unlink(missing_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice ray rl",
        usage="sluice ray rl @ rl.toml [--trainer @ trainer.toml ...] [--key value ...] [options]",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--address", default="auto", help="address of the cluster (default: the one that this node belongs to)")
    add_machines_options(parser, "those that the cluster has")
    add(
        "--pin",
        default="",
        metavar="ADDRESS",
        help="node of the cluster that holds all that keeps state, so that --output-dir need not be shared: run the command there, too",
    )
    add_plan_options(parser)
    add("--verbose", action="store_true", help="show every log line, not just warnings and errors")
    add("--resume", action="store_true", help="resume the run if it exists; otherwise start a new one")
    add("--resume-from", metavar="RUN/step_N", help="begin this run (--run NAME) from a checkpoint of another one")
    add("--plain", action="store_true", help="one line per step instead of the live view")
    add(
        "--place-deadline",
        type=seconds,
        default=PLACE_S,
        metavar="S",
        help=f"seconds until Ray must have placed a part, at the start or after a node was lost (default: {PLACE_S:g})",
    )
    return parser
