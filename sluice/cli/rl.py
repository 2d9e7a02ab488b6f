"""`sluice rl @ rl.toml`: all services of a run as child processes of one supervisor, with one view of them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from sluice.cli.command import Command
from sluice.cli.launch import child_specs, free_addresses, replica_names
from sluice.cli.live_view import RunView
from sluice.cli.options import Options, seconds, whole_number
from sluice.cli.placement import Place, place
from sluice.cli.restart_policy import RestartLimits
from sluice.cli.run_directory import claim, newest_checkpoint, where_resumed, write_settings
from sluice.cli.supervisor import Ending, Outcome, Supervisor, run_until_signal
from sluice.cli.watch import follow_run
from sluice.config import (
    ConfigError,
    RunConfig,
    ServerConfig,
    allocation_of,
    check_tables_fit,
    dump_toml,
    load_run,
    service_names,
)
from sluice.devices import visible_devices
from sluice.models import check_hub, check_model
from sluice.rpc.binding import server_credentials
from sluice.rpc.tokens import TokenCheck

__all__ = ["COMMAND", "replicas_of", "run"]

NEEDED = ("orchestrator", "rollout", "trainer", "weightsync")
"""Services that a run consists of."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_EXIT_CODES = {Ending.SUCCEEDED: 0, Ending.STOPPED: EXIT_INTERRUPTED, Ending.FAILED: EXIT_FAILED}


def run(argv: list[str]) -> int:
    """Run to the end, or to Ctrl-C.

    Returns:
        0 after the last step, 1 if a service failed for good, 130 after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: if a setting is wrong, a service is not installed, or the run exists and is not to be resumed.
    """
    parser = _parser()
    if {"--help", "-h"} & set(argv):
        print(parser.format_help())
    options, settings = parser.parse_known_args(argv)
    config = load_run(settings, check=partial(_check, options.replicas))
    _ask_hub(config)
    replicas = replicas_of(options.replicas, config)
    addresses, places = free_addresses(replicas), _places(config, replicas)
    config = config.model_copy(update={"peers": addresses.peers()})
    with claim(config, resume=options.resume) as directory, _private_settings(config) as private:
        public = write_settings(config)
        file, logs = private or public, directory / "logs"
        specs = child_specs(config, addresses, file, logs, threads=options.threads, places=places)
        console = Console()
        view = RunView(config.run, console, live=console.is_terminal and not options.plain, verbose=options.verbose)
        supervisor = Supervisor(
            specs,
            view,
            limits=RestartLimits(restarts=options.max_restarts),
            start_deadline_s=options.start_deadline,
        )
        if options.resume:
            view.say(where_resumed(directory))
        view.say(f"run {config.run}: {len(specs)} services starting, logs in {directory / 'logs'}")
        _warn_of_crowding(view, places)
        began = time.monotonic()
        outcome = asyncio.run(_supervise(supervisor, view, config))
    _tell(view, outcome, config, time.monotonic() - began)
    return _EXIT_CODES[outcome.ending]


def _warn_of_crowding(view: RunView, places: Mapping[str, Place]) -> None:
    processes, cores = sum(each.processes for each in places.values()), os.cpu_count() or 1
    if processes > cores and not any(each.devices for each in places.values()):
        view.say(
            f"{processes} computing processes share {cores} cores: give the run fewer, or expect it to be slow",
            "yellow",
        )


def replicas_of(asked: int | None, config: RunConfig) -> int:
    """How many rollout replicas there are to be.

    Raises:
        ConfigError: if there is none, or the settings say different numbers.
    """
    allocation = allocation_of(config)
    named = len(config.peers.rollout)
    if allocation is not None and allocation.rollout is not None:
        replicas = allocation.rollout.dimensions.data
        listed = named if "rollout" in config.peers.model_fields_set else replicas
        for setting, number in (("--replicas", asked or replicas), ("the length of peers.rollout", listed)):
            if number != replicas:
                raise ConfigError(
                    f"the allocation {allocation} has {replicas} replicas, but {setting} is {number}: remove one of them"
                )
        return replicas
    if not (asked or named):
        raise ConfigError("peers.rollout is empty: a run needs at least one rollout replica (--replicas 1)")
    return asked or named


