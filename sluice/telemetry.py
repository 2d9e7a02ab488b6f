"""Logs and metrics of a service: structlog on stderr, the lag of its event loop, the curves of a run."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Self, TextIO, TypeAlias

import structlog
from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry
from structlog.typing import EventDict, Processor, WrappedLogger

from sluice.clock import CLOCK, Clock
from sluice.config.secrets import hide
from sluice.tensorboard_log import TensorBoardLog

LEVEL_VARIABLE = "SLUICE_LOG_LEVEL"
"""Environment variable with the level, for processes that read no settings."""

LEVELS = ("debug", "info", "warning", "error", "critical")

_CHATTY = ("asyncio", "filelock", "fsspec", "grpc", "httpcore", "httpx", "matplotlib", "urllib3", "uvicorn.access")
"""Libraries whose info lines say nothing about the run."""

log = structlog.get_logger(__name__)


def configure_logging(
    service: str,
    level: str | None = None,
    stream: TextIO | None = None,
    *,
    secrets: Collection[str] = (),
    for_people: bool = False,
) -> None:
    """Route structlog and the standard library's logging to one stream, in one format.

    Args:
        service: Name that every JSON line carries.
        level: Least severe level written; None takes ``SLUICE_LOG_LEVEL``, else ``info``.
        stream: Where to write; None is stderr.
        secrets: Texts that are replaced in every line, tracebacks included.
        for_people: Write text instead of JSON, for a command that a person started, and the same problem at most three times.

    Raises:
        ValueError: if the level has no such name.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE) or "info").lower()
    if name not in LEVELS:
        raise ValueError(f"log level {name!r} is unknown; choose one of {', '.join(LEVELS)}")
    threshold = logging.getLevelNamesMapping()[name.upper()]
    output = stream or sys.stderr
    shared = _shared_processors(service, terminal=output.isatty())
    renderer = _renderer(terminal=output.isatty(), secrets=secrets, for_people=for_people)
    limit: list[Processor] = [FewOfAKind()] if for_people else []
    structlog.configure(
        processors=[*shared, *limit, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=threshold, force=True)
    logging.captureWarnings(True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(max(threshold, logging.WARNING) if threshold > logging.DEBUG else threshold)


def _shared_processors(service: str, *, terminal: bool) -> list[Processor]:
    def name_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    clock = structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal)
    return [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, clock, name_service]


def _renderer(*, terminal: bool, secrets: Collection[str], for_people: bool) -> list[Processor]:
    """Return the last processors. Tracebacks are plain, without local variables: these may hold prompts and tokens."""

    def without_secrets(_logger: WrappedLogger, _method: str, line: Any) -> str:  # noqa: ANN401 - the rendered text
        return hide(line, secrets)

    last: list[Processor] = [without_secrets] if secrets else []
    if for_people:
        return [structlog.processors.format_exc_info, _sentence, *last]
    if terminal:
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback), *last]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str), *last]


class FewOfAKind:
    """Drop log lines about a problem that was shown `SHOWN` times. Lines that differ only in their task are about the same problem."""

    SHOWN = 3

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, ...]] = Counter()

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        """Return the line (structlog's interface).

        Raises:
            DropEvent: if lines about this problem were shown `SHOWN` times.
        """
        *_, last = str(event.get("problem") or event.get("error") or "").splitlines() or [""]
        kind = (str(event["event"]), str(event.get("reason", "")), last)
        self._seen[kind] += 1
        if self._seen[kind] > self.SHOWN:
            raise structlog.DropEvent
        if self._seen[kind] == self.SHOWN:
            event["note"] = "others like it are not shown"
        return event


_LONG = ("problem", "error", "exception")
"""Values that may have several lines."""

_OF_LIBRARIES = ("vllm_process_name",)
"""Fields that libraries add to every record of the process."""

_NOT_FOR_PEOPLE = frozenset({"event", "level", "timestamp", "service", "logger", "note", *_LONG, *_OF_LIBRARIES})


def _sentence(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    """Return the event with its short values on one line, and values of several lines below it."""
    values = ", ".join(f"{name} {value}" for name, value in event.items() if name not in _NOT_FOR_PEOPLE)
    below = [line for name in _LONG if name in event for line in str(event[name]).splitlines()]
    below += [f"({event['note']})"] if "note" in event else []
    return "\n  ".join([f"{event['event']}: {values}" if values else str(event["event"]), *below])


LOOP_LAG_SECONDS = Histogram(
    "sluice_loop_lag_seconds",
    "How late the event loop runs what is due, looked at every 50 ms.",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 5),
)

_LOOK_S = 0.05

