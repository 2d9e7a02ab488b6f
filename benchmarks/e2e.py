"""The quickstart's task from one warm checkpoint: ours with each engine at several staleness bounds, and TRL's GRPOTrainer, in turns.

Ours are the four services, as `sluice rl` starts them. TRL generates by itself, with transformers and both cores. Prompts, their order, reward, group
size and learning rate are the same. Time counts from the first request for samples.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.children import BENCH_PACKAGES, log_tail, scratch
from benchmarks.process_tree import CpuMeter
from orchestrator_svc.journal.store import read_facts
from orchestrator_svc.run.metrics import read_metrics
from sluice.config import ConfigError
from sluice.engines import ENGINES
from sluice.environments.loading import load_environment

GOALS = (0.85, 0.9)
"""Mean rewards over `WINDOW` steps whose times are compared."""

WINDOW = 3

SETTLED = 10
"""Steps of a session after which its speed is measured."""

SESSION_S = 600.0
"""Seconds that one session may take."""

PREPARE_S = 600.0


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line.

    Raises:
        ConfigError: if TRL is not installed or the example is not there.
    """
    parser = argparse.ArgumentParser(prog="sluice bench e2e", description=__doc__)
    parser.add_argument("--example", type=Path, default=Path("examples/reverse_text"), help="directory of the example")
    parser.add_argument("--model", type=Path, help="warm checkpoint to begin with; default: make one")
    parser.add_argument("--steps", type=int, default=150, help="steps of a session")
    parser.add_argument(
        "--engines", nargs="*", choices=sorted(ENGINES), default=sorted(ENGINES), help="engines of ours"
    )
    parser.add_argument("--levels", type=int, nargs="*", default=[0, 1, 2], help="bounds of staleness")
    parser.add_argument("--rounds", type=int, default=3, help="sessions of each side")
    parser.add_argument("--minutes", type=float, default=30.0, help="begin no further round after this time")
    parser.add_argument("--without-trl", action="store_true", help="measure ours alone")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round; each round has the next one")
    parser.add_argument("--keep", type=Path, help="directory to keep everything in")
    options = parser.parse_args(argv)
    if not options.without_trl and not (BENCH_PACKAGES / "trl").is_dir() and importlib.util.find_spec("trl") is None:
        raise ConfigError("TRL is not installed: run `make install-bench`, or leave it out with `--without-trl`")
    if not (options.levels and options.engines):
        raise ConfigError("give at least one bound of staleness with --levels and one engine with --engines")
    if not (options.example / "rl.toml").is_file():
        raise ConfigError(
            f"{options.example} has no rl.toml: run this in the root of the repository, or give --example"
        )
    with scratch(options.keep) as directory:
        return asyncio.run(_measure(options, directory))


@dataclass(frozen=True)
class Training:
    """The task of every session.

    Attributes:
        example: Directory of the example.
        model: Warm checkpoint to begin with.
        directory: Where the sessions put their files.
    """

    example: Path
    model: Path
    directory: Path
    steps: int

    def drawn(self, seed: int) -> Path:
        """The file with the tasks that our last session with a seed drew."""
        return self.directory / f"drawn-{seed}.json"


@dataclass
class Session:
    """One run of one side.

    Attributes:
        rewards: Mean reward by step, from the first.
        ended_s: When each step ended, in seconds since the first request for samples.
        cpu_ms: CPU milliseconds a step by process, once the speed has settled.
        idle: Share of the time in which a process did nothing, for those that are one thread.
    """

    rewards: list[float]
    ended_s: list[float]
    cpu_ms: dict[str, float] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return (self.ended_s[-1] - self.ended_s[SETTLED - 1]) / (len(self.ended_s) - SETTLED)

    def reached_s(self, goal: float) -> float | None:
        """Return the seconds until the mean reward of the last steps was at least `goal`; None if it never was."""
        return next((self.ended_s[at] for at in range(WINDOW - 1, len(self.rewards)) if self._mean(at) >= goal), None)

    def _mean(self, at: int) -> float:
        return statistics.fmean(self.rewards[at - WINDOW + 1 : at + 1])

    def __str__(self) -> str:
        """Return one line."""
        times = ", ".join(f"{goal}: {_seconds(self.reached_s(goal))}" for goal in GOALS)
        cpu = ", ".join(f"{name} {value:.0f}" for name, value in sorted(self.cpu_ms.items(), key=lambda pair: -pair[1]))
        idle = ", ".join(f"{name} {value:.0%}" for name, value in self.idle.items())
        return (
            f"{self.step_s:.3f} s a step, reward {times}; CPU ms a step {sum(self.cpu_ms.values()):.0f} ({cpu});"
            f" idle {idle or '-'}"
        )


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


