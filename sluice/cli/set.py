"""`sluice set`: change settings of a run while it lives."""

from __future__ import annotations

import asyncio
import sys

from sluice.cli.rl import CONFIG_FILE
from sluice.client import OrchestratorClient
from sluice.config import ConfigError, Options, RunConfig, load_run
from sluice.rpc import SluiceError


def run(argv: list[str]) -> int:
    """Run the command; exit code 1 if the orchestrator refused or did not answer.

    Raises:
        ConfigError: if there is no such run, or the words are no settings.
    """
    parser = Options(
        prog="sluice set",
        description="Change settings of a run while it lives, all of them or none (docs/live-settings.md). After them: settings"
        " of this command, such as `--output-dir DIR`, where the run is, or `--security.token-file FILE`.",
    )
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument(
        "values", metavar="KEY=VALUE", nargs="+", help="a setting and its value, such as trainer.lr=5e-7"
    )
    own = next((place for place, word in enumerate(argv) if word.startswith(("--", "@"))), len(argv))
    if "--help" in argv:
        own = len(argv)
    arguments = parser.parse_args(argv[:own])
    values: dict[str, str] = {}
    for word in arguments.values:
        key, equals, value = word.partition("=")
        if not equals or key in values:
            raise ConfigError(f"{word!r}: write KEY=VALUE, each key once, such as trainer.lr=5e-7")
        values[key.strip()] = value.strip()
    return asyncio.run(_set(_settings_of(arguments.run, argv[own:]), arguments.run, values))


def _settings_of(name: str, settings: list[str]) -> RunConfig:
    """Return the settings of a run as its directory has them, with those of this command over them.

    Raises:
        ConfigError: if there is no such run here, and no address of its orchestrator is given either.
    """
    given = load_run(settings)
    path = given.output_dir / name / CONFIG_FILE
    if path.is_file():
        return load_run(["@", str(path), *settings])
    if "orchestrator" in given.peers.model_fields_set:
        return given
    raise ConfigError(
        f"there is no run {name!r} in {given.output_dir}: name its directory with --output-dir DIR, or its orchestrator with"
        " --peers.orchestrator HOST:PORT"
    )


async def _set(config: RunConfig, name: str, values: dict[str, str]) -> int:
    target = config.peers.orchestrator
    try:
        async with OrchestratorClient(target, config.security) as orchestrator:
            changed = await orchestrator.set(name, values)
    except SluiceError as error:
        print(f"sluice: the orchestrator at {target} says: {error}", file=sys.stderr)
        return 1
    for each in changed:
        print(
            f"{each.key}: {each.old_value or 'as started'} -> {each.new_value}, from batch {each.from_sequence_no} on"
        )
    if not changed:
        print("nothing changed: the run has these values")
    return 0
