"""`sluice rl @ rl.toml`: run reinforcement learning with all services as child processes, and show the run."""

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

from sluice.config import (
    Command,
    ConfigError,
    Options,
    RunConfig,
    ServerConfig,
    check_tables_fit,
    dump_toml,
    load_run,
    seconds,
    service_names,
    whole_number,
)
from sluice.config.allocation import visible_devices
from sluice.models import check_hub, check_model
from sluice.rpc.access import TokenCheck, server_credentials
from sluice.supervise.plan import Place, child_specs, free_addresses, place, replica_names, replicas_of
from sluice.supervise.restart_policy import RestartLimits
from sluice.supervise.run_directory import claim, describe_resume, newest_checkpoint, write_settings
from sluice.supervise.supervisor import Ending, Outcome, Supervisor, run_until_signal
from sluice.view.live_view import RunView

__all__ = ["COMMAND", "EXIT_INTERRUPTED", "run"]

NEEDED = ("orchestrator", "rollout", "trainer", "weightsync")
"""The services of a run."""

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_EXIT_CODES = {Ending.SUCCEEDED: 0, Ending.STOPPED: EXIT_INTERRUPTED, Ending.FAILED: EXIT_FAILED}


def run(argv: list[str]) -> int:
    """Run until the last step, or until Ctrl-C.

    Returns:
        0 after the last step, 1 if a service failed and was not restarted, 130 after Ctrl-C or SIGTERM.

    Raises:
        ConfigError: if a setting is wrong, a service is not installed, or the run exists and `--resume` is missing.
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
            view.say(describe_resume(directory))
        view.say(f"run {config.run}: starting {len(specs)} services, logs in {logs}")
        _warn_of_crowding(view, places)
        began = time.monotonic()
        outcome = asyncio.run(_supervise(supervisor, view, config))
    _tell(view, outcome, config, time.monotonic() - began)
    return _EXIT_CODES[outcome.ending]


def _warn_of_crowding(view: RunView, places: Mapping[str, Place]) -> None:
    processes, cores = sum(each.processes for each in places.values()), os.cpu_count() or 1
    if processes > cores and not any(each.devices for each in places.values()):
        view.say(
            f"{processes} computing processes share {cores} cores: use fewer (--replicas, trainer.parallel), or expect a slow run",
            "yellow",
        )


def _check(asked: int | None, config: RunConfig) -> list[str]:
    """Refuse settings that would make a service fail, before any is started; return what a dry run says beside them.

    Raises:
        ConfigError: with the remedy.
    """
    missing = [name for name in NEEDED if name not in service_names()]
    if missing:
        raise ConfigError(
            f"`sluice rl` needs the services {', '.join(missing)}, which are not installed: install their packages"
        )
    check_model(config.model)
    replicas = replicas_of(asked, config)
    notes = [line for name in NEEDED for line in config.section(name).check_start(config) or ()]
    check_tables_fit(config)
    TokenCheck(config.security)
    server_credentials(ServerConfig(), config.security)
    _places(config, replicas)
    return notes


def _places(config: RunConfig, replicas: int) -> Mapping[str, Place]:
    return place(config, replica_names(replicas), visible_devices(os.environ))


def _ask_hub(config: RunConfig) -> None:
    """Refuse models that are neither directories nor on the hub, before every service tries to load them."""
    beside = config.section("trainer").models_beside()
    for setting, model in {"model": config.model, **beside}.items():
        check_hub(model, setting)


@contextlib.contextmanager
def _private_settings(config: RunConfig) -> Iterator[Path | None]:
    """Write a settings file with the secrets, which only this user can read; None if there are no secrets."""
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
    """Run the children, and show them."""
    following = view.follow(config.peers.orchestrator, config.security)
    beside = [asyncio.create_task(view.keep_drawing()), asyncio.create_task(following)]
    try:
        return await run_until_signal(supervisor, lambda text: view.say(text, style="yellow"))
    finally:
        for task in beside:
            task.cancel()
        for ended in await asyncio.gather(*beside, return_exceptions=True):
            if isinstance(ended, Exception):
                view.say(f"the live view failed, the run was not affected: {ended!r}", style="red")


def _tell(view: RunView, outcome: Outcome, config: RunConfig, seconds: float) -> None:
    """Print how the run ended."""
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
            view.say(f"full log: {config.run_dir / 'logs' / outcome.child}.log", style="red")


def _what_resume_does(config: RunConfig) -> str:
    """Return what `--resume` would do about a stopped run."""
    checkpoint = newest_checkpoint(config.run_dir)
    if checkpoint:
        return f"--resume continues from {checkpoint}"
    return "it has no checkpoint yet (orchestrator.checkpoint.every_steps): --resume starts at step 0"


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
        help="resume the run if it exists; otherwise start a new one",
    )
    add("--verbose", action="store_true", help="show every log line, not just warnings and errors")
    add("--plain", action="store_true", help="one line per step instead of the live view")
    add(
        "--max-restarts",
        type=whole_number(0),
        default=limits.restarts,
        metavar="N",
        help="most restarts of a service within ten minutes (default: 3)",
    )
    add(
        "--start-deadline",
        type=seconds,
        default=600.0,
        metavar="S",
        help="seconds until a service must serve (default: 600)",
    )
    return parser


COMMAND = Command("rl", "run reinforcement learning: all services as child processes, one live view", run)
