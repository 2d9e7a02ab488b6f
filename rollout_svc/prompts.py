"""Text and messages to token ids and back, with the model's own tokenizer and template."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from sluice.render import ChatRenderer, TemplateError, tokenizer_digest
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, tokens_pb2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompts", "load_tokenizer"]

TOKEN_TEXTS = 1 << 16
"""Most texts of single tokens that are kept."""


async def load_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """The model's tokenizer, or None if it has none: then only token ids are served."""

    def load() -> PreTrainedTokenizerBase | None:
        from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds; only where a model is served

        try:
            return AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError, KeyError):
            return None

    return await asyncio.to_thread(load)


class Prompts:
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

    def ids_of(self, request: rollout_pb2.GenerateRequest) -> list[int]:
        """Token ids of a request's prompt.

        Raises:
            SluiceError: INVALID_ARGUMENT if there is no prompt or the template refuses it; FAILED_PRECONDITION if the
                caller expects another tokenizer.
        """
        self.check_digest(request.tokenizer_digest)
        match request.WhichOneof("prompt"):
            case "token_ids":
                return list(request.token_ids.ids)
            case "text":
                return self._encode(request.text)
            case "conversation":
                return self.render(request.conversation)
            case _:
                raise SluiceError.invalid_argument("prompt", "set token_ids, text or conversation")

    def tokenize(self, request: rollout_pb2.TokenizeRequest) -> list[int]:
        """Token ids of text or messages, appended to those that they continue.

        Raises:
            SluiceError: INVALID_ARGUMENT if the template refuses them or does not append.
        """
        continued = list(request.continues.ids)
        match request.WhichOneof("input"):
            case "text":
                return continued + self._encode(request.text)
            case "conversation":
                return self.render(request.conversation, continued, generation_prompt=request.add_generation_prompt)
            case _:
                raise SluiceError.invalid_argument("input", "set text or conversation")

    def render(
        self,
        conversation: tokens_pb2.Conversation,
        continued: Sequence[int] = (),
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation, appended to those that it continues.

        Raises:
            SluiceError: INVALID_ARGUMENT if the template refuses it.
        """
        self._require_tokenizer()
        renderer = self._renderer(conversation.template_arguments.SerializeToString(deterministic=True))
        messages = [message_dict(message) for message in conversation.messages]
        tools = [tool_dict(tool) for tool in conversation.tools] or None
        try:
            if continued:
                return renderer.render_continuation(
                    continued, messages, add_generation_prompt=generation_prompt, tools=tools
                )
            return renderer.render(messages, add_generation_prompt=generation_prompt, tools=tools)
        except TemplateError as error:
            raise SluiceError.invalid_argument("conversation", str(error)) from error

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
                f"the caller expects tokenizer {expected}, this replica has {self.digest or 'none'}: "
                "serve and train from the same model directory",
            )

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
    """A JSON object, always the same for the same content: its keys in order, whole numbers as integers.

    A Struct keeps neither the order of keys nor the kind of numbers, and a template writes both into the prompt.
    """
    plain = _plain(MessageToDict(struct))
    return dict(plain)


def _plain(value: Any) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
