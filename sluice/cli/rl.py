"""`sluice rl @ rl.toml`: run reinforcement learning with all services as child processes, and show the run.

The run's directory ``outputs/<run>`` is locked by one process at a time, and never overwritten by another run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console

from sluice import host_files
from sluice.checkpoint_files import complete_checkpoints
from sluice.cli.live_view import RunView
from sluice.config import (
    ConfigError,
    Options,
    RunConfig,
    ServerConfig,
    check_tables_fit,
    dump_toml,
    find_command,
    load_run,
    seconds,
    service_names,
    whole_number,
)
from sluice.config.decide import visible_devices
from sluice.models import check_hub, check_model
from sluice.rpc.access import Access, server_credentials
from sluice.rpc.principals import new_token, replace_private
from sluice.rpc.server import LOOPBACK
from sluice.supervise.plan import (
    Place,
    agent_names,
    assign_devices,
    child_specs,
    choose_addresses,
    has_external_agents,
    replica_names,
    replicas_of,
)
from sluice.supervise.supervisor import MAX_RESTARTS, Ending, Outcome, Supervisor, run_until_signal

NEEDED = ("orchestrator", "rollout", "trainer", "weightsync")
"""The services of a run."""

CONFIG_FILE = "config.toml"
LOCK_FILE = ".lock"
JOURNAL_FILE = "journal.sqlite"
"""Written by the orchestrator. A run without it never began, for example because its settings were wrong."""

EXIT_INTERRUPTED = 130
_EXIT_CODES = {Ending.SUCCEEDED: 0, Ending.STOPPED: EXIT_INTERRUPTED, Ending.FAILED: 1}


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
    config = load_run(settings, check=partial(check_run, options.replicas))
    for setting, model in {"model": config.model, **config.section("trainer").models_beside()}.items():
        check_hub(model, setting)  # once, before every service tries to load it
    replicas = replicas_of(options.replicas, config)
    addresses, places = choose_addresses(config, replicas), _places(config, replicas)
    config = config.model_copy(update={"peers": addresses.peers()})
    if options.resume_from:
        fork(config, options.resume_from, resume=options.resume)
    resume = options.resume or bool(options.resume_from)
    with claim(config, resume=resume) as directory, _private_settings(config) as private:
        public = write_settings(config)
        file, logs = private or public, directory / "logs"
        specs = child_specs(config, addresses, file, logs, threads=options.threads, places=places)
        console = Console()
        view = RunView(config.run, console, live=console.is_terminal and not options.plain, verbose=options.verbose)
        supervisor = Supervisor(specs, view, max_restarts=options.max_restarts, start_deadline_s=options.start_deadline)
        if resume:
            view.say(describe_resume(directory))
        view.say(f"run {config.run}: starting {len(specs)} services, logs in {logs}")
        if "gateway" in addresses.http:
            host, http, grpc = LOOPBACK, addresses.http["gateway"], addresses.grpc["gateway"]
            view.say(f"agents open sessions at http://{host}:{http} (POST /rl/sessions) or by gRPC at {host}:{grpc}")
        _warn_of_crowding(view, places)
        began = time.monotonic()
        outcome = asyncio.run(_supervise(supervisor, view, config))
    _report_outcome(view, outcome, config, time.monotonic() - began)
    return _EXIT_CODES[outcome.ending]


def check_run(replicas_flag: int | None, config: RunConfig) -> list[str]:
    """Refuse settings that would make a service fail, before any is started; return the further lines of a dry run."""
    needed = [
        *NEEDED,
        *(["gateway"] if has_external_agents(config) else []),
        *(["agents"] if agent_names(config) else []),
    ]
    missing = [name for name in needed if name not in service_names()]
    if missing:
        raise ConfigError(
            f"`sluice rl` needs the services {', '.join(missing)}, which are not installed: install their packages"
        )
    check_model(config.model)
    replicas = replicas_of(replicas_flag, config)
    if config.deterministic and replicas > 1:
        raise ConfigError(f"deterministic = true needs one replica, but --replicas is {replicas}: leave it out")
    notes = [line for name in needed for line in config.section(name).check_start(config) or ()]
    check_tables_fit(config)
    Access(config.security)
    server_credentials(ServerConfig(), config.security)
    _places(config, replicas)
    return notes


def _places(config: RunConfig, replicas: int) -> Mapping[str, Place]:
    return assign_devices(config, replica_names(replicas), visible_devices(os.environ))


def fork(run: RunConfig, checkpoint: str, *, resume: bool) -> None:
    """Make the run's directory from a checkpoint of another run. With `resume`, a run that was forked before continues.

    Raises:
        ConfigError: if that checkpoint is not whole, or the run exists and `resume` is False.
    """
    if resume and (run.run_dir / JOURNAL_FILE).exists():
        return
    command = find_command("fork")
    if command is None:
        raise ConfigError("--resume-from needs the orchestrator, which is not installed: install its package")
    command.run([checkpoint, run.run, "--output-dir", str(run.output_dir)])


@contextlib.contextmanager
def claim(run: RunConfig, *, resume: bool) -> Iterator[Path]:
    """Lock the run's directory while the block lasts. With `resume` the run may exist; otherwise it must not have begun.

    Raises:
        ConfigError: if the run exists and `resume` is False, or another process runs it.
    """
    directory = run.run_dir
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}; choose another --output-dir") from error
    with _locked(directory) as locked:
        if not locked:
            raise ConfigError(
                f"another process runs {run.run!r} in {directory}: stop it, or choose another name with --run NAME"
            )
        if (directory / JOURNAL_FILE).exists() and not resume:
            raise ConfigError(
                f"run {run.run!r} exists in {directory}: continue it with --resume, or choose another with --run NAME"
            )
        yield directory


def is_held(directory: Path) -> bool:
    """Return whether a process holds the run in this directory.

    Raises:
        ConfigError: if the lock file cannot be opened.
    """
    if not os.path.lexists(directory / LOCK_FILE):
        return False
    with _locked(directory) as locked:
        return not locked


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock a run while the block lasts; False if another process holds it."""
    path = directory / LOCK_FILE
    try:
        lock = host_files.open_private(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ConfigError(f"cannot open the lock {path}: {error.strerror}; choose another --output-dir") from error
    try:
        yield host_files.lock_now(lock, fcntl.LOCK_EX)
    finally:
        host_files.close(lock)


def write_settings(run: RunConfig) -> Path:
    """Write the resolved settings to the run's directory, without secrets, and return the file."""
    path = run.run_dir / CONFIG_FILE
    host_files.write_whole(path, dump_toml(run))
    return path


@contextlib.contextmanager
def _private_settings(config: RunConfig) -> Iterator[Path | None]:
    """Write a settings file with the secrets, which only this user can read; None if there are no secrets.

    If the services have principals, one secret is made here: the token with which the orchestrator calls the replicas.
    """
    security = config.security
    makes_token = security.dispatcher_token_file is None and not Access(security).open
    if not makes_token and dump_toml(config, redacted=False) == dump_toml(config):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="sluice-") as name:
        directory = Path(name)
        if makes_token:
            token = directory / "dispatcher.token"
            replace_private(token, new_token().encode())
            config = config.model_copy(
                update={"security": security.model_copy(update={"dispatcher_token_file": token})}
            )
        settings = directory / "settings.toml"
        replace_private(settings, dump_toml(config, redacted=False).encode())
        yield settings


