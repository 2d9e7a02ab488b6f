"""`sluice doctor [RUN_DIRECTORY | @ rl.toml]`: look at the machine, a run's settings and its services, and say what is wrong and what to do."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from sluice.cli.rl import begun_before, check_run
from sluice.config import ConfigError, Options, RunConfig, load_run, service_names
from sluice.config.tables import rollout_of
from sluice.doctor.finding import Finding, State, ok, wrong
from sluice.doctor.machine import check_engine, check_machine
from sluice.doctor.peers import check_peers, peers_of
from sluice.doctor.settings import check_settings
from sluice.engines import ENGINES
from sluice.progress import doing
from sluice.run_files import CONFIG_FILE

_STYLES = {State.OK: "green", State.WARNING: "yellow", State.WRONG: "bold red"}


def run(argv: list[str]) -> int:
    """Look at everything that was asked for, and print what was found.

    Returns:
        0, or 1 if something is wrong.
    """
    parser = Options(
        prog="sluice doctor",
        description=f"{__doc__} Without further words it looks at the machine alone. A directory is that of a run, whose settings it has."
        " Further words are settings, as `sluice rl` takes them.",
    )
    parser.add_argument("--peers", action="store_true", help="ask the services that the settings name (peers), too")
    parser.add_argument(
        "--start",
        nargs="+",
        default=[],
        choices=service_names(),
        metavar="SERVICE",
        help="services that will be started here one by one: their ports must be free",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments, settings = parser.parse_known_args(argv)
    directory, settings = _run_directory(settings)
    found = _findings(settings, arguments.start, directory, peers=arguments.peers)
    with doing("look at this machine and what was named", unit="checks") as step:
        findings = list(step.count(found))
    if arguments.json:
        sys.stdout.write(json.dumps([asdict(each) for each in findings], indent=2) + "\n")
    else:
        _print(findings)
    return int(any(each.state is State.WRONG for each in findings))


def _run_directory(words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the directory of a run that the first word names, None if it names none, and the settings.

    Raises:
        ConfigError: if there is no such directory.
    """
    if not words or words[0].startswith(("-", "@")):
        return None, words
    directory, rest = Path(words[0]), words[1:]
    if not directory.is_dir():
        raise ConfigError(
            f"{directory} is no directory: name that of a run, such as outputs/NAME, or give its settings with @ rl.toml"
        )
    path = directory / CONFIG_FILE
    return directory, ["@", str(path), *rest] if path.is_file() else rest


def _findings(words: list[str], start: list[str], directory: Path | None, *, peers: bool) -> Iterator[Finding]:
    yield from check_machine()
    if not words and not start and not peers and directory is None:
        return
    try:
        config = load_run(words)
    except ConfigError as error:
        yield wrong("settings", str(error), "correct the settings: docs/configuration.md has all of them")
        return
    if words:
        yield _run_starts(config)
        rollout = rollout_of(config)
        if rollout is not None:
            engine = ENGINES[rollout.engine]
            yield check_engine(engine.library, f"`pip install {engine.library}` as docs/rollout.md says")
    yield from check_settings(config, start, directory)
    if peers:
        yield from asyncio.run(check_peers(peers_of(config), config.security))


def _run_starts(config: RunConfig) -> Finding:
    """Make the checks with which `sluice rl` begins."""
    try:
        check_run(config)
    except ConfigError as error:
        return wrong("run", str(error), "`sluice rl ... --dry-run` makes the same checks")
    return ok("run", begun_before(config) or f"`sluice rl` would begin run {config.run}")


def _print(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for each in findings:
        console.print(f"[{_STYLES[each.state]}]{each.state:<8}[/]{each.check:<18}{escape(each.found)}")
        if each.remedy:
            console.print(f"{'':<26}-> {escape(each.remedy)}")
    bad, warned = (sum(each.state is state for each in findings) for state in (State.WRONG, State.WARNING))
    console.print(f"{len(findings)} checks: {bad} wrong, {warned} warnings")
