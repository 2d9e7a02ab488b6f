"""`sluice rl @ rl.toml`: run reinforcement learning with all services as child processes, and show the run.

The run's directory ``outputs/<run>`` is locked by one process at a time, and never overwritten by another run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from sluice import host_files
from sluice.checkpoint_files import complete_checkpoints
from sluice.cli.live_view import RunView, finding_style
from sluice.cli.plan_options import add_plan_options, arranging, plan_with
from sluice.config import (
    ConfigError,
    Options,
    RunConfig,
    check_tables_fit,
    dump_toml,
    find_command,
    load_run,
    service_names,
)
from sluice.config.decide import visible_devices
from sluice.models import check_hub, check_model
from sluice.plan import Plan, make_plan
from sluice.plan.local import (
    child_specs,
    free_names,
    known_host,
    local_peers,
    metrics_targets,
    on_free_ports,
    this_machine,
    unused_ports,
)
from sluice.plan.plan import COMPUTES
from sluice.rpc.access import Access
from sluice.rpc.principals import new_token, replace_private
from sluice.rpc.tls import pem_files
from sluice.run_files import CONFIG_FILE, JOURNAL_FILE, REPORT_FILE, locked
from sluice.supervise.restart_policy import EXIT_SET_ASIDE
from sluice.supervise.supervisor import STOP_MARGIN_S, Ending, Outcome, Supervisor, run_until_signal
from sluice.watch.estimate import estimate
from sluice.watch.files import watch_of

METRICS_SUFFIX = ".metrics_targets.json"
"""Suffix of the file that lists the metrics addresses of a live run's services, for `file_sd_configs` of Prometheus. The file lies next to
the run's directory, since Prometheus accepts patterns of file names but not of directories."""

_MOST_ATTEMPTS = 3
"""Most attempts to start a run if other programs take its ports."""

EXIT_INTERRUPTED = 130
EXIT_CODES = {Ending.SUCCEEDED: 0, Ending.STOPPED: EXIT_INTERRUPTED, Ending.FAILED: 1}
"""Exit code of the command by the end of the run."""


def run(argv: list[str]) -> int:
    """Run until the last step, or until Ctrl-C.

    Returns:
        0 after the last step, or if a resumed run has nothing left to do; 1 if a service failed and was not restarted; 130 after Ctrl-C or
        SIGTERM.

    Raises:
        ConfigError: if a setting is wrong, a service is not installed, or the run exists and `--resume` is missing.
    """
    parser = _parser()
    if {"--help", "-h"} & set(argv):
        print(parser.format_help())
    options, settings = parser.parse_known_args(argv)
    resume = options.resume or bool(options.resume_from)
    notes: list[str] = []
    config = load_run(
        settings,
        arrange=arranging(options, this_machine(visible_devices(os.environ)), notes=notes),
        check=lambda config: _check(config, _plan(config, options), resume=resume),
    )
    for setting, model in {"model": config.model, **config.section("trainer").models_beside()}.items():
        check_hub(model, setting)  # once, before every service tries to load it
    if options.resume_from:
        fork(config, options.resume_from, resume=options.resume)
    with claim(config, resume=resume) as directory:
        console = Console()
        view = view_of(config, console, live=console.is_terminal and not options.plain, verbose=options.verbose)
        if resume:
            if done := describe_finished(config):
                view.say(done, style="green")
                return 0
            view.say(describe_resume(directory))
        for line in notes:
            view.say(f"decided: {line}")
        for line in _unused(_plan(config, options), config):
            view.say(line, style="yellow")
        view.say(f"estimate: {estimate(config)}")
        began = time.monotonic()
        outcome = run_on_free_ports(_plan(config, options), config, view, partial(_run_once, options, view))
    report_outcome(view, outcome, config, time.monotonic() - began)
    return EXIT_SET_ASIDE if outcome.set_aside else EXIT_CODES[outcome.ending]


def view_of(config: RunConfig, console: Console, *, live: bool, verbose: bool) -> RunView:
    """Return the view of a run, with the steps that earlier processes of the run made."""
    return RunView(config.run, console, live=live, verbose=verbose, watch=watch_of(config), run_dir=config.run_dir)


def _check(config: RunConfig, plan: Plan, *, resume: bool) -> list[str]:
    """Make the checks of a run on this machine, and return further lines for a dry run.

    Raises:
        ConfigError: if a check fails.
    """
    notes = [*check_run(config, plan), *_unused(plan, config), f"estimate: {estimate(config)}"]
    check_begins(config, resume=resume)
    return notes


def _unused(plan: Plan, config: RunConfig) -> list[str]:
    """Return one line for each port of the settings that is not used, and one for devices that are idle."""
    return [*unused_ports(plan, config), *filter(None, [plan.idle])]