async def _measure(options: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    model = options.model or await _warm_model(options.example, directory)
    task = Training(options.example, model, directory, options.steps)
    ours = {f"{engine} {level}": (engine, level) for engine in options.engines for level in options.levels}
    sides = [*ours, *(["trl"] if not options.without_trl else [])]
    sessions: dict[str, list[Session]] = {side: [] for side in sides}
    give_up = time.monotonic() + 60 * options.minutes
    for number in range(options.rounds):
        if time.monotonic() > give_up:
            print(f"no further round after {options.minutes:g} minutes", flush=True)
            break
        for side in sides:
            seed = options.seed + number
            session = await (_ours(task, seed, *ours[side]) if side in ours else _trl(task, seed))
            sessions[side].append(session)
            print(f"round {number + 1}, {side}: {session}", flush=True)
    return _results(options, sessions)


def _results(options: argparse.Namespace, sessions: Mapping[str, list[Session]]) -> Mapping[str, Any]:
    """Compare medians over the rounds. For ours, take the engine and bound that reach the first goal soonest."""
    step_s = {side: statistics.median(each.step_s for each in done) for side, done in sessions.items()}
    reached = {side: {str(goal): _median_reached(done, goal) for goal in GOALS} for side, done in sessions.items()}
    ours = [side for side in sessions if side != "trl"]
    goal = str(GOALS[0])
    best = min(ours, key=lambda side: (reached[side][goal] is None, reached[side][goal] or 0.0))
    ratios: dict[str, float] = {}
    if "trl" in sessions:
        for side in ours:
            ratios[f"trl_step_over_{side}"] = round(step_s["trl"] / step_s[side], 3)
            theirs, own = reached["trl"][goal], reached[side][goal]
            if theirs and own:
                ratios[f"trl_sync_over_{side}"] = round(theirs / own, 3)
        ratios["trl_step_over_ours"] = ratios[f"trl_step_over_{best}"]
        if f"trl_sync_over_{best}" in ratios:
            ratios["trl_sync_over_ours"] = ratios[f"trl_sync_over_{best}"]
    cpu = {side: _mean_by_name(each.cpu_ms for each in done) for side, done in sessions.items()}
    return {
        "ratios": ratios,
        "trl_sync_over_ours": ratios.get("trl_sync_over_ours"),
        "trl_step_over_ours": ratios.get("trl_step_over_ours"),
        "ours": best,
        "step_s": {side: round(value, 4) for side, value in step_s.items()},
        "reached_s": reached,
        "cpu_ms_per_step": cpu,
        "two_core_bound_s": {side: round(sum(each.values()) / 2000, 4) for side, each in cpu.items()},
        "idle": {side: _mean_by_name(each.idle for each in done) for side, done in sessions.items()},
        "sessions": {side: [asdict(each) for each in done] for side, done in sessions.items()},
        "options": {name: str(value) for name, value in vars(options).items()},
    }


def _median_reached(sessions: Sequence[Session], goal: float) -> float | None:
    """Return the median time to a goal; None if a session did not reach it."""
    times = [each.reached_s(goal) for each in sessions]
    known = [each for each in times if each is not None]
    return round(statistics.median(known), 2) if len(known) == len(times) else None


def _mean_by_name(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found = list(rows)
    return {name: round(statistics.fmean(row[name] for row in found), 3) for name in found[0]} if found else {}


async def _warm_model(example: Path, directory: Path) -> Path:
    """Make the model from scratch and warm it up, as the quickstart does."""
    programs = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    await _wait(["sh", str(example / "prepare.sh"), str(directory)], directory / "prepare.log", programs, PREPARE_S)
    return directory / "sft"


async def _ours(task: Training, seed: int, engine: str, max_staleness: int) -> Session:
    """Run `sluice rl` as its example says, and note the tasks that it drew."""
    where = task.directory / f"{engine}-{max_staleness}-{seed}"
    command = [sys.executable, "-m", "sluice.cli.main", "rl", "@", str(task.example / "rl.toml"), "--plain"]
    command += [f"--model={task.model}", f"--run={where.name}", f"--output-dir={where.parent}", f"--seed={seed}"]
    command += [f"--rollout.engine={engine}", f"--max-staleness={max_staleness}"]
    command += [f"--orchestrator.max-steps={task.steps}"]
    meter = CpuMeter()
    await _wait(command, where.with_suffix(".log"), dict(os.environ), SESSION_S, meter)
    draws = await asyncio.to_thread(
        lambda: [fact for _, fact in read_facts(where) if fact.WhichOneof("kind") == "task_drawn"]
    )
    first_request = draws[0].time.ToNanoseconds() / 1e9
    await asyncio.to_thread(task.drawn(seed).write_text, json.dumps([fact.task_drawn.task_id for fact in draws]))
    metrics = await asyncio.to_thread(read_metrics, where / "metrics.jsonl")
    steps = [metrics[number] for number in sorted(metrics) if "reward/mean" in metrics[number]]
    session = Session([each["reward/mean"] for each in steps], [each["time"] - first_request for each in steps])
    spent = meter.between(steps[SETTLED - 1]["time"], steps[-1]["time"])
    _note_cpu(session, spent)
    settled = steps[SETTLED:]
    session.idle["trainer"] = statistics.fmean(each["load/trainer_idle"] for each in settled)
    elapsed = session.ended_s[-1] - session.ended_s[SETTLED - 1]
    sampling = (
        "engine" if "engine" in spent else "rollout"
    )  # transformers runs within the service, in a thread of its own
    session.idle[sampling] = max(0.0, 1 - spent[sampling] / elapsed)
    return session


async def _trl(task: Training, seed: int) -> Session:
    """Run TRL on the tasks that ours drew, in their order."""
    settings = tomllib.loads(await asyncio.to_thread((task.example / "rl.toml").read_text))
    orchestrator, trainer = settings["orchestrator"], settings["trainer"]
    tasks, log = task.directory / f"tasks-{seed}.json", task.directory / f"trl-{seed}.log"
    rows = await asyncio.to_thread(_tasks, task, seed, orchestrator["environment"], orchestrator["batch_size"])
    await asyncio.to_thread(tasks.write_text, json.dumps(rows))
    threads = len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "benchmarks.e2e_trl", f"--model={task.model}", f"--tasks={tasks}"]
    command += [f"--environment={orchestrator['environment']}", f"--batch={orchestrator['batch_size']}"]
    command += [f"--group={orchestrator['group_size']}", f"--max-tokens={orchestrator['sampling']['max_tokens']}"]
    command += [
        f"--lr={trainer['lr']}",
        f"--warmup={trainer['warmup_steps']}",
        f"--seed={seed}",
        f"--threads={threads}",
    ]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(BENCH_PACKAGES)])
    # OpenMP's default, to spin shortly while waiting, is fastest for TRL alone on a machine: with threads that sleep at once its speed is half.
    # Beside other programs spinning makes a step four times as long.
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    environment |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(threads)}
    await _wait(command, log, environment, SESSION_S)
    first, *steps = await asyncio.to_thread(_rows, log)
    session = Session([each["reward"] for each in steps], [each["time"] - first["first_request"] for each in steps])
    _note_cpu(session, {"trl": steps[-1]["cpu_s"] - steps[SETTLED - 1]["cpu_s"]})
    return session


