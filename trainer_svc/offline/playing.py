"""Run `sluice eval` as part of an offline run, to play an environment with a model directory. Imports no torch."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from sluice.config import ConfigError
from sluice.supervise.watchdog import Watchdog
from trainer_svc.offline.config import OfflineConfig

_CHECK_S = 180.0
"""Seconds that the check of an evaluation's settings may take. Most of the time goes into imports."""

_LOOK_S = 1.0
"""Seconds between two checks whether an evaluation has ended. The other ranks take part in each check."""

RESULT = "result.json"
"""File with the result of `sluice eval`."""

_FAULTS = ("missing_rewards", "failed_tasks", "failed_episodes", "truncated_share")
_INTERVALS = ("_stderr", "_low", "_high")

_START_S, _PLAY_S = 600.0, 3600.0
"""Defaults of the settings `start_s` and `deadline_s` of `sluice eval`, after which it ends by itself."""

_OF_TORCHRUN = ("MASTER_", "TORCHELASTIC_", "ROLE_NAME")
_OF_RANKS = ("RANK", "WORLD_SIZE")
"""First and last parts of the names of environment variables that make a process a rank of the trainer."""


class EvaluationFailedError(Exception):
    """`sluice eval` has no result; the message says why."""


def check_evaluation(config: OfflineConfig) -> None:
    """Let `sluice eval` check the settings of the evaluation, before anything is loaded.

    Raises:
        ConfigError: if `sluice eval` refuses the settings.
    """
    if not config.evaluation:
        return
    with tempfile.TemporaryDirectory(prefix="sluice-evaluation-") as directory:
        argv = [*_command(config, config.model, Path(directory)), "--dry-run"]
        try:
            ended = subprocess.run(  # noqa: S603 - our own command
                argv, env=_environment(), capture_output=True, text=True, timeout=_CHECK_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"evaluation: its settings could not be checked within {_CHECK_S:g} s") from error
    if ended.returncode:
        raise ConfigError(f"evaluation: {_reason(ended.stderr)}")


async def play(config: OfflineConfig, model: Path, meanwhile: Callable[[], object]) -> dict[str, float]:
    """Run `sluice eval` with a model directory, and return its results; it ends with this process.

    Args:
        config: The settings of the run, including its evaluation.
        model: The model directory.
        meanwhile: Called every second, so that ranks which wait for this one see that it is alive.

    Raises:
        EvaluationFailedError: if there is no result.
    """
    clock = asyncio.get_running_loop().time
    with tempfile.TemporaryDirectory(prefix="sluice-evaluation-") as name:
        directory = Path(name)
        said = directory / "output"
        watchdog = await Watchdog.start()
        try:
            with said.open("wb") as output:
                argv = _command(config, str(model), directory)
                child = await watchdog.start_child(argv, stdout=output, stderr=output, environment=_environment())
            ends = clock() + _deadline(config.evaluation)
            while child.returncode is None:
                meanwhile()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await child.wait()
                except TimeoutError:
                    if clock() > ends:
                        raise EvaluationFailedError("`sluice eval` did not end within its deadlines") from None
            watchdog.note("-", child.pid)
        finally:
            await watchdog.stop()
        try:
            written = json.loads((directory / RESULT).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = _reason(said.read_text(encoding="utf-8", errors="replace"))
            raise EvaluationFailedError(f"`sluice eval` ended with code {child.returncode}: {reason}") from error
    return mean_results([each["metrics"] for each in written.get("results", [written])])


def shown(results: Mapping[str, float]) -> str:
    """Return results as text, without the bounds of intervals, and without faults (`_FAULTS`) that are 0."""
    return "".join(
        f"  {name} {value:.4f}"
        for name, value in results.items()
        if not name.endswith(_INTERVALS) and name != "pass_at_1" and (value or name not in _FAULTS)
    )


def mean_results(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the results that all environments have, as means over the environments."""
    common = [name for name in results[0] if all(name in each for each in results)]
    return {name: math.fsum(each[name] for each in results) / len(results) for name in common}


def _command(config: OfflineConfig, model: str, directory: Path) -> list[str]:
    """Write the settings of the evaluation to `directory`, and return the command that plays the environment with a model."""
    settings: dict[str, Any] = {"engine": "transformers", "chat_template_kwargs": config.chat_template_kwargs}
    if config.chat_template is not None:
        settings["chat_template"] = str(config.chat_template.absolute())
    settings |= config.evaluation
    if settings["engine"] == "transformers" and config.device != "auto":
        settings["rollout"] = {"device": config.device, **settings.get("rollout", {})}
    path = directory / "eval.toml"
    path.write_text(
        tomli_w.dumps({name: value for name, value in settings.items() if value is not None}), encoding="utf-8"
    )
    argv = [sys.executable, "-m", "sluice.cli.main", "eval", "@", str(path)]
    return [*argv, "--model", model, "--output", str(directory / RESULT)]


def _environment() -> dict[str, str]:
    """Return the environment variables of this process without those that make it a rank of the trainer."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_TORCHRUN) and not name.endswith(_OF_RANKS)
    }


def _deadline(evaluation: Mapping[str, Any]) -> float:
    """Return the seconds after which `sluice eval` ends by itself, unless it hangs."""
    each = 3 * float(evaluation.get("start_s", _START_S)) + float(evaluation.get("deadline_s", _PLAY_S))
    return each * max(1, len(evaluation.get("environments", ())))


def _reason(output: str) -> str:
    """Return the last line of a command's output."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].removeprefix("sluice: ") if lines else "it said nothing"
