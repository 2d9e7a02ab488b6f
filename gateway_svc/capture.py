"""A captured request of any dialect: what to sample, and which parts of it were not done as the client wrote them.

A captured endpoint serves clients that nobody can change. What cannot change the tokens is ignored, what the engine does not enforce is
not enforced, and what would make the log-probabilities those of another distribution follows `capture.on_unsupported`. Each of these
is a notice. Notices are counted, and none is an error unless the settings say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import grpc
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from sluice.limits import MAX_TEMPERATURE, MIN_TEMPERATURE, may_train_at
from sluice.openai.dialect import MessageFilter
from sluice.openai.errors import describe_faults
from sluice.rpc import SluiceError
from sluice.v1 import episode_pb2, rollout_pb2, tokens_pb2

NoticeKind: TypeAlias = Literal["ignored", "left_out", "not_enforced", "overridden", "not_trained"]

Unsupported: TypeAlias = Literal["override", "reject", "not_trained", "allow"]
"""What happens to sampling that may not be trained. `allow` is for sessions of an evaluation: nothing of them is trained."""


MAX_NOTICE_CHARACTERS = 64
"""Characters of the name of a notice."""

MAX_NOTICES = 64
"""Notices of one request; further ones are left out."""


class Notice(NamedTuple):
    """A part of a request that was not done as the client wrote it.

    Attributes:
        kind: `ignored`: it cannot change the tokens. `left_out`: it is not in the prompt. `not_enforced`: the model is asked, not
            forced. `overridden`: the sampling of the session holds. `not_trained`: it was done, and its tokens are not trained.
        what: Name of the field, with its value where that is one of few.
    """

    kind: NoticeKind
    what: str


@dataclass(slots=True)
class CapturedRequest:
    """A request of any dialect.

    Attributes:
        dialect: Dialect and route, such as ``openai.responses``.
        model: Name of the model as the client wrote it; the response repeats it.
        generate: What to sample. Sampling fields that are not set are those of the session.
        stream: Whether the client wants a stream.
        notices: What was not done as written.
        not_trained: Why it may not be trained, such as ``TOP_P``; empty if it may.
    """

    dialect: str
    model: str
    generate: rollout_pb2.GenerateRequest
    stream: bool = False
    notices: list[Notice] = field(default_factory=list)
    not_trained: str = ""

    def note(self, kind: NoticeKind, what: str) -> None:
        """Add a notice, once; of a longer name only the beginning: it becomes a label of a metric, and clients choose it."""
        notice = Notice(kind, what[:MAX_NOTICE_CHARACTERS])
        if notice not in self.notices and len(self.notices) < MAX_NOTICES:
            self.notices.append(notice)


class Begun(NamedTuple):
    """A request that was accepted, before its first token.

    Attributes:
        request_id: Its name; generations are named ``{request_id}/{index}``.
        prompt_tokens: Tokens of the prompt; 0 if they are not known yet.
    """

    request_id: str
    prompt_tokens: int

    @property
    def response_id(self) -> str:
        """Return the name of the first generation, which is the id of the response."""
        return f"{self.request_id}/0"


@dataclass(frozen=True, slots=True)
class Delta:
    """Text of a sample that follows the text already sent. What is sent is a prefix of the message in the result.

    Attributes:
        index: Index of the sample, from 0.
        content: More of its content.
        reasoning: More of its reasoning, all of which precedes the content.
    """

    index: int
    content: str = ""
    reasoning: str = ""


Result: TypeAlias = episode_pb2.EpisodeServiceGenerateResponse
"""What was sampled and recorded, with each message as `visible_message` returns it. Of a prompt that is no conversation, the content of the
message is the text."""


def visible_message(sample: rollout_pb2.GeneratedSample, generation_id: str) -> tokens_pb2.ChatMessage:
    """Return a sampled message as the client gets it, and sends it back.

    It has no stop string, and each of its tool calls has an id: one of ours where the model's format has none.

    Args:
        sample: The sample. Without a message, its text is the content.
        generation_id: Its name.
    """
    shown = tokens_pb2.ChatMessage()
    if sample.HasField("message"):
        shown.CopyFrom(sample.message)
    else:
        shown.content = sample.text
    shown.role = "assistant"
    if sample.stop_string:
        shown.content = shown.content.partition(sample.stop_string)[0]
        shown.reasoning = shown.reasoning.partition(sample.stop_string)[0]
    for index, call in enumerate(shown.tool_calls):
        call.id = call.id or f"call_{xxhash.xxh3_64_hexdigest(f'{generation_id}/{index}'.encode())}"
    return shown


class TextDeltas:
    """What samples say, as it comes and without their stop strings: the messages of a conversation, else the texts.

    Args:
        stops: The stop strings.
        of_messages: Whether the samples are messages.
    """

    def __init__(self, stops: Sequence[str], *, of_messages: bool) -> None:
        self._stops, self._of_messages = stops, of_messages
        self._filters: dict[int, MessageFilter] = {}

    def of(self, chunk: rollout_pb2.StreamChunk) -> Iterator[Delta]:
        """Yield what can be shown after a message of the stream."""
        for delta in chunk.deltas:
            new = delta.tokens
            said = (delta.reasoning, delta.content) if self._of_messages else ("", new.text)
            visible = self._filters.setdefault(new.index, MessageFilter(self._stops))
            reasoning, content = visible.after(*said, new.stop_string, last=bool(new.finish_reason))
            if reasoning or content:
                yield Delta(new.index, content, reasoning)


class Unshown:
    """Tracks how much of each message a stream has sent."""

    def __init__(self) -> None:
        self._content: dict[int, int] = {}
        self._reasoning: dict[int, int] = {}

    def sent(self, delta: Delta) -> None:
        """Account for text that is sent."""
        self._content[delta.index] = self._content.get(delta.index, 0) + len(delta.content)
        self._reasoning[delta.index] = self._reasoning.get(delta.index, 0) + len(delta.reasoning)

    def rest(self, index: int, message: tokens_pb2.ChatMessage) -> Delta:
        """Return what is left of a whole message."""
        content, reasoning = self._content.get(index, 0), self._reasoning.get(index, 0)
        return Delta(index, message.content[content:], message.reasoning[reasoning:])


class Lenient(BaseModel):
    """An object in which unknown keys are kept apart: they are ignored and counted."""

    model_config = ConfigDict(extra="allow")

    def note_unknown(self, request: CapturedRequest, *known: str) -> None:
        """Add a notice for each key that this server does not read, unless it is null."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in known:
                request.note("ignored", name)


