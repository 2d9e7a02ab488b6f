"""Turns text and messages into token ids and back, with the model's own tokenizer and chat template."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
import xxhash

from rollout_svc.least_tokens import LeastTokens
from rollout_svc.replies import CALLS, MAX_BEFORE_REPLY, THINK_START, ReplyFormat, ReplyReader, Said, reply_format
from rollout_svc.turns import Turns
from sluice.chat_template import set_chat_template, template_text
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig
from sluice.render import ChatRenderer, TemplateArgumentError, TemplateError, tokenizer_digest
from sluice.rpc import SluiceError
from sluice.rpc.access import caller
from sluice.rpc.bounds import Room
from sluice.template_arguments import arguments_text, template_arguments
from sluice.threads import CallHungError, DeadlineThreads, TooManyHungError
from sluice.tool_schemas import tool_dict
from sluice.v1 import rollout_pb2, tokens_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = structlog.get_logger()

TOKEN_TEXTS = 1 << 16
"""Maximum number of cached texts of single tokens."""

RENDER_THREADS = 4
"""Threads that render and tokenize, so that a long prompt does not block the event loop."""

LARGE_BYTES = 64 << 10
"""Bytes above which a prompt counts as large. It may take a tenth of a second."""

LARGE_THREADS = RENDER_THREADS // 2
"""Maximum number of threads for large prompts, so that small prompts soon find a free thread."""

MAX_WAITING_BYTES = 256 << 20
"""Maximum bytes of the requests that wait for a thread or have one."""

RETRY_AFTER_S = 1.0

RENDER_DEADLINE_S = 30.0
"""Seconds to render and tokenize one prompt. The wait for a thread may take the same time. 4 MiB of text take about 2 s."""

MAX_HUNG_RENDERINGS = 32
"""Maximum number of renderings that hang, for example in a template that loops for ever. A thread cannot be ended."""

PARSE_THREADS = 2
"""Number of threads in which vLLM's parsers read replies."""

PARSE_DEADLINE_S = 5.0
"""Seconds to parse one reply; a parser needs less than a millisecond."""

MAX_QUICK_TOKENS = 16_384
"""Maximum number of tokens of a reply to read on the event loop before other tasks get a turn; that takes about a millisecond."""

NO_IDS = frozenset[int]()

MAX_PARTS = 16_384
"""Maximum number of messages, parts, tool calls and tools of one conversation. Each takes much more memory than its bytes on the wire."""

MAX_ARGUMENT_BYTES = 64 << 10
"""Maximum size of the template arguments of one conversation."""

MAX_TOOLS_BYTES = 1 << 20
"""Maximum size of the tools of one conversation."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character to which a tokenizer decodes bytes that are not a complete character."""

CONTEXT_TOKENS = 8
"""Number of earlier tokens to decode together with new ones. A UTF-8 character has at most 4 bytes, so 8 tokens are enough."""

Result = TypeVar("Result")


async def load_tokenizer(run: CommonConfig) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a run's model, with the run's chat template. Return None if the model has no tokenizer: then prompts must be token ids.

    Raises:
        ConfigError: if its chat template is not valid Jinja, or does not read an argument of the run.
    """
    template = template_text(run.chat_template)

    def load() -> PreTrainedTokenizerBase | None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds; only where a model is served

        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(run.model)
        except (OSError, ValueError, KeyError):
            return None
        return set_chat_template(tokenizer, template, run.chat_template_kwargs)

    return await asyncio.to_thread(load)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a prompt.

    Attributes:
        ids: The ids.
        continued: Whether they begin with the ids that the request continues.
    """

    ids: list[int]
    continued: bool = False


