"""`sluice rescore RUN`: apply another reward to the trajectories that a run has stored, and compare it with the one that it was trained with.

Nothing is sampled and nothing of the run is changed: it shows what a reward would have said before a run is spent on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import Field

from orchestrator_svc.commands.runs import find_run
from orchestrator_svc.commands.table import table_lines
from sluice.config import Command, ConfigError, Section, load_command
from sluice.config.removed import without_removed
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.loading import locate
from sluice.host_files import write_whole
from sluice.loading import check_there
from sluice.progress import doing
from sluice.run_files import CONFIG_FILE
from sluice.telemetry import LEVEL_VARIABLE, configure_logging

_LEAST_FOR_CORRELATION = 2

Row = Mapping[str, Any]


class RescoreConfig(Section):
    """Settings of `sluice rescore`; those of the environment that are unset are the run's."""

    output_dir: Path = Field(Path("outputs"), description="Holds the runs.")
    environment: str = Field("", description="Environment whose `score` is applied, as `orchestrator.environment`.")
    environment_args: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments that differ from the run's, such as another `reward`."
    )
    split: str = Field("", description="Split of the tasks.")
    steps: list[int] = Field(default_factory=list, description="First and last step; none: all.", max_length=2)
    environment_processes: EnvironmentProcessesConfig | None = Field(
        None, description="Processes that run the environment's code."
    )
    output: Path | None = Field(None, description="JSONL file for both rewards of each trajectory; none writes none.")
    start_s: float = Field(600.0, gt=0, description="Seconds to construct the environment, and to list the tasks.")
    concurrency: int = Field(64, ge=1, description="Groups that are scored at a time.")


def run(argv: list[str]) -> int:
    """Score the trajectories of a run; print both rewards; return 0, or 1 if a reward is missing."""
    if not argv or argv[0].startswith(("-", "@")):
        if set(argv) & {"--help", "-h"}:
            load_command(RescoreConfig, ["--help"], "rescore")
        raise ConfigError('give the run first: sluice rescore RUN --environment-args \'{"reward": "math"}\'')
    config = load_command(RescoreConfig, argv[1:], "rescore")
    configure_logging("rescore", os.environ.get(LEVEL_VARIABLE) or "warning", for_people=True)
    directory = find_run(argv[0], config.output_dir)
    config = _completed(config, directory)
    check_there(locate(config.environment), "environment")
    rows = [row for row in _stored(directory) if _within(row["step"], config.steps)]
    if not rows:
        raise ConfigError(
            f"{directory / 'trajectories'} has no trajectories of these steps: choose others with --steps; those of the oldest steps are"
            " removed (orchestrator.disk.trajectories_mb), and none are written if orchestrator.write_trajectories is false"
        )
    scored = asyncio.run(_rescored(config, rows, _seed(directory)))
    if config.output is not None:
        config.output.parent.mkdir(parents=True, exist_ok=True)
        write_whole(config.output, "".join(json.dumps(row) + "\n" for row in scored))
    sys.stdout.writelines(f"{line}\n" for line in _table(scored))
    return int(any(row["new_reward"] is None for row in scored))


