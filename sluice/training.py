"""`sluice.train`: a run from a script. It starts the services, waits for the end, and returns the result."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

from sluice.errors import ConfigError
from sluice.host_files import write_whole
from sluice.loading import STARTED_BY, ScriptEndedError
from sluice.supervise.log_records import original
from sluice.supervise.restart_policy import EXIT_CONFIG

_SAYS = "sluice: "
"""Prefix of the message of a command that refuses its settings."""

_LINES_KEPT = 50
"""Number of last lines of an output to search for that message."""

_COPY_S = 5.0
"""Seconds to copy the end of a run's output. The wait is bounded because a process that the run left behind may keep the output open."""

Reward: TypeAlias = "Callable[..., Sequence[float | None]] | str"


class TrainingFailedError(Exception):
    """A run did not reach its end. The message has the exit code, the reason as far as it is known, and where the logs are, if any."""


@dataclass(frozen=True)
class TrainedRun:
    """A run that reached its end.

    Attributes:
        directory: The run's directory, with all of its files.
        model: The trained weights, a Hugging Face directory.
        report: What `sluice report` summarises.
        metrics: One mapping for each step.
    """

    directory: Path
    model: Path
    report: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each step."""
        return [float(each["reward/mean"]) for each in self.metrics if "reward/mean" in each]


def train(
    model: str | Path,
    dataset: str | Path | Iterable[Mapping[str, Any]] = "",
    reward_funcs: Reward | Sequence[Reward] = (),
    *,
    reward_weights: Sequence[float] | None = None,
    environment_factory: type | str = "",
    environment: str = "",
    environment_args: Mapping[str, Any] | None = None,
    run: str = "train",
    output_dir: str | Path = "outputs",
    settings: Mapping[str, Any] | None = None,
) -> TrainedRun:
    """Train a model by RL, as `sluice rl` does, and wait for the end of the run.

    Args:
        model: Hugging Face directory or hub id.
        dataset: Rows with a column `prompt`, which is a text or messages: a JSONL or Parquet file, a directory, a hub id, or the rows
            themselves, such as a `Dataset` or a list.
        reward_funcs: One or several functions as TRL's GRPOTrainer takes them: they get `prompts`, `completions` and each other column
            as a list, and return a number or None for each completion. They run in processes of their own. These execute the file
            that defines the functions only up to the call of `train`, so everything that the functions need must stand above it.
        reward_weights: Factor of each reward in their sum.
        environment_factory: Class whose public methods are tools, as TRL takes it.
        environment: Any other environment, as `orchestrator.environment`.
        environment_args: Its keyword arguments.
        run: Name of the run.
        output_dir: Holds the runs.
        settings: Further settings by their names, nested or dotted: ``{"trainer.lr": 1e-5, "orchestrator": {"max_steps": 100}}``.

    Raises:
        ConfigError: if an argument or a setting cannot be used.
        TrainingFailedError: if the run fails.
        KeyboardInterrupt: on Ctrl-C; the run can be continued with ``settings={"resume": True}``.
    """
    if os.environ.get(STARTED_BY):
        raise ScriptEndedError  # a process of the environment executes the script, and needs only the definitions above this call
    output = Path(output_dir)
    if environment and (dataset or reward_funcs or environment_factory):
        raise ConfigError(
            "give either environment with environment_args, or dataset, reward_funcs and environment_factory"
        )
    given = dict(environment_args or {})
    if not environment:
        environment = "trl"
        functions = [reward_funcs] if callable(reward_funcs) or isinstance(reward_funcs, str) else list(reward_funcs)
        found = {
            "dataset": str(dataset) if isinstance(dataset, str | Path) else str(_written(dataset, output)),
            "reward_funcs": [_location(each) for each in functions],
            "reward_weights": None if reward_weights is None else list(reward_weights),
            "environment_factory": _location(environment_factory),
            "argv": sys.argv,
        }
        given |= {name: value for name, value in found.items() if value}
    words = {
        "run": run,
        "output_dir": str(output),
        "model": str(model),
        "orchestrator.environment": environment,
        "orchestrator.environment_args": given,
        **_flat(settings or {}),
    }
    argv = [sys.executable, "-m", "sluice.cli.main", "rl"]
    for name, value in words.items():
        argv += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    began = time.time()
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, errors="replace") as process:  # noqa: S603 - our own program
        said: deque[str] = deque(maxlen=_LINES_KEPT)
        copying = threading.Thread(target=_copy, args=(process.stderr, said), daemon=True)
        copying.start()
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()  # the child gets Ctrl-C, too: it ends the services, then itself
            raise
        copying.join(_COPY_S)
    directory = output / run
    if code:
        reason = _refusal(said) or _reason_in(directory, began) or "what it printed says why"
        logs = directory / "logs"
        where = f"; the logs are in {logs}" if logs.is_dir() and code != EXIT_CONFIG else ""
        raise TrainingFailedError(f"run {run} ended with exit code {code}: {reason}{where}")
    return _read(directory)


def _copy(lines: IO[str] | None, kept: deque[str]) -> None:
    """Copy a run's standard error to the standard error of this process, and keep the last lines."""
    for line in lines or ():
        kept.append(line)
        sys.stderr.write(line)


