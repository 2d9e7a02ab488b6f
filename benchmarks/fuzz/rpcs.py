"""Every RPC that a running server lists: messages of its descriptor, damaged bytes, cut and idle streams, callers without permission."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from benchmarks.fuzz.findings import Findings
from benchmarks.fuzz.messages import Draw, Names, wires
from benchmarks.fuzz.stack import RUN, Stack, Watched
from sluice import v1
from sluice.rpc.errors import DETAILS_KEY, DOMAIN
from sluice.v1 import common_pb2, errors_pb2

BESIDE = {"grpc.health.v1.Health": health_pb2, "grpc.reflection.v1alpha.ServerReflection": reflection_pb2}
"""Services of every server that GetServerInfo does not list. Their errors are gRPC's own."""

ENDS_ITS_SERVER = frozenset(
    {
        "sluice.v1.RolloutAdminService/Drain",
        "sluice.v1.ServerAdminService/DrainServer",
        "sluice.v1.OrchestratorService/StopRun",
    }
)
"""Methods that end their server if a message is sound. So permitted callers send them only malformed messages."""

CALL_S = 1.0
"""Deadline of a call. Streams and calls that wait for others get less: they would use all of it."""

WATCH_S = 0.1
ANSWER_S = 20.0
"""Seconds within which a sound call must be answered after any input."""

MOST_RESPONSES = 4
MOST_FRAMES = 5

_FINE = {"OK", "CANCELLED", "DEADLINE_EXCEEDED"}
"""Codes without details: the call was cancelled, or its deadline passed, both by the client."""

_FAULTS = {"INTERNAL", "UNKNOWN"}
_REASONS = {each.name.removeprefix("ERROR_REASON_") for each in errors_pb2.ErrorReason.DESCRIPTOR.values}

_GRPC_SAYS = ("Received message larger than max", "Cardinality violation", "Unexpected exit")

_SETTINGS = settings(
    database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), max_examples=1
)

_RUN = f"runs/{RUN}"
_CONVERSATION = {"messages": [{"role": "user", "content": "a"}]}
_SAMPLED: dict[str, Any] = {"conversation": _CONVERSATION, "sampling": {"maxTokens": 3}}
_TRAJECTORY = {
    "trajectoryId": "t",
    "groupId": "g",
    "episodeId": "e",
    "taskId": "k",
    "tokenIds": [9, 10, 11, 12],
    "maskRuns": [2, 2],
    "logprobs": [-1.0, -2.0],
    "versionSpans": [{"start": 0, "policyVersion": {"epoch": 1, "number": 0}}],
    "temperature": 1.0,
    "reward": 1.0,
    "advantages": [0.5],
}
_HEADER = {
    "run": _RUN,
    "batchId": "b",
    "sequenceNo": 1,
    "targetVersion": {"epoch": 1, "number": 1},
    "trajectoryCount": 1,
    "advantageEstimator": "grpo",
}
_SHARD = {
    "name": "model",
    "sizeBytes": 64,
    "tensors": [{"name": "a", "dtype": "F32", "globalShape": [2], "offsets": [0], "sizes": [2], "encoding": 1}],
}

SOUND: Mapping[str, Sequence[dict[str, Any]]] = {
    "GenerateRequest": [_SAMPLED, {"tokenIds": {"ids": [5, 6]}, "sampling": {"maxTokens": 2}, "n": 2}],
    "GenerateStreamRequest": [{"request": _SAMPLED}],
    "TokenizeRequest": [{"conversation": _CONVERSATION}, {"text": "a"}],
    "EpisodeServiceGenerateRequest": [_SAMPLED],
    "EpisodeServiceGenerateStreamRequest": [{"request": _SAMPLED}],
    "OpenEpisodeRequest": [{"requestId": "o"}, {"requestId": "p"}],
    "RecordRewardRequest": [{"reward": 0.5}],
    "SubmitTrajectoryRequest": [{"reward": 1.0}],
    "BeginGenerationRequest": [
        {"bodyDigest": "MDEyMzQ1Njc4OWFiY2RlZg==", "requestId": "q", "gateway": "g", "claim": "1s"}
    ],
    "ExchangeRequest": [{"call": 1, "onBehalfOf": "agent", "timeout": "1s", "begin": {"requestId": "q"}}],
    "LeaseTasksRequest": [{"run": _RUN, "requestId": "r", "maxTasks": 1}],
    "SubmitBatchRequest": [{"header": _HEADER}, {"trajectory": _TRAJECTORY}],
    "BeginEpochRequest": [{"run": _RUN, "epoch": 9}],
    "PushWeightsRequest": [{"header": {"run": _RUN, "version": {"epoch": 1, "number": 5}, "shard": _SHARD}}],
    "CommitVersionRequest": [
        {"manifest": {"run": _RUN, "version": {"epoch": 1, "number": 5}, "kind": 1, "shards": [_SHARD]}}
    ],
    "ResetRequest": [{"task": {"taskId": "task"}, "episodeId": "e", "seed": 1}],
    "StepRequest": [{"episodeId": "e", "message": {"role": "assistant", "content": "go"}}],
    "RegisterReplicaRequest": [{"run": _RUN, "replica": "r9", "address": "127.0.0.1:1"}],
}
"""Sound messages by type, which get further than purely random ones. Other types are fuzzed without."""

