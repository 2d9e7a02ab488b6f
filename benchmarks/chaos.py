"""Runs of the quickstart's size whose services are killed, stopped, cut off and starved at random moments.

A seed decides what goes wrong, and in which order. Each run has two replicas and must end with every step applied, with an exact
audit, and with a reward within two standard deviations of undisturbed runs. Five undisturbed runs give the deviation so roughly
that one run in seven lies further out by chance: of several seeds the mean must be within two, and each run within four. The files
of a run lie on a small disk of its own, so that this disk can be full; where the system lets nobody mount one, that fault is left
out, and the output says so.

The time of a recovery is what a fault adds: the seconds until three more steps were made, more than any token may lag behind, less
those that three steps of this run take otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks import faults
from benchmarks.children import log_tail, scratch
from benchmarks.faults import Fault
from orchestrator_svc.commands.audit import audit_run
from orchestrator_svc.journal.segments import JournalError
from sluice.config import ConfigError

REPLICAS = ("rollout-0", "rollout-1")

DISK_MIB = 2048

LAST_STEPS = 20
"""Steps at the end of a run whose mean reward is compared."""

GOING_ON_STEPS = 3
"""Steps after a fault that show that the whole run continues: more than any token may lag behind, so that weights arrive, too."""

NO_REPLICA = ", while no replica serves"

START_S = 240.0
RECOVERY_S = 180.0
"""Seconds that a run may stand still."""

RUN_S = 1500.0
PREPARE_S = 600.0
_LOOK_S = 0.02


def run(argv: list[str]) -> Mapping[str, Any]:
    """Disturb runs and print what became of them; return the content of the JSON line, whose `failures` must be empty.

    Raises:
        ConfigError: if the example is not there.
    """
    parser = argparse.ArgumentParser(prog="sluice bench chaos", description=__doc__)
    parser.add_argument("--example", type=Path, default=Path("examples/reverse_text"), help="directory of the example")
    parser.add_argument("--model", type=Path, help="warm checkpoint to begin with; default: make one")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first disturbed run")
    parser.add_argument("--seeds", type=int, default=1, help="disturbed runs, each with the next seed")
    parser.add_argument("--undisturbed", type=int, default=5, help="runs without faults to compare with; 0: none")
    parser.add_argument("--steps", type=int, default=130, help="steps of a run")
    parser.add_argument("--kills", type=int, default=2, help="times that each process is killed alone")
    parser.add_argument("--pairs", type=int, default=4, help="times that two are killed together")
    parser.add_argument("--keep", type=Path, help="directory to keep everything in")
    options = parser.parse_args(argv)
    if not (options.example / "rl.toml").is_file():
        raise ConfigError(
            f"{options.example} has no rl.toml: run this in the root of the repository, or give --example"
        )
    with scratch(options.keep) as directory:
        return asyncio.run(_all_runs(options, directory))


@dataclass
class Report:
    """The outcome of one run.

    Attributes:
        reward: Mean reward of the last steps.
        tokens: Tokens that the run received from replicas.
        tokens_lost: Further tokens that were sampled and lost with a killed replica.
        after_s: Seconds after each fault until the run had made `GOING_ON_STEPS` further steps. If no replica served
            meanwhile, the name of the fault says so: an engine had to start.
        step_s: Seconds between two steps of this run, the median.
        failures: Problems that must not occur.
    """

    seed: int
    seconds: float = 0.0
    reward: float = float("nan")
    steps: int = 0
    after_s: list[tuple[str, float]] = field(default_factory=list)
    step_s: float = 0.0
    audit: dict[str, Any] = field(default_factory=dict)
    tokens: int = 0
    tokens_lost: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return one line."""
        thrown = f", {_share(self.tokens_lost, self.tokens):.2%} of the tokens thrown away"
        audit = ", ".join(f"{name} {value}" for name, value in self.audit.items())
        return (
            f"{self.steps} steps in {self.seconds:.0f} s, reward {self.reward:.3f}, {len(self.after_s)} faults{thrown};"
            f" audit: {audit or 'none'}; {'; '.join(self.failures) or 'all well'}"
        )


