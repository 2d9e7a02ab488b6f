"""The chat renderer of all services: turns messages into token ids and loss masks, and never encodes existing tokens again.

SFT, rollout, capture and evaluation use it, so that the ids that are sampled, trained and continued by a later turn are the same.
It checks that a template only appends: if more messages change the text of the earlier ones, it raises `TemplateError`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A chat message as templates read it: `role`, `content` and other fields."""

SENTINEL = "SLUICEturnSENTINEL"
"""Content of a placeholder for an assistant turn. Only letters, so that no template or tokenizer treats it specially."""

ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Roles that every chat template either renders or refuses with an error."""

_STAND_IN = ({"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL})


RENDER_VARIABLES = frozenset({"messages", "self", "raise_exception", "strftime_now"})
"""Further names that transformers sets for every template, beside the parameters of `apply_chat_template` and the special tokens."""

LONGEST_REASON = 500
"""Maximum length of a template's error message in ours, since it may quote the messages."""


class TemplateError(ValueError):
    """A chat template is missing, refuses the messages, or does not render a conversation by appending."""


class TemplateArgumentError(TemplateError):
    """A template argument is not a variable of the chat template, or is one that the renderer sets."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of a conversation to learn from.

    Attributes:
        ids: Token ids, beginning with the prompt.
        loss_mask: For each id, whether it is learned: the assistant's tokens and the end of its turn.
    """

    ids: list[int]
    loss_mask: list[bool]


