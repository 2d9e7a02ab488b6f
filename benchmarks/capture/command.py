"""`sluice bench capture`: proof that what agents of every dialect sample is trained token for token.

Agents of seven kinds play episodes with a tool at two gateways, two replicas and an orchestrator, which are killed with SIGKILL, while a
request is under way and between requests. Connections are cut off, replies lost, requests sent twice and retried, with a mark and without.
Two runs: one whose weights stay as they are, and one with updates and `kv_policy = recompute`. Then four records of the same tokens
are compared: what the samplers drew (written down below everything else), what the journal captured, what the agents were given, and
what was trained; and the trainer's forward computes the log-probabilities again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.capture import environment, judge, witness
from benchmarks.capture.agents import MAX_TOKENS, agents
from benchmarks.capture.clients import EndedError, Fleet, Played, RefusedError
from benchmarks.capture.records import keep_segments, read_run
from benchmarks.capture.warm_up import warm_model
from benchmarks.children import in_child, log_tail, scratch
from orchestrator_svc.commands.audit import audit_run
from orchestrator_svc.journal.segments import JournalError
from sluice.cli import fork_server
from sluice.cli.rl import write_settings
from sluice.config import SecurityConfig, load_run, whole_number
from sluice.plan import Plan, make_plan
from sluice.plan.local import HOSTS, child_specs, on_free_ports, this_machine
from sluice.rpc import connect
from sluice.supervise.log_records import LogLine
from sluice.supervise.supervisor import ChildSpec, ChildState, Outcome, Supervisor
from sluice.tasks import discard_outcome
from sluice.v1 import episode_pb2_grpc

KINDS = ("chat", "completions", "responses", "messages", "tokens", "grpc", "rewriting")

GATEWAYS = ("gateway-0", "gateway-1")
REPLICAS = 2

WITHIN_NATS = 1e-4
"""Largest difference between a log-probability of the trainer's forward and the one used in training."""

MOST_TIES = 1e-4
"""Largest share of tokens at which float32 itself is further off: see `benchmarks.capture.recompute`."""

LEAST_CALLED = 0.9
"""Least share of the episodes of each kind with a parsed call."""

GROUP_SIZE, BATCH_GROUPS = 4, 5

START_S = 300.0
RUN_S = 3600.0
QUIET_S = 60.0
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Kill:
    """One SIGKILL: of which child, and whether between requests or while some are under way."""

    child: str
    between: bool

    def __str__(self) -> str:
        """Return the key under which kills are counted."""
        return f"{self.child.partition('-')[0]} {'between' if self.between else 'inside'} turns"


def draw_kills(rounds: int, dice: random.Random) -> list[Kill]:
    """Return the kills of a run in order: each victim `rounds` times between turns and `rounds` times inside of turns."""
    victims = [*GATEWAYS, *(f"rollout-{number}" for number in range(REPLICAS)), "orchestrator"]
    kills = [Kill(victim, between) for victim in victims for between in (False, True)] * rounds
    dice.shuffle(kills)
    return kills


