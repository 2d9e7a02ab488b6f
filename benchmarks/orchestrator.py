"""Episodes per second and episodes in flight that one orchestrator carries, and what they cost it.

The orchestrator is the real one, as `sluice orchestrator` starts it: journal on disk, reward pool, metrics. The replica and the
trainer beside it keep their contracts over gRPC and compute nothing. Each level is a run of its own: first as fast as it goes, then
held at 70% of that rate. What the result says of rate, episodes in flight, memory and lag was true of the held level together.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.children import free_port, in_child, scratch, service
from benchmarks.fleet.costs import OrchestratorCosts, line_through
from benchmarks.fleet.poll_costs import PollCosts
from benchmarks.fleet.poll_costs import measure as measure_polls
from benchmarks.loop_lag import lag_ms, lags
from benchmarks.simulated_services import read_counts
from benchmarks.simulated_tasks import TURNS
from sluice.client import OrchestratorClient

RUN = "bench"

SHARE = 0.7
"""Share of the peak rate at which a level is held."""

STALENESS_RESERVE = 16
"""Batches that may wait in addition to twice those in progress: the groups of a batch end at different times, and a batch waits
for its oldest groups."""

ROOM = 1.1
"""Ratio of the most episodes in flight to the wanted number: at any time some are between two stages."""

FASTEST = 10_000.0
"""Episodes per second that the simulated replicas would allow at the peak: more than the orchestrator takes."""

WARM_UP_ROUNDS = 1.5
"""How often all episodes in flight are answered before the measurement begins."""

PICKS = 2.0
"""Searches for a replica per group: one to decide whether it may start, one to place its request."""

_STREAM = "GenerateStream"
_TOKEN_ID_BYTES, _LOGPROB_BYTES = 3, 4

_LEAST_EPISODES = 100
"""Episodes that must end while a level is measured, however busy the machine is."""

_LOOK_S = 1.0
_POLLED_S = 4.0
_WARM_UP_LOOK_S = 0.1
_START_S = 60.0
_LONGEST_WARM_UP_S = 300.0


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line."""
    parser = argparse.ArgumentParser(prog="sluice bench orchestrator", description=__doc__)
    parser.add_argument("--in-flight", type=int, default=10_000, help="episodes under way at a time")
    parser.add_argument(
        "--also", type=int, nargs="*", default=[1_000, 50_000], help="further numbers of them, at the same rate"
    )
    parser.add_argument(
        "--multi-turn", type=int, default=2_000, help=f"of episodes of {TURNS} turns; 0 leaves them out"
    )
    parser.add_argument(
        "--rate", type=float, help="episodes/s to hold; default: 70%% of the peak, which is measured first"
    )
    parser.add_argument("--peak", action="store_true", help="also measure how fast it goes if --rate says what to hold")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured seconds of each level")
    parser.add_argument("--group", type=int, default=16, help="episodes per group")
    parser.add_argument("--batch", type=int, default=64, help="groups per batch")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sample")
    parser.add_argument("--replicas", type=int, default=1, help="simulated replicas, a process each")
    parser.add_argument("--write-trajectories", action="store_true", help="also write trajectories with their text")
    parser.add_argument("--set", action="append", default=[], help="further settings of the orchestrator, as KEY=VALUE")
    parser.add_argument("--keep", type=Path, help="directory to keep everything in (logs, journal, metrics)")
    options = parser.parse_args(argv)
    with scratch(options.keep) as directory:
        return asyncio.run(_measure(options, directory))


@dataclass(frozen=True)
class Level:
    """One load.

    Attributes:
        in_flight: Episodes in flight at a time.
        episodes_per_s: Rate that the replicas allow.
        turns: Requests that an episode makes one after the other.
    """

    name: str
    in_flight: int
    episodes_per_s: float
    turns: int = 1

    @property
    def latency_s(self) -> float:
        """Seconds of one request that keep so many in flight."""
        return ROOM * self.in_flight / self.episodes_per_s / self.turns


