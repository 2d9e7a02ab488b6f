"""`sluice training-api @ tuner.toml`: start the services of the training API on this machine, for training loops of yours.

Weight service, replicas and tuner are child processes, as those of `sluice rl` are: the same restarts, drain and logs. Only the tuner
has the port of its settings, which callers must know.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from functools import partial
from typing import Any

from rich.console import Console

from sluice.cli.live_view import RunView
from sluice.cli.plan_options import add_plan_options, plan_with
from sluice.cli.rl import (
    EXIT_CODES,
    claim,
    listed_metrics,
    metrics_file,
    private_settings,
    report_failure,
    run_on_free_ports,
    write_settings,
)
from sluice.config import ConfigError, Options, RunConfig, load_run, service_names
from sluice.config.decide import visible_devices
from sluice.plan import Plan, Purpose
from sluice.plan.local import child_specs, known_host, this_machine
from sluice.rpc.access import Access
from sluice.rpc.tls import pem_files
from sluice.run_files import JOURNAL_FILE
from sluice.supervise.supervisor import Ending, Outcome, Supervisor, run_until_signal


def run(argv: list[str]) -> int:
    """Serve until Ctrl-C or SIGTERM.

    Returns:
        130 after a signal, 1 if a service failed and was not restarted.

    Raises:
        ConfigError: if a setting is wrong, a service is not installed, or the directory belongs to a run of `sluice rl`.
    """
    parser = _parser()
    if {"--help", "-h"} & set(argv):
        print(parser.format_help())
    options, settings = parser.parse_known_args(argv)
    config = load_run(settings, check=lambda config: _check(config, _plan(config, options)))
    if (config.run_dir / JOURNAL_FILE).exists():
        raise ConfigError(f"{config.run_dir} holds a run of `sluice rl`: choose another name with --run NAME")
    with claim(config, resume=False) as directory:
        view = RunView(config.run, Console(), live=False, verbose=options.verbose)
        began = time.monotonic()
        outcome = run_on_free_ports(_plan(config, options), config, view, partial(_run_once, options, view))
    if outcome.ending is Ending.FAILED:
        report_failure(view, outcome, "failed", directory / "logs")
    else:
        trainings = directory / "trainings"
        view.say(f"stopped after {time.monotonic() - began:.1f} s; trainings are saved in {trainings}", style="yellow")
    return EXIT_CODES[outcome.ending]


def _run_once(options: argparse.Namespace, view: RunView, plan: Plan, config: RunConfig) -> Outcome:
    """Run all services on the ports of the plan."""
    with private_settings(config) as private, listed_metrics(plan, config) as listed:
        public = write_settings(config)
        file, logs = private or public, config.run_dir / "logs"
        devices, own_threads = visible_devices(os.environ), options.threads is not None
        specs = child_specs(plan, config, file, logs, devices=devices, own_threads=own_threads)
        supervisor = Supervisor(specs, view, max_restarts=plan.most_restarts)
        view.say(f"starting {len(specs)} services, logs in {logs}")
        if listed:
            view.say(f"metrics of {listed} services: {metrics_file(config)} names their ports for Prometheus")
        view.say(f"callers reach the training API at {known_host(config, 'tuner')}:{plan.place('tuner').port()}")
        return asyncio.run(run_until_signal(supervisor, lambda text: view.say(text, style="yellow")))


def _plan(config: RunConfig, options: argparse.Namespace) -> Plan:
    return plan_with(options, config, this_machine(visible_devices(os.environ)), Purpose.TRAINING_API)


def _check(config: RunConfig, plan: Plan) -> list[str]:
    """Refuse settings that would make a service fail, before any service is started. Return further lines for a dry run."""
    missing = sorted({each.service for each in plan.parts} - set(service_names()))
    if missing:
        raise ConfigError(
            f"the training API needs {', '.join(missing)}, which are not installed: install their packages"
        )
    rank, lora = _table(config, "tuner").lora.rank, _table(config, "rollout").lora
    if not lora.enabled or lora.max_rank < rank:
        raise ConfigError(
            f"the replicas must serve the adapters of the tuner: set rollout.lora.enabled to true and rollout.lora.max_rank to"
            f" {rank} (tuner.lora.rank) or more"
        )
    Access(config.security)
    pem_files(config.security)
    return [line for each in plan.parts for line in config.section(each.service).check_start(config) or ()]


def _table(config: RunConfig, service: str) -> Any:  # noqa: ANN401 - a table of a package that this one does not import
    return config.section(service)


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice training-api",
        usage="sluice training-api @ tuner.toml --model MODEL [--key value ...] [options]",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
    )
    add_plan_options(parser)
    parser.add_argument("--verbose", action="store_true", help="show every log line, not just warnings and errors")
    return parser
