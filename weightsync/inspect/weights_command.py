"""`sluice weights ls|show|verify|diff`: look into the versions of a run, and fetch them as an engine would."""

from __future__ import annotations

import asyncio
from itertools import takewhile

from sluice.config import Command, ConfigError, load_command
from sluice.telemetry import configure_logging
from sluice.versions import Version
from weightsync.config import WeightsConfig

USAGE = """\
usage: sluice weights ls                     versions of a run, and the replicas that follow it
       sluice weights show [VERSION]         one version: digest, shards, encodings; the newest without VERSION
       sluice weights verify [VERSION]       fetch it as an engine does, and compare every byte with its digests
       sluice weights verify --replica HOST:PORT
                                             compare the weights in a replica's memory with the files of their version
       sluice weights diff VERSION VERSION   what changed from one to the other, tensor by tensor

A version is written epoch.number, such as 1.42. Settings, for all of them:

"""


_VERBS = {"ls": (0, 0), "show": (0, 1), "verify": (0, 1), "diff": (2, 2)}
"""Smallest and largest number of versions that each verb takes."""


def run(argv: list[str]) -> int:
    """Run one verb; return 1 if a version is damaged."""
    words = list(takewhile(lambda word: not word.startswith(("-", "@")), argv))
    settings = argv[len(words) :]
    if {"--help", "-h"} & set(settings):
        print(USAGE, end="")  # noqa: T201 - help goes to standard output
        load_command(WeightsConfig, ["--help"], "weights")
    if not words or words[0] not in _VERBS:
        raise ConfigError(f"no action is given: use sluice weights {'|'.join(_VERBS)}; see sluice weights --help")
    least, most = _VERBS[words[0]]
    versions = [_version(word) for word in words[1:]]
    if not least <= len(versions) <= most:
        usual = most if least == most else f"{least} or {most}"
        raise ConfigError(
            f"sluice weights {words[0]} takes {usual} versions, not {len(versions)}; they come before the settings:"
            f" sluice weights {' '.join([words[0], *['1.42'] * most])} --run my-run"
        )
    config = load_command(WeightsConfig, settings, "weights")
    configure_logging("weights", "error")  # errors are printed instead of logged
    from weightsync.inspect.weights_verbs import run_verb  # noqa: PLC0415 - `--help` is fast without grpc and torch

    return asyncio.run(run_verb(words[0], config, versions))


def _version(word: str) -> Version:
    try:
        return Version.parse(word)
    except ValueError as error:
        raise ConfigError(str(error)) from error


COMMAND = Command("weights", "list, show, verify and compare the weight versions of a run", run)