@dataclass
class Measured:
    """Measurements of one level."""

    episodes_per_s: float
    in_flight: int
    """The fewest episodes in flight in any sample."""
    steps_per_s: float
    rss_mib: float
    rss_growth_mib_per_min: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    """Upper edge of the bucket with the longest lag; for the last bucket its lower edge."""
    cpu_ms_per_episode: dict[str, float] = field(default_factory=dict)
    """CPU milliseconds per episode, by process."""
    busy: dict[str, float] = field(default_factory=dict)
    """Cores that each process used."""
    messages: dict[str, float] = field(default_factory=dict)
    """Messages per episode, by method."""
    sizes: dict[str, float] = field(default_factory=dict)
    """Bytes of these messages per episode, without what gRPC and TCP add."""

    def __str__(self) -> str:
        """Return one line."""
        cpu = "  ".join(f"{name} {value:.2f}" for name, value in self.cpu_ms_per_episode.items())
        return (
            f"{self.episodes_per_s:,.0f} episodes/s, {self.in_flight:,} in flight, {self.rss_mib:,.0f} MiB"
            f" ({self.rss_growth_mib_per_min:+.1f} a minute), lag {self.lag_p50_ms:.1f} / {self.lag_p99_ms:.1f} / {self.lag_max_ms:.0f} ms (median / 99% / longest),"
            f" CPU ms an episode: {cpu}; orchestrator busy {self.busy['orchestrator']:.2f}"
        )