Outcome: TypeAlias = "tuple[str, str, list[bytes]]"


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        frames: The messages that are sent, as bytes.
        ending: What follows the messages: the end of the stream, a cancellation, or nothing until the deadline.
        behalf: Metadata that a gateway sends: the principal for whom it calls.
        request_id: Metadata that is written to logs.
    """

    frames: tuple[bytes, ...]
    ending: str
    behalf: str = "admin"
    request_id: str = "fuzz"


@st.composite
def cases(draw: Draw, method: MethodDescriptor, names: Names, sound: Sequence[Message]) -> Case:
    """Draw a call of a method, with the number of messages that its kind needs or a wrong one."""
    frame = wires(method.input_type, names, sound)
    if draw(st.integers(0, 31)) == 0:
        frames = draw(st.lists(frame, max_size=2))
    elif method.client_streaming:
        frames = draw(st.lists(frame, max_size=MOST_FRAMES))
    else:
        frames = [draw(frame)]
    ending = draw(st.sampled_from(("end", "end", "end", "end", "end", "cancel", "idle")))
    behalf = draw(st.sampled_from(("admin", "admin", "admin", "admin", "agent", "", " ", "a" * 3000)))
    return Case(tuple(frames), ending, behalf, draw(st.sampled_from(("fuzz", "", "a" * 3000, "{}%s \\n"))))


class Fuzzer:
    """Calls the methods of one service and judges the answers.

    Args:
        stack: Everything that runs.
        watched: The service.
        findings: Takes what is wrong.
    """

    def __init__(self, stack: Stack, watched: Watched, findings: Findings) -> None:
        self._stack, self._watched, self._findings = stack, watched, findings
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        options += [("grpc.enable_retries", 0), ("grpc.max_metadata_size", 64 << 10)]
        self.channel = grpc.insecure_channel(watched.target, options=options)
        self._names: dict[str, list[str]] = {name: list(texts) for name, texts in stack.names.items()}
        self.codes: dict[str, Counter[str]] = {}

    def methods(self) -> list[MethodDescriptor]:
        """Return the methods of all services that the server lists. Methods that end the server come last."""
        request = common_pb2.GetServerInfoRequest().SerializeToString()
        _, message, responses = self.call(
            "/sluice.v1.ServerInfoService/GetServerInfo", Case((request,), "end"), ANSWER_S
        )
        if not responses:
            raise RuntimeError(f"{self._watched.name} does not say what it serves: {message}")
        for each in pkgutil.iter_modules(v1.__path__):  # so that the pool of descriptors has all contracts
            importlib.import_module(f"{v1.__name__}.{each.name}")
        listed = common_pb2.GetServerInfoResponse.FromString(responses[0]).services
        pool: Any = descriptor_pool.Default()  # type: ignore[no-untyped-call, unused-ignore]
        found = [method for name in [*listed, *BESIDE] for method in pool.FindServiceByName(name).methods]
        return sorted(found, key=lambda method: path_of(method)[1:] in ENDS_ITS_SERVER)

    def call(self, path: str, case: Case, timeout: float, token: str | None = None) -> Outcome:
        """Make one call; return the name of its code, its message and its responses.

        Args:
            path: As ``/package.Service/Method``.
            case: What is sent.
            timeout: Deadline in seconds.
            token: Token of the caller; None: the admin's, "": no token.
        """
        token = self._stack.tokens["admin"] if token is None else token
        metadata = [("on-behalf-of", case.behalf), ("x-request-id", case.request_id)]
        metadata += [("authorization", f"Bearer {token}")] if token else []
        begun, done = threading.Event(), threading.Event()

        def frames() -> Iterator[bytes]:
            yield from case.frames
            if case.ending == "idle":
                done.wait(timeout)
            elif case.ending == "cancel" and begun.wait(timeout):
                call.cancel()

        responses: list[bytes] = []
        stream: Any = self.channel.stream_stream(path, None, None)
        call = stream(frames(), timeout=timeout, metadata=tuple(metadata))
        begun.set()
        try:
            for response in call:
                responses.append(response)
                if len(responses) == MOST_RESPONSES:
                    call.cancel()
                    break
            code, message = call.code(), ""
        except grpc.RpcError as error:
            code, message = error.code(), error.details() or ""
        finally:
            done.set()
        return code.name, _described(call, code, message), responses

    def fuzz(self, method: MethodDescriptor, count: int, number: int) -> int:
        """Send `count` drawn inputs to a method; return how many were sent, those of callers without permission included."""
        path, sent = path_of(method), 0
        ends = path[1:] in ENDS_ITS_SERVER
        names = {name: tuple(texts) for name, texts in self._names.items()}
        timeout = WATCH_S if method.server_streaming or method.client_streaming else CALL_S
        kind = message_factory.GetMessageClass(method.input_type)
        parse = kind.FromString
        sound = [ParseDict(each, kind(), ignore_unknown_fields=True) for each in SOUND.get(method.input_type.name, ())]
        codes = self.codes.setdefault(path, Counter())

        @seed(number)
        @settings(_SETTINGS, max_examples=count)
        @given(cases(method, names, sound))
        def batch(case: Case) -> None:
            nonlocal sent
            if ends and any(_parses(parse, frame) for frame in case.frames):
                return
            sent += 1
            code, message, responses = self.call(path, case, timeout)
            codes[code] += 1
            self._judge(method, case, code, message, responses)

        batch()
        return sent + self._refused(method, number)

    def _refused(self, method: MethodDescriptor, number: int) -> int:
        """Call without a token and with a wrong one: the answer must be the same for every input, malformed ones included."""
        if method.containing_service.full_name == "grpc.health.v1.Health":
            return 0
        path, sent = path_of(method), 0

        @seed(number)
        @settings(_SETTINGS, max_examples=6)
        @given(cases(method, {}, ()), st.sampled_from(("", "wrong", "~" * 4000, "a b")))
        def batch(case: Case, token: str) -> None:
            nonlocal sent
            sent += 1
            code, message, _ = self.call(path, case, ANSWER_S, token)
            if code not in {"UNAUTHENTICATED", "CANCELLED"} and case.frames:
                self._findings.add(path, f"a caller without a token got {code}: {message}", repr(case)[:400])

        batch()
        return sent

    def _judge(self, method: MethodDescriptor, case: Case, code: str, message: str, responses: Sequence[bytes]) -> None:
        path = path_of(method)
        parse = message_factory.GetMessageClass(method.output_type).FromString
        for response in responses:
            try:
                self._learn(parse(response))
            except DecodeError as error:
                self._findings.add(path, f"a response is malformed: {error}", repr(case)[:400])
        spoken = self._watched.exceptions()
        for what, excerpt in spoken:
            self._findings.add(path, what, f"{_shown(method, case)}\n{excerpt[-1200:]}")
        wrong = code in _FAULTS or (code not in _FINE and not message.startswith("sluice:"))
        if wrong and not spoken and not (method.containing_service.full_name in BESIDE and code not in _FAULTS):
            self._findings.add(path, f"{code} {message[:300]}", f"{_shown(method, case)}; {case!r}"[:1500])
        if not self._watched.alive():
            raise RuntimeError(f"{self._watched.name} ended after {path}: {_shown(method, case)}")

    def _learn(self, response: Message) -> None:
        """Remember the texts of an answer, so that later inputs can use names that exist."""
        for name, text in _texts(response):
            known = self._names.setdefault(name, [])
            if text not in known and 0 < len(text) <= 256:
                known.append(text)
                del known[:-16]


def path_of(method: MethodDescriptor) -> str:
    """Return the path of a method on the wire."""
    return f"/{method.containing_service.full_name}/{method.name}"


def _parses(parse: Callable[[bytes], Message], frame: bytes) -> bool:
    try:
        parse(frame)
    except DecodeError:
        return False
    return True


def _texts(message: Message) -> Iterator[tuple[str, str]]:
    for field, value in message.ListFields():
        if isinstance(value, str):
            yield field.name, value
        elif isinstance(value, Message):
            yield from _texts(value)
        elif field.is_repeated and not isinstance(value, bytes | dict):
            with contextlib.suppress(TypeError, AttributeError):
                for each in list(value)[:8]:
                    if isinstance(each, Message):
                        yield from _texts(each)
                    elif isinstance(each, str):
                        yield field.name, each


def _described(call: Any, code: grpc.StatusCode, message: str) -> str:  # noqa: ANN401 - a call of gRPC
    """Return the message of an error with a prefix: "sluice:" if its details are as the contracts promise, else what is missing."""
    if code is grpc.StatusCode.OK:
        return ""
    if any(message.startswith(each) for each in _GRPC_SAYS):
        return f"sluice: {message}"
    details = next((value for key, value in call.trailing_metadata() or () if key == DETAILS_KEY), b"")
    status, info = Status(), ErrorInfo()
    status.ParseFromString(details)
    if not any(each.Unpack(info) for each in status.details):
        return f"without ErrorInfo: {message}"
    if info.domain != DOMAIN or info.reason not in _REASONS:
        return f"with the unknown reason {info.domain}/{info.reason}: {message}"
    return f"sluice: {message}" if len(message) > 10 else f"without a sentence: {message!r}"


def _shown(method: MethodDescriptor, case: Case) -> str:
    """Return the messages of a call as text, as far as they can be read."""
    kind: Descriptor = method.input_type
    parse = message_factory.GetMessageClass(kind).FromString
    texts = []
    for frame in case.frames:
        try:
            texts.append(str(parse(frame))[:600].replace("\n", " "))
        except DecodeError:
            texts.append(f"bytes {frame[:64]!r}")
    return f"{case.ending}: {texts}"