def newest_checkpoint(directory: Path) -> str:
    """Return the name of a run's newest complete checkpoint, such as ``step_50``; empty without one."""
    return next((each.checkpoint.name for each in complete_checkpoints(directory / "checkpoints")), "")


def describe_resume(directory: Path) -> str:
    """Return where `--resume` starts, for people."""
    if not (directory / JOURNAL_FILE).exists():
        return f"there is no run in {directory} to resume: starting a new one"
    checkpoint = newest_checkpoint(directory)
    if not checkpoint:
        return f"the run in {directory} has no checkpoint: training starts at step 0"
    return f"resuming from {checkpoint} of {directory}"


def _warn_of_crowding(view: RunView, places: Mapping[str, Place]) -> None:
    processes, cores = sum(each.processes for each in places.values()), os.cpu_count() or 1
    if processes > cores and not any(each.devices for each in places.values()):
        view.say(
            f"{processes} computing processes share {cores} cores: use fewer (--replicas, trainer.parallel), or expect a slow run",
            "yellow",
        )


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


def _report_outcome(view: RunView, outcome: Outcome, config: RunConfig, seconds: float) -> None:
    """Print how the run ended."""
    done = f"{view.progress.applied} steps in {seconds:.1f} s"
    match outcome.ending:
        case Ending.SUCCEEDED:
            view.say(f"run {config.run} done: {done}; results in {config.run_dir}", style="green")
        case Ending.STOPPED:
            checkpoint = newest_checkpoint(config.run_dir)
            resume = "it has no checkpoint yet (orchestrator.checkpoint.every_steps): --resume starts at step 0"
            if checkpoint:
                resume = f"--resume continues from {checkpoint}"
            view.say(f"run {config.run} stopped after {done}; {resume}", style="yellow")
        case Ending.FAILED:
            view.say(f"run {config.run} failed after {done}: {outcome.child} {outcome.reason}", style="bold red")
            for line in outcome.tail:
                view.say(f"{outcome.child:>12} | {line}", style="red")
            view.say(f"full log: {config.run_dir / 'logs' / outcome.child}.log", style="red")


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice rl",
        usage="sluice rl @ rl.toml [--trainer @ trainer.toml ...] [--key value ...] [options]",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--replicas", type=whole_number(1), help="rollout processes (default: as many as peers.rollout names)")
    add("--threads", type=whole_number(1), help="threads per trainer and rollout process (default: the cores, divided)")
    add("--resume", action="store_true", help="resume the run if it exists; otherwise start a new one")
    add(
        "--resume-from",
        metavar="RUN/step_N",
        help="begin this run (--run NAME) from a checkpoint of another one; with --resume, continue if that was done before",
    )
    add("--verbose", action="store_true", help="show every log line, not just warnings and errors")
    add("--plain", action="store_true", help="one line per step instead of the live view")
    add(
        "--max-restarts",
        type=whole_number(0),
        default=MAX_RESTARTS,
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