async def _all_runs(options: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    model = options.model or await _warm_model(options.example, directory)
    disk = _may_mount()
    if not disk:
        print("the system lets nobody mount a disk: a full one is left out", flush=True)
    job = _Job(options.example, model.resolve(), directory, options.steps, disk)
    calm: list[Report] = []
    for seed in range(options.undisturbed):
        calm.append(await job.run(f"calm-{seed}", seed, []))
        print(f"undisturbed, seed {seed}: {calm[-1]}", flush=True)
    disturbed: list[Report] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        drawn = faults.draw_faults(seed, REPLICAS, kills=options.kills, pairs=options.pairs, disk=disk)
        print(f"seed {seed}: {len(drawn)} faults", flush=True)
        disturbed.append(await job.run(f"chaos-{seed}", seed, drawn))
        print(f"seed {seed}: {disturbed[-1]}", flush=True)
    return _results(calm, disturbed)


def unlike(calm: Sequence[float], disturbed: Mapping[int, float]) -> list[str]:
    """Return the differences between rewards of disturbed runs, by seed, and of undisturbed runs that chance does not explain."""
    if len(calm) < 2 or not disturbed:
        return []
    mean, deviation = statistics.fmean(calm), statistics.stdev(calm)
    compared = {f"seed {seed}: reward": (reward, 4 if len(disturbed) > 1 else 2) for seed, reward in disturbed.items()}
    if len(disturbed) > 1:
        compared["mean reward of all seeds"] = (statistics.fmean(disturbed.values()), 2)
    return [
        f"{what} {reward:.4f} is more than {most} standard deviations ({deviation:.4f}) from {mean:.4f}"
        for what, (reward, most) in compared.items()
        if not abs(reward - mean) <= most * deviation  # NaN counts as different
    ]


def _results(calm: Sequence[Report], disturbed: Sequence[Report]) -> Mapping[str, Any]:
    recovery, after = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for report in disturbed:
        for fault, seconds in report.after_s:
            after[fault].append(seconds)
            recovery[fault].append(max(0.0, seconds - GOING_ON_STEPS * report.step_s))
    for name, times in sorted(recovery.items()):
        print(
            f"{name:<56} {len(times):>3} times, recovers in {statistics.median(times):5.1f} s (median), {max(times):5.1f} s (worst);"
            f" {GOING_ON_STEPS} steps on after {statistics.median(after[name]):5.1f} s (median)"
        )
    rewards = [each.reward for each in calm]
    if len(rewards) > 1:
        mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        away = "  ".join(f"{each.seed}: {(each.reward - mean) / max(deviation, 1e-9):+.1f}" for each in disturbed)
        print(
            f"reward undisturbed {mean:.4f} with a standard deviation of {deviation:.4f}; seeds away from it, in these: {away}"
        )
    tokens, lost = sum(each.tokens for each in disturbed), sum(each.tokens_lost for each in disturbed)
    return {
        "seeds": [each.seed for each in disturbed],
        "failures": [f"seed {each.seed}: {problem}" for each in [*calm, *disturbed] for problem in each.failures]
        + unlike(rewards, {each.seed: each.reward for each in disturbed}),
        "recovery_median_s": _medians(recovery),
        "steps_on_median_s": _medians(after),
        "step_s": [round(each.step_s, 3) for each in disturbed],
        "tokens_lost_share": round(_share(lost, tokens), 5),
        "tokens_lost": lost,
        "reward_undisturbed": [round(each.reward, 4) for each in calm],
        "reward": [round(each.reward, 4) for each in disturbed],
        "audits": [each.audit for each in disturbed],
        "seconds": [round(each.seconds, 1) for each in disturbed],
    }


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: round(statistics.median(each), 2) for name, each in sorted(times.items())}