def _check(asked: int | None, config: RunConfig) -> None:
    """Find what would fail later, before anything is started.

    Raises:
        ConfigError: with the remedy.
    """
    missing = [name for name in NEEDED if name not in service_names()]
    if missing:
        raise ConfigError(f"`sluice rl` needs the services {', '.join(missing)}, which are not installed here")
    check_model(config.model)
    replicas = replicas_of(asked, config)
    for name in NEEDED:
        config.section(name).check_start(config)
    check_tables_fit(config)
    TokenCheck(config.security)
    server_credentials(ServerConfig(), config.security)
    _places(config, replicas)


def _places(config: RunConfig, replicas: int) -> Mapping[str, Place]:
    return place(config, replica_names(replicas), visible_devices(os.environ))


def _ask_hub(config: RunConfig) -> None:
    """See that models which are no directories can be had, before every service tries for itself."""
    beside = config.section("trainer").models_beside()
    for setting, model in {"model": config.model, **beside}.items():
        check_hub(model, setting)


@contextlib.contextmanager
def _private_settings(config: RunConfig) -> Iterator[Path | None]:
    """A file with the secrets for the children alone; None where there is no secret to hand on."""
    whole = dump_toml(config, redacted=False)
    if whole == dump_toml(config):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sluice-") as directory:
        path = Path(directory) / "settings.toml"
        path.touch(mode=0o600)
        path.write_text(whole, encoding="utf-8")
        yield path


async def _supervise(supervisor: Supervisor, view: RunView, config: RunConfig) -> Outcome:
    """Run the children, and the view beside them."""
    beside = [
        asyncio.create_task(view.keep_drawing()),
        asyncio.create_task(
            follow_run(config.peers.orchestrator, config.security, config.run, view.progress, view.on_step)
        ),
    ]
    try:
        return await run_until_signal(supervisor, lambda text: view.say(text, style="yellow"))
    finally:
        for task in beside:
            task.cancel()
        for ended in await asyncio.gather(*beside, return_exceptions=True):
            if isinstance(ended, Exception):
                view.say(f"the view of the run failed: {ended!r}", style="red")


def _tell(view: RunView, outcome: Outcome, config: RunConfig, seconds: float) -> None:
    """The last words."""
    done = f"{view.progress.applied} steps in {seconds:.1f} s"
    match outcome.ending:
        case Ending.SUCCEEDED:
            view.say(f"run {config.run} done: {done}; results in {config.run_dir}", style="green")
        case Ending.STOPPED:
            view.say(f"run {config.run} stopped after {done}; {_what_resume_does(config)}", style="yellow")
        case Ending.FAILED:
            view.say(f"run {config.run} failed after {done}: {outcome.child} {outcome.reason}", style="bold red")
            for line in outcome.tail:
                view.say(f"{outcome.child:>12} | {line}", style="red")
            view.say(f"whole log: {config.run_dir / 'logs' / outcome.child}.log", style="red")


def _what_resume_does(config: RunConfig) -> str:
    """From where a stopped run would go on."""
    checkpoint = newest_checkpoint(config.run_dir)
    if checkpoint:
        return f"--resume goes on from {checkpoint}"
    return "there is no checkpoint yet (orchestrator.checkpoint.every_steps): --resume trains from the start"


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice rl",
        usage="sluice rl @ rl.toml [--trainer @ trainer.toml ...] [--key value ...] [options]",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
    )
    limits = RestartLimits()
    add = parser.add_argument
    add("--replicas", type=whole_number(1), help="rollout processes (default: as many as peers.rollout names)")
    add("--threads", type=whole_number(1), help="threads per trainer and rollout process (default: the cores, divided)")
    add(
        "--resume",
        action="store_true",
        help="go on with a run that exists; one that does not begins at the start, which is said",
    )
    add("--verbose", action="store_true", help="show every log line, not just warnings and errors")
    add("--plain", action="store_true", help="one line per step instead of the live view")
    add(
        "--max-restarts",
        type=whole_number(0),
        default=limits.restarts,
        metavar="N",
        help="restarts of a service in ten minutes",
    )
    add("--start-deadline", type=seconds, default=600.0, metavar="S", help="seconds a service has to begin to serve")
    return parser


COMMAND = Command("rl", "run reinforcement learning: all services as child processes, one live view", run)