def _tasks(task: Training, seed: int, environment: str, batch: int) -> list[dict[str, Any]]:
    """Return the first tasks that ours drew, as many as the steps need.

    Raises:
        RuntimeError: if ours drew fewer.
    """
    known = {each.task_id: each for each in load_environment(environment, {}).tasks("train", seed)}
    order = json.loads(task.drawn(seed).read_text())[: task.steps * batch]
    if len(order) < task.steps * batch:
        raise RuntimeError(f"ours drew {len(order)} tasks, and TRL needs {task.steps * batch}")
    return [{"task_id": each, "data": dict(known[each].data)} for each in order]


def _rows(log: Path) -> list[dict[str, float]]:
    """Return the objects of a log's lines of JSON. Skip lines that libraries write in between."""
    rows = []
    for line in log.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _note_cpu(session: Session, spent: Mapping[str, float]) -> None:
    steps = len(session.ended_s) - SETTLED
    session.cpu_ms = {name: round(seconds / steps * 1e3, 1) for name, seconds in spent.items()}


async def _wait(
    command: Sequence[str], log: Path, environment: Mapping[str, str], limit_s: float, meter: CpuMeter | None = None
) -> None:
    """Run a program to its end, and let a meter follow its processes.

    Raises:
        RuntimeError: if it fails or takes too long; the end of its log is in the message.
    """
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=environment)
    following = asyncio.create_task(meter.follow(child.pid)) if meter else None
    try:
        await asyncio.wait_for(child.wait(), limit_s)
    except TimeoutError:
        raise RuntimeError(f"{command} did not end within {limit_s:g} s:\n{log_tail(log)}") from None
    finally:
        if following is not None:
            following.cancel()
        if child.returncode is None:
            child.terminate()
            await child.wait()
    if child.returncode:
        raise RuntimeError(f"{command} ended with code {child.returncode}:\n{log_tail(log)}")
