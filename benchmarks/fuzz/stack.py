"""All services of a run, each as a process of its own with principals, and the measurements of each process."""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

import benchmarks.capture.environment
import benchmarks.tiny_environment
from benchmarks.children import make_model, service
from sluice.cli.init_model import ModelShape
from sluice.cli.rl import write_settings
from sluice.config import PeersConfig, load_run
from sluice.rpc.principals import new_token
from sluice.rpc.server import LOOPBACK, free_ports

RUN = "fuzz"

SERVICES = ("weightsync", "trainer", "rollout", "orchestrator", "gateway", "envserver", "tuner")
"""Services in the order of their start."""

WITH_HTTP = ("rollout", "gateway")

MODEL = ModelShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp=48, max_positions=512)

MOST_BYTES = 6 << 30
"""Memory that a service may allocate."""

START_S = 240.0
QUIET_S = 75.0
"""Seconds after which none of our calls may be in progress any more: longer than a server waits for a body."""

_LOOK_S = 0.05
_SCRAPE_S = 10.0

_EXCEPTION = re.compile(r"Traceback|never retrieved|was never awaited|Fatal Python|Segmentation fault")
"""Log text that shows an unhandled exception."""

_FRAME = re.compile(r'File "[^"]*?/([^/"]+/[^/"]+)", line (\d+)')
_EXCERPT = 8000


@dataclass(frozen=True, slots=True)
class Load:
    """The resources of a process at one moment.

    Attributes:
        rss: Resident bytes, its children included.
        files: Open file descriptors.
        threads: Threads.
        calls: Calls and requests in progress.
    """

    rss: int
    files: int
    threads: int
    calls: int

    def __str__(self) -> str:
        """Return the figures as the text of one column."""
        return f"{self.rss / 2**20:.0f} MiB, {self.files} files, {self.threads} threads, {self.calls} calls"