def run_on_free_ports(
    plan: Plan, config: RunConfig, view: RunView, run_once: Callable[[Plan, RunConfig], Outcome]
) -> Outcome:
    """Run a plan on free ports. If another program takes a port before the service listens there, start again on other ports."""
    for attempts_left in reversed(range(_MOST_ATTEMPTS)):
        placed = on_free_ports(plan, config)
        outcome = run_once(placed, config.model_copy(update={"peers": local_peers(placed, config)}))
        if not attempts_left or not outcome.cannot_bind or not free_names(placed.place(outcome.child), config):
            break
        view.say(
            f"{outcome.child} cannot listen: another program took its port; starting all again on others", "yellow"
        )
    return outcome


def _run_once(options: argparse.Namespace, view: RunView, plan: Plan, config: RunConfig) -> Outcome:
    """Run all services on the ports of the plan."""
    with private_settings(config) as private, listed_metrics(plan, config) as listed:
        public = write_settings(config)
        file, logs = private or public, config.run_dir / "logs"
        devices, own_threads = visible_devices(os.environ), options.threads is not None
        specs = child_specs(plan, config, file, logs, devices=devices, own_threads=own_threads)
        supervisor = Supervisor(
            specs, view, max_restarts=plan.most_restarts, orphan_grace_s=plan.drain_s + STOP_MARGIN_S
        )
        view.say(f"run {config.run}: starting {len(specs)} services, logs in {logs}")
        if listed:
            view.say(f"metrics of {listed} services: {metrics_file(config)} names their ports for Prometheus")
        if plan.has("gateway"):
            host, ports = known_host(config, "gateway"), plan.place("gateway")
            http, grpc = f"{host}:{ports.port('http')}", f"{host}:{ports.port()}"
            view.say(f"agents open sessions at http://{http} (POST /rl/sessions) or by gRPC at {grpc}")
        _warn_of_crowding(view, plan)
        return asyncio.run(supervise(supervisor, view, config))


def _plan(config: RunConfig, options: argparse.Namespace) -> Plan:
    return plan_with(options, config, this_machine(visible_devices(os.environ)))


def check_run(config: RunConfig, plan: Plan | None = None) -> list[str]:
    """Refuse settings that would make a service fail, before any service is started. Return further lines for a dry run.

    Without `plan`, check the plan that `sluice rl` makes without flags.
    """
    plan = plan or make_plan(config, this_machine(visible_devices(os.environ)))
    needed = sorted({each.service for each in plan.parts})
    missing = [name for name in needed if name not in service_names()]
    if missing:
        raise ConfigError(
            f"`sluice rl` needs the services {', '.join(missing)}, which are not installed: install their packages"
        )
    check_model(config.model)
    if config.deterministic and plan.part("rollout").count > 1:
        raise ConfigError(
            f"deterministic = true needs one replica, but --replicas is {plan.part('rollout').count}: leave it out"
        )
    notes = [line for name in needed for line in config.section(name).check_start(config) or ()]
    check_tables_fit(config)
    Access(config.security)
    pem_files(config.security)
    return notes


def fork(run: RunConfig, checkpoint: str, *, resume: bool) -> None:
    """Make the run's directory from a checkpoint of another run. With `resume`, a run that was forked before continues.

    Raises:
        ConfigError: if that checkpoint is incomplete, or the run exists and `resume` is False.
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
    with locked(directory) as is_ours:
        if not is_ours:
            raise ConfigError(
                f"another process runs {run.run!r} in {directory}: stop it, or choose another name with --run NAME"
            )
        check_begins(run, resume=resume)
        yield directory


def check_begins(run: RunConfig, *, resume: bool) -> None:
    """Refuse a run that exists, unless it is to be resumed.

    Raises:
        ConfigError: with both remedies.
    """
    if (begun := begun_before(run)) and not resume:
        raise ConfigError(begun)


def begun_before(run: RunConfig) -> str:
    """Return what to do about a run that exists; empty if it has not begun."""
    if not (run.run_dir / JOURNAL_FILE).exists():
        return ""
    return f"run {run.run!r} exists in {run.run_dir}: continue it with --resume, or choose another with --run NAME"


def write_settings(run: RunConfig) -> Path:
    """Write the resolved settings to the run's directory, without secrets, and return the file."""
    path = run.run_dir / CONFIG_FILE
    host_files.write_whole(path, dump_toml(run))
    return path


def metrics_file(run: RunConfig) -> Path:
    """Return the path of the file with the metrics addresses of a live run, for Prometheus."""
    return run.output_dir / f"{run.run}{METRICS_SUFFIX}"


