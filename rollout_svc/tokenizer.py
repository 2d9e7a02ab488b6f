"""Text and messages to token ids and back, with the model's own tokenizer and template."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.struct_pb2 import Struct, Value

from sluice.render import ChatRenderer, TemplateArgumentError, TemplateError, tokenizer_digest
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ModelTokenizer", "TextStream", "load_tokenizer"]

TOKEN_TEXTS = 1 << 16
"""Most texts of single tokens that are kept."""

RENDER_THREADS = 4
"""Threads that render and tokenize, so that a long prompt does not stop the event loop."""

RENDER_DEADLINE_S = 30.0
"""Time to turn one prompt into token ids, waiting for a thread included; 4 MiB of text take about 2 s."""

MAX_PARTS = 16_384
"""Messages, parts, tool calls and tools of one conversation together; each costs far more memory than bytes on the wire."""

MAX_ARGUMENT_BYTES = 64 << 10
"""Size of the template arguments of one conversation."""

MAX_TOOLS_BYTES = 1 << 20
"""Size of the tools of one conversation."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes bytes to that are not a whole character."""

CONTEXT_TOKENS = 8
"""Tokens before the new ones that are decoded again: more than a character of UTF-8 has bytes."""

Result = TypeVar("Result")


async def load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, or None if it has none: then only token ids are served."""

    def load() -> PreTrainedTokenizerBase | None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds; only where a model is served

        try:
            return AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError, KeyError):
            return None

    return await asyncio.to_thread(load)


class ModelTokenizer:
    """Renders prompts and decodes answers.

    Args:
        tokenizer: The model's tokenizer; None serves token ids alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self.digest = tokenizer_digest(tokenizer) if tokenizer is not None else ""
        # One renderer per set of template arguments: each probes the template once.
        self._renderer = functools.lru_cache(maxsize=32)(self._build_renderer)
        self._token_text = functools.lru_cache(maxsize=TOKEN_TEXTS)(self._decode_token)
        self._special_ids, self._byte_ids = _special_ids(tokenizer), _byte_ids(tokenizer)
        self._threads = ThreadPoolExecutor(RENDER_THREADS, thread_name_prefix="render")

    async def ids_of(self, request: rollout_pb2.GenerateRequest) -> list[int]:
        """Return the token ids of a request's prompt.

        Raises:
            SluiceError: INVALID_ARGUMENT if there is no prompt or the template refuses it; FAILED_PRECONDITION if the
                caller expects another tokenizer.
        """
        self.check_digest(request.tokenizer_digest)
        match request.WhichOneof("prompt"):
            case "token_ids":
                return list(request.token_ids.ids)
            case "text":
                return await self._in_thread(lambda: self._encode(request.text))
            case "conversation":
                return await self._in_thread(lambda: self.render(request.conversation))
            case _:
                raise SluiceError.invalid_argument("prompt", "set token_ids, text or conversation")

    async def tokenize(self, request: rollout_pb2.TokenizeRequest) -> list[int]:
        """Return the token ids of text or messages, appended to those that they continue.

        Raises:
            SluiceError: INVALID_ARGUMENT if the template refuses them or does not append.
        """
        continued = list(request.continues.ids)
        match request.WhichOneof("input"):
            case "text":
                return continued + await self._in_thread(lambda: self._encode(request.text))
            case "conversation":
                prompt = request.add_generation_prompt
                return await self._in_thread(
                    lambda: self.render(request.conversation, continued, generation_prompt=prompt)
                )
            case _:
                raise SluiceError.invalid_argument("input", "set text or conversation")

    def render(
        self,
        conversation: tokens_pb2.Conversation,
        continued: Sequence[int] = (),
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation, appended to those that it continues.

        Raises:
            SluiceError: INVALID_ARGUMENT if it is too large, sets a variable that is not the caller's, or the template
                refuses it.
        """
        self._require_tokenizer()
        check_size(conversation)
        messages = [message_dict(message) for message in conversation.messages]
        tools = [tool_dict(tool) for tool in conversation.tools] or None
        try:
            renderer = self._renderer(conversation.template_arguments.SerializeToString(deterministic=True))
            if continued:
                return renderer.render_continuation(
                    continued, messages, add_generation_prompt=generation_prompt, tools=tools
                )
            return renderer.render(messages, add_generation_prompt=generation_prompt, tools=tools)
        except TemplateArgumentError as error:
            raise SluiceError.invalid_argument("conversation.template_arguments", str(error)) from error
        except TemplateError as error:
            raise SluiceError.invalid_argument("conversation", str(error)) from error

    def text_stream(self) -> TextStream:
        """Return a decoder for one sample whose tokens come in parts."""
        return TextStream(self.decode, self._special_ids, self._byte_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens; empty without a tokenizer."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token, special ones included; empty without a tokenizer."""
        return self._token_text(token_id)

    def check_digest(self, expected: str) -> None:
        """Refuse a caller that expects another tokenizer or template."""
        if expected and expected != self.digest:
            raise SluiceError.failed_precondition(
                "TOKENIZER_MISMATCH",
                f"the caller expects tokenizer {expected[:64]}, this replica has {self.digest or 'none'}: "
                "serve and train from the same model directory",
            )

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        """Run work of unknown length outside of the event loop.

        Raises:
            SluiceError: UNAVAILABLE if it takes too long.
        """
        try:
            async with asyncio.timeout(RENDER_DEADLINE_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError as error:
            raise SluiceError.unavailable(
                "RENDERING_TIMED_OUT",
                f"the prompt was not turned into token ids within {RENDER_DEADLINE_S:.0f} s; send a shorter one or retry",
                RENDER_DEADLINE_S,
            ) from error

    def _encode(self, text: str) -> list[int]:
        self._require_tokenizer()
        return self._renderer(b"").encode(text)

    def _require_tokenizer(self) -> None:
        if self._tokenizer is None:
            raise SluiceError.invalid_argument("prompt", "the served model has no tokenizer: send token_ids")

    def _decode_token(self, token_id: int) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _build_renderer(self, template_arguments: bytes) -> ChatRenderer:
        if self._tokenizer is None:
            raise SluiceError.invalid_argument("prompt", "the served model has no tokenizer: send token_ids")
        arguments = tokens_pb2.Conversation().template_arguments
        arguments.ParseFromString(template_arguments)
        return ChatRenderer(self._tokenizer, struct_dict(arguments))


class TextStream:
    """Text of one sample whose tokens come in parts; joined, it is the text of all tokens decoded at once.

    Only the new tokens and a few before them are decoded. Those before settle what the first new token looks like in
    context, such as whether it begins with a space. A character that is not complete is held back.

    Args:
        decode: Gives the text of token ids without special tokens.
        special_ids: Tokens that have no text.
        byte_ids: Tokens that each stand for one byte. A tokenizer decodes a run of them as one, and to nothing but
            replacement characters if any of its bytes is wrong; so the text of a run is known at its end.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], special_ids: frozenset[int], byte_ids: frozenset[int]
    ) -> None:
        self._decode, self._special_ids, self._byte_ids = decode, special_ids, byte_ids
        self._ids: list[int] = []
        self._given = 0
        """Characters of the text of `_ids` that were given out."""

    def after(self, new_ids: Sequence[int], *, last: bool) -> str:
        """Return the text that new tokens complete; all that is left if they are the last."""
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
        """Forget tokens that no longer change how the next ones are decoded."""
        if len(self._ids) < 2 * CONTEXT_TOKENS:
            return
        start = len(self._ids) - CONTEXT_TOKENS
        while start and self._ids[start] in self._byte_ids:
            start -= 1
        kept = self._ids[start:]
        text = self._decode(kept)
        # Without any text, the next token would be decoded as the first of the sample.
        if text or len(self._ids) > 8 * CONTEXT_TOKENS:
            self._ids, self._given = kept, _settled(text)


def _settled(text: str) -> int:
    """Return how many characters cannot change any more: all but the beginning of one that is not complete."""
    return len(text) - text.endswith(REPLACEMENT)


def _special_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    added = tokenizer.added_tokens_decoder if tokenizer is not None else {}
    return frozenset(id_ for id_, token in added.items() if token.special)


def _byte_ids(tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the tokens `<0x00>` to `<0xFF>` of a vocabulary that spells unknown characters by their bytes."""
    names = {f"<0x{byte:02X}>" for byte in range(256)}
    vocabulary = tokenizer.get_vocab() if tokenizer is not None else {}
    return frozenset(vocabulary[name] for name in names & vocabulary.keys())


def check_size(conversation: tokens_pb2.Conversation) -> None:
    """Refuse a conversation that would take much more memory or time than its bytes on the wire suggest.

    Raises:
        SluiceError: INVALID_ARGUMENT.
    """
    parts = len(conversation.messages) + len(conversation.tools)
    parts += sum(len(message.parts) + len(message.tool_calls) for message in conversation.messages)
    if parts > MAX_PARTS:
        raise SluiceError.invalid_argument(
            "conversation", f"has {parts} messages, parts, tool calls and tools; at most {MAX_PARTS} are taken"
        )
    for field, size, most in (
        ("template_arguments", conversation.template_arguments.ByteSize(), MAX_ARGUMENT_BYTES),
        ("tools", sum(tool.ByteSize() for tool in conversation.tools), MAX_TOOLS_BYTES),
    ):
        if size > most:
            raise SluiceError.invalid_argument(f"conversation.{field}", f"take {size} bytes; at most {most} are taken")


def message_dict(message: tokens_pb2.ChatMessage) -> dict[str, Any]:
    """A message as chat templates know it.

    Raises:
        SluiceError: INVALID_ARGUMENT for content that this server cannot take.
    """
    if any(part.WhichOneof("part") == "image" for part in message.parts):
        raise SluiceError.invalid_argument("conversation.messages.parts", "this server takes no images yet")
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


def tool_dict(tool: tokens_pb2.Tool) -> dict[str, Any]:
    """A tool as chat templates know it."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": struct_dict(tool.parameters),
        },
    }


def struct_dict(struct: Struct) -> dict[str, Any]:
    """Return a JSON object, always the same for the same content: its keys in order, whole numbers as integers.

    A Struct keeps neither the order of keys nor the kind of numbers, and a template writes both into the prompt.

    Raises:
        SluiceError: INVALID_ARGUMENT for a number that JSON does not have.
    """
    return {key: _plain(struct.fields[key]) for key in sorted(struct.fields)}


def _plain(value: Value) -> Any:  # noqa: ANN401 - JSON
    match value.WhichOneof("kind"):
        case "struct_value":
            return struct_dict(value.struct_value)
        case "list_value":
            return [_plain(each) for each in value.list_value.values]
        case "number_value":
            number = value.number_value
            if not math.isfinite(number):
                raise SluiceError.invalid_argument("conversation", f"{number} is not a number of JSON")
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None