def _share(lost: int, received: int) -> float:
    return lost / max(1, lost + received)


def _may_mount() -> bool:
    """Return whether a process may mount a disk that is visible only to it and its children."""
    if shutil.which("unshare") is None:
        return False
    trial = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(trial, capture_output=True, check=False, timeout=30).returncode == 0  # noqa: S603 - constants


async def _warm_model(example: Path, directory: Path) -> Path:
    """Make the model from scratch and warm it up, as the quickstart does."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
    log = directory / "prepare.log"
    with log.open("wb") as output:
        command = ("sh", str(example / "prepare.sh"), str(directory))
        child = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output, env=environment)
    try:
        code = await asyncio.wait_for(child.wait(), PREPARE_S)
    finally:
        if child.returncode is None:
            child.kill()
    if code:
        raise RuntimeError(f"the model could not be made:\n{log_tail(log)}")
    return directory / "sft"


@dataclass(frozen=True)
class _Job:
    """The task of every run.

    Attributes:
        disk: Whether the files of a run lie on a disk of its own.
    """

    example: Path
    model: Path
    directory: Path
    steps: int
    disk: bool

    async def run(self, name: str, seed: int, drawn: Sequence[Fault]) -> Report:
        """Run once under some faults."""
        began, report = time.monotonic(), Report(seed)
        async with self._started(name, seed) as started:
            try:
                await started.disturb(drawn, report)
                code = await asyncio.wait_for(started.process.wait(), RUN_S)
                if code:
                    report.failures.append(f"`sluice rl` ended with code {code}: {log_tail(started.log)}")
            except TimeoutError as error:
                report.failures.append(f"{error or 'the run did not end'}: {log_tail(started.log)}")
        report.seconds = time.monotonic() - began
        await asyncio.to_thread(self._judge, self.directory / name, report)
        return report

    @contextlib.asynccontextmanager
    async def _started(self, name: str, seed: int) -> AsyncIterator[_Started]:
        """Start `sluice rl`. Kill it with all its processes if it still runs at the end."""
        scratch = self.directory / "disk" if self.disk else self.directory
        scratch.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "sluice.cli.main", "rl", "@", str(self.example / "rl.toml"), "--plain"]
        command += [f"--model={self.model}", f"--run={name}", f"--output-dir={scratch}", f"--seed={seed}"]
        command += [f"--replicas={len(REPLICAS)}", f"--orchestrator.max-steps={self.steps}", "--max-restarts=1000"]
        if self.disk:
            keep = f"cp -a {shlex.quote(str(scratch / name))} {shlex.quote(str(self.directory))}"
            script = (
                f"mount -t tmpfs -o size={DISK_MIB}m none {shlex.quote(str(scratch))} || exit 99\n"
                f"trap 'kill -INT $!' INT TERM\n{shlex.join(command)} &\nwait $!\ncode=$?\n{keep}\nexit $code"
            )
            command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
        log = self.directory / f"{name}.log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        try:
            yield _Started(process, scratch / name, log, self.disk)
        finally:
            if process.returncode is None:
                await _kill_tree(process)

    def _judge(self, directory: Path, report: Report) -> None:
        """Read the files of the run: its steps, its rewards, and its audit."""
        try:
            rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
            summary = json.loads((directory / "report.json").read_text())
        except (OSError, ValueError) as error:
            report.failures.append(f"the run left no report: {error}")
            return
        rewards = {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
        report.steps = max((row["step"] for row in rows), default=0)
        if len(rows) < 2 or not rewards:
            report.failures.append(
                f"metrics.jsonl has {len(rows)} rows, {len(rewards)} of them with a reward: too few for the time of a step and"
                " the mean reward; the end of the run's log says why it made no more steps"
            )
        else:
            report.step_s = statistics.median(after["time"] - before["time"] for before, after in pairwise(rows))
            report.reward = statistics.fmean([rewards[step] for step in sorted(rewards)][-LAST_STEPS:])
        report.tokens, report.tokens_lost = summary["tokens_generated"], summary["tokens_lost"]
        if report.steps != self.steps:
            report.failures.append(f"{report.steps} steps instead of {self.steps}")
        try:
            result = audit_run(directory)
        except (JournalError, OSError) as error:
            report.failures.append(f"the run cannot be audited: {error}")
            return
        report.audit = {"accepted": result.accepted, "trained": result.trained, "dropped": dict(result.dropped)}
        report.audit |= {"rolled back": result.rolled_back, "in flight": result.in_flight}
        report.failures += [f"audit: {each.problem}" for each in result.differences[:5]]


async def _kill_tree(process: asyncio.subprocess.Process) -> None:
    """Kill a process and everything below it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