@contextlib.contextmanager
def listed_metrics(plan: Plan, run: RunConfig) -> Iterator[int]:
    """While the block lasts, list the metrics addresses of the services for Prometheus. Yield their number."""
    path, targets = metrics_file(run), metrics_targets(plan, run)
    if targets:
        host_files.write_whole(path, json.dumps(targets, indent=1) + "\n")
    try:
        yield len(targets)
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def private_settings(config: RunConfig) -> Iterator[Path | None]:
    """Write a settings file with the secrets, which only this user can read. Yield its path, or None if there are no secrets.

    If the services have principals and no dispatcher's token is set, make the token with which the orchestrator calls the replicas.
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


def describe_finished(config: RunConfig) -> str:
    """Return a text for people that a run has nothing left to do; empty if `--resume` has to start it.

    There is work left if the run did not succeed, the settings ask for more steps, or its last checkpoint is missing.
    """
    try:
        report = json.loads((config.run_dir / REPORT_FILE).read_text(encoding="utf-8"))
        succeeded, steps = report["state"] == "succeeded", int(report["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    settings: Any = config.section("orchestrator")
    saved = int(newest_checkpoint(config.run_dir).removeprefix("step_") or 0)
    if not succeeded or steps < settings.max_steps or (settings.checkpoint.final and saved < steps):
        return ""
    return (
        f"run {config.run} has made {steps} steps, and orchestrator.max_steps is {settings.max_steps}: nothing is left to do, and"
        f" nothing was started; results in {config.run_dir}. To train on, resume with a greater --orchestrator.max-steps"
    )


def describe_resume(directory: Path) -> str:
    """Return where `--resume` starts, for people."""
    if not (directory / JOURNAL_FILE).exists():
        return f"there is no run in {directory} to resume: starting a new one"
    checkpoint = newest_checkpoint(directory)
    if not checkpoint:
        return f"the run in {directory} has no checkpoint: training starts at step 0"
    return f"resuming from {checkpoint} of {directory}"


def _warn_of_crowding(view: RunView, plan: Plan) -> None:
    computing = [plan.part(each.part) for each in plan.places if each.part in COMPUTES]
    processes, cores = sum(each.processes for each in computing), os.cpu_count() or 1
    if processes > cores and not any(each.devices for each in computing):
        view.say(
            f"{processes} computing processes share {cores} cores: use fewer (--replicas, trainer.parallel), or expect a slow run",
            "yellow",
        )


async def supervise(supervisor: Supervisor, view: RunView, config: RunConfig) -> Outcome:
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


def report_outcome(view: RunView, outcome: Outcome, config: RunConfig, seconds: float) -> None:
    """Print how the run ended."""
    done = f"{view.progress.applied} steps in {seconds:.1f} s"
    match outcome.ending:
        case Ending.SUCCEEDED:
            view.watch.end(time.time())
            found = view.watch.active
            for finding in found:
                view.tell(finding)
            but = f", but look at {', '.join(each.rule.name for each in found)} above" if found else ""
            style = finding_style(any(each.broken for each in found)) if found else "green"
            view.say(f"run {config.run} done: {done}{but}; results in {config.run_dir}", style=style)
        case Ending.STOPPED:
            checkpoint = newest_checkpoint(config.run_dir)
            resume = "it has no checkpoint yet (orchestrator.checkpoint.every_steps): --resume starts at step 0"
            if checkpoint:
                resume = f"--resume continues from {checkpoint}"
            view.say(f"run {config.run} stopped after {done}; {resume}", style="yellow")
        case Ending.FAILED:
            report_failure(view, outcome, f"run {config.run} failed after {done}", config.run_dir / "logs")


def report_failure(view: RunView, outcome: Outcome, what: str, logs: Path) -> None:
    """Print which child failed and why, with its last lines and its log."""
    view.say(f"{what}: {outcome.child} {outcome.reason}", style="bold red")
    refused = outcome.tail[-1:] if outcome.tail and outcome.tail[-1].startswith("sluice: ") else ()
    for line in refused or outcome.tail:
        view.say(f"{outcome.child:>12} | {line}", style="red")
    view.say(f"full log: {logs / outcome.child}.log", style="red")


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice rl",
        usage="sluice rl @ rl.toml [--trainer @ trainer.toml ...] [--key value ...] [options]",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_plan_options(parser, ("gateway",))
    add("--verbose", action="store_true", help="show every log line, not just warnings and errors")
    add("--resume", action="store_true", help="resume the run if it exists; otherwise start a new one")
    add(
        "--resume-from",
        metavar="RUN/step_N",
        help="begin this run (--run NAME) from a checkpoint of another one; with --resume, continue if that was done before",
    )
    add("--plain", action="store_true", help="one line per step instead of the live view")
    return parser
