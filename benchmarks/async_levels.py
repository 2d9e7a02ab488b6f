"""Wall-clock per step at max_staleness 0, 1, 2 and 4, with log-normal lengths and one core for each side.

Four services do real training on real samples. Rounds alternate between the levels, each with the same lengths in the
same order; neighbours in time are compared. The yardstick beside is synchronous training with both cores for each side,
and the bound that `overlap` computes from the same lengths and the measured speed of each side alone. The share of the time that each side
waits is measured as every run reports it, beside what the bound has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.children import MODEL_2M, free_port, make_model, median_ratio, scratch, service
from benchmarks.overlap import QUESTION, Course, EngineSpeed, Loop, Workload, course, lengths
from orchestrator_svc.run.metrics import read_metrics
from sluice.client import RolloutClient
from sluice.v1 import tokens_pb2

LEVELS = (0, 1, 2, 4)
FILL, DRAIN = 6, 5
"""Steps of a session before and after the measured ones, in which the pipeline fills and empties."""

LONGEST = 480
PROMPT_TOKENS = 8
"""Tokens of the question in the chat template."""

WINDOW_FRACTION = 0.3

PACED_AFTER = 4
"""Batches that are measured before groups start by the pace: a session has few."""

SESSION_DEADLINE_S = 600.0

Metrics = Mapping[str, float]


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return what the JSON line holds."""
    parser = argparse.ArgumentParser(prog="sluice bench async", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="sessions of each level")
    parser.add_argument("--steps", type=int, default=12, help="measured steps per session")
    parser.add_argument("--batch", type=int, default=8, help="groups per batch")
    parser.add_argument("--group", type=int, default=4, help="samples per group")
    parser.add_argument("--median", type=int, default=40, help="median length in tokens")
    parser.add_argument("--p99", type=int, default=400, help="99th percentile of the length in tokens")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the lengths")
    parser.add_argument("--threads-both", type=int, default=2, help="threads of each side where it has both cores")
    parser.add_argument("--keep", type=Path, help="directory to keep everything in (logs, metrics)")
    options = parser.parse_args(argv)
    if len(os.sched_getaffinity(0)) < 2:
        raise RuntimeError("sluice bench async gives each side a core of its own: run it with two or more")
    with scratch(options.keep) as directory:
        return asyncio.run(_measure(options, directory))