def run(argv: list[str]) -> Mapping[str, Any]:
    """Play, kill and compare; return the content of the JSON line, whose `failures` must be empty."""
    parser = argparse.ArgumentParser(prog="sluice bench capture", description=__doc__)
    parser.add_argument("--model", type=Path, help="model that was warmed up on calls; default: make one")
    parser.add_argument(
        "--episodes", type=whole_number(1), default=200, help="episodes of each kind, weights unchanged"
    )
    parser.add_argument(
        "--updated", type=whole_number(0), default=60, help="episodes of each kind with updates; 0: none"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of agents")
    parser.add_argument("--kills", type=whole_number(0), default=2, help="rounds of kills; one has ten kills")
    parser.add_argument("--at-a-time", type=whole_number(1), default=24, help="episodes under way")
    parser.add_argument("--seed", type=int, default=0, help="decides tasks, faults and kills")
    parser.add_argument("--keep", type=Path, help="directory to keep everything in")
    options = parser.parse_args(argv)
    with scratch(options.keep) as directory:
        return asyncio.run(_runs(options, directory))


async def _runs(options: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    model = (options.model or await warm_model(directory, options.seed)).resolve()
    wanted = {"unchanged": (options.episodes, False), "updated": (options.updated, True)}
    results: dict[str, Any] = {}
    for name, (episodes, updates) in wanted.items():
        if episodes:
            job = Job(options, model, directory, name, episodes, updates)
            results[name] = await job.run()
    failures = [f"{name}: {problem}" for name, result in results.items() for problem in result.pop("failures")]
    return {**results, "failures": failures}


class _Shown:
    """Prints when children die, and keeps track of which ones serve."""

    def __init__(self) -> None:
        self.serving: set[str] = set()

    def on_line(self, child: str, line: LogLine) -> None:
        """Do nothing: the line is in the logs."""

    def on_state(self, child: str, state: ChildState, detail: str) -> None:
        """Note a change."""
        (self.serving.add if state is ChildState.SERVING else self.serving.discard)(child)
        if state is ChildState.RESTARTING:
            print(f"  {child} {detail}", flush=True)


@dataclass
class Job:
    """One run with its agents.

    Attributes:
        wanted: Episodes of each kind.
        updates: Whether the weights change.
    """

    options: argparse.Namespace
    model: Path
    directory: Path
    name: str
    wanted: int
    updates: bool
    kills: Counter[str] = field(default_factory=Counter)

    @property
    def run_dir(self) -> Path:
        """Directory of the run."""
        return self.directory / self.name

    async def run(self) -> dict[str, Any]:
        """Play the episodes and judge the files of the run; return the figures, with `failures`."""
        began = time.monotonic()
        shown, fleet, played = _Shown(), None, list[Played]()
        failures: list[str] = []
        async with self._supervised(shown) as (ended, plan):
            try:
                await self._serving(shown, ended)
                async with self._fleet(plan) as fleet:
                    await self._play(fleet, plan, shown, ended, played)
            except (TimeoutError, RefusedError, RuntimeError) as error:
                failures.append(f"{type(error).__name__}: {error}")
        seconds = time.monotonic() - began
        result = await asyncio.to_thread(self._judge, fleet, played, failures)
        print(f"{self.name}: {seconds:.0f} s; {json.dumps(result, indent=1)}", flush=True)
        return {"seconds": round(seconds, 1), **result}

    # The processes.

    def _specs(self) -> tuple[list[ChildSpec], Plan]:
        options, seen = self.options, self.directory / f"{self.name}-sampled"
        seen.mkdir()
        settings = {
            "run": self.name,
            "output-dir": self.directory,
            "model": self.model,
            "seed": options.seed,
            "gateway.server.port": 0,
            "gateway.server.http-port": 0,
            "orchestrator.max-steps": 1_000_000,
            "orchestrator.batch-size": BATCH_GROUPS,
            "orchestrator.group-size": GROUP_SIZE,
            "orchestrator.checkpoint.every-steps": 0,  # a checkpoint would release the payloads that are compared
            "orchestrator.checkpoint.final": "false",
            "orchestrator.environment": f"{Path(environment.__file__)}:{environment.Shop.__name__}",
            "orchestrator.workflow": "external",
            "orchestrator.advantage": "grpo",
            "orchestrator.sampling.max-tokens": MAX_TOKENS,
            "rollout.max-model-len": 512,
            "trainer.objective.preset": "grpo",
            "max-staleness": 2,
            "rollout.engine": "transformers",
            "rollout.dtype": "float32",
            "rollout.kv-policy": "recompute",
            "trainer.dtype": "float32",
            "trainer.lr": 1e-4 if self.updates else 0.0,
            "weightsync.keep": 1_000_000 if self.updates else 3,
            "weightsync.anchor-every": 1,
        }
        words = [f"--{key}={value}" for key, value in settings.items()]
        config = load_run(words)
        extra = {"gateway": len(GATEWAYS)}
        plan = make_plan(config, this_machine(()), replicas=REPLICAS, extra=extra, threads=1)
        plan = on_free_ports(plan, config)
        config = config.model_copy(update={"peers": plan.peers(HOSTS)})
        config.run_dir.mkdir(parents=True)
        specs = child_specs(plan, config, write_settings(config), config.run_dir / "logs", own_threads=True)
        return [_witnessed(each, seen) if each.name.startswith("rollout") else each for each in specs], plan

    @contextlib.asynccontextmanager
    async def _supervised(self, shown: _Shown) -> AsyncIterator[tuple[asyncio.Task[Outcome], Plan]]:
        specs, plan = self._specs()
        supervisor, stop = Supervisor(specs, shown, max_restarts=100_000), asyncio.Event()
        ended = asyncio.create_task(supervisor.run(stop))
        keeping = asyncio.create_task(self._keep_segments())
        discard_outcome(ended, keeping)
        try:
            yield ended, plan
        finally:
            stop.set()
            await ended
            keeping.cancel()
            await asyncio.wait({keeping})
            keep_segments(self.run_dir)

    async def _keep_segments(self) -> None:
        """Keep every segment of the journal until it is judged. Each is written to for longer than the time between two checks."""
        while True:
            keep_segments(self.run_dir)
            await asyncio.sleep(_LOOK_S)

    async def _serving(self, shown: _Shown, ended: asyncio.Task[Outcome]) -> None:
        async with asyncio.timeout(START_S):
            while len(shown.serving) < 2 * REPLICAS + 3:
                self._check(ended)
                await asyncio.sleep(_LOOK_S)

    def _check(self, ended: asyncio.Task[Outcome]) -> None:
        """Raise if the run has ended.

        Raises:
            RuntimeError: with the end of the log of the child that ended it.
        """
        if ended.done():
            outcome = ended.result()
            log = self.run_dir / "logs" / f"{outcome.child}.log"
            tail = log_tail(log) if log.is_file() else ""
            raise RuntimeError(f"the run ended: {outcome.child} {outcome.reason}\n{tail}")

    @contextlib.asynccontextmanager
    async def _fleet(self, plan: Plan) -> AsyncIterator[Fleet]:
        async with contextlib.AsyncExitStack() as stack:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=60, limits=limits))
            channels = [
                await stack.enter_async_context(connect(each, SecurityConfig()))
                for each in plan.addresses("gateway", HOSTS)
            ]
            urls = [f"http://{each}" for each in plan.addresses("gateway", HOSTS, "http")]
            fleet = Fleet(urls, [episode_pb2_grpc.EpisodeServiceStub(each) for each in channels], http, self.name)
            fleet.open.set()
            yield fleet

    # The episodes.

    async def _play(
        self, fleet: Fleet, plan: Plan, shown: _Shown, ended: asyncio.Task[Outcome], played: list[Played]
    ) -> None:
        """Play until each kind has its episodes. Meanwhile kill children at regular intervals of progress."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - seconds

        make = agents(AutoTokenizer.from_pretrained(self.model))
        kinds, begun = self.options.kinds, Counter[str]()
        numbers = iter(range(1 << 30))

        async def work() -> None:
            while any(begun[kind] < self.wanted for kind in kinds):
                kind = min(kinds, key=lambda kind: begun[kind])
                begun[kind] += 1
                dice = random.Random(f"{self.options.seed}/{self.name}/{next(numbers)}")  # noqa: S311 - a plan
                episode: Played | None = None
                try:
                    episode = await fleet.play(kind, make[kind], dice)
                except EndedError as error:
                    raise RuntimeError(f"the run ended before its episodes: {error}") from error
                finally:
                    if episode is None:
                        begun[kind] -= 1
                if episode is not None:
                    played.append(episode)

        total = self.wanted * len(kinds)
        dice = random.Random(f"{self.options.seed}/{self.name}")  # noqa: S311 - a plan
        kills = draw_kills(self.options.kills, dice)
        workers = [asyncio.create_task(work(), name=f"agent {number}") for number in range(self.options.at_a_time)]
        try:
            async with asyncio.timeout(RUN_S):
                for number, each in enumerate(kills):
                    due = total * (number + 1) // (len(kills) + 1)
                    while len(played) < due and not any(worker.done() for worker in workers):
                        self._check(ended)
                        await asyncio.sleep(_LOOK_S)
                    await self._kill(each, fleet, plan, dice)
                await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _kill(self, kill: Kill, fleet: Fleet, plan: Plan, dice: random.Random) -> None:
        """Kill a child, either when no request is in progress or when some are."""
        async with asyncio.timeout(QUIET_S):
            if kill.between:
                fleet.open.clear()
            while bool(fleet.busy) == kill.between:  # noqa: ASYNC110 - many tasks change it
                await asyncio.sleep(0.001)
        if not kill.between:
            await asyncio.sleep(dice.uniform(0, 0.1))
        busy = len(fleet.busy)
        process = _process(plan.place(kill.child).port())
        if process is not None:
            process.kill()
            self.kills[str(kill)] += 1
            print(f"  killed {kill.child} with {busy} episodes inside of a turn", flush=True)
        fleet.open.set()

    # What is left.

    def _judge(self, fleet: Fleet | None, played: Sequence[Played], failures: list[str]) -> dict[str, Any]:
        from benchmarks.capture.recompute import recompute  # noqa: PLC0415 - brings torch

        findings = judge.Findings(failures=failures)
        run = read_run(self.run_dir)
        samplers = witness.Witness(witness.read(self.directory / f"{self.name}-sampled"))
        judge.captured_are_sampled(run, samplers, findings)
        judge.given_are_captured(run, played, findings)
        judge.histories_continue(run, played, findings)
        judge.trained_once(run, findings)
        self._judge_episodes(fleet, played, findings)
        again = in_child(recompute, self.run_dir, self.model, updates=self.updates, threads=2, within=WITHIN_NATS)
        if not again.beyond_exactly <= WITHIN_NATS:
            findings.failures.append(
                f"{again.beyond} log-probabilities differ by more than {WITHIN_NATS:g} from the trainer's, {again.where[:3]},"
                f" and by up to {again.beyond_exactly:g} from its forward in float64"
            )
        if again.beyond > MOST_TIES * again.tokens:
            findings.failures.append(
                f"{again.beyond} of {again.tokens} log-probabilities differ by more than {WITHIN_NATS:g}"
            )
        if again.missing or not again.tokens:
            findings.failures.append(
                f"nothing was computed again of the versions {', '.join(again.missing) or 'of this run'}"
            )
        try:
            audit = audit_run(self.run_dir)
            findings.fail([f"audit: {each.problem}" for each in audit.differences])
            counts = {"accepted": audit.accepted, "trained": audit.trained, "dropped": dict(audit.dropped)}
            counts |= {"in flight": audit.in_flight, "rolled back": audit.rolled_back}
        except (JournalError, OSError) as error:
            findings.failures.append(f"the run cannot be audited: {error}")
            counts = {}
        return {
            **findings.figures,
            "logprobs": asdict(again),
            "given_up": dict(run.given_up),
            "audit": counts,
            "failures": findings.failures,
        }

    def _judge_episodes(self, fleet: Fleet | None, played: Sequence[Played], findings: judge.Findings) -> None:
        episodes, called = Counter(each.kind for each in played), Counter(each.kind for each in played if each.called)
        for kind in self.options.kinds:
            if episodes[kind] < self.wanted:
                findings.failures.append(f"{episodes[kind]} episodes of {kind} instead of {self.wanted}")
            elif called[kind] < LEAST_CALLED * episodes[kind]:
                findings.failures.append(f"{called[kind]} of {episodes[kind]} episodes of {kind} have a parsed call")
        if fleet is not None:
            findings.failures += fleet.failures
        findings.figures |= {
            "episodes": dict(episodes),
            "called_share": {kind: round(called[kind] / max(1, episodes[kind]), 3) for kind in episodes},
            "sessions_by_two_gateways": sum(len(each.gateways) > 1 for each in played),
            "kills": dict(self.kills),
            "faults": {name: count for name, count in fleet.counts.items() if count} if fleet is not None else {},
            "slowest_reply_s": round(fleet.slowest_s, 1) if fleet is not None else None,
        }


def _witnessed(spec: ChildSpec, directory: Path) -> ChildSpec:
    """Return the spec of a replica whose sampler records its draws."""
    arguments = spec.argv[spec.argv.index("rollout") :]
    program = (sys.executable, "-m", witness.__name__)
    return replace(
        spec,
        argv=(*program, "run", str(directory), *arguments),
        fork_server=(*program, "fork", str(directory), *arguments) if spec.fork_server else (),
    )


def _process(port: int) -> psutil.Process | None:
    """Return the child that listens at a port, not the fork server that started it, which has the same command line."""
    named = {}
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = each.cmdline()
            if "--server.port" in words and words[words.index("--server.port") + 1] == str(port):
                named[each.pid] = each, each.ppid(), fork_server.__name__ in words or "fork" in words
    children = [process for process, parent, _ in named.values() if parent in named]
    alone = [process for process, _, forks in named.values() if not forks]
    return next(iter([*children, *alone]), None)
