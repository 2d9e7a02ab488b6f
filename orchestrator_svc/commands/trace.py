"""`sluice trace RUN [EPISODE]`: what agents did in a run's external episodes: who called what, when, which tokens, which version.

Without an episode: the last ones that were opened, a line each. With one: its requests in order, what each continues or where it
forks, what was said, and what became of its trajectories. With --otlp: send the spans of all tasks and batches to an OpenTelemetry
collector instead. The files are only read, and the run may be alive.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from google.protobuf.json_format import MessageToDict

from orchestrator_svc.commands.runs import find_run
from orchestrator_svc.commands.spans import Span, SpanId, Spans
from orchestrator_svc.commands.table import table_lines
from orchestrator_svc.commands.trace_history import Following, Trace, TracedSession, following
from orchestrator_svc.journal.external import RecordedRequest, Session
from orchestrator_svc.journal.facts import LedgerError
from orchestrator_svc.journal.segments import JournalError, SegmentError, read_payload
from orchestrator_svc.journal.store import read_facts
from sluice.config import Command, ConfigError, Options, whole_number
from sluice.progress import doing
from sluice.v1 import session_pb2, tokens_pb2
from sluice.versions import Version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

_NAMED = 5
"""Most episodes that a message names."""

_MOST_FACTS = (1 << 63) - 1
"""The largest number that a row of the journal can have."""

SPANS_PATH = "/v1/traces"
"""Where a collector takes spans, unless the address names another path (OTLP specification)."""

_MOST_SPANS = 512
"""Spans in one request: 300 KB, far below the 20 MiB that collectors take."""

_FOLLOW_S = 2.0
"""Seconds between two reads of new facts."""

_AGAIN_S = 5.0
"""Seconds until spans that a collector has not taken are sent again."""

_LEAST_WIDTH = 60

_INDENT = " " * 13

Say: TypeAlias = Callable[[str], object]

Generations = Mapping[int, session_pb2.RecordedGeneration]
"""What was sampled for the requests of a session, by number from 1, as far as it is kept."""


def run(argv: list[str]) -> int:
    """Print the episodes of a run, or one of them; return 0.

    Raises:
        ConfigError: if there is no such run or episode, or a file cannot be read.
    """
    parser = Options(prog="sluice trace", description=__doc__)
    parser.add_argument("run", help="name of the run, or its directory")
    parser.add_argument("episode", nargs="?", default="", help="such as g12-3-0, or g12 if it has a single one")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="holds the runs (default: outputs)")
    parser.add_argument("--last", type=whole_number(1), default=20, help="episodes that are listed (default: 20)")
    parser.add_argument("--tokens", action="store_true", help="show the token ids, too")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object for each episode, with all that is known of it"
    )
    parser.add_argument(
        "--otlp",
        metavar="URL",
        default="",
        help="send spans to this collector (OTLP over HTTP), such as http://localhost:4318",
    )
    parser.add_argument(
        "--follow", action="store_true", help="with --otlp: send each span once it has ended, until a signal"
    )
    parser.add_argument(
        "--after",
        type=whole_number(0, _MOST_FACTS),
        default=0,
        metavar="FACT",
        help="with --otlp: leave out what was sent up to this fact",
    )
    arguments = parser.parse_args(argv)
    if not arguments.otlp and (arguments.follow or arguments.after):
        raise ConfigError("--follow and --after need --otlp")
    directory = find_run(arguments.run, arguments.output_dir)
    try:
        if arguments.otlp:
            _export(directory, arguments.otlp, arguments.after, follow=arguments.follow)
            return 0
        with doing(f"read the journal of {directory}", unit="facts") as step:
            trace = Trace.of(step.count(read_facts(directory)))
        if arguments.episode:
            shown = [_find(trace, arguments.episode)]
        else:
            shown = list(trace.sessions.values())[-arguments.last :]
        if not shown:
            raise ConfigError(
                f"{directory} has no external episodes: no agent has opened one, or the workflow runs in process"
            )
        readings = [_read(directory, each.session) for each in shown]
    except (OSError, JournalError, LedgerError) as error:
        raise ConfigError(f"the journal of {directory} cannot be read: {error}") from error
    if arguments.json:
        told: Iterable[str] = (json.dumps(_as_json(trace, *each)) for each in zip(shown, readings, strict=True))
    elif arguments.episode:
        told = lines(trace, shown[0], readings[0], tokens=arguments.tokens)
    else:
        more = len(trace.sessions) - len(shown)
        told = [
            *_list(shown, readings),
            *([f"{more:,} more were opened before them: --last shows more"] if more else []),
            f"One of them: sluice trace {arguments.run} {shown[-1].session.name}",
        ]
    sys.stdout.writelines(f"{line}\n" for line in told)
    return 0


def _export(directory: Path, address: str, after: int, *, follow: bool) -> None:
    """Send the spans of a run to a collector; with `follow` until SIGINT or SIGTERM."""
    collector = Collector(address, directory.resolve().name)
    stop = Event()
    if follow:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
    try:
        export_spans(directory, collector, after, stop if follow else None, lambda line: sys.stderr.write(f"{line}\n"))
    finally:
        collector.close()


def _find(trace: Trace, name: str) -> TracedSession:
    """Return the episode with this name, or the only one whose name begins with `name`."""
    if name in trace.sessions:
        return trace.sessions[name]
    found = [each for each in trace.sessions if each.startswith(f"{name}-")]
    if len(found) == 1:
        return trace.sessions[found[0]]
    if found:
        more = ", ..." if len(found) > _NAMED else ""
        raise ConfigError(f"{name} is one of {', '.join(found[:_NAMED])}{more}: name one")
    last = list(trace.sessions)[-_NAMED:]
    known = f"the last ones are {', '.join(last)}" if last else "no agent has opened one"
    raise ConfigError(f"no episode {name!r} was opened in this run; {known}")


def _read(directory: Path, session: Session) -> Generations:
    """Return what was sampled for the requests of a session, as far as it is still kept."""
    generations = {}
    for number, request in enumerate(session.requests.values(), 1):
        try:
            payload = read_payload(directory / "journal", request.place)
        except SegmentError:
            continue  # a checkpoint covers it, and the facts are all that is left
        generations[number] = session_pb2.RecordedGeneration.FromString(payload)
    return generations


# The list.


def _list(shown: Sequence[TracedSession], readings: Sequence[Generations]) -> list[str]:
    rows = [("episode", "task", "opened (UTC)", "by", "route", "requests", "sampled", "branches", "end")]
    for traced, generations in zip(shown, readings, strict=True):
        session = traced.session
        kept = len(generations) == len(session.requests)
        rows.append(
            (
                session.name,
                f"{traced.environment}/{traced.task_id}",
                f"{traced.opened:%m-%d %H:%M:%S}",
                session.principal,
                ",".join(sorted({each.dialect for each in generations.values()})) or "-",
                str(len(session.requests)),
                str(sum(map(_sampled, generations.values()))) if kept else "-",
                str(len(session.submitted_branches or session.leaves())),
                traced.end or "open",
            )
        )
    return table_lines(rows)


def _sampled(made: session_pb2.RecordedGeneration) -> int:
    return sum(len(sample.token_ids) for sample in made.response.samples)


# One episode.


def lines(trace: Trace, traced: TracedSession, generations: Generations, *, tokens: bool = False) -> Iterator[str]:
    """Yield what happened in one episode, for people to read."""
    session = traced.session
    attempt = f", attempt {session.attempt + 1}" if session.attempt else ""
    yield f"episode {session.name}: task {traced.task_id} of {traced.environment}{attempt}, by {session.principal}"
    yield f"{traced.opened:%Y-%m-%d %H:%M:%S} UTC  opened"
    number = 0
    for event in traced.events:
        at = f"{(event.time - traced.opened).total_seconds():+9.3f} s  "
        if event.request is None:
            yield at + event.text
            continue
        number += 1
        made = generations.get(number)
        if made is None:
            yield f"{at}#{number}  {_unkept(session, event.request)}"
            continue
        before = {each: generations[each] for each in generations if each < number}
        turn = _Turn(made, following(made, before))
        unread = "  no client has it" if event.request.request_id in session.undelivered else ""
        yield f"{at}#{number}  {turn.where(event.time)}{unread}"
        for line in (turn.prompt(), *turn.samples(), *turn.said(), *(turn.ids() if tokens else ())):
            yield _INDENT + line
    if not traced.end:
        yield "it is open"
    yield from _trajectories(trace, session, generations)


def _unkept(session: Session, request: RecordedRequest) -> str:
    sizes = " and ".join(str(each.tokens) for each in request.samples)
    parent = f", continues #{_number(session, request.samples[0].parent)}" if request.samples[0].parent else ""
    return f"{sizes} tokens with the prompt{parent}; what they say is not kept any more: a checkpoint covers it"


def _number(session: Session, generation_id: str) -> int:
    return list(session.requests).index(generation_id.rpartition("/")[0]) + 1


def _trajectories(trace: Trace, session: Session, generations: Generations) -> Iterator[str]:
    """Yield the branches of a submitted episode, and what became of each."""
    held: set[str] = set()
    for name, branch in zip(session.trajectory_ids, session.submitted_branches, strict=True):
        path = " -> ".join(f"#{_number(session, each)}" for each in branch)
        shared = [f"#{_number(session, each)}" for each in branch if each in held]
        held.update(branch)
        context = f" ({', '.join(shared)} as context)" if shared else ""
        yield f"trajectory {name}: {path}{context}: {trace.outcomes.get(name, 'its group has not ended')}"
    why_not = {number: each.not_trained for number, each in generations.items() if each.not_trained}
    for number, reason in why_not.items():
        yield f"#{number} is not trained: {reason}"


@dataclass(frozen=True)
class _Turn:
    """One request as it is shown."""

    made: session_pb2.RecordedGeneration
    follows: Following

    def where(self, recorded: datetime) -> str:
        """Return by which route, gateway and replica it was sampled, and how long that took."""
        made = self.made
        words = [made.dialect or "unknown route"]
        words += [f"gateway {made.gateway}"] if made.gateway else []
        words += [f"replica {', then '.join(made.replicas)}"] if made.replicas else []
        if made.HasField("begin_time"):
            words.append(f"{(recorded - made.begin_time.ToDatetime(UTC)).total_seconds():.3f} s")
        return "  ".join(words)

    def prompt(self) -> str:
        """Return what the prompt continues, or where it forks."""
        total, follows = len(self.made.response.prompt_token_ids), self.follows
        if follows.exact:
            return (
                f"prompt {total} tokens: continues #{follows.number} ({follows.common}), {total - follows.common} new"
            )
        if follows.common:
            return f"prompt {total} tokens: a fork, equal to #{follows.number} up to token {follows.common}"
        return f"prompt {total} tokens"

    def samples(self) -> Iterator[str]:
        """Yield how many tokens were sampled, by which versions, and why they end."""
        samples = self.made.response.samples
        for sample in samples:
            spans = sample.version_spans
            versions = [str(Version.from_proto(each.policy_version)) for each in spans]
            if len(spans) > 1:
                versions = [f"{version} from {each.start}" for version, each in zip(versions, spans, strict=True)]
            end = tokens_pb2.FinishReason.Name(sample.finish_reason).removeprefix("FINISH_REASON_").lower()
            name = f" as sample {sample.index}" if len(samples) > 1 else ""
            yield f"sampled {len(sample.token_ids)} tokens{name}, version {', '.join(versions)}, {end}"

    def said(self) -> Iterator[str]:
        """Yield the new messages and the replies, a line each."""
        for message in self.follows.messages:
            yield _line(message.role, message)
        for sample in self.made.response.samples:
            reply = sample.message if sample.HasField("message") else tokens_pb2.ChatMessage(content=sample.text)
            yield _line("-> assistant", reply)

    def ids(self) -> Iterator[str]:
        """Yield the ids of the prompt's new tokens, and of the sampled ones."""
        prompt = self.made.response.prompt_token_ids
        yield f"prompt ids from {self.follows.common}: {' '.join(map(str, prompt[self.follows.common :]))}"
        for sample in self.made.response.samples:
            yield f"sampled ids: {' '.join(map(str, sample.token_ids))}"