@dataclass
class Watched:
    """One service.

    Attributes:
        name: The service.
        log: Its output.
        port: Port of gRPC.
        http_port: Port of HTTP; 0 if it has none.
        metrics_port: Port of the metrics.
        pid: Id of its process; 0 before its start.
    """

    name: str
    log: Path
    port: int
    http_port: int
    metrics_port: int
    tokens: Mapping[str, str]
    pid: int = 0
    _read: int = field(default=0, repr=False)

    @property
    def target(self) -> str:
        """Address of the gRPC port."""
        return f"{LOOPBACK}:{self.port}"

    def alive(self) -> bool:
        """Return whether the process runs."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def load(self) -> Load:
        """Return the resources of the process.

        Raises:
            psutil.NoSuchProcess: if it has ended.
        """
        process = psutil.Process(self.pid)
        rss = process.memory_info().rss
        for child in process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                rss += child.memory_info().rss
        return Load(rss, process.num_fds(), process.num_threads(), self.calls())

    def calls(self) -> int:
        """Return the calls and requests in progress according to the service; -1 if its metrics do not answer."""
        request = urllib.request.Request(
            f"http://{LOOPBACK}:{self.metrics_port}/metrics",
            headers={"authorization": f"Bearer {self.tokens['admin']}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=_SCRAPE_S) as answer:  # noqa: S310
                text = answer.read().decode()
        except OSError:
            return -1
        return sum(
            int(sample.value)
            for family in text_string_to_metric_families(text)
            if family.name == "sluice_rpc_in_flight"
            for sample in family.samples
        )

    def settled(self, calls: int, files: int) -> Load:
        """Wait until at most `calls` calls are in progress and `files` files open, but not forever, and return the resources."""
        end = time.monotonic() + QUIET_S
        while self.alive() and time.monotonic() < end:
            load = self.load()
            if 0 <= load.calls <= calls and load.files <= files:
                return load
            time.sleep(_LOOK_S)
        return self.load()

    def exceptions(self) -> list[tuple[str, str]]:
        """Return the exceptions logged since the last call: where and what each is, and its last lines."""
        with self.log.open("rb") as log:
            log.seek(self._read)
            text = log.read()
        self._read += len(text)
        lines = text.decode(errors="replace").replace("\\n", "\n").replace('\\"', '"')
        found = []
        end = 0
        for match in _EXCEPTION.finditer(lines):
            if match.start() < end:
                continue
            end = min(lines.find('"}', match.start()) % (len(lines) + 1), match.start() + _EXCERPT)
            excerpt = lines[lines.rfind("\n", 0, match.start()) + 1 : end]
            frames = _FRAME.findall(excerpt)
            found.append((f"{excerpt.strip().splitlines()[-1][:300]} {frames[-1] if frames else ''}", excerpt))
        return found


def _peers(grpc: Mapping[str, int]) -> PeersConfig:
    """Return the addresses of the services, by their ports."""
    address = {name: f"{LOOPBACK}:{port}" for name, port in grpc.items()}
    return PeersConfig(
        weightsync=address["weightsync"],
        trainer=address["trainer"],
        rollout=[address["rollout"]],
        orchestrator=address["orchestrator"],
        gateway=address["gateway"],
    )


@dataclass
class Stack:
    """The services of a run.

    Attributes:
        tokens: Tokens of the principals, by role.
        model: Name of the model that is served.
        names: Texts that the services know, by the name of a field.
    """

    directory: Path
    tokens: dict[str, str]
    model: Path
    services: dict[str, Watched]
    names: dict[str, tuple[str, ...]]
    _settings: Path

    @contextlib.asynccontextmanager
    async def started(self, *names: str) -> AsyncIterator[None]:
        """Run services until the block ends, in this order.

        Raises:
            RuntimeError: if one does not start.
        """
        async with contextlib.AsyncExitStack() as stack:
            for name in names:
                each = self.services[name]
                words = [f"--server.host={LOOPBACK}", f"--server.port={each.port}"]
                words += [f"--server.metrics-port={each.metrics_port}"]
                words += [f"--server.http-port={each.http_port}"] if each.http_port else []
                words += ["--replica=rollout"] if name == "rollout" else []
                child = await stack.enter_async_context(
                    service(name, "@", str(self._settings), *words, health=each.target, log=each.log, start_s=START_S)
                )
                each.pid = child.pid
                # A defect must end the service, not take the memory of the machine.
                psutil.Process(child.pid).rlimit(psutil.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
            yield


def prepare(directory: Path) -> Stack:
    """Make a model, tokens and settings in a directory."""
    model = make_model(directory / "model", MODEL)
    tokens = {role: new_token() for role in ("agent", "admin", "dispatcher")}
    files = {role: directory / f"{role}.token" for role in tokens}
    for role, file in files.items():
        file.write_text(tokens[role])
        file.chmod(0o600)
    ports = free_ports(len(SERVICES) * 3)
    grpc = dict(zip(SERVICES, ports, strict=False))
    http = dict(zip(WITH_HTTP, ports[len(SERVICES) :], strict=False))
    metrics = dict(zip(SERVICES, ports[2 * len(SERVICES) :], strict=True))
    settings = {
        "run": RUN,
        "output-dir": directory,
        "model": model,
        "log-level": "info",
        "security.token-file": files["agent"],
        "security.admin-token-file": files["admin"],
        "security.dispatcher-token-file": files["dispatcher"],
        "orchestrator.max-steps": 1_000_000,
        "orchestrator.batch-size": 4,
        "orchestrator.group-size": 2,
        "orchestrator.checkpoint.every-steps": 0,
        "orchestrator.checkpoint.final": "false",
        "orchestrator.environment": f"{Path(benchmarks.capture.environment.__file__)}:Shop",
        "orchestrator.workflow": "external",
        "orchestrator.advantage": "grpo",
        "orchestrator.sampling.max-tokens": 8,
        "orchestrator.replicas.networks": '["127.0.0.0/8"]',
        "rollout.max-model-len": 512,
        "rollout.engine": "transformers",
        "rollout.dtype": "float32",
        "trainer.objective.preset": "grpo",
        "trainer.dtype": "float32",
        "trainer.device": "cpu",
        "tuner.dtype": "float32",
        "tuner.device": "cpu",
        "max-staleness": 2,
        "envserver.source": f"{Path(benchmarks.tiny_environment.__file__)}:Count",
    }
    config = load_run([f"--{key}={value}" for key, value in settings.items()])
    config = config.model_copy(update={"peers": _peers(grpc)})
    config.run_dir.mkdir(parents=True)
    services = {
        name: Watched(name, directory / f"{name}.log", grpc[name], http.get(name, 0), metrics[name], tokens)
        for name in SERVICES
    }
    known = {
        "": (RUN, f"runs/{RUN}", "rollout", "task", "go", "model", "1", "a"),
        "run": (f"runs/{RUN}",),
        "name": (f"runs/{RUN}", f"runs/{RUN}/versions/0.0", f"runs/{RUN}/checkpoints/1.1"),
        "role": ("user", "assistant", "system", "tool"),
        "replica": ("rollout",),
        "address": (f"{LOOPBACK}:{grpc['rollout']}",),
        "task_id": ("task", "train-0", "train-1"),
        "split": ("train",),
        "shard": ("model",),
    }
    return Stack(directory, tokens, model, services, known, write_settings(config))
