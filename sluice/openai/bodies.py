"""Input of the dialects: bodies, sampling, content, and the request that results.

Each body has two forms. A gateway reads the lenient form, since its clients cannot be changed: it ignores fields that change no token,
leaves out or does not enforce what it cannot do, and adds a notice to the request for each. A replica reads the strict form
(`Strict...`), which refuses everything that would not be done as the client wrote it. The strict form is a subclass with narrower fields
that forbids unknown keys, so one function turns both forms into a request.

The strict form accepts `user`, `metadata`, `store`, `safety_identifier` and `prompt_cache_key`, which describe the caller and change no
answer. Fields for which only one value is supported (such as `echo` or `service_tier`) may be sent with that value. Only the form of the
values is checked here. The replica checks whether they fit the model, as it does for gRPC requests.
"""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar

import grpc
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from sluice.openai.errors import describe_faults
from sluice.rpc import MAX_SAMPLES, SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2

MAX_ALTERNATIVES = 20
"""Maximum number of alternatives per token."""

Unsigned = Annotated[int, Field(ge=0, lt=2**32)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Alternatives = Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)]


def inconsistent(parameter: str, text: str) -> PydanticCustomError:
    """Return the error for a parameter that does not fit another one. The response names the parameter."""
    return PydanticCustomError("inconsistent", "{text}", {"parameter": parameter, "text": text})


MAX_DEPTH = 16
"""Maximum nesting of objects and lists in a free-form JSON object. Protobuf has a similar limit."""

MAX_VALUES = 65_536
"""Maximum number of values in a free-form JSON object."""

MAX_MESSAGES = 16_384
MAX_TOOLS = 1024


def _bounded(given: dict[str, Any]) -> dict[str, Any]:
    """Refuse an object that is nested too deeply, is too large, or holds a number that JSON does not have."""
    level: list[Any] = [given]
    count = 0
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for each in level:
            below += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            if isinstance(each, float) and not math.isfinite(each):
                raise PydanticCustomError("not_finite", "{number} is not a number of JSON", {"number": str(each)})
            if isinstance(each, int) and abs(each) > MAX_INTEGER:
                raise PydanticCustomError("too_large", "an integer has more than 64 bits")
        count += len(below)
        if count > MAX_VALUES:
            raise PydanticCustomError("too_large", "has more than {most} values", {"most": MAX_VALUES})
        if not below:
            return given
        level = below
    raise PydanticCustomError("too_deep", "has more than {most} levels", {"most": MAX_DEPTH})


MAX_INTEGER = 2**64


def refuse_not_finite(body: Any) -> Any:  # noqa: ANN401 - JSON
    """Return a parsed body. Refuse numbers anywhere in it that JSON does not have: NaN, or numbers too large for a double, such as 1e999.

    Such a number can neither be sent back nor shown to the model.

    Raises:
        PydanticCustomError: with the path of the number.
    """
    left = [body]
    while left:
        value = left.pop()
        inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for each in inside:
            kind = type(each)
            if kind is dict or kind is list:
                left.append(each)
            elif kind is float and not math.isfinite(each):
                text = f"{each} is not a number of JSON: send a finite number that a double holds"
                raise inconsistent(_path_of(each, body), text)
    return body


def _path_of(wanted: float, body: Any) -> str:  # noqa: ANN401 - JSON
    """Return the path of this object (by identity) in a parsed body, cut to a length that fits a message."""
    left: list[tuple[str, Any]] = [("", body)]
    while left:
        path, value = left.pop()
        if value is wanted:
            return path if len(path) <= MAX_PATH else f"{path[:MAX_PATH]}..."
        if isinstance(value, dict):
            left += ((f"{path}.{name}" if path else name, each) for name, each in value.items())
        elif isinstance(value, list):
            left += ((f"{path}[{index}]", each) for index, each in enumerate(value))
    return ""


MAX_PATH = 256
"""Maximum number of characters of a path in a message: a client chooses the names in it."""

JsonObject = Annotated[dict[str, Any], AfterValidator(_bounded)]


