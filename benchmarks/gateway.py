"""What a gateway adds to a request: the speed beside vLLM's own server, CPU time, latency, memory.

`engine`: sessions at a gateway against vLLM's OpenAI server with the same engine settings and the same prompts, in alternating rounds.
Every reply of the gateway is in the journal, synchronised to disk, before its end is sent. `cost`: CPU time and latency that each
process adds to a request whose engine is simulated. `held`: memory of open sessions. `abandoned`: what is left of sessions whose
agents went away. The gateway and the orchestrator are the real ones, started as `sluice gateway` and `sluice orchestrator`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.children import BENCH_PACKAGES, free_port, log_tail, make_model, median_ratio, program, scratch, service
from benchmarks.loop_lag import lag_ms, lags
from benchmarks.profiles import profiled
from sluice.cli.fetch_model import fetch_model
from sluice.config import ConfigError, Options, whole_number
from sluice.versions import Version

RUN = "bench"
PARTS = ("engine", "cost", "held", "abandoned")
SMOLLM2 = "smollm2-135m"

MAX_MODEL_LEN = 512
START_S = 300.0
REQUEST_S = 600.0
OPEN_WAIT_S = 10.0
_LOOK_S = 0.2

SIMULATED_S = 1.0
"""Seconds of a request at the simulated engine."""

MOST_OPENING = 32
"""Sessions that are opened and sample at a time if speed is not measured."""

IDLE_S = 10.0
"""Seconds after which an abandoned session is given up."""

WAVES = 3
"""How often sessions are opened and abandoned: memory that grows each time is a leak."""

GIB, MIB, KIB = 1 << 30, 1 << 20, 1 << 10


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line."""
    parser = Options(prog="sluice bench gateway", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument(
        "--smollm2", type=Path, default=Path("models") / SMOLLM2, help="SmolLM2-135M; it is fetched if it is not there"
    )
    parser.add_argument("--models", nargs="+", choices=("2m", SMOLLM2), default=["2m", SMOLLM2], help="of `engine`")
    parser.add_argument("--sessions", type=whole_number(1), default=64, help="sessions at a time")
    parser.add_argument("--tokens", type=whole_number(1), default=64, help="tokens of a reply")
    parser.add_argument("--rounds", type=whole_number(1), default=5, help="measured rounds of each way")
    parser.add_argument("--requests", type=whole_number(1), default=1, help="requests of a session in a round")
    parser.add_argument("--cost-requests", type=whole_number(1), default=30, help="requests of a session in `cost`")
    parser.add_argument(
        "--held", type=whole_number(1, 1 << 16), default=4000, help="sessions that are open at once in `held`"
    )
    parser.add_argument(
        "--abandoned", type=whole_number(1, 1 << 16), default=1000, help="sessions of a wave in `abandoned`"
    )
    parser.add_argument("--profile", action="store_true", help="show by py-spy what the CPU time of `cost` is spent on")
    parser.add_argument("--keep", type=Path, help="directory to keep logs and journals in")
    options = parser.parse_args(argv)
    with scratch(options.keep) as directory:
        return asyncio.run(_measure(options, directory))


async def _measure(options: argparse.Namespace, directory: Path) -> Mapping[str, Any]:
    results: dict[str, Any] = {"ratios": {}, "load_average": os.getloadavg()[0]}
    for name in (*options.models, *options.parts):
        (directory / name).mkdir()
    if "engine" in options.parts:
        for name in options.models:
            found = await against_vllm(options, directory / name, name)
            results["ratios"][f"requests_over_engine_{name}"] = found.pop("requests_over_engine")
            results[name] = found
    if "cost" in options.parts:
        results["cost"] = await cost(options, directory / "cost")
    if "held" in options.parts:
        results["held"] = await held(options.held, directory / "held")
    if "abandoned" in options.parts:
        results["abandoned"] = await abandoned(options.abandoned, directory / "abandoned")
    return results


# The services.


@dataclass(frozen=True)
class Doors:
    """A gateway and what it needs.

    Attributes:
        url: URL of its HTTP port.
        processes: Processes by name.
        metrics: URLs of metrics, of gateway and orchestrator.
    """

    url: str
    processes: Mapping[str, psutil.Process]
    metrics: Mapping[str, str]

    async def lags(self) -> dict[str, dict[float, float]]:
        """Return how late each event loop was so far, in the form of `loop_lag.lags`."""
        return {name: await asyncio.to_thread(lags, url) for name, url in self.metrics.items()}

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that each process has used, with its children."""
        return {name: sum(_cpu_s(each) for each in family(process)) for name, process in self.processes.items()}

    def memory(self) -> dict[str, int]:
        """Return the bytes of resident memory of each process."""
        return {name: process.memory_info().rss for name, process in self.processes.items()}

    def descriptors(self) -> dict[str, int]:
        """Return the number of open files and sockets of each process."""
        return {name: process.num_fds() for name, process in self.processes.items()}


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    return [process, *process.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


@contextlib.asynccontextmanager
async def gateway(
    directory: Path, replica: str, trainer: str, sessions: int, **external: float
) -> AsyncIterator[Doors]:
    """Start an orchestrator and a gateway.

    Args:
        directory: For journals and logs.
        replica: Address of the replica.
        trainer: Address of the trainer.
        sessions: Least number of offered episodes.
        external: Settings of `orchestrator.external`.
    """
    port, gateway_port, http_port = free_port(), free_port(), free_port()
    metrics = {"gateway": free_port(), "orchestrator": free_port()}
    group, groups = min(64, sessions), -(-sessions // 64) + 1
    common = [f"--run={RUN}", f"--output-dir={directory}", "--model=bench", "--log-level=warning"]
    # The sessions of all rounds belong to one group and lease. They are idle during the other server's turns, however slow the engine is.
    external = {"group_s": 86_400.0, "lease_s": 86_400.0, "idle_s": 86_400.0, **external}
    orchestrator = [
        *common,
        f"--peers.trainer={trainer}",
        f"--peers.rollout={replica}",
        f"--server.port={port}",
        f"--server.metrics-port={metrics['orchestrator']}",
        "--environment=benchmarks.simulated_tasks:Question",
        "--workflow=external",
        "--sampling.ignore-eos=true",  # a request may not set it, and replies of equal length need it, so the session sets it
        f"--group-size={group}",
        "--batch-size=1",
        f"--max-staleness={groups}",
        f"--max-running={groups}",
        f"--max-concurrent={groups}",
        "--max-steps=1000000",
        "--pacing.enabled=false",
        *(f"--external.{name.replace('_', '-')}={value:g}" for name, value in external.items()),
    ]
    door = [
        *common,
        f"--peers.orchestrator=127.0.0.1:{port}",
        f"--server.port={gateway_port}",
        f"--server.http-port={http_port}",
        f"--server.metrics-port={metrics['gateway']}",
    ]
    async with (
        service("orchestrator", *orchestrator, health=f"127.0.0.1:{port}", log=directory / "orchestrator.log") as below,
        service("gateway", *door, health=f"127.0.0.1:{gateway_port}", log=directory / "gateway.log") as above,
    ):
        processes = {"gateway": psutil.Process(above.pid), "orchestrator": psutil.Process(below.pid)}
        try:
            urls = {name: f"http://127.0.0.1:{each}/metrics" for name, each in metrics.items()}
            yield Doors(f"http://127.0.0.1:{http_port}", processes, urls)
        except Exception:
            for name in processes:
                print(f"--- {name}.log\n{log_tail(directory / f'{name}.log')}", file=sys.stderr, flush=True)
            raise


@contextlib.asynccontextmanager
async def simulated_gateway(
    directory: Path, sessions: int, *, latency_s: float, tokens: int, **external: float
) -> AsyncIterator[Doors]:
    """Start a gateway whose engine and trainer compute nothing."""
    trainer, replica = free_port(), free_port()
    load = [f"--trainer=127.0.0.1:{trainer}", f"--latency-s={latency_s}", "--spread=0", f"--tokens={tokens}"]
    simulated = "benchmarks.simulated_services"
    async with (
        program(simulated, "trainer", f"--port={trainer}", log=directory / "trainer.log"),
        program(simulated, "replica", f"--port={replica}", *load, log=directory / "replica.log") as engine,
        gateway(directory, f"127.0.0.1:{replica}", f"127.0.0.1:{trainer}", sessions, **external) as doors,
    ):
        yield replace(doors, processes={**doors.processes, "replica": engine})


# The clients.


@dataclass(frozen=True, slots=True)
class Opened:
    """A session: its name, and the headers of its requests."""

    name: str
    headers: Mapping[str, str]


def client(url: str, connections: int) -> httpx.AsyncClient:
    """Return a client that keeps a connection for each session."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits, trust_env=False)


async def open_session(http: httpx.AsyncClient) -> Opened:
    """Lease and open a session; wait for the services to find each other.

    Raises:
        RuntimeError: if it cannot be opened.
    """
    end = time.monotonic() + START_S
    while True:
        response = await http.post("/rl/sessions", json={"wait_s": OPEN_WAIT_S})
        if response.status_code == 200:
            given = response.json()
            return Opened(given["id"], {"authorization": f"Bearer {given['key']}"})
        if response.status_code not in (429, 503) or time.monotonic() > end:
            raise RuntimeError(f"no session can be opened: {response.status_code} {response.text[:500]}")
        await asyncio.sleep(_LOOK_S)


def prompt(number: int) -> list[dict[str, str]]:
    """Return messages of about forty words, different for each number, so that no cache holds them."""
    words = " ".join(f"{number}.{index} apples" for index in range(12))
    return [
        {"role": "system", "content": "You are a careful assistant. Answer in one sentence."},
        {"role": "user", "content": f"Question {number}: there are {words}. How many apples is that?"},
    ]


async def ask(http: httpx.AsyncClient, number: int, tokens: int, headers: Mapping[str, str] | None = None) -> float:
    """Ask for a reply of `tokens` tokens; return the seconds that it took.

    Raises:
        RuntimeError: if the reply is not as requested.
    """
    body = {"model": "bench", "messages": prompt(number), "max_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    begun = time.perf_counter()
    response = await http.post("/v1/chat/completions", json=body, headers=headers)
    seconds = time.perf_counter() - begun
    usage = response.json().get("usage", {}) if response.status_code == 200 else {}
    if usage.get("completion_tokens") != tokens:
        raise RuntimeError(f"no reply of {tokens} tokens: {response.status_code} {response.text[:500]}")
    return seconds


# Against vLLM's server.


async def against_vllm(options: argparse.Namespace, directory: Path, name: str) -> dict[str, Any]:
    """Send the same requests to vLLM's server and to a gateway, in turns."""
    if name == SMOLLM2:
        print(fetch_model(SMOLLM2, options.smollm2), flush=True)
    model = options.smollm2.resolve() if name == SMOLLM2 else make_model(directory / "model")
    async with contextlib.AsyncExitStack() as stack:
        theirs, engine = await stack.enter_async_context(vllm_server(directory, model, options.sessions))
        doors = await stack.enter_async_context(real_gateway(directory, model, options.sessions))
        doors = replace(doors, processes={**doors.processes, "vllm_server": engine})
        plain = await stack.enter_async_context(client(theirs, options.sessions))
        captured = await stack.enter_async_context(client(doors.url, options.sessions))
        sessions = await asyncio.gather(*(open_session(captured) for _ in range(options.sessions)))
        numbers = itertools.count()
        seconds: dict[str, list[float]] = {"vllm": [], "gateway": []}
        cpu_ms: dict[str, dict[str, list[float]]] = {"vllm": {}, "gateway": {}}
        latency: dict[str, list[float]] = {"vllm": [], "gateway": []}
        requests = options.sessions * options.requests

        async def sample(way: str, first: int) -> list[float]:
            async def one(index: int, session: Opened) -> list[float]:
                mine = range(first + index * options.requests, first + (index + 1) * options.requests)
                if way == "vllm":
                    return [await ask(plain, number, options.tokens) for number in mine]
                return [await ask(captured, number, options.tokens, session.headers) for number in mine]

            parts = await asyncio.gather(*(one(index, session) for index, session in enumerate(sessions)))
            return list(itertools.chain(*parts))

        for number in range(options.rounds + 1):
            first = next(numbers) * requests
            for way in ("vllm", "gateway") if number % 2 else ("gateway", "vllm"):
                begun, cpu = time.perf_counter(), doors.cpu_s()
                found = await sample(way, first)
                spent, elapsed = doors.cpu_s(), time.perf_counter() - begun
                if number:  # the first round warms up
                    seconds[way].append(elapsed)
                    latency[way] += found
                    for part, used in spent.items():
                        cpu_ms[way].setdefault(part, []).append((used - cpu[part]) * 1000 / requests)
            if number:
                print(
                    f"{name} round {number}: " + "  ".join(f"{w} {requests / s[-1]:.2f}/s" for w, s in seconds.items()),
                    flush=True,
                )
    return {
        "requests_over_engine": median_ratio(seconds["vllm"], seconds["gateway"]),
        "requests_per_s": {way: round(requests / statistics.median(found), 3) for way, found in seconds.items()},
        "seconds_of_rounds": {way: [round(s, 2) for s in found] for way, found in seconds.items()},
        "p99_s": {way: round(quantile(found, 0.99), 3) for way, found in latency.items()},
        "cpu_ms_per_request": {
            way: {part: round(statistics.median(used), 1) for part, used in parts.items()}
            for way, parts in cpu_ms.items()
        },
    }


def engine_settings(model: Path, sessions: int) -> dict[str, Any]:
    """Return the engine arguments of both servers. By default a replica uses the trainer's precision, vLLM the files'."""
    from rollout_svc.engines.vllm.processes import model_dtype  # noqa: PLC0415 - only where vLLM is wanted

    return {"max_num_seqs": sessions, "max_model_len": MAX_MODEL_LEN, "dtype": model_dtype(str(model))}


@contextlib.asynccontextmanager
async def vllm_server(directory: Path, model: Path, sessions: int) -> AsyncIterator[tuple[str, psutil.Process]]:
    """Start vLLM's OpenAI server with the engine arguments and the environment that a replica gives its engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - takes seconds

    from rollout_svc.engines.vllm import processes  # noqa: PLC0415 - only where vLLM is wanted

    port, log = free_port(), directory / "vllm.log"
    if not (BENCH_PACKAGES / "watchfiles").is_dir():
        raise ConfigError("vLLM's server needs more than a replica: run `make install-bench`, or leave `engine` out")
    paths = (str(BENCH_PACKAGES), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    processes.prepare_environment(environment, workers=1)
    given = processes.engine_arguments(
        str(model),
        engine_settings(model, sessions),
        on_cpu=not processes.has_accelerator(),
        arguments_class=AsyncEngineArgs,
    )
    ours = {"model", "worker_extension_cls", "weight_transfer_config", "use_tqdm_on_load", "skip_tokenizer_init"}
    words = [flag(key, value) for key, value in given.items() if key not in ours]
    words += [f"--model={model}", "--served-model-name=bench", "--host=127.0.0.1", f"--port={port}"]
    words += ["--disable-uvicorn-access-log", "--no-enable-log-requests"]
    url = f"http://127.0.0.1:{port}"
    async with program("vllm.entrypoints.openai.api_server", *words, log=log, **environment) as process:
        async with client(url, 1) as http:
            end = time.monotonic() + START_S
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if (await http.get("/health", timeout=5)).status_code == 200:
                        break
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE or time.monotonic() > end:
                    raise RuntimeError(f"vLLM's server does not serve:\n{log_tail(log)}")
                await asyncio.sleep(_LOOK_S)
        yield url, process


def flag(name: str, value: object) -> str:
    """Return an engine argument as a word of vLLM's command line."""
    word = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{word}" if value else f"--no-{word}"
    return f"--{word}={json.dumps(value) if isinstance(value, dict | list) else value}"


@contextlib.asynccontextmanager
async def real_gateway(directory: Path, model: Path, sessions: int, engine: Sequence[str] = ()) -> AsyncIterator[Doors]:
    """Start a gateway whose replica runs vLLM, or another engine. The trainer is simulated; its version was pushed to a weight service.

    Args:
        directory: For journals and logs.
        model: Model that the replica serves.
        sessions: Episodes that are on offer at least.
        engine: Settings of the replica's engine; none: vLLM.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 - brings torch

    from benchmarks.weight_stack import weight_service  # noqa: PLC0415 - brings torch

    trainer, port = free_port(), free_port()
    replica = f"127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(
            program("benchmarks.simulated_services", "trainer", f"--port={trainer}", log=directory / "trainer.log")
        )
        weights = await stack.enter_async_context(weight_service(directory, local=True))
        await weights.push(Version(1, 0), load_file(model / "model.safetensors"))
        words = [
            f"--run={RUN}",
            f"--model={model}",
            "--log-level=warning",
            f"--peers.weightsync={weights.target}",
            f"--server.port={port}",
            f"--server.http-port={free_port()}",
            *(engine or [f"--engine-args={json.dumps(engine_settings(model, sessions))}"]),
        ]
        child = await stack.enter_async_context(
            service("rollout", *words, health=replica, log=directory / "rollout.log", start_s=START_S)
        )
        doors = await stack.enter_async_context(gateway(directory, replica, f"127.0.0.1:{trainer}", sessions))
        yield replace(doors, processes={**doors.processes, "replica": psutil.Process(child.pid)})


# CPU time and latency.


async def cost(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure what gateway and orchestrator add to requests whose engine is simulated."""
    sessions, requests = options.sessions, options.cost_requests
    async with (
        simulated_gateway(directory, sessions, latency_s=SIMULATED_S, tokens=options.tokens) as doors,
        client(doors.url, sessions) as http,
    ):
        opened = await asyncio.gather(*(open_session(http) for _ in range(sessions)))
        numbers = itertools.count()

        async def talk(session: Opened, count: int) -> list[float]:
            # Sessions begin at different moments, and each request follows the previous one.
            await asyncio.sleep(SIMULATED_S * (hash(session.name) % 97) / 97)
            return [await ask(http, next(numbers), options.tokens, session.headers) for _ in range(count)]

        await asyncio.gather(*(talk(session, 2) for session in opened))
        before, lags_before = doors.cpu_s(), await doors.lags()
        ids = {name: process.pid for name, process in doors.processes.items() if name != "replica"}
        async with profiled(ids if options.profile else {}, SIMULATED_S * requests) as profiles:
            latency = list(itertools.chain(*await asyncio.gather(*(talk(session, requests) for session in opened))))
        used, lags_after = doors.cpu_s(), await doors.lags()
    cpu_ms = {name: round((used[name] - before[name]) * 1000 / len(latency), 2) for name in used}
    bare_ms = await bare_cost(options, directory)
    added = [(seconds - SIMULATED_S) * 1000 for seconds in latency]
    result = {
        "requests": len(latency),
        "cpu_ms_per_request": cpu_ms,
        "added_cpu_ms_per_request": round(cpu_ms["gateway"] + cpu_ms["orchestrator"], 2),
        "bare_cpu_ms_per_request": bare_ms,
        "added_cpu_over_bare": round((cpu_ms["gateway"] + cpu_ms["orchestrator"]) / sum(bare_ms.values()), 2),
        "added_ms": {f"p{percent}": round(quantile(added, percent / 100), 1) for percent in (50, 90, 99)},
        "lag_ms": {name: lag_ms(lags_before[name], after) for name, after in lags_after.items()},
    }
    print(f"cost: {result}", flush=True)
    for name, shares in profiles.items():
        print(f"{name}, CPU time: " + "  ".join(f"{what} {share:.0%}" for what, share in shares.items()), flush=True)
    return result | ({"profiles": profiles} if profiles else {})


async def bare_cost(options: argparse.Namespace, directory: Path) -> dict[str, float]:
    """Return the CPU milliseconds of the same messages between idle processes: the cost of gRPC and HTTP on this machine."""
    module, port, below, engine = "benchmarks.bare_door", free_port(), free_port(), free_port()
    latency = f"--latency-s={SIMULATED_S}"
    async with (
        program(module, "below", f"--port={below}", log=directory / "bare_below.log") as orchestrator,
        program(module, "engine", f"--port={engine}", latency, log=directory / "bare_engine.log"),
        program(
            module, "door", f"--port={port}", f"--below={below}", f"--engine={engine}", log=directory / "bare.log"
        ) as door,
        client(f"http://127.0.0.1:{port}", options.sessions) as http,
    ):
        await _until_it_serves(http, directory / "bare.log")
        body = {"model": "bench", "messages": prompt(0), "max_tokens": options.tokens}

        async def talk(number: int, count: int) -> None:
            await asyncio.sleep(SIMULATED_S * number / options.sessions)
            for _ in range(count):
                (await http.post("/v1/chat/completions", json=body)).raise_for_status()

        processes = {"door": door, "below": orchestrator}
        await asyncio.gather(*(talk(number, 2) for number in range(options.sessions)))
        before = {name: _cpu_s(process) for name, process in processes.items()}
        await asyncio.gather(*(talk(number, options.cost_requests) for number in range(options.sessions)))
        requests = options.sessions * options.cost_requests
        return {name: round((_cpu_s(each) - before[name]) * 1000 / requests, 2) for name, each in processes.items()}


async def _until_it_serves(http: httpx.AsyncClient, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            await http.get("/")
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the bare door does not serve:\n{log_tail(log)}")
        await asyncio.sleep(_LOOK_S)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of `values` does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


# Memory.


async def held(count: int, directory: Path) -> dict[str, Any]:
    """Open sessions, sample once in each, and measure the memory that they take while they are open."""
    async with (
        simulated_gateway(directory, count + MOST_OPENING, latency_s=0.05, tokens=64) as doors,
        client(doors.url, MOST_OPENING) as http,
    ):
        await _sampled(http, MOST_OPENING)  # warm up what is made only once
        before = doors.memory()
        await _sampled(http, count)
        after = doors.memory()
    kib = {name: round((after[name] - before[name]) / KIB / count, 2) for name in ("gateway", "orchestrator")}
    largest = max(after[name] - before[name] for name in kib)
    result = {
        "sessions": count,
        "mib_before": _mib(before),
        "mib": _mib(after),
        "kib_per_session": kib,
        "sessions_per_gib": round(GIB / largest * count),
        "sessions_per_gib_of_both": round(GIB / sum(after[name] - before[name] for name in kib) * count),
    }
    print(f"held: {result}", flush=True)
    return result


async def abandoned(count: int, directory: Path) -> dict[str, Any]:
    """Open sessions, sample once in each, and leave them. When they are given up, repeat with new ones, wave after wave."""
    times = {"idle_s": IDLE_S, "attempts": 1000}
    memory, descriptors = [], []
    async with simulated_gateway(directory, count, latency_s=0.05, tokens=64, **times) as doors:
        names: set[str] = set()
        for _ in range(WAVES + 1):  # the first one warms up
            async with client(doors.url, MOST_OPENING) as http:
                opened = await _sampled(http, count)
                names |= {session.name for session in opened}
                await _until_ended(http, opened)
            await asyncio.sleep(1.0)  # connections close
            memory.append(_mib(doors.memory()))
            descriptors.append(doors.descriptors())
    result = {
        "sessions_of_a_wave": count,
        "sessions": len(names),
        "mib_after_waves": memory,
        "descriptors_after_waves": descriptors,
        "mib_more_per_wave": {
            name: round((memory[-1][name] - memory[0][name]) / WAVES, 2) for name in ("gateway", "orchestrator")
        },
    }
    print(f"abandoned: {result}", flush=True)
    return result


async def _sampled(http: httpx.AsyncClient, count: int) -> list[Opened]:
    """Open sessions and sample once in each."""
    room = asyncio.Semaphore(MOST_OPENING)

    async def one(number: int) -> Opened:
        async with room:
            session = await open_session(http)
            await ask(http, number, 64, session.headers)
            return session

    return await asyncio.gather(*map(one, range(count)))


async def _until_ended(http: httpx.AsyncClient, opened: Sequence[Opened]) -> None:
    """Wait until none of the sessions is open any more. Make no call that would keep a session open.

    Raises:
        RuntimeError: if one stays open.
    """
    end = time.monotonic() + START_S
    await asyncio.sleep(IDLE_S)
    for session in opened:
        while (await http.get("/v1/models", headers=session.headers)).status_code != 410:
            if time.monotonic() > end:
                raise RuntimeError(f"session {session.name} is still open")
            await asyncio.sleep(_LOOK_S)


def _mib(sizes: Mapping[str, int]) -> dict[str, float]:
    return {name: round(size / MIB, 1) for name, size in sizes.items()}
