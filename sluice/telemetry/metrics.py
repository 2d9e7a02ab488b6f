"""Metrics: the process's Prometheus registry, shared with libraries such as vLLM, and the curves of a run."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest, start_http_server

__all__ = ["CONTENT_TYPE", "MetricsServer", "MetricsWriter", "metrics_text", "start_metrics_server"]

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""Content type of `metrics_text`."""

log = structlog.get_logger(__name__)


def metrics_text() -> bytes:
    """Return all metrics of the process in the text format of Prometheus, for a service with an HTTP port of its own."""
    return generate_latest(REGISTRY)


class MetricsServer:
    """A running ``/metrics`` endpoint."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread
        self.port = int(server.server_port)

    def stop(self, timeout_s: float = 5.0) -> None:
        """Stop serving; returns when its thread has ended or after `timeout_s` seconds."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout_s)


def start_metrics_server(port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serve the metrics from a thread.

    Args:
        port: TCP port; 0 picks a free one.
        host: Address to bind; the metrics hold counts and times, no prompts and no secrets.

    Raises:
        OSError: if the address cannot be bound.
    """
    server, thread = start_http_server(port, addr=host)
    running = MetricsServer(server, thread)
    log.info("metrics", url=f"http://{host}:{running.port}/metrics")
    return running


class MetricsWriter:
    """Appends the scalars of a run to ``metrics.jsonl`` and to TensorBoard logs, without torch. For one thread.

    Args:
        run_dir: The run's directory; it is created if needed.
    """

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415 - slow to import

        run_dir.mkdir(parents=True, exist_ok=True)
        self._lines = (run_dir / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._events = EventFileWriter(str(run_dir / "tensorboard"), flush_secs=10)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of one step.

        Args:
            step: Position on the horizontal axis.
            values: Scalars by name; ``/`` groups them in TensorBoard. NaN and infinities, which JSON lacks, are written as null.
        """
        now = time.time()
        line = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._lines.write(json.dumps({"step": step, "time": now, **line}) + "\n")
        self._add_event(step, now, values)

    def _add_event(self, step: int, now: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - slow to import
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._events.add_event(Event(wall_time=now, step=step, summary=Summary(value=scalars)))

    def flush(self) -> None:
        """Make everything written readable by others."""
        self._lines.flush()
        self._events.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close."""
        self.close()