def _refusal(lines: Iterable[str]) -> str:
    """Return the last error message in the output of a command or service; empty if there is none."""
    text = "".join(lines)
    place = max(text.rfind(f"\n{_SAYS}"), 0 if text.startswith(_SAYS) else -1)
    return "" if place < 0 else text[place:].strip().removeprefix(_SAYS)


def _reason_in(directory: Path, since: float) -> str:
    """Return why a run failed, from its report or the log of a service; empty if neither says. Files older than `since` are ignored."""
    try:
        report = directory / "report.json"
        is_new = report.is_file() and report.stat().st_mtime >= since
        if is_new and (error := json.loads(report.read_text(encoding="utf-8")).get("error")):
            return str(error)
        for log in sorted(directory.glob("logs/*.log")):
            with log.open(encoding="utf-8", errors="replace") as lines:
                last = [f"{original(line)}\n" for line in deque(lines, _LINES_KEPT)]
            if log.stat().st_mtime >= since and (said := _refusal(last)):
                return said
    except (OSError, ValueError):
        pass
    return ""


def _location(thing: Any) -> str:  # noqa: ANN401 - a function, a class, or where one is
    """Return the location by which another process finds a function or class.

    Raises:
        ConfigError: if another process cannot find it.
    """
    if isinstance(thing, str):
        return thing
    name = getattr(thing, "__qualname__", "")
    if not name.isidentifier():
        raise ConfigError(
            f"{name or thing!r} cannot be found by other processes: define it at the top level of a file, with `def` or `class`"
        )
    if thing.__module__ != "__main__":
        return f"{thing.__module__}:{name}"
    try:
        file = Path(inspect.getfile(thing)).resolve()
    except (OSError, TypeError):
        file = Path()
    if not file.is_file():
        raise ConfigError(f"{name} has no file that other processes could read: put it into one, and import it")
    return f"{file}:{name}"


def _written(rows: Iterable[Mapping[str, Any]], output: Path) -> Path:
    """Write rows to a file that is named after its content."""
    try:
        text = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a row of the data set is not what JSON has ({error}): give texts, numbers, lists and mappings"
        ) from error
    if not text:
        raise ConfigError("the data set has no rows")
    path = output / "datasets" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return path


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and not name.endswith("_args"):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _read(directory: Path) -> TrainedRun:
    report = json.loads((directory / "report.json").read_text())
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    versions = [each for each in (directory / "weights").glob("v*") if each.is_dir()]
    last = max(versions, key=lambda each: [int(number) for number in each.name[1:].split(".")])
    return TrainedRun(directory, last, report, [json.loads(line) for line in lines])