class Inner(BaseModel):
    """An object within a body. What it holds besides its fields is ignored."""

    model_config = ConfigDict(extra="ignore")


AnyBody = TypeVar("AnyBody", bound=BaseModel)


def read_body(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Parse the JSON of a request.

    Raises:
        SluiceError: INVALID_ARGUMENT with the path of each fault.
    """
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        parameter, message = describe_faults(error.errors(include_url=False, include_input=False))
        raise SluiceError(
            grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", message, violations={parameter or "body": message}
        ) from error


def fault(parameter: str, message: str) -> SluiceError:
    """Return the error for a field that cannot be served."""
    return SluiceError.invalid_argument(parameter, message)


def set_priority(request: CapturedRequest, priority: int | None) -> None:
    """Set the priority that a client wants. Below 0, where it would go before other sessions and the run's own episodes, it is 0."""
    if priority is not None and priority < 0:
        request.note("overridden", "priority")
    request.generate.priority = max(0, priority or 0)


NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
}
"""Sampling with which the log-probabilities of the engine are those of the policy, for each field that a trained request may not set."""


def settle_sampling(request: CapturedRequest, unsupported: Unsupported) -> None:
    """Remove the sampling that may not be trained, refuse it, or mark the request as not trained; see `capture.on_unsupported`.

    Raises:
        SluiceError: INVALID_ARGUMENT if the settings say `reject`.
    """
    sampling = request.generate.sampling
    for name, neutral in NEUTRAL.items():
        if getattr(sampling, name) == neutral:
            sampling.ClearField(name)  # type: ignore[arg-type]  # a name of a field
    present = {each.name for each, _ in sampling.ListFields()}
    changing = [name for name in (*NEUTRAL, "logit_bias") if name in present]
    if (
        "temperature" in present
        and 0 <= sampling.temperature < MAX_TEMPERATURE
        and not may_train_at(sampling.temperature)
    ):
        changing.append("temperature")
    if unsupported == "allow":
        return
    for name in changing:
        if unsupported == "reject":
            why = "changes the distribution that tokens are sampled from, so that they could not be trained"
            if name == "temperature":
                why = f"is {sampling.temperature:g}, and trained tokens need at least {MIN_TEMPERATURE:g}"
            raise fault(name, f"{why}: leave it out, or let capture.on_unsupported be override or not_trained")
        if unsupported == "override":
            request.note("overridden", name)
            sampling.ClearField(name)  # type: ignore[arg-type]
        else:
            request.note("not_trained", name)
            request.not_trained = request.not_trained or name.upper()