NoticeKind: TypeAlias = Literal["ignored", "left_out", "not_enforced", "overridden", "not_trained"]

MAX_NOTICE_CHARACTERS = 64
"""Maximum number of characters of the name of a notice."""

MAX_NOTICES = 64
"""Maximum number of notices of one request. Further ones are left out."""


class Notice(NamedTuple):
    """A part of a request that was not done as the client wrote it.

    Attributes:
        kind: `ignored`: it cannot change the tokens. `left_out`: it is not in the prompt. `not_enforced`: the model is asked, not
            forced. `overridden`: the session's sampling is used. `not_trained`: it was done, but its tokens are not trained.
        what: Name of the field, with its value if there are only a few possible values.
    """

    kind: NoticeKind
    what: str


@dataclass(slots=True)
class ClientRequest:
    """A request of any dialect.

    Attributes:
        dialect: Dialect and route, such as ``openai.responses``.
        model: Name of the model as the client wrote it; the response repeats it.
        generate: The request to sample. Unset sampling fields take the session's values.
        stream: Whether the client wants a stream.
        notices: Parts that were not done as written.
        not_trained: Why its tokens may not be trained, such as ``TOP_P``; empty if they may.
    """

    dialect: str
    model: str
    generate: rollout_pb2.GenerateRequest
    stream: bool = False
    notices: list[Notice] = field(default_factory=list)
    not_trained: str = ""

    def note(self, kind: NoticeKind, what: str) -> None:
        """Add a notice, once. Cut long names, because they become labels of a metric, and clients choose them."""
        notice = Notice(kind, what[:MAX_NOTICE_CHARACTERS])
        if notice not in self.notices and len(self.notices) < MAX_NOTICES:
            self.notices.append(notice)


class Inner(BaseModel):
    """An object within a body. Unknown keys are ignored."""

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


TEXT_PARTS = {"text", "input_text", "output_text", "summary_text", "reasoning_text"}

IMAGE_PARTS = {"image_url", "input_image"}

ROLES = {"developer": "system"}
"""Roles that have another name in the contract."""