@dataclass
class _Started:
    """A running run."""

    process: asyncio.subprocess.Process
    directory: Path
    log: Path
    disk: bool

    async def disturb(self, drawn: Sequence[Fault], report: Report) -> None:
        """Do one fault after the other, each some time after the run has recovered from the previous one.

        Raises:
            TimeoutError: if the run stands still.
        """
        if not drawn:
            return
        await self._until_steps(GOING_ON_STEPS, START_S, "after its start")
        supervisor = self._supervisor()
        for fault in drawn:
            await asyncio.sleep(fault.wait_s)
            if self.process.returncode is not None:
                report.failures.append(f"the run ended before the fault `{fault}`")
                return
            before, began = self._steps(), time.monotonic()
            doing = asyncio.create_task(self._do(supervisor, fault))
            if fault.kind == "disk full":  # steps that are made while it fills up show nothing
                await doing
                before, began = self._steps(), time.monotonic()
            alone = await self._until_steps(before + GOING_ON_STEPS, RECOVERY_S, f"after the fault `{fault}`")
            seconds, kind = time.monotonic() - began, str(fault) + (NO_REPLICA if alone else "")
            await doing
            report.after_s.append((kind, seconds))
            print(f"  step {before}: {kind}, {GOING_ON_STEPS} steps on after {seconds:.1f} s", flush=True)

    async def _do(self, supervisor: psutil.Process, fault: Fault) -> None:
        """Do a fault, and wait for its end."""
        match fault.kind:
            case "kill":
                await faults.kill(supervisor, fault)
            case "stop":
                await faults.stop(supervisor, fault)
            case "cut":
                faults.cut(supervisor, fault)
            case "disk full":
                await faults.fill_disk(self._seen_from_here())

    def _supervisor(self) -> psutil.Process:
        top = psutil.Process(self.process.pid)
        if not self.disk:
            return top
        return next(each for each in top.children() if "sluice.cli.main" in each.cmdline())

    def _seen_from_here(self) -> Path:
        """Return the path of the run's directory for a process that has not mounted its disk."""
        if not self.disk:
            return self.directory
        return Path(f"/proc/{self.process.pid}/root{self.directory}")

    def _steps(self) -> int:
        """Return the number of lines of metrics: one for each applied step, also if a step was applied again."""
        with contextlib.suppress(OSError):
            return (self._seen_from_here() / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def _a_replica_serves(self) -> bool:
        """Return whether the supervisor last reported for some replica that it serves."""
        said = re.findall(r"^(rollout-\d+) (.*)$", self.log.read_text(errors="replace"), re.MULTILINE)
        return "serves" in dict(said).values()

    async def _until_steps(self, number: int, limit_s: float, when: str) -> bool:
        """Wait until `number` steps were applied; return whether there was a time without a serving replica.

        Raises:
            TimeoutError: if that takes too long.
        """
        give_up, alone = time.monotonic() + limit_s, False
        while self._steps() < number and self.process.returncode is None:
            alone = alone or not self._a_replica_serves()
            if time.monotonic() > give_up:
                raise TimeoutError(f"the run stood still for {limit_s:g} s {when}")
            await asyncio.sleep(_LOOK_S)
        return alone