async def _measure(options: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    one, other = sorted(os.sched_getaffinity(0))[:2]
    model = make_model(directory / "model", MODEL_2M)
    per_session = options.steps + FILL + DRAIN
    answer_tokens = lengths(
        per_session * options.batch, seed=options.seed, median=options.median, p99=options.p99, longest=LONGEST
    )
    settings = {
        "environment": "benchmarks.overlap:LongTail",
        "environment-args": {"answer_tokens": list(answer_tokens), "sessions": options.rounds * len(LEVELS)},
        "batch-size": options.batch,
        "group-size": options.group,
        "window-fraction": WINDOW_FRACTION,
        "sampling.ignore-eos": True,
        "pacing.batches": PACED_AFTER,
        "checkpoint.final": False,
        "write-trajectories": False,
    }
    pinned = Placement("pinned", {one}, {other}, threads=1)
    both = Placement("both", None, None, options.threads_both)
    async with (
        fleet(pinned, directory, model, orchestrator=settings, lr=options.lr) as apart,
        fleet(both, directory, model, orchestrator=settings, lr=options.lr) as together,
    ):
        sessions, speed = await _rounds(options, apart, together, per_session)
    return _results(options, sessions, _bounds(options, answer_tokens, speed, sessions["0"]), speed)


async def _rounds(
    options: argparse.Namespace, apart: Fleet, together: Fleet, per_session: int
) -> tuple[dict[str, list[list[Metrics]]], EngineSpeed]:
    """Return the measured steps of each session by kind (a level, or ``both_cores``), and the speed of the engine alone."""
    sessions: dict[str, list[list[Metrics]]] = {"0": [], "both_cores": [], **{str(level): [] for level in LEVELS[1:]}}
    speed: dict[int, float] = {}
    for number in range(options.rounds):
        for samples, rate in (await _engine_speed(apart.rollout)).items():
            speed[samples] = max(rate, speed.get(samples, 0.0))  # when the machine was disturbed least
        for kind, done in sessions.items():
            where, level = (together, 0) if kind == "both_cores" else (apart, int(kind))
            done.append((await where.session(level, per_session))[FILL : FILL + options.steps])
            print(f"round {number + 1}, {_name(kind)}: {_describe(done[-1])}", flush=True)
    print("engine alone, tokens/s by samples: " + "  ".join(f"{n}: {rate:,.0f}" for n, rate in speed.items()))
    return sessions, EngineSpeed(speed)


async def _engine_speed(target: str) -> dict[int, float]:
    """Return tokens per second of the replica alone by number of samples, through the RPC that the run uses."""
    found: dict[int, float] = {}
    async with RolloutClient(target) as client:
        for samples in (1, 1, 2, 4, 8, 16, 32, 64, 128):  # the first one warms up
            tokens = min(256, max(48, 2048 // samples))
            sampling = tokens_pb2.SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
            begun = time.perf_counter()
            await client.generate([{"role": "user", "content": QUESTION}], sampling, n=samples, timeout_s=120)
            found[samples] = samples * tokens / (time.perf_counter() - begun)
    return found


def _name(kind: str) -> str:
    return f"max_staleness {kind}" if kind.isdigit() else kind.replace("_", " ").replace("both", "synchronous on both")


def _describe(steps: Sequence[Metrics]) -> str:
    return (
        f"{_step_s(steps):.2f} s a step, trainer busy {_trainer_s(steps):.2f} s of it,"
        f" {_mean(steps, 'tokens/trained'):.0f} tokens, staleness {_mean(steps, 'staleness/mean'):.2f},"
        f" trainer waits {_mean(steps, 'load/trainer_idle'):.0%}, engine waits {_mean(steps, 'load/rollout_idle'):.0%}"
    )


def _mean(steps: Sequence[Metrics], name: str) -> float:
    return statistics.fmean(step[name] for step in steps)


def _step_s(steps: Sequence[Metrics]) -> float:
    return _mean(steps, "time/step_s")


def _trainer_s(steps: Sequence[Metrics]) -> float:
    return statistics.fmean(map(_train_s, steps))


def _train_s(step: Metrics) -> float:
    return step["trainer/tokens"] / step["trainer/tokens_per_s"]


def _bounds(
    options: argparse.Namespace, answer_tokens: Sequence[int], speed: EngineSpeed, synchronous: list[list[Metrics]]
) -> dict[str, Course]:
    """Return the bound on the course of a session for each level, and with each side alone."""
    # A token costs the trainer about the same in any batch; take the session that was disturbed least.
    per_token = min(statistics.median(1 / step["trainer/tokens_per_s"] for step in steps) for steps in synchronous)
    train_s = []
    for first in range(0, len(answer_tokens), options.batch):
        tokens = sum(answer_tokens[first : first + options.batch]) + options.batch * PROMPT_TOKENS
        train_s.append(per_token * tokens * options.group)
    work = Workload(answer_tokens, options.group, options.batch, train_s, WINDOW_FRACTION)
    bounds = {str(level): course(work, speed, Loop(level)) for level in LEVELS}
    at_once = EngineSpeed({1: 1e9, 1_000_000: 1e15})
    bounds["trainer_alone"] = course(work, at_once, Loop(LEVELS[-1]))
    bounds["engine_alone"] = course(replace(work, train_s=[0.0] * len(train_s)), speed, Loop(LEVELS[-1]))
    return bounds


def _results(
    options: argparse.Namespace,
    sessions: Mapping[str, list[list[Metrics]]],
    bounds: Mapping[str, Course],
    speed: EngineSpeed,
) -> Mapping[str, Any]:
    end = FILL + int(options.steps)
    step_s = {kind: [_step_s(steps) for steps in done] for kind, done in sessions.items()}
    bound_s = {kind: each.step_s(FILL, end) for kind, each in bounds.items()}
    print("bounds, s a step: " + "  ".join(f"{_name(kind)} {value:.2f}" for kind, value in bound_s.items()))
    ratios: dict[str, float] = {}
    for level in LEVELS:
        name = str(level)
        ratios[f"over_bound_{level}"] = round(statistics.median(step_s[name]) / bound_s[name], 3)
        if level:
            ratios[f"speedup_{level}"] = median_ratio(step_s["0"], step_s[name])
            ratios[f"speedup_{level}_over_both_cores"] = median_ratio(step_s["both_cores"], step_s[name])
            ratios[f"bound_{level}"] = round(bound_s["0"] / bound_s[name], 3)
    return {
        "ratios": ratios,
        "step_s": {kind: [round(each, 3) for each in done] for kind, done in step_s.items()},
        "bound_step_s": {kind: round(value, 3) for kind, value in bound_s.items()},
        "trainer_s": {kind: round(statistics.fmean(map(_trainer_s, done)), 3) for kind, done in sessions.items()},
        "trainer_waits": _means(sessions, "load/trainer_idle"),
        "engine_waits": _means(sessions, "load/rollout_idle"),
        "bound_trainer_waits": {str(level): round(bounds[str(level)].waiting(FILL, end)[0], 3) for level in LEVELS},
        "bound_engine_waits": {str(level): round(bounds[str(level)].waiting(FILL, end)[1], 3) for level in LEVELS},
        "staleness": _means(sessions, "staleness/mean"),
        "engine_tokens_per_s": {samples: round(rate) for samples, rate in speed.tokens_per_s.items()},
        **{name: value for name, value in vars(options).items() if name != "keep"},
    }


def _means(sessions: Mapping[str, list[list[Metrics]]], name: str) -> dict[str, float]:
    """Return the mean of a metric over all measured steps, by kind of session."""
    return {kind: round(statistics.fmean(_mean(steps, name) for steps in done), 3) for kind, done in sessions.items()}


@dataclass(frozen=True)
class Placement:
    """The cores of the replica and of the trainer (None: all), and the threads of each of the two."""

    name: str
    """Name of the run."""
    rollout: set[int] | None
    trainer: set[int] | None
    threads: int


@dataclass
class Fleet:
    """Weight sync, trainer and replica, used by one orchestrator after the other.

    Each session is a new orchestrator with its own staleness bound, which resumes the run where the last one ended. So all sessions
    use the same warm engine and trainer.
    """

    rollout: str
    """Address of the replica."""
    _name: str
    _directory: Path
    _common: Sequence[str]
    _orchestrator: Sequence[str]
    _steps_so_far: int = 0

    async def session(self, max_staleness: int, steps: int) -> list[Mapping[str, float]]:
        """Run an orchestrator for some steps; return the metrics of each.

        Raises:
            RuntimeError: if it fails.
            TimeoutError: if it takes longer than its deadline.
        """
        first, self._steps_so_far = self._steps_so_far + 1, self._steps_so_far + steps
        port = free_port()
        arguments = [
            *self._common,
            *self._orchestrator,
            f"--server.port={port}",
            f"--max-staleness={max_staleness}",
            f"--max-steps={self._steps_so_far}",
        ]
        log = self._directory / f"{self._name}-orchestrator-{first}.log"
        async with service("orchestrator", *arguments, health=f"127.0.0.1:{port}", log=log) as child:
            code = await asyncio.wait_for(child.wait(), SESSION_DEADLINE_S)
        if code:
            raise RuntimeError(f"the orchestrator ended with code {code}:\n{log.read_text(errors='replace')[-2000:]}")
        metrics = await asyncio.to_thread(read_metrics, self._directory / self._name / "metrics.jsonl")
        return [metrics[step] for step in range(first, self._steps_so_far + 1)]


@contextlib.asynccontextmanager
async def fleet(
    placement: Placement, directory: Path, model: Path, *, orchestrator: Mapping[str, Any], lr: float
) -> AsyncIterator[Fleet]:
    """Start the services for later orchestrators with these settings."""
    targets = {name: f"127.0.0.1:{free_port()}" for name in ("weightsync", "trainer", "rollout")}
    common = [f"--run={placement.name}", f"--output-dir={directory}", f"--model={model}", "--log-level=warning"]
    common += [f"--peers.{name}={target}" for name, target in targets.items()]
    own = {
        "weightsync": [],
        "trainer": [f"--lr={lr}", f"--threads={placement.threads}"],
        "rollout": [f"--threads={placement.threads}", f"--server.http-port={free_port()}"],
    }
    cpus = {"rollout": placement.rollout, "trainer": placement.trainer}
    # OpenMP reads the number of threads before any setting is read.
    environment = {"OMP_NUM_THREADS": str(placement.threads), "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    async with contextlib.AsyncExitStack() as stack:
        for name, target in targets.items():
            arguments = [*common, *own[name], f"--server.port={target.rpartition(':')[2]}"]
            log = directory / f"{placement.name}-{name}.log"
            await stack.enter_async_context(
                service(
                    name,
                    *arguments,
                    health=target,
                    log=log,
                    cpus=cpus.get(name),
                    environment={**os.environ, **environment},
                )
            )
        settings = [f"--{name}={_flag(value)}" for name, value in orchestrator.items()]
        yield Fleet(targets["rollout"], placement.name, directory, common, settings)


def _flag(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