async def _measure(options: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    levels: dict[str, Measured] = {}

    async def measure(level: Level) -> Measured:
        await asyncio.to_thread((directory / level.name).mkdir)
        async with _services(options, directory / level.name, level) as services:
            found = levels[level.name] = await _observe(services, level, options.seconds)
        print(f"{level.name}: {found}", flush=True)
        return found

    rate = options.rate
    if options.peak or not rate:
        peak = await measure(Level("peak", options.in_flight, FASTEST))
        rate = rate or SHARE * peak.episodes_per_s
    held = await measure(Level("held", options.in_flight, rate))
    for in_flight in options.also:
        await measure(Level(f"{in_flight}-in-flight", in_flight, rate))
    if options.multi_turn:
        await measure(Level("multi-turn", options.multi_turn, FASTEST, turns=TURNS))
    print(table(levels), flush=True)
    comparable = [each for name, each in levels.items() if name not in {"peak", "multi-turn"}]
    costs = await _costs(comparable, options) if len(comparable) > 1 else None
    return {
        "costs": None if costs is None else asdict(costs),
        "ratios": {"episodes_per_s_over_1000": round(held.episodes_per_s / 1000, 3)},
        "options": {name: value for name, value in vars(options).items() if name != "keep"},
        "peak_episodes_per_s": levels["peak"].episodes_per_s if "peak" in levels else None,
        **_multi_turn(levels.get("multi-turn")),
        **{name: value for name, value in vars(held).items() if name != "busy"},
        "levels": {name: vars(level) for name, level in levels.items()},
    }


async def _costs(levels: Sequence[Measured], options: argparse.Namespace) -> OrchestratorCosts:
    polled = [await asyncio.to_thread(in_child, measure_polls, each, _POLLED_S) for each in POLLED]
    for each in polled:
        print(
            f"{each.replicas} replicas: {each.polls_per_s:,.0f} status requests a second take {each.cpu_per_s:.3f} cores, a look for"
            f" a replica {each.pick_s * 1e3:.3f} ms",
            flush=True,
        )
    return costs_of(levels, polled, group=options.group, per_batch=options.group * options.batch, tokens=options.tokens)


def table(levels: Mapping[str, Measured]) -> str:
    """Return the levels as the table of docs/throughput.md."""
    names = ("level", "in flight", "episodes/s", "CPU ms an episode", "cores", "resident memory", "loop lag, 99%")
    rows = [
        (
            name,
            f"{each.in_flight:,}",
            f"{each.episodes_per_s:,.0f}",
            f"{each.cpu_ms_per_episode['orchestrator']:.2f}",
            f"{each.busy['orchestrator']:.2f}",
            f"{each.rss_mib:,.0f} MiB",
            f"{each.lag_p99_ms:.0f} ms",
        )
        for name, each in levels.items()
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def _multi_turn(level: Measured | None) -> Mapping[str, float]:
    """Return the rates of episodes of several turns; nothing if they were left out."""
    if level is None:
        return {}
    rate = level.episodes_per_s
    return {"multi_turn_episodes_per_s": rate, "multi_turn_turns_per_s": round(rate * TURNS, 1)}


@dataclass(frozen=True)
class Services:
    """The processes of one level.

    Attributes:
        simulated: Addresses of the replicas and the trainer.
        processes: By name; the orchestrator's children count as "scoring".
    """

    orchestrator: str
    metrics_url: str
    simulated: Sequence[str]
    processes: Mapping[str, Sequence[psutil.Process]]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that each process has used."""
        orchestrator = self.processes["orchestrator"][0]
        parts = {name: sum(map(_cpu_s, each)) for name, each in self.processes.items()}
        return parts | {"scoring": sum(map(_cpu_s, orchestrator.children(recursive=True)))}


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


@contextlib.asynccontextmanager
async def _services(options: argparse.Namespace, directory: Path, level: Level) -> AsyncIterator[Services]:
    trainer, orchestrator = (f"127.0.0.1:{free_port()}" for _ in range(2))
    replicas = [f"127.0.0.1:{free_port()}" for _ in range(options.replicas)]
    metrics_port = free_port()
    groups = max(1, round(ROOM * level.in_flight / options.group))
    batches = 2 * -(-groups // options.batch) + STALENESS_RESERVE
    settings = [
        f"--run={RUN}",
        f"--output-dir={directory}",
        "--model=simulated",
        "--log-level=warning",
        f"--max-staleness={batches}",
        f"--peers.trainer={trainer}",
        f"--peers.rollout={','.join(replicas)}",
        f"--server.port={orchestrator.rpartition(':')[2]}",
        f"--server.metrics-port={metrics_port}",
        f"--environment=benchmarks.simulated_tasks:{'Talk' if level.turns > 1 else 'Question'}",
        f"--batch-size={options.batch}",
        f"--group-size={options.group}",
        f"--max-running={groups}",
        f"--max-concurrent={batches * options.batch}",
        *(
            f"--concurrency.{name}-samples={-(-groups // options.replicas) * options.group}"
            for name in ("initial", "most")
        ),
        "--max-steps=1000000",
        f"--sampling.max-tokens={options.tokens}",
        f"--write-trajectories={json.dumps(options.write_trajectories)}",
        *(f"--{each}" for each in options.set),
    ]
    async with contextlib.AsyncExitStack() as stack:
        started = [await stack.enter_async_context(_simulated("trainer", trainer, directory / "trainer.log"))]
        for number, target in enumerate(replicas):
            load = [
                f"--latency-s={level.latency_s}",
                f"--tokens={options.tokens}",
                f"--trainer={trainer}",
                f"--run={RUN}",
            ]
            log = directory / f"replica-{number}.log"
            started.append(await stack.enter_async_context(_simulated("replica", target, log, *load)))
        log = directory / "orchestrator.log"
        child = await stack.enter_async_context(service("orchestrator", *settings, health=orchestrator, log=log))
        process = psutil.Process(child.pid)
        processes = {"orchestrator": [process], "trainer": started[:1], "replicas": started[1:]}
        try:
            metrics = f"http://127.0.0.1:{metrics_port}/metrics"
            yield Services(orchestrator, metrics, [*replicas, trainer], processes)
        finally:
            if child.returncode is not None:
                tail = log.read_text(errors="replace")[-2000:]
                print(f"the orchestrator ended with code {child.returncode}:\n{tail}", file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def _simulated(name: str, target: str, log: Path, *arguments: str) -> AsyncIterator[psutil.Process]:
    port = target.rpartition(":")[2]
    command = (sys.executable, "-m", "benchmarks.simulated_services", name, f"--port={port}", *arguments)
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        yield psutil.Process(child.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.wait()


async def _observe(services: Services, level: Level, seconds: float) -> Measured:
    """Wait until the load is steady, then measure for `seconds` seconds, or longer until enough episodes ended.

    Raises:
        RuntimeError: if it does not become steady in time, or too few episodes end.
    """
    process = services.processes["orchestrator"][0]
    async with OrchestratorClient(services.orchestrator) as client:
        give_up = time.monotonic() + _LONGEST_WARM_UP_S + _START_S
        while (state := await client.run(RUN)).trajectories_accepted < WARM_UP_ROUNDS * level.in_flight:
            if time.monotonic() > give_up:
                raise RuntimeError(
                    f"{level.name}: only {state.trajectories_accepted} episodes ended: {state.error or state}"
                )
            await asyncio.sleep(_WARM_UP_LOOK_S)
        before, cpu = await client.run(RUN), services.cpu_s()
        lags_before = await asyncio.to_thread(lags, services.metrics_url)
        counts_before = [await read_counts(each) for each in services.simulated]
        begun, in_flight, sizes, ended = time.perf_counter(), [], [], 0
        while (elapsed := time.perf_counter() - begun) < seconds or ended < _LEAST_EPISODES:
            if elapsed > seconds + _LONGEST_WARM_UP_S:
                raise RuntimeError(
                    f"{level.name}: only {ended} episodes ended within {elapsed:.0f} s: {state.error or state}"
                )
            await asyncio.sleep(min(_LOOK_S, seconds - elapsed + 0.001) if elapsed < seconds else _LOOK_S)
            state = await client.run(RUN)
            in_flight.append(state.running_episodes)
            ended = state.trajectories_accepted - before.trajectories_accepted
            sizes.append(process.memory_info().rss / (1 << 20))
        after, used = await client.run(RUN), services.cpu_s()
        elapsed = time.perf_counter() - begun
        counts = [
            (await read_counts(each)).since(earlier)
            for each, earlier in zip(services.simulated, counts_before, strict=True)
        ]
        lag = lag_ms(lags_before, await asyncio.to_thread(lags, services.metrics_url))
    episodes = after.trajectories_accepted - before.trajectories_accepted
    spent = {name: used[name] - cpu[name] for name in used}
    return Measured(
        episodes_per_s=round(episodes / elapsed, 1),
        in_flight=min(in_flight),
        steps_per_s=round((after.step - before.step) / elapsed, 2),
        rss_mib=round(max(sizes), 1),
        rss_growth_mib_per_min=round((sizes[-1] - sizes[0]) / elapsed * 60, 1),
        lag_p50_ms=lag["p50"],
        lag_p99_ms=lag["p99"],
        lag_max_ms=lag["max"],
        cpu_ms_per_episode={name: round(each / episodes * 1e3, 3) for name, each in spent.items()},
        busy={name: round(each / elapsed, 3) for name, each in spent.items()},
        messages={name: round(each / episodes, 6) for name, each in _summed(each.messages for each in counts).items()},
        sizes={name: round(each / episodes, 1) for name, each in _summed(each.sizes for each in counts).items()},
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total


POLLED = (64, 512)
"""Numbers of replicas for which the costs of an idle fleet are measured."""


def costs_of(
    levels: Sequence[Measured], polled: Sequence[PollCosts], *, group: int, per_batch: int, tokens: int
) -> OrchestratorCosts:
    """Return the costs of single messages, from single-turn levels that have equally many episodes but different numbers of messages.

    Args:
        levels: At least two, with different numbers in flight.
        polled: Costs of fleets of different sizes.
        group: Episodes of a group, which is one request.
        per_batch: Episodes of a batch.
        tokens: Tokens of a sample.
    """
    polling = line_through((each.polls_per_s, each.cpu_per_s) for each in polled)
    of_levels = line_through(
        (
            each.messages[_STREAM],
            each.cpu_ms_per_episode["orchestrator"] / 1e3
            - polling.fixed / each.episodes_per_s
            - each.messages["GetStatus"] / 2 * polling.each,
        )
        for each in levels
    )
    # Bytes of a request, and of the messages of its stream. Levels differ in the number of messages, not in tokens.
    stream = line_through((each.messages[_STREAM] * group, each.sizes[_STREAM] * group) for each in levels)
    # By batch: a level has few of them, so that there is part of one more or less at its ends.
    trained = statistics.median(
        (each.sizes["SubmitBatch"] + each.sizes["WatchSteps"]) / each.messages["WatchSteps"] / per_batch
        for each in levels
    )
    trained_token_bytes = _TOKEN_ID_BYTES + _LOGPROB_BYTES
    return OrchestratorCosts(
        trajectory_s=of_levels.fixed,
        message_s=of_levels.each,
        idle=polling.fixed,
        poll_s=polling.each,
        pick_s=line_through((each.replicas, each.pick_s) for each in polled),
        picks=PICKS,
        request_bytes=0.0,
        message_bytes=stream.each,
        token_bytes=stream.fixed / group / tokens,
        poll_bytes=statistics.median(each.poll_bytes for each in polled),
        trajectory_bytes=max(0.0, trained - tokens * trained_token_bytes),
        trained_token_bytes=trained_token_bytes,
    )