def _settings(directory: Path) -> Mapping[str, Any]:
    try:
        written = tomllib.loads((directory / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the settings of {directory} cannot be read: {error}") from error
    return without_removed(written, recorded=True)


def _seed(directory: Path) -> int:
    return int(_settings(directory).get("seed", 0))


def _completed(config: RescoreConfig, directory: Path) -> RescoreConfig:
    """Take unset values from the settings of the run.

    Raises:
        ConfigError: if the run has several environments and none is named.
    """
    had = _settings(directory).get("orchestrator", {})
    if had.get("environments") and not config.environment:
        raise ConfigError("the run has several environments: give environment and environment_args of one")
    own = {} if config.environment else had.get("environment_args", {})
    processes = config.environment_processes or EnvironmentProcessesConfig.model_validate(
        had.get("environment_processes", {})
    )
    return config.model_copy(
        update={
            "environment": config.environment or had.get("environment", ""),
            "environment_args": {**own, **config.environment_args},
            "split": config.split or had.get("split", "train"),
            "environment_processes": processes,
        }
    )


def _stored(directory: Path) -> Iterator[Row]:
    """Yield the trajectories of a run that an environment can score, in the order of their steps."""
    for file in sorted((directory / "trajectories").glob("step_*.jsonl"), key=lambda each: int(each.stem[5:])):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("completion") is not None:
                yield row


def _within(step: int, steps: Sequence[int]) -> bool:
    return not steps or steps[0] <= step <= steps[-1]


async def _rescored(config: RescoreConfig, rows: Sequence[Row], seed: int) -> list[dict[str, Any]]:
    from sluice.environments.processes import EnvironmentProcesses  # noqa: PLC0415 - brings gRPC: not for `--help`

    processes = config.environment_processes or EnvironmentProcessesConfig()
    limit = (config.start_s, "--start-s")
    async with contextlib.AsyncExitStack() as stack:
        with doing(f"start {config.environment}"):
            environment = await stack.enter_async_context(
                EnvironmentProcesses(config.environment, config.environment_args, processes, limit)
            )
            tasks = {each.task_id: each for each in await environment.tasks(config.split, seed)}
        if not environment.scores:
            raise ConfigError(
                f"environment {environment.name} has no `score`: its episodes cannot be scored afterwards"
            )
        unknown = sorted({row["task_id"] for row in rows} - tasks.keys())
        if unknown:
            raise ConfigError(
                f"{len(unknown)} tasks of the run are not among those of split {config.split}, such as {unknown[0]}:"
                " give the split and arguments that the run had"
            )
        room = asyncio.Semaphore(config.concurrency)

        async def score(group: Sequence[Row]) -> list[dict[str, Any]]:
            async with room:
                found = await environment.judge(tasks[group[0]["task_id"]], [row["completion"] for row in group])
            step.advance()
            kept = ("step", "trajectory_id", "group_id", "task_id", "reward")
            return [
                {**{name: row.get(name) for name in kept}, "new_reward": each.reward, "metrics": dict(each.metrics)}
                for row, each in zip(group, found, strict=True)
            ]

        groups = [list(group) for _, group in groupby(rows, key=lambda row: row["group_id"])]
        step = stack.enter_context(doing("score", len(groups), "groups"))
        return [row for group in await asyncio.gather(*map(score, groups)) for row in group]


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines for people: both rewards, their correlation, and the share of groups with different rewards, which teach something."""
    both = [(row["reward"], row["new_reward"]) for row in rows if None not in {row["reward"], row["new_reward"]}]
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row["group_id"])]
    yield f"{len(rows):,} trajectories of {len(groups):,} groups"
    told = []
    for label, name in (("reward of the run", "reward"), ("other reward", "new_reward")):
        values = [row[name] for row in rows if row[name] is not None]
        if values:
            signals = sum(len({row[name] for row in group}) > 1 for group in groups)
            mean, spread = math.fsum(values) / len(values), statistics.pstdev(values)
            missing = f", {len(rows) - len(values):,} missing" if len(values) < len(rows) else ""
            spreads = f"mean {mean:.4f}, deviation {spread:.4f}"
            told.append((label, f"{spreads}, groups with a signal {signals / len(groups):.1%}{missing}"))
    olds, news = [old for old, _ in both], [new for _, new in both]
    if len(both) >= _LEAST_FOR_CORRELATION and len(set(olds)) > 1 and len(set(news)) > 1:
        told.append(("correlation", f"{statistics.correlation(olds, news):.4f}"))
    yield from (f"  {line}" for line in table_lines(told, gap=1, least=18))


COMMAND = Command("rescore", "apply another reward to the stored trajectories of a run", run)