_LAGS_KEPT = 100_000
"""Lags that are kept if `take_p99_s` is not called: those of more than an hour."""


class LoopLag:
    """Measures how late an event loop runs callbacks that are due. A callback that keeps the loop busy delays every call and answer.

    The times to measure are fixed in advance. So a loop that stood still for a second counts as twenty late measurements, each with
    its own delay, not as one.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._lags: deque[float] = deque(maxlen=_LAGS_KEPT)

    async def run(self) -> None:
        """Measure until cancelled."""
        due = self._clock()
        while True:
            due += _LOOK_S
            await self._clock.sleep(due - self._clock())
            lag = max(0.0, self._clock() - due)
            self._lags.append(lag)
            LOOP_LAG_SECONDS.observe(lag)

    def take_p99_s(self) -> float:
        """Return the 99th percentile of the lags since the last call, in seconds; 0 if there are none."""
        lags = sorted(self._lags)
        self._lags.clear()
        return lags[min(len(lags) - 1, int(len(lags) * 0.99))] if lags else 0.0


class StateMetrics(Collector):
    """Metrics that are read from the state of a service at each scrape. A context manager: they are served while its block runs.

    A scrape runs in a thread of its own. The state is read on the event loop that was running when this object was created, so that
    nothing changes it meanwhile. If that loop does not read it within `READ_S`, these metrics are missing from the scrape.

    Args:
        read: Returns the metrics; does not wait.
        registry: Where they are registered.
    """

    READ_S = 5.0

    def __init__(self, read: Callable[[], Iterable[Metric]], registry: CollectorRegistry = REGISTRY) -> None:
        self._read, self._registry = read, registry
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._registry.register(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """Describe no metrics in advance: that would require reading them."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the current values (prometheus_client's interface)."""
        try:
            on_the_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_the_loop = False
        if on_the_loop:
            yield from self._read()
            return
        reading: Future[list[Metric]] = Future()

        def read() -> None:
            if reading.set_running_or_notify_cancel():
                try:
                    reading.set_result(list(self._read()))
                except Exception as error:  # noqa: BLE001 - the scrape raises it
                    reading.set_exception(error)

        self._loop.call_soon_threadsafe(read)
        try:
            yield from reading.result(self.READ_S)
        except TimeoutError:
            reading.cancel()
            log.warning("metrics are left out of a scrape: the event loop was busy", waited_s=self.READ_S)


Values: TypeAlias = float | Mapping[str, float] | Mapping[tuple[str, str], float]
"""One value, or one for each value of a label, or for each pair of values of two labels."""


def gauge(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a gauge with the present values."""
    return _with_values(GaugeMetricFamily(name, text, labels=labels), values)


def counter(name: str, text: str, values: Values, *labels: str) -> Metric:
    """Return a counter with the present values. Its samples have the suffix ``_total``."""
    return _with_values(CounterMetricFamily(name, text, labels=labels), values)


def _with_values(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    if isinstance(values, Mapping):
        for key, each in values.items():
            family.add_metric(key if isinstance(key, tuple) else (key,), each)
    else:
        family.add_metric((), values)
    return family


class MetricsWriter:
    """Appends the scalars of a run to ``metrics.jsonl`` and to TensorBoard logs, without torch. For one thread.

    Args:
        run_dir: The run's directory.
        settings: The run's settings, some of which TensorBoard shows.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        cut_torn_line(path)
        self._lines = path.open("a", encoding="utf-8", buffering=1)
        self._events = TensorBoardLog(run_dir, settings)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step.

        Args:
            step: Position on the horizontal axis.
            values: Scalars by name; ``/`` groups them in TensorBoard. NaN and infinities, which JSON lacks, are written as null.
        """
        now = time.time()
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.write(json.dumps({"step": step, "time": now, **line}) + "\n")
        self._events.scalars(step, now, values)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show some trajectories of a step in TensorBoard.

        Args:
            step: Position on the horizontal axis.
            rows: Rows of ``trajectories/``.
        """
        self._events.samples(step, time.time(), rows)

    def flush(self) -> None:
        """Make everything written readable by others."""
        self._lines.flush()
        self._events.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self._lines.close()
        self._events.close()


def cut_torn_line(path: Path) -> None:
    """Remove an incomplete last line, which a kill left, so that the next line is not appended to it."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = size = file.seek(0, os.SEEK_END)
        while end and not _ends_line(file, end):
            end -= 1
        if end < size:
            file.truncate(end)


def _ends_line(file: BinaryIO, end: int) -> bool:
    file.seek(end - 1)
    return file.read(1) == b"\n"