class ModelTokenizer:
    """Renders prompts, and decodes and parses samples.

    Args:
        tokenizer: The model's tokenizer. None: prompts must be token ids.
        replies: How the model's replies are read. None: as its template writes them.
        clock: Time of the deadlines.
        arguments: Arguments of the chat template, for requests that do not set them.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        replies: ReplyFormat | None = None,
        clock: Clock = CLOCK,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer, self._clock = tokenizer, clock
        self._arguments = dict(arguments or {})
        self.replies = reply_format(tokenizer, "auto", "auto") if replies is None else replies
        self._said_malformed = False
        self._parsing = DeadlineThreads("parsing", PARSE_THREADS, PARSE_DEADLINE_S, MAX_HUNG_RENDERINGS, clock)
        self.digest = tokenizer_digest(tokenizer, self._arguments) if tokenizer is not None else ""
        # One renderer per set of template arguments, since each renderer examines the template once.
        self._renderer = functools.lru_cache(maxsize=32)(self._build_renderer)
        self._token_text = functools.lru_cache(maxsize=TOKEN_TEXTS)(self._decode_token)
        self._special_ids, self._byte_ids = _special_ids(tokenizer), _byte_ids(tokenizer)
        kept = self.replies.kept or frozenset()
        self._unread_ids = frozenset(id_ for id_ in self._special_ids if self.token_text(id_) not in kept)
        self._threads = DeadlineThreads("rendering", RENDER_THREADS, RENDER_DEADLINE_S, MAX_HUNG_RENDERINGS, clock)
        self._turns = Turns(RENDER_THREADS, LARGE_THREADS, LARGE_BYTES)
        self._waiting = Room(MAX_WAITING_BYTES)

    async def prompt_of(self, request: rollout_pb2.GenerateRequest, most: int | None = None) -> Prompt:
        """Return the token ids of a request's prompt.

        Args:
            request: The request.
            most: Maximum number of tokens. A prompt that certainly has more is refused before it is tokenized. None: no limit.

        Raises:
            SluiceError: INVALID_ARGUMENT if there is no prompt, there are two, it is too long, or the template refuses it;
                FAILED_PRECONDITION if the caller expects another tokenizer.
        """
        self.check_digest(request.tokenizer_digest)
        prompt = request.WhichOneof("prompt")
        if request.HasField("rendered"):
            if prompt != "conversation" or request.HasField("continues"):
                raise SluiceError.invalid_argument(
                    "rendered",
                    "are the token ids of a conversation: set conversation too, and neither another prompt nor continues",
                )
            return Prompt(list(request.rendered.ids))
        match prompt:
            case "token_ids":
                return Prompt(list(request.token_ids.ids))
            case "text":
                return Prompt(await self._in_thread("text", request, lambda: self._encode(request.text, most)))
            case "conversation" if request.HasField("continues"):
                return await self._in_thread(
                    "conversation", request, lambda: self._continue(request.conversation, request.continues, most)
                )
            case "conversation":
                return Prompt(
                    await self._in_thread("conversation", request, lambda: self.render(request.conversation, most=most))
                )
            case _:
                raise SluiceError.invalid_argument("prompt", "set token_ids, text or conversation")

    async def tokenize(self, request: rollout_pb2.TokenizeRequest) -> list[int]:
        """Return the token ids of text or messages, appended to the token ids that they continue.

        Raises:
            SluiceError: INVALID_ARGUMENT if the template refuses the messages or does not append.
        """
        continued = list(request.continues.ids)
        match request.WhichOneof("input"):
            case "text":
                return continued + await self._in_thread("text", request, lambda: self._encode(request.text))
            case "conversation":
                prompt = request.add_generation_prompt
                return await self._in_thread(
                    "conversation",
                    request,
                    lambda: self.render(request.conversation, continued, generation_prompt=prompt),
                )
            case _:
                raise SluiceError.invalid_argument("input", "set text or conversation")

    def render(
        self,
        conversation: tokens_pb2.Conversation,
        continued: Sequence[int] = (),
        *,
        generation_prompt: bool = True,
        most: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, appended to the token ids that it continues.

        Raises:
            SluiceError: INVALID_ARGUMENT if it is too large or certainly has more tokens than `most`, sets a template variable that it
                may not set, or the template refuses it.
        """
        renderer, messages, tools = self._read(conversation, most)
        with _template_errors():
            if continued:
                return renderer.render_continuation(
                    continued, messages, add_generation_prompt=generation_prompt, tools=tools
                )
            return renderer.render(messages, add_generation_prompt=generation_prompt, tools=tools)

    def _continue(
        self, conversation: tokens_pb2.Conversation, continues: rollout_pb2.Continuation, most: int | None
    ) -> Prompt:
        """Return the ids of a continuation with the rest of the conversation. If that is impossible, render the whole conversation.

        Raises:
            SluiceError: as `render`.
        """
        renderer, messages, tools = self._read(conversation, most)
        earlier, rest = messages[: continues.messages], messages[continues.messages :]
        with contextlib.suppress(TemplateError):
            ids = renderer.render_continuation(list(continues.token_ids), rest, earlier=earlier, tools=tools)
            if not continues.only_as_rendered or renderer.stands_for(ids, messages, tools=tools):
                return Prompt(ids, continued=True)
        with _template_errors():
            return Prompt(renderer.render(messages, tools=tools))

    def _read(
        self, conversation: tokens_pb2.Conversation, most: int | None
    ) -> tuple[ChatRenderer, list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return the renderer of a conversation, its messages and its tools.

        Raises:
            SluiceError: INVALID_ARGUMENT if it is too large, or sets a template variable that it may not set.
        """
        self._require_tokenizer("conversation")
        check_size(conversation)
        messages = [message_dict(message) for message in conversation.messages]
        try:
            tools = [tool_dict(tool) for tool in conversation.tools] or None
        except ValueError as error:
            raise SluiceError.invalid_argument("conversation.tools", str(error)) from error
        try:
            arguments = arguments_text(template_arguments(conversation))
        except ValueError as error:
            raise SluiceError.invalid_argument("conversation.template_arguments", str(error)) from error
        with _template_errors():
            renderer = self._renderer(arguments, most)
        return renderer, messages, tools

    def text_stream(self, continued: Sequence[int]) -> TextStream:
        """Return a decoder for one sample whose tokens come in parts. Its text begins with the text of the continued tokens."""
        return TextStream(self.decode, self._special_ids, self._byte_ids, continued)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens. Empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """Return the text of one token, which may be a special token. Empty without a tokenizer."""
        return self._token_text(token_id)

    async def message_of(
        self, request: rollout_pb2.GenerateRequest, name: str, prompt_ids: Sequence[int], ids: Sequence[int]
    ) -> tokens_pb2.ChatMessage:
        """Return the message of a reply. Text that cannot be parsed stays in the content.

        Args:
            request: The request, with the tools that were offered.
            name: Names the reply; ids of its calls are made from it.
            prompt_ids: The ids before the reply.
            ids: The reply.
        """
        reply = self.reply_stream(request, prompt_ids)
        await reply.after(ids, last=True)
        return self.message(name, reply)

    def reply_stream(self, request: rollout_pb2.GenerateRequest, prompt_ids: Sequence[int]) -> ReplyStream:
        """Return a reader for one reply whose tokens come in parts.

        Args:
            request: The request, with the tools that were offered.
            prompt_ids: The ids before the reply.
        """
        how = self.replies
        offered = request.conversation.tools
        tools = (lambda: [tool_dict(tool) for tool in offered]) if offered else None
        # Parsers of vLLM read special tokens, too, except those that end the reply.
        unread, ending = (self._unread_ids, NO_IDS) if how.kept is not None else (NO_IDS, self._special_ids)
        text = TextStream(self._decode_all, unread, self._byte_ids, ())
        return ReplyStream(
            text, ReplyReader(how, tools, opened=self._opens_reasoning(prompt_ids)), ending, self._parsed
        )

    def message(self, name: str, reply: ReplyStream) -> tokens_pb2.ChatMessage:
        """Return the message of a reply after its last part, and count its calls.

        Args:
            name: Names the reply; ids of its calls are made from it.
            reply: The reply.
        """
        said = reply.said
        CALLS.labels("parsed").inc(len(said.calls))
        CALLS.labels("malformed").inc(said.malformed)
        if said.malformed and not self._said_malformed:
            self._said_malformed = True
            log.warning(
                "a tool call could not be read; further ones are only counted in sluice_rollout_tool_calls_total",
                name=name,
                content=said.content[:200],
                tool_parser=self.replies.tool_parser,
            )
        message = tokens_pb2.ChatMessage(role="assistant", content=said.content, reasoning=reply.reasoning)
        for index, call in enumerate(said.calls):
            id_ = f"call_{xxhash.xxh3_64_hexdigest(f'{name}/{index}'.encode())}"
            message.tool_calls.add(id=id_, name=call.name, arguments=call.arguments)
        return message

    async def _parsed(self, reader: ReplyReader) -> tuple[str, Said]:
        """Return the reasoning of a whole reply, and its content and calls. Text that cannot be parsed is content."""
        if not reader.needs_parser:
            return reader.read()
        try:
            return await self._parsing.run(reader.read)
        except (CallHungError, TooManyHungError) as error:
            log.warning("a reply was not parsed in time; all of it is content", problem=str(error))
        except Exception as error:  # noqa: BLE001 - a parser of vLLM may fail in any way on a model's output
            log.warning("a reply could not be parsed; all of it is content", problem=str(error)[:200])
        reasoning, text = reader.unread()
        for special in {self.token_text(id_) for id_ in self._special_ids} - {""}:
            text = text.replace(special, "")
        return reasoning, Said(text, malformed=1)

    def _opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with reasoning that it has just opened."""
        if self._tokenizer is None:
            return False
        end = str(self._tokenizer.decode(list(prompt_ids[-MAX_BEFORE_REPLY:]), skip_special_tokens=False))
        return end.rstrip().endswith(THINK_START)

    def check_digest(self, expected: str) -> None:
        """Refuse a caller that expects another tokenizer or template."""
        if expected and expected != self.digest:
            raise SluiceError.failed_precondition(
                "TOKENIZER_MISMATCH",
                f"the caller expects tokenizer {expected[:64]}, this replica has {self.digest or 'none'}: "
                "serve and train from the same model directory, with the same chat_template and chat_template_kwargs",
            )

    async def _in_thread(
        self, field: str, request: rollout_pb2.GenerateRequest | rollout_pb2.TokenizeRequest, work: Callable[[], Result]
    ) -> Result:
        """Turn a field of a request into token ids outside the event loop, since it may take long. Tenants take turns.

        Raises:
            SluiceError: INVALID_ARGUMENT if it takes too long, UNAVAILABLE if no thread is free or too much waits.
        """
        tenant, size = tenant_of(request), request.ByteSize()
        try:
            if not self._waiting.take(tenant, size):
                raise SluiceError.unavailable(
                    "RENDERING_BUSY",
                    f"prompts of {self._waiting.held} bytes wait to be tokenized; retry",
                    RETRY_AFTER_S,
                )
            async with self._clock.timeout(2 * RENDER_DEADLINE_S), self._turns.turn(tenant, size):
                return await self._threads.run(work)
        except CallHungError as error:  # the prompt is at fault: another replica would hang, too
            raise SluiceError.invalid_argument(
                field, f"was not turned into token ids within {RENDER_DEADLINE_S:.0f} s: send a shorter one"
            ) from error
        except TimeoutError as error:
            raise SluiceError.unavailable(
                "RENDERING_BUSY", "other prompts take all threads that render; retry", RETRY_AFTER_S
            ) from error
        except TooManyHungError as error:
            raise SluiceError.unavailable(
                "RENDERINGS_HANG", f"{MAX_HUNG_RENDERINGS} prompts hang in the chat template: restart this replica"
            ) from error
        finally:
            self._waiting.give_back(tenant, size)

    def _encode(self, text: str, most: int | None = None) -> list[int]:
        self._require_tokenizer("text")
        if most is not None and (least := self._least_tokens(text)) > most:
            raise SluiceError.invalid_argument("text", _too_long(least, most))
        return self._renderer("{}", None).encode(text)

    @functools.cached_property
    def _least_tokens(self) -> LeastTokens:
        if self._tokenizer is None:
            raise SluiceError.invalid_argument("prompt", "the served model has no tokenizer: send token_ids")
        return LeastTokens(self._tokenizer)

    def _check_length(self, most: int, text: str) -> None:
        least = self._least_tokens(text)
        if least > most:
            raise TemplateError(_too_long(least, most))

    def _require_tokenizer(self, field: str) -> None:
        if self._tokenizer is None:
            raise SluiceError.invalid_argument(field, "the served model has no tokenizer: send token_ids")

    def _decode_token(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _build_renderer(self, arguments: str, most: int | None) -> ChatRenderer:
        """Return the renderer for the template arguments of a request, as JSON text, which take precedence over the replica's.

        The renderer refuses conversations that certainly have more than `most` tokens.
        """
        if self._tokenizer is None:
            raise SluiceError.invalid_argument("prompt", "the served model has no tokenizer: send token_ids")
        check = None if most is None else functools.partial(self._check_length, most)
        return ChatRenderer(self._tokenizer, self._arguments | json.loads(arguments), check=check)


def tenant_of(request: rollout_pb2.GenerateRequest | rollout_pb2.TokenizeRequest) -> str:
    """Return the tenant under which a request takes turns: for an agent its own name; for other callers the tenant in the request, if it has one."""
    principal = caller()
    return principal.name if principal.role == "agent" or not request.tenant else request.tenant


def _too_long(least: int, most: int) -> str:
    return f"has {least} tokens at least; at most {most} fit this model, so shorten it"


@contextlib.contextmanager
def _template_errors() -> Iterator[None]:
    """Turn the refusals of a chat template into INVALID_ARGUMENT."""
    try:
        yield
    except TemplateArgumentError as error:
        raise SluiceError.invalid_argument("conversation.template_arguments", str(error)) from error
    except TemplateError as error:
        raise SluiceError.invalid_argument("conversation", str(error)) from error


class TextStream:
    """Decodes one sample whose tokens come in parts. The parts of the text joined are the text of all tokens.

    Only the new tokens and a few before them are decoded. The earlier tokens are needed because the text of a token depends on
    its position: for example, whether it begins with a space. An incomplete character is held back.

    Args:
        decode: Returns the text of token ids without special tokens.
        special_ids: Tokens that have no text.
        byte_ids: Tokens that each stand for one byte. A tokenizer decodes a run of such tokens together. If a byte is wrong, the
            whole run becomes replacement characters, so the text of a run is only known at its end.
        continued: Tokens before the first part. The text of the first part begins with their text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        special_ids: frozenset[int],
        byte_ids: frozenset[int],
        continued: Sequence[int],
    ) -> None:
        self._decode, self._special_ids, self._byte_ids = decode, special_ids, byte_ids
        self._ids = [each for each in continued if each not in special_ids]
        self._given = 0
        """Number of characters of the text of `_ids` that were returned."""

    def after(self, new_ids: Sequence[int], *, last: bool) -> str:
        """Return the text that new tokens complete. If they are the last, return all the remaining text."""
        self._ids += [each for each in new_ids if each not in self._special_ids]
        if not self._ids or (self._ids[-1] in self._byte_ids and not last):
            return ""
        text = self._decode(self._ids)
        end = len(text) if last else _settled(text)
        new = text[self._given : end]
        self._given = end
        self._shorten()
        return new

    def _shorten(self) -> None:
        """Forget tokens that do not change how later ones are decoded."""
        if len(self._ids) < 2 * CONTEXT_TOKENS:
            return
        start = len(self._ids) - CONTEXT_TOKENS
        while start and self._ids[start] in self._byte_ids:
            start -= 1
        kept = self._ids[start:]
        text = self._decode(kept)
        # Without earlier text, the next token would be decoded as the first token of the sample.
        if text or len(self._ids) > 8 * CONTEXT_TOKENS:
            self._ids, self._given = kept, _settled(text)


class ReplyStream:
    """Reads one reply whose tokens come in parts. The joined parts of reasoning and content are the message's reasoning and content.

    Args:
        text: Decodes the tokens.
        reader: Parses the text.
        ending: Tokens to ignore at the end of the reply.
        parse: Returns the result of the reader after the last part.

    Attributes:
        reasoning: The reasoning, after the last part.
        said: Content and calls, after the last part.
    """

    def __init__(
        self,
        text: TextStream,
        reader: ReplyReader,
        ending: frozenset[int],
        parse: Callable[[ReplyReader], Awaitable[tuple[str, Said]]],
    ) -> None:
        self._text, self._reader, self._ending, self._parse = text, reader, ending, parse
        self._held: list[int] = []
        self._reasoned = self._answered = 0
        """Number of characters that were returned."""
        self.reasoning, self.said = "", Said("")

    async def after(self, new_ids: Sequence[int], *, last: bool) -> tuple[str, str]:
        """Return the reasoning and the content that are certain after more tokens, without what was returned before."""
        reasoning, content = "", ""
        for start in range(0, max(1, len(new_ids)), MAX_QUICK_TOKENS):
            if start:
                await asyncio.sleep(0)
            end = start + MAX_QUICK_TOKENS
            more = self._read(new_ids[start:end], last=last and end >= len(new_ids))
            reasoning, content = reasoning + more[0], content + more[1]
        if last:
            self.reasoning, self.said = await self._parse(self._reader)
            return self.reasoning[self._reasoned :], self.said.content[self._answered :]
        self._reasoned += len(reasoning)
        self._answered += len(content)
        return reasoning, content

    def _read(self, new_ids: Sequence[int], *, last: bool) -> tuple[str, str]:
        ids = [*self._held, *new_ids]
        shown = len(ids)
        while shown and ids[shown - 1] in self._ending:
            shown -= 1
        self._held = ids[shown:]
        return self._reader.after(self._text.after(ids[:shown], last=last), last=last)


def _settled(text: str) -> int:
    """Return the number of final characters: all except an incomplete character at the end."""
    return len(text) - text.endswith(REPLACEMENT)


def _special_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
    return frozenset(id_ for id_, token in added.items() if token.special)


def _byte_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the tokens `<0x00>` to `<0xFF>`, which some vocabularies use for the bytes of unknown characters."""
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    return frozenset(vocabulary[name] for name in names & vocabulary.keys())


def check_size(conversation: tokens_pb2.Conversation) -> None:
    """Refuse a conversation that would take far more memory or time than its size on the wire suggests.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    parts = len(conversation.messages) + len(conversation.tools)
    parts += sum(len(message.parts) + len(message.tool_calls) for message in conversation.messages)
    if parts > MAX_PARTS:
        raise SluiceError.invalid_argument(
            "conversation", f"has {parts} messages, parts, tool calls and tools; the limit is {MAX_PARTS}"
        )
    for field, size, most in (
        ("template_arguments", _arguments_size(conversation), MAX_ARGUMENT_BYTES),
        ("tools", sum(map(_rendered_size, conversation.tools)), MAX_TOOLS_BYTES),
    ):
        if size > most:
            raise SluiceError.invalid_argument(f"conversation.{field}", f"take {size} bytes; the limit is {most}")


def _arguments_size(conversation: tokens_pb2.Conversation) -> int:
    """Return the size of the template arguments. If a request has them in both forms, only the JSON is read."""
    if conversation.HasField("template_arguments_json"):
        return len(conversation.template_arguments_json.encode())
    return conversation.template_arguments.ByteSize()


def _rendered_size(tool: tokens_pb2.Tool) -> int:
    """Return the size of a tool as a template gets it. If the schema is there in both forms, only the JSON is read."""
    return tool.ByteSize() - (tool.parameters.ByteSize() if tool.HasField("parameters_json") else 0)


def message_dict(message: tokens_pb2.ChatMessage) -> dict[str, Any]:
    """Return a message in the form that chat templates read.

    Raises:
        SluiceError: INVALID_ARGUMENT for content that this server does not support.
    """
    if any(part.WhichOneof("part") == "image" for part in message.parts):
        raise SluiceError.invalid_argument("conversation.messages.parts", "this server does not support images")
    fields: dict[str, Any] = {
        "role": message.role,
        "content": "".join(part.text for part in message.parts) if message.parts else message.content,
    }
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": message.reasoning}
    return fields | {key: value for key, value in optional.items() if value}