class RequestBody(BaseModel):
    """Body of a request, in any dialect: a JSON object whose numbers are all finite. Unknown keys are kept separately, for notices."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_finite(cls, given: Any) -> Any:  # noqa: ANN401 - JSON
        return refuse_not_finite(given)

    def note_unknown(self, request: ClientRequest) -> None:
        """Add a notice for each key that this server does not read, unless it is null."""
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                request.note("ignored", name)


class Said(BaseModel):
    """A part of a conversation at a replica. Clients send back what they received, so an unknown key with an empty value is allowed."""

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, data: Any) -> Any:  # noqa: ANN401 - whatever was sent
        if not isinstance(data, dict) or data.keys() <= cls.model_fields.keys():
            return data
        return {name: value for name, value in data.items() if name in cls.model_fields or not _says_nothing(value)}


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value == []


def _refuse(_given: object) -> None:
    raise PydanticKnownError("extra_forbidden")


def _refuse_said(given: object) -> None:
    if not _says_nothing(given):
        raise PydanticKnownError("extra_forbidden")


Refused = Annotated[None, BeforeValidator(_refuse)]
"""A field that the strict form refuses."""

Unsaid = Annotated[None, BeforeValidator(_refuse_said)]
"""A field that the strict form of a part of a conversation refuses unless its value is empty."""


class StreamOptions(Inner):
    """Options of a streamed response."""

    include_usage: bool | None = None


def _named(given: object) -> object:
    if given is None:  # at a replica, `model` is required and names the served model
        raise PydanticKnownError("string_type")
    return given


class SamplingBody(RequestBody):
    """Parameters of Chat Completions and Completions. Other parameters are ignored and counted."""

    model: Annotated[str | None, BeforeValidator(_named)] = ""
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Unsigned | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**32)
    min_p: float | None = None
    min_tokens: Unsigned | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Unsigned, Bias] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    return_token_ids: bool | None = None

    def generate_request(self, max_tokens: int | None, top_logprobs: int) -> rollout_pb2.GenerateRequest:
        """Return the request in the form of the contract, without its prompt."""
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given = {name: getattr(self, name) for name in names}
        sampling = tokens_pb2.SamplingParams(
            **{name: value for name, value in given.items() if value is not None},
            max_tokens=max_tokens,
            top_k=max(self.top_k, 0) if self.top_k is not None else None,
            min_tokens=self.min_tokens or 0,
            stop=self.stops,
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            logit_bias=self.logit_bias or {},
            seed=None if self.seed is None else self.seed % 2**64,
            top_logprobs=top_logprobs,
        )
        return rollout_pb2.GenerateRequest(sampling=sampling, n=self.n or 1, priority=self.priority or 0)

    @property
    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class StrictStreamOptions(StreamOptions, extra="forbid"):
    """Options of a streamed response."""

    include_obfuscation: Literal[False] | None = None


class StrictSamplingBody(SamplingBody, extra="forbid"):
    """Parameters of both endpoints of a replica. If a parameter is null or missing, the default of the contract applies."""

    model: str | None = None
    stream_options: StrictStreamOptions | None = None
    seed: int | None = Field(None, ge=0, lt=2**64)
    min_tokens: Refused = None
    service_tier: Literal["auto", "default"] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_finite(cls, given: Any) -> Any:  # noqa: ANN401 - JSON
        """Check nothing here, because the limits of each field check its numbers."""
        return given

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise inconsistent("stream_options", "needs stream = true")
        return self


class Typed(Inner):
    """An object of which only `type` is read."""

    type: str


class Url(Inner):
    """Location of an image."""

    url: str


class Part(Inner):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | Url | None = None


Content = str | list[Part] | None


def add_content(message: tokens_pb2.ChatMessage, content: Content, where: str, request: ClientRequest) -> None:
    """Set the content of a message. Join text that comes in parts, unless the message has images.

    Raises:
        SluiceError: INVALID_ARGUMENT for a part that cannot be shown to the model.
    """
    if content is None or isinstance(content, str):
        message.content = content or ""
        return
    parts = [_part(each, f"{where}.content[{index}]", request) for index, each in enumerate(content)]
    if all(part.WhichOneof("part") == "text" for part in parts):
        message.content = "".join(part.text for part in parts)
    else:
        message.parts.extend(parts)


def _part(part: Part, where: str, request: ClientRequest) -> tokens_pb2.ContentPart:
    if part.type in TEXT_PARTS and part.text is not None:
        return tokens_pb2.ContentPart(text=part.text)
    if part.type == "refusal":
        return tokens_pb2.ContentPart(text=part.refusal or "")
    if part.type in IMAGE_PARTS and part.image_url is not None:
        url = part.image_url if isinstance(part.image_url, str) else part.image_url.url
        return tokens_pb2.ContentPart(image=_image(url, where))
    if part.type in TEXT_PARTS:
        request.note("ignored", "empty part")
        return tokens_pb2.ContentPart(text="")
    raise fault(
        where, f"a part of type {part.type[:64]!r} cannot be given to the model: send text or an image as a data: URL"
    )


def _image(url: str, where: str) -> bytes:
    head, comma, data = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise fault(where, "the gateway fetches no images: send it as a data: URL in base64")
    return image_of(data, where)


def image_of(data: str, where: str) -> bytes:
    """Return the bytes of an image.

    Raises:
        SluiceError: INVALID_ARGUMENT if `data` is not base64.
    """
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise fault(where, f"the image is not base64: {error}") from error


def note_choice(request: ClientRequest, tool_choice: str | Typed | None, parallel: bool | None) -> None:
    """Add notices for a client's demands on tool calls: the model is asked to meet them, not forced."""
    choice = (tool_choice or "auto") if isinstance(tool_choice, str | None) else "named"
    if choice != "auto":
        request.note("not_enforced", f"tool_choice.{choice}")
    if parallel is False:
        request.note("not_enforced", "parallel_tool_calls")