def _line(role: str, message: tokens_pb2.ChatMessage) -> str:
    """Return a message on one line, cut to the width of the terminal."""
    texts = [f"({message.reasoning})"] if message.reasoning else []
    texts += [message.content, *(part.text or "(an image)" for part in message.parts)]
    texts += [f"{call.name}({call.arguments})" for call in message.tool_calls]
    text = f"{role}: " + " ".join(" ".join(texts).split())
    width = max(shutil.get_terminal_size().columns, _LEAST_WIDTH) - len(_INDENT)
    return text if len(text) <= width else f"{text[: width - 4]} ..."


# JSON.


def _as_json(trace: Trace, traced: TracedSession, generations: Generations) -> dict[str, Any]:
    session = traced.session
    requests: Iterable[tuple[int, RecordedRequest]] = enumerate(session.requests.values(), 1)
    return {
        "episode": session.name,
        "environment": traced.environment,
        "task": traced.task_id,
        "principal": session.principal,
        "opened": traced.opened.isoformat(),
        "end": traced.end,
        "events": [
            {"time": each.time.isoformat(), "what": each.text or f"recorded {each.request and each.request.request_id}"}
            for each in traced.events
        ],
        "requests": [
            {"request_id": request.request_id, "parent": request.samples[0].parent}
            | (
                {"recorded": MessageToDict(generations[number], preserving_proto_field_name=True)}
                if number in generations
                else {}
            )
            for number, request in requests
        ],
        "trajectories": {each: trace.outcomes.get(each, "") for each in session.trajectory_ids},
    }


# Spans for a collector.


class Collector:
    """An OpenTelemetry collector, or another server of its protocol.

    Headers, certificates, compression and the deadline of a request come from the variables that OpenTelemetry defines:
    ``OTEL_EXPORTER_OTLP_HEADERS``, ``_CERTIFICATE``, ``_COMPRESSION``, ``_TIMEOUT``.

    Args:
        address: Such as ``http://localhost:4318``.
        run: Name of the run.

    Raises:
        ConfigError: if the address is malformed, or the exporter is not installed.
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
            ended = spans.take_fact(fact)
            waiting += ended if number > after else ()
            if len(waiting) >= _MOST_SPANS:
                if not _send(collector, waiting, sent, stop, say):
                    return sent
                count, sent, waiting = count + len(waiting), read, []
        if waiting:
            if not _send(collector, waiting, sent, stop, say):
                return sent
            count, waiting = count + len(waiting), []
        sent = max(sent, read)
        if stop is None or stop.wait(_FOLLOW_S):
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


COMMAND = Command("trace", "show what external agents did: who called what, when, which tokens, which version", run)
