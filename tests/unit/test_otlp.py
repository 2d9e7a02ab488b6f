"""`sluice trace RUN --otlp URL` against a server that takes OTLP over HTTP, decoded by OpenTelemetry's own schema."""

from __future__ import annotations

import asyncio
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from run_facts import accept, applied, begin_epoch, covered, made

from orchestrator_svc.commands import trace as trace_command
from orchestrator_svc.journal.store import Journal, JournalLimits
from sluice.config import ConfigError

service_pb2: Any = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="opentelemetry-exporter-otlp-proto-http is not installed",
)

LIMIT_S = 60.0


class Collector:
    """Takes spans as a collector does.

    Attributes:
        requests: The received requests, in order.
        refusals: Status codes with which the next requests are answered.
    """

    def __init__(self) -> None:
        self.requests: queue.Queue[Any] = queue.Queue()
        self.refusals: list[int] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                code = collector.refusals.pop(0) if collector.refusals else 200
                if code == 200:
                    collector.requests.put(service_pb2.ExportTraceServiceRequest.FromString(body))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(service_pb2.ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list[Any]:
        """Return the spans that have come since the last call."""
        found: list[Any] = []
        while not self.requests.empty():
            found += spans_of(self.requests.get())
        return found


def spans_of(request: Any) -> list[Any]:
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


def attributes(holder: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    serving = threading.Thread(target=collector.server.serve_forever)
    serving.start()
    yield collector
    collector.server.shutdown()
    serving.join()
    collector.server.server_close()


def write_step(directory: Path) -> None:
    """Append a group, its batch and its step to the journal of a run."""

    async def write() -> None:
        journal = Journal(directory, {"run": "demo"}, limits=JournalLimits(fsync_interval_s=0.0))
        if not journal.ledger.allotted:
            begin_epoch(journal)
        number = journal.ledger.next_batch
        accept(journal, number)
        journal.record_fact(made(journal, number))
        fact = applied(journal, number)
        fact.batch_applied.policy_version.epoch, fact.batch_applied.policy_version.number = 1, number
        journal.record_fact(fact)
        journal.record_fact(covered(number))
        await journal.close()

    asyncio.run(write())


def test_spans_of_a_run_reach_a_collector_and_a_second_call_sends_the_later_ones_alone(
    tmp_path: Path, collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    write_step(run)
    assert trace_command.run([str(run), "--otlp", collector.url]) == 0
    request = collector.requests.get(timeout=LIMIT_S)
    resource = attributes(request.resource_spans[0].resource)
    assert (resource["service.name"], resource["sluice.run"]) == ("sluice", "demo")
    found = spans_of(request)
    assert [each.name for each in found] == ["score", "score", "wait for batch", "train step", "batch", "train", "task"]
    task, train, batch = found[-1], found[-2], found[-3]
    assert attributes(task)["sluice.version"] == "1.1"
    assert attributes(task)["sluice.outcome"] == "trained"
    assert (train.trace_id, train.parent_span_id) == (task.trace_id, task.span_id)
    assert [(each.trace_id, each.span_id) for each in batch.links] == [(task.trace_id, task.span_id)]
    assert len(task.trace_id) == 16
    assert all(0 < each.start_time_unix_nano <= each.end_time_unix_nano for each in found)

    said = capsys.readouterr().err
    assert said.startswith("7 spans sent to ")
    after = said.split()[-1]
    write_step(run)
    assert trace_command.run([str(run), "--otlp", collector.url, "--after", after]) == 0
    assert [attributes(each)["sluice.version"] for each in collector.spans() if each.name == "task"] == ["1.2"]


@pytest.mark.slow
def test_a_live_run_is_followed_and_a_collector_that_refuses_for_a_while_gets_all(
    tmp_path: Path, collector: Collector
) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    write_step(run)
    collector.refusals = [400]
    command = [sys.executable, "-m", "sluice.cli.main", "trace", str(run), "--otlp", collector.url, "--follow"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as follower:
        first = spans_of(collector.requests.get(timeout=LIMIT_S))
        write_step(run)
        second = spans_of(collector.requests.get(timeout=LIMIT_S))
        follower.send_signal(signal.SIGTERM)
        said = follower.communicate(timeout=LIMIT_S)[1]
    assert [attributes(each)["sluice.version"] for each in [*first, *second] if each.name == "task"] == ["1.1", "1.2"]
    assert f"{collector.url}/v1/traces does not take spans; trying again" in said
    assert f"{len(first) + len(second)} spans sent" in said
    assert follower.returncode == 0


def test_a_collector_that_does_not_take_spans_is_named_with_the_way_to_go_on(
    tmp_path: Path, collector: Collector
) -> None:
    run = tmp_path / "demo"
    run.mkdir()
    write_step(run)
    collector.refusals = [404]
    with pytest.raises(ConfigError, match=r"/v1/traces does not take spans: .*--after 3$"):
        trace_command.run([str(run), "--otlp", collector.url, "--after", "3"])
    assert trace_command.run([str(run), "--otlp", collector.url, "--after", "5000000"]) == 0, (
        "a long run has many facts"
    )
    with pytest.raises(ConfigError, match="give the address of a collector"):
        trace_command.run([str(run), "--otlp", "localhost:4318"])
    with pytest.raises(ConfigError, match="need --otlp"):
        trace_command.run([str(run), "--follow"])


def test_without_the_exporter_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'sluice\[otlp\]'"):
        trace_command.run([str(tmp_path), "--otlp", "http://localhost:4318"])
