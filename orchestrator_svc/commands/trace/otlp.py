"""Sends spans to an OpenTelemetry collector by OTLP over HTTP, with OpenTelemetry's own exporter (the extra `otlp`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from orchestrator_svc.commands.trace.spans import Span, SpanId, Spans
from orchestrator_svc.journal.store import read_facts
from sluice.config import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

SPANS_PATH = "/v1/traces"
"""Where a collector takes spans, unless the address names another path (OTLP specification)."""

_MOST = 512
"""Spans in one request: 300 KB, far below the 20 MiB that collectors take."""

_LOOK_S = 2.0
"""Seconds between two looks for new facts."""

_AGAIN_S = 5.0
"""Seconds until spans that a collector has not taken are sent again."""

Say: TypeAlias = Callable[[str], object]


class Collector:
    """An OpenTelemetry collector, or what speaks its protocol.

    Headers, certificates, compression and the deadline of a request come from the variables that OpenTelemetry defines:
    ``OTEL_EXPORTER_OTLP_HEADERS``, ``_CERTIFICATE``, ``_COMPRESSION``, ``_TIMEOUT``.

    Args:
        address: Such as ``http://localhost:4318``.
        run: Name of the run.

    Raises:
        ConfigError: if the address is none, or the exporter is not installed.
    """

    def __init__(self, address: str, run: str) -> None:
        parts = urlsplit(address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"--otlp {address}: give the address of a collector, such as http://localhost:4318")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ConfigError(f"--otlp needs OpenTelemetry's exporter ({error}): pip install 'sluice[otlp]'") from error
        self.run = run
        self.address = address if parts.path.strip("/") else f"{address.rstrip('/')}{SPANS_PATH}"
        self._exporter = OTLPSpanExporter(endpoint=self.address)
        release = {"service.name": "sluice", "service.version": version("sluice")}
        self._resource = Resource.create({**release, "sluice.run": run})

    def send(self, spans: Sequence[Span]) -> bool:
        """Send spans, with the exporter's retries; return whether the collector has taken them. Its log says why not."""
        from opentelemetry.sdk.trace.export import SpanExportResult  # noqa: PLC0415 - an extra

        return self._exporter.export([self._readable(each) for each in spans]) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415 - an extra
        from opentelemetry.trace import Link, Status, StatusCode  # noqa: PLC0415 - an extra

        return ReadableSpan(
            name=span.name,
            context=_context(span.id),
            parent=_context(span.parent) if span.parent else None,
            resource=self._resource,
            attributes=dict(span.attributes),
            links=[Link(_context(each)) for each in span.links],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=InstrumentationScope("sluice"),
        )


def _context(name: SpanId) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags  # noqa: PLC0415 - an extra

    return SpanContext(name.trace, name.span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def export_spans(directory: Path, collector: Collector, after: int, stop: Event | None, say: Say) -> int:
    """Send the spans of a run.

    Args:
        directory: The run's directory.
        collector: Takes them.
        after: Number of the fact up to which they were sent before.
        stop: Follow the run until it is set: send each span once it has ended, and wait for a collector that does not answer.
            None: send what the journal has.
        say: Is given lines for people.

    Returns:
        Number of the fact up to which they are sent now.

    Raises:
        ConfigError: if the collector does not take them, and `stop` is None.
        JournalError: if the journal cannot be read.
    """
    spans, read, sent, count = Spans(collector.run), 0, after, 0
    waiting: list[Span] = []
    while True:
        for number, fact in read_facts(directory, read):
            read = number
            ended = spans.take(fact)
            waiting += ended if number > after else ()
            if len(waiting) >= _MOST:
                if not _send(collector, waiting, sent, stop, say):
                    return sent
                count, sent, waiting = count + len(waiting), read, []
        if waiting:
            if not _send(collector, waiting, sent, stop, say):
                return sent
            count, waiting = count + len(waiting), []
        sent = max(sent, read)
        if stop is None or stop.wait(_LOOK_S):
            say(f"{count:,} spans sent to {collector.address}; those of later facts: --after {sent}")
            return sent


def _send(collector: Collector, spans: Sequence[Span], sent: int, stop: Event | None, say: Say) -> bool:
    """Send spans until the collector has taken them; return False if `stop` is set before."""
    while not collector.send(spans):
        problem = f"{collector.address} does not take spans"
        rest = f"to send the rest later: --after {sent}"
        if stop is None:
            raise ConfigError(f"{problem}: is it a collector's OTLP port for HTTP? {rest}")
        if stop.is_set() or stop.wait(_AGAIN_S):
            say(f"{problem}; {rest}")
            return False
        say(f"{problem}; trying again")
    return True