class ChatRenderer:
    """Renders conversations with the chat template of one tokenizer.

    Args:
        tokenizer: A transformers tokenizer.
        template_arguments: Further variables of the template, such as ``enable_thinking``, for every call.

    Raises:
        TemplateArgumentError: if an argument is not one of `template_variables`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_arguments: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        _check_arguments(tokenizer, template_arguments or {})
        self._arguments = dict(template_arguments or {})
        self._closings: dict[str, list[int]] = {}
        self._own_roles: set[str] = set()

    def text(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text that the template renders for a conversation.

        Raises:
            TemplateError: if the tokenizer has no template or the template refuses the messages.
        """
        from jinja2 import TemplateError as JinjaError  # noqa: PLC0415  only where messages are rendered

        if not self.tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template: send the prompt as text or token ids, or add a template"
            )
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._arguments,
            )
        # A template is a program. On unexpected messages it can raise any of these.
        except (
            JinjaError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            reason = str(error)
            reason = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."
            raise TemplateError(f"the chat template refuses these messages: {reason}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens that the tokenizer would add: the template has written them."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, by default with the generation prompt."""
        return self.encode(self.text(messages, add_generation_prompt=add_generation_prompt, tools=tools))

    def render_continuation(
        self,
        ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Append messages to a conversation whose ids end with the assistant's sampled turn.

        Return `ids` unchanged, followed by the missing part of the end of that turn and by the new messages. If the turn was
        cut off at its maximum length, all of its end is missing.

        Raises:
            TemplateError: if there are no messages, or the template does not render an earlier turn separately.
        """
        if not new_messages:
            raise TemplateError("there are no messages to append: send at least one")
        after = self._after_stand_in(new_messages, add_generation_prompt=add_generation_prompt, tools=tools)
        addition = self.encode(after)
        closing = self._closing(after)
        given = next((n for n in range(len(closing), 0, -1) if list(ids[-n:]) == closing[:n]), 0)
        return [*ids, *addition[given:]]

    def render_sft(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Rendered:
        """Return the token ids of a whole conversation and a mask of the assistant's turns with their end tokens.

        Each turn is encoded separately, as it would be sampled: after the generation prompt.

        Raises:
            TemplateError: if there is no assistant turn, if one is not text, or if the template changes earlier text when messages
                are added, such as one that removes earlier reasoning.
        """
        messages = [_with_text(message, index) for index, message in enumerate(messages)]
        self._check_roles(messages, tools)
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.text(messages[:index], add_generation_prompt=True, tools=tools)
            whole = self.text(messages[: index + 1], add_generation_prompt=False, tools=tools)
            context = self.encode(_appended(done, prompt, index))
            answer = self.encode(_appended(prompt, whole, index))
            learned = self._learned(answer)
            ids += context + answer
            mask += [False] * len(context) + [True] * learned + [False] * (len(answer) - learned)
            done = whole
        if not any(mask):
            raise TemplateError("this conversation has no assistant turn to learn: add one or drop the row")
        return Rendered(ids, mask)

    def render_completion(self, prompt: str, completion: str) -> Rendered:
        """Return the token ids of plain text and its completion, without a template. The completion and an end token are learned."""
        context = self.encode(prompt)
        beginning = self.tokenizer.bos_token_id
        if beginning is not None:
            context.insert(0, beginning)
        answer = self.encode(completion)
        if self.tokenizer.eos_token_id is not None:
            answer.append(self.tokenizer.eos_token_id)
        if not context or not answer:
            raise TemplateError("prompt and completion must not be empty: nothing would predict the first token")
        return Rendered([*context, *answer], [False] * len(context) + [True] * len(answer))

    def _check_roles(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Refuse a role that the template leaves out, as many do with an unknown one. Each role is tested once."""
        for index, message in enumerate(messages):
            role = message["role"]
            if role in ROLES or role in self._own_roles:
                continue
            marked = [*messages[:index], {**message, "content": SENTINEL}]
            if SENTINEL not in self.text(marked, add_generation_prompt=False, tools=tools):
                raise TemplateError(
                    f"message {index} has the role {role!r}, which the chat template leaves out: use {', '.join(sorted(ROLES))}"
                )
            self._own_roles.add(role)

    def _learned(self, answer: list[int]) -> int:
        """Return how many ids of an assistant turn are learned: up to its last end token. Templates add line feeds after it."""
        ends = [position for position, token in enumerate(answer) if token == self.tokenizer.eos_token_id]
        return ends[-1] + 1 if ends else len(answer)

    def _after_stand_in(
        self,
        new_messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text after the content of an assistant turn when messages follow it."""
        text = self.text([*_STAND_IN, *new_messages], add_generation_prompt=add_generation_prompt, tools=tools)
        if text.count(SENTINEL) != 1:
            raise TemplateError(
                "the chat template does not render an earlier assistant turn exactly once, so that turns cannot be "
                "appended: send each request as a whole conversation instead"
            )
        return text.partition(SENTINEL)[2]

    def _closing(self, after: str) -> list[int]:
        """Return the ids that end an assistant turn when messages follow it."""
        alone = self.text(_STAND_IN, add_generation_prompt=False).rpartition(SENTINEL)[2]
        if not after.startswith(alone):
            raise TemplateError(
                "the chat template ends an assistant turn differently when messages follow it, so that turns cannot "
                "be appended: send each request as a whole conversation instead"
            )
        if alone not in self._closings:
            self._closings[alone] = self.encode(alone)
        return self._closings[alone]


def template_variables(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Return the names of the template arguments that a caller may set.

    These are the variables that the model's chat templates read, except those that the renderer, transformers or the tokenizer
    set. With these, a caller could replace the template or the special tokens.

    Raises:
        TemplateError: if a template is not valid Jinja.
    """
    templates = tokenizer.chat_template or ()
    if isinstance(templates, str):
        templates = (templates,)
    elif isinstance(templates, Mapping):
        templates = templates.values()
    special = (*tokenizer.SPECIAL_TOKENS_ATTRIBUTES, *tokenizer.special_tokens_map)
    reserved = RENDER_VARIABLES.union(inspect.signature(tokenizer.apply_chat_template).parameters, special)
    return frozenset().union(*(_variables_read(template) for template in templates)) - reserved


@functools.lru_cache(maxsize=64)
def _variables_read(template: str) -> frozenset[str]:
    """Return the names that a Jinja template reads and does not define itself."""
    from jinja2 import Environment, TemplateSyntaxError, meta  # noqa: PLC0415  only where messages are rendered
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415
    from jinja2.nodes import Node  # noqa: PLC0415
    from jinja2.parser import Parser  # noqa: PLC0415

    class Generation(Extension):
        """The block tag that transformers adds to Jinja; it marks the assistant's text."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Parser) -> list[Node]:
            """Return the block's content."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # Nothing is rendered here, so nothing must be escaped.
    environment = Environment(extensions=[Generation, loopcontrols])  # noqa: S701
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(template)))
    except TemplateSyntaxError as error:
        raise TemplateError(f"the model's chat template is not valid Jinja: {error}") from error


def _check_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
    if not arguments:
        return
    allowed = template_variables(tokenizer)
    unknown = sorted(arguments.keys() - allowed)
    if unknown:
        raise TemplateArgumentError(
            f"{', '.join(repr(name[:64]) for name in unknown[:4])} cannot be set: the model's chat template takes "
            f"{', '.join(sorted(allowed)) or 'no arguments'}"
        )


def _with_text(message: Message, index: int) -> Message:
    """Return a message with text as its content: a template would write None as "None". Roles other than assistant may have parts."""
    role, content = message["role"], message.get("content")
    if isinstance(content, str) or (isinstance(content, list) and role != "assistant"):
        return message
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    raise TemplateError(
        f"message {index} of the {role} has content of type {type(content).__name__}: use text, or remove the row"
    )


def _appended(before: str, after: str, index: int) -> str:
    """Return what `after` adds to `before`.

    Raises:
        TemplateError: if `after` does not begin with `before`.
    """
    if not after.startswith(before):
        raise TemplateError(
            f"the chat template changes the text before message {index} once that message is added (templates that "
            "strip earlier reasoning do): give one row per assistant turn, or a template that only appends"
        )
    return after[len(before) :]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the digest of vocabulary, merges, normalisation, special tokens and chat template.

    Two services with the same digest turn messages into the same ids. Paths, padding and truncation are not part of it.

    Returns:
        SHA-256 as 64 hexadecimal digits.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content["padding"] = content["truncation"] = None
    else:
        content = {"vocabulary": tokenizer.get_vocab()}
    material = {
        "tokenizer": content,
        "template": tokenizer.chat_template,
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
    }
    return hashlib.sha256(json.dumps(material, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
