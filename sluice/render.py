"""The chat renderer of all services: turns messages into token ids and loss masks, and never encodes existing tokens again.

SFT, rollout, capture and evaluation use it, so that the ids that are sampled, trained and continued by a later turn are the same.
It checks that a template only appends: if further messages change the text of the earlier ones, it raises `TemplateError`.

Only the template writes control tokens. In the text of a message (an assistant's, too), in tools and in template arguments the names of
control tokens are plain text. A *marked* text is a rendered text in which such plain names begin with a stand-in
(`sluice.control_tokens`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sluice.control_tokens import SURROGATE, control_tokens, texts_of, with_texts
from sluice.end_tokens import SENTINEL, EndTokens, find_end_tokens

if TYPE_CHECKING:
    from jinja2 import Environment
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
"""A chat message as templates read it: `role`, `content` and other fields."""

ROLES = frozenset({"system", "user", "assistant", "tool"})
"""Roles that every chat template either renders or refuses with an error."""

RESULT_SENTINEL = "SLUICEresultSENTINEL"
"""Content of a placeholder for a tool's result."""

UNKNOWN_TOOL = "SLUICEtoolSENTINEL"
"""Name of the tool in a placeholder for a call whose tool is not known."""

_QUESTION = {"role": "user", "content": "x"}
_ANSWER = {"role": "assistant", "content": SENTINEL}


RENDER_VARIABLES = frozenset({"messages", "self", "raise_exception", "strftime_now"})
"""Further names that transformers sets for every template, beside the parameters of `apply_chat_template` and the special tokens."""

LONGEST_REASON = 500
"""Maximum length of a template's error message within our own. It is bounded because it may quote the messages."""


class TemplateError(ValueError):
    """A chat template is missing, refuses the messages, or does not render a conversation by appending."""


class RewritesError(TemplateError):
    """The chat template changes the text of earlier messages when others are added."""


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


@dataclass(frozen=True, slots=True)
class Seam:
    """Where messages are appended to an assistant's turn.

    Attributes:
        turn_end: Marked text that ends the turn after the sampled text, such as an end token and a line feed.
        addition: Marked text that the new messages add after it.
    """

    turn_end: str
    addition: str


class ChatRenderer:
    """Renders conversations with the chat template of one tokenizer.

    Args:
        tokenizer: A transformers tokenizer.
        template_arguments: Further variables of the template, such as ``enable_thinking``, for every call.
        ends: The tokens that end a turn, which training teaches. None: the end tokens of the tokenizer and its template.
        check: Called with each text before it is encoded. Raises TemplateError for a text that must not be encoded.

    Raises:
        TemplateArgumentError: if an argument is not one of `template_variables`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_arguments: Mapping[str, Any] | None = None,
        ends: EndTokens | None = None,
        check: Callable[[str], None] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._check = check
        self._given_ends = ends
        _check_arguments(tokenizer, template_arguments or {})
        self._arguments = dict(template_arguments or {})
        self._control = control_tokens(tokenizer)
        self._written_roles: set[str] = set()

    @functools.cached_property
    def ends(self) -> EndTokens:
        """The tokens that end a turn."""
        return (
            find_end_tokens(self.tokenizer, arguments=self._arguments) if self._given_ends is None else self._given_ends
        )

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
        if not self.tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template: send the prompt as text or token ids, or add a template"
            )
        return self._rendered(messages, add_generation_prompt=add_generation_prompt, tools=tools)

    def _rendered(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        hide: Callable[[str], str] = str,
    ) -> str:
        """Return the text of a conversation after applying `hide` to each text in it."""
        filled = functools.partial(self._filled, add_generation_prompt=add_generation_prompt, tools=tools, hide=hide)
        # Most templates read the arguments of a call as an object, a few as text. They raise on the form that they do not read.
        forms = [_with_arguments(messages, _as_object)]
        if any(message.get("tool_calls") for message in messages):
            forms.append(_with_arguments(messages, _as_text))
        for form in forms[:-1]:
            with contextlib.suppress(TemplateError):
                return filled(form)
        return filled(forms[-1])

    def _marked(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None
    ) -> str:
        """Return the marked text of a conversation.

        Raises:
            TemplateError: as for `text`, or if it is not clear which control tokens the template has written.
        """
        text = self.text(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        if SURROGATE.search(text):
            raise TemplateError("these messages have half of a surrogate pair, which is not a character: remove it")
        if self._check is not None:
            self._check(text)
        control = self._control
        given = [messages, _with_arguments(messages, _as_object), tools or [], self._arguments]
        if not any(map(control.may_be_in, texts_of(given))):
            return text
        for hide in control.hiding():
            with contextlib.suppress(TemplateError):
                hidden = self._rendered(messages, add_generation_prompt=add_generation_prompt, tools=tools, hide=hide)
                if control.plain(hidden) == text:
                    return control.marked(hidden)
        raise TemplateError(
            "a text of these messages has a control token, and the chat template decides by it what it writes, so that it is not clear "
            "which control tokens are text: remove it"
        )

    def _encoded(self, marked: str) -> list[int]:
        """Return the token ids of a marked text.

        Raises:
            TemplateError: if the tokenizer cannot encode a control token as text.
        """
        if self._check is not None:
            self._check(self._control.plain(marked))
        try:
            return self._control.encode(marked, self.encode)
        except ValueError as error:
            raise TemplateError(f"{error}: remove it") from error

    def _filled(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        hide: Callable[[str], str],
    ) -> str:
        """Return the rendered text of messages. The arguments of calls must have the form that the template reads."""
        from jinja2 import TemplateError as JinjaError  # noqa: PLC0415  only where messages are rendered

        try:
            text = self.tokenizer.apply_chat_template(
                with_texts(list(messages), hide),
                tools=with_texts(list(tools), hide) if tools else None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **with_texts(self._arguments, hide),
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
        """Return the token ids of a text in which names of control tokens stand for these. No special tokens are added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, by default with the generation prompt.

        Raises:
            TemplateError: if the template refuses the messages, or leaves a tool's result out.
        """
        text = self._marked(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        self._check_results(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self._encoded(text)

    def render_continuation(
        self,
        ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        earlier: Sequence[Message] = (),
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Append messages to a conversation whose ids end with the assistant's sampled turn.

        Return `ids` unchanged, followed by the missing part of the end of that turn and by the new messages. If the turn was
        cut off at its maximum length, all of its end is missing.

        Args:
            ids: The ids so far.
            new_messages: What follows, at least one message.
            earlier: The messages that the ids stand for, if they are known; the last one is the assistant's. How a template
                writes a tool's result, or the beginning of the next turn, may depend on them.
            add_generation_prompt: End with the beginning of the assistant's next turn.
            tools: Tools offered to the model.

        Raises:
            TemplateError: if there are no messages, or the template cannot append them, because a rendering of the whole conversation
                would write them differently, or leave a tool's result out.
        """
        if not new_messages:
            raise TemplateError("there are no messages to append: send at least one")
        seam = self._seam(new_messages, earlier, add_generation_prompt=add_generation_prompt, tools=tools)
        end = self._encoded(seam.turn_end)
        given = next((n for n in range(len(end), 0, -1) if list(ids[-n:]) == end[:n]), 0)
        added = self._encoded(seam.turn_end + seam.addition)
        if added[: len(end)] != end:  # a token spans the end of the turn and what follows
            added = [*end, *self._encoded(seam.addition)]
        return [*ids, *added[given:]]

    def _check_results(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Refuse messages if the template leaves a tool's result out."""
        with_marks, marks = _marked_results(messages)
        if not marks:
            return
        rendered = self.text(with_marks, add_generation_prompt=add_generation_prompt, tools=tools)
        missing = next((index for index, mark in marks.items() if mark not in rendered), None)
        if missing is not None:
            raise TemplateError(
                f"the chat template leaves out the tool's result in message {missing}: send it after an assistant message with the"
                " call that it answers in `tool_calls`, or as a user message where the model takes no tools"
            )

    def stands_for(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> bool:
        """Return whether ids have the text and the control tokens that the template renders for a conversation.

        The other ids may differ, since a model may sample different tokens for the same text.
        """
        whole = self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return list(ids) == whole or self._decoded(ids) == self._decoded(whole)

    def render_sft(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        learned: Container[int] | None = None,
    ) -> Rendered:
        """Return the token ids of a whole conversation and a mask of the turns to learn with their end tokens.

        Each turn of the assistant is encoded separately, as it would be sampled: after the generation prompt.

        Args:
            messages: The conversation.
            tools: Schemas of its tools.
            learned: Places of the messages that are learned, of any role; None for all of the assistant.

        Raises:
            RewritesError: if the template changes earlier text when messages are added, for example removes earlier reasoning.
            TemplateError: if there is no turn to learn, a turn is not text or does not begin as the generation prompt does, no token ends
                the assistant's turns, or the template leaves out a tool's result.
        """
        texts, turns = self._turns(messages, tools, learned)
        row = Rendered([], [])
        done = ""
        for index, message in enumerate(texts):
            if message["role"] == "assistant" or index in turns:
                turn, done = self._turn(texts[: index + 1], tools, done)
                row = self._joined(row, turn, learn=index in turns)
        if turns and texts[max(turns)]["role"] == "assistant":
            row = self._ended(row)
        return row

    def render_turns(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        learned: Container[int] | None = None,
    ) -> list[Rendered]:
        """Return rows in which each learned turn follows the text that the model will see before that turn.

        If the template only appends, this is the one row of `render_sft`. Otherwise there is one row per learned turn.

        Raises:
            TemplateError: as for `render_sft`, or if the template changes a turn that is not the last one.
        """
        try:
            return [self.render_sft(messages, tools, learned)]
        except RewritesError:
            texts, turns = self._turns(messages, tools, learned)
            rows = []
            for index in turns:
                row, _ = self._turn(texts[: index + 1], tools)
                rows.append(self._ended(row) if texts[index]["role"] == "assistant" else row)
            return rows

    def _turns(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, learned: Container[int] | None
    ) -> tuple[list[Message], list[int]]:
        """Return the messages with text as their contents, and the indices of the learned messages.

        Raises:
            TemplateError: if no message is learned, a learned one is not text, or the template leaves a role out.
        """
        texts = [_with_text(message, index) for index, message in enumerate(messages)]
        self._check_roles(texts, tools)
        if learned is None:
            turns = [index for index, message in enumerate(texts) if message["role"] == "assistant"]
        else:
            turns = [index for index in range(len(texts)) if index in learned]
        if not turns:
            raise TemplateError(
                "this conversation has no turn to learn, such as one of the assistant: add one, or drop the row"
            )
        for index in turns:
            if not isinstance(texts[index]["content"], str):
                raise TemplateError(
                    f"message {index} of the {texts[index]['role']} is to be learned, and its content is no text: use text, or drop the row"
                )
        return texts, turns

    def _turn(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, done: str = ""
    ) -> tuple[Rendered, str]:
        """Return the row of the last message, which follows the text `done`, and the marked text of all messages."""
        index = len(messages) - 1
        whole = self._marked(messages, add_generation_prompt=False, tools=tools)
        if messages[index]["role"] == "assistant":
            prompt = self._marked(messages[:index], add_generation_prompt=True, tools=tools)
            self._check_results(messages[:index], add_generation_prompt=True, tools=tools)
            context = self._encoded(_appended(done, prompt, index))
            self._check_opening(messages, prompt, whole, tools)
            answer = self._encoded(_appended(prompt, whole, index))
        else:  # not sampled, so context and content are encoded as one text
            head = _appended(done, self._head(messages, tools), index)
            ids = self._encoded(_appended(done, whole, index))
            pairs = zip(self._encoded(head), ids, strict=False)
            count = len(list(itertools.takewhile(lambda both: both[0] == both[1], pairs)))
            count = count if done else max(count, 1)  # the first token of a row has no context to predict it from
            context, answer = ids[:count], ids[count:]
        count = self._learned(answer)
        mask = [False] * len(context) + [True] * count + [False] * (len(answer) - count)
        return Rendered(context + answer, mask), whole

    def _check_opening(
        self, messages: Sequence[Message], prompt: str, whole: str, tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        """Refuse a last turn without the beginning that the generation prompt gives it, such as an open `<think>`."""
        if whole.startswith(prompt):
            return
        index = len(messages) - 1
        before = self._marked(messages[:index], add_generation_prompt=False, tools=tools)
        if prompt.startswith(before) and whole.startswith(before):
            opening = self._control.plain(prompt[len(before) :])
            raise TemplateError(
                f"the chat template begins a turn that is sampled with {opening!r}, and writes message {index} without it: give the"
                " message its reasoning in `reasoning_content`, or set template arguments such as enable_thinking = false, or give a"
                " template that begins both in the same way"
            )

    def _head(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the marked text up to the content of the last message.

        Raises:
            TemplateError: if the template does not write that content exactly once.
        """
        *before, last = messages
        text = self._marked([*before, {**last, "content": SENTINEL}], add_generation_prompt=False, tools=tools)
        if text.count(SENTINEL) != 1:
            raise TemplateError(
                f"message {len(before)} of the {last['role']} is to be learned, but the chat template does not write its content"
                " once: leave that role out of learn_roles, or drop the row"
            )
        return text.partition(SENTINEL)[0]

    def _joined(self, row: Rendered, turn: Rendered, *, learn: bool) -> Rendered:
        """Return a row with a further turn.

        If the template writes no end token, the first token of the next turn counts as one, provided that sampling stops at it, as with
        GLM-4.
        """
        mask = turn.loss_mask if learn else [False] * len(turn.ids)
        if row.loss_mask and row.loss_mask[-1] and row.ids[-1] not in self.ends.sources and turn.ids:
            mask = [turn.ids[0] in self.ends.sources, *mask[1:]]
        return Rendered([*row.ids, *turn.ids], [*row.loss_mask, *mask])

    def _ended(self, row: Rendered) -> Rendered:
        """Return a row that ends with a learned end token: one is appended if the template writes none after the last turn.

        Raises:
            TemplateError: if no token ends a turn.
        """
        last = max((place for place, learn in enumerate(row.loss_mask) if learn), default=-1)
        if last < len(row.ids) - 1 or row.ids[last] in self.ends.sources or self._control.has(row.ids[last]):
            return row
        return Rendered([*row.ids, self._appended_end()], [*row.loss_mask, True])

    def _appended_end(self) -> int:
        end = self.ends.appended
        if end is None:
            raise TemplateError(
                "no token ends a turn, so that the model would not learn to stop: the tokenizer has no eos_token, config.json and"
                " generation_config.json have no eos_token_id, and the chat template writes no end; set eos_token of the tokenizer"
            )
        return end

    def render_completion(self, prompt: str, completion: str) -> Rendered:
        """Return the token ids of plain text and its completion, without a template. The completion and an end token are learned.

        Raises:
            TemplateError: if there is nothing to learn, nothing that its first token could be predicted from, or no end token.
        """
        context = self.encode(prompt)
        beginning = self.tokenizer.bos_token_id
        if beginning is not None:
            context.insert(0, beginning)
        if not context:
            raise TemplateError("the prompt must not be empty: nothing would predict the first token")
        answer = self.encode(completion)
        if not any(token in self.ends.sources for token in answer):
            answer.append(self._appended_end())
        count = self._learned(answer)
        mask = [False] * len(context) + [True] * count + [False] * (len(answer) - count)
        return Rendered([*context, *answer], mask)

    def _check_roles(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Refuse a role that the template leaves out, as many do with an unknown one, and some with an assistant's text.

        Each role is tested once.
        """
        for index, message in enumerate(messages):
            role = message["role"]
            is_text = role == "assistant" and message.get("content") and not message.get("tool_calls")
            if role in self._written_roles or (role in ROLES and not is_text):
                continue
            marked = [*messages[:index], {**message, "content": SENTINEL}]
            if SENTINEL not in self.text(marked, add_generation_prompt=False, tools=tools):
                remedy = (
                    "give a template that writes an assistant's content where it is a text"
                    if is_text
                    else f"use {', '.join(sorted(ROLES))}"
                )
                raise TemplateError(
                    f"message {index} has the role {role!r}, whose text the chat template leaves out: {remedy}"
                )
            self._written_roles.add(role)

    def _learned(self, answer: list[int]) -> int:
        """Return how many ids of a turn are learned: all up to and including its first end token, at which sampling stops.

        Line feeds that templates add after that token are not learned. A turn with calls may end with a token that no place names as an
        end token. Then the last control token counts as the end, if only white space follows.
        """
        end = next((place for place, token in enumerate(answer) if token in self.ends.sources), None)
        if end is None:
            last = max((place for place, token in enumerate(answer) if self._control.has(token)), default=None)
            end = last if last is not None and not self._text_of(answer[last + 1 :]).strip() else None
        return len(answer) if end is None else end + 1

    def _seam(
        self,
        new_messages: Sequence[Message],
        earlier: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Seam:
        """Return what follows the assistant's last turn, found by rendering a placeholder for that turn.

        The placeholder for a turn with calls has the same calls, since templates write a result according to its call. If the rendering
        cannot be cut after a call, the placeholder is a turn of text. In both cases the whole conversation must end in the same way.

        Raises:
            TemplateError: if no placeholder shows what the template appends.
        """
        before = earlier[:-1] or [_QUESTION]
        calls = earlier[-1].get("tool_calls") if earlier else _calls_of_results(new_messages)
        turn = earlier[-1] if earlier else {"role": "assistant", "content": "", "tool_calls": calls}
        whole = self._marked([*before, turn, *new_messages], add_generation_prompt=add_generation_prompt, tools=tools)
        stand_ins: list[Message] = [_ANSWER]
        if calls:
            stand_ins.insert(0, {"role": "assistant", "content": "", "tool_calls": _marked_calls(calls)})
        cut = functools.partial(self._cut, before, add_generation_prompt=add_generation_prompt, tools=tools)
        reasons = []
        for stand_in in stand_ins:
            try:
                return self._checked(cut, stand_in, new_messages, whole)
            except TemplateError as error:
                reasons.append(error)
        raise reasons[-1]

    def _checked(
        self,
        cut: Callable[[Message, Sequence[Message]], Seam],
        stand_in: Message,
        new_messages: Sequence[Message],
        whole: str,
    ) -> Seam:
        """Return what follows a placeholder, if the whole conversation ends in the same way and no tool's result is missing.

        Raises:
            TemplateError: otherwise.
        """
        seam = cut(stand_in, new_messages)
        if not whole.endswith(seam.addition) or UNKNOWN_TOOL in seam.addition:
            raise TemplateError(
                "the chat template writes these messages differently after the turn that they answer, so that they cannot be "
                "appended: send the whole conversation instead, with the name of the tool in each of its results"
            )
        marked, marks = _marked_results(new_messages)
        if marks:
            text = cut(stand_in, marked).addition
            if not all(mark in text for mark in marks.values()):
                raise TemplateError(
                    "the chat template leaves out a tool's result after this turn, so that it cannot be appended: send the whole "
                    "conversation instead"
                )
        return seam

    def _cut(
        self,
        before: Sequence[Message],
        stand_in: Message,
        new_messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> Seam:
        """Return the end of a placeholder's turn and what new messages add to it.

        Raises:
            TemplateError: if the template does not render the placeholder exactly once, or ends it differently when messages follow.
        """
        turn = [*before, stand_in]
        text = self._marked([*turn, *new_messages], add_generation_prompt=add_generation_prompt, tools=tools)
        alone = self._marked(turn, add_generation_prompt=False, tools=tools)
        if text.count(SENTINEL) != 1 or alone.count(SENTINEL) != 1:
            raise TemplateError(
                "the chat template does not render an earlier assistant turn exactly once, so that turns cannot be "
                "appended: send each request as a whole conversation instead"
            )
        after, end = text.partition(SENTINEL)[2], alone.partition(SENTINEL)[2]
        if not after.startswith(end):
            raise TemplateError(
                "the chat template ends an assistant turn differently when messages follow it, so that turns cannot "
                "be appended: send each request as a whole conversation instead"
            )
        addition = after[len(end) :]
        if stand_in.get("tool_calls"):
            end = self._end_after_call(end, before, tools)
        return Seam(end, addition)

    def _end_after_call(self, rest: str, before: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Return the text that ends a turn with calls. It does not include the end of the call itself, which the model has sampled.

        Args:
            rest: The text from the middle of the call to the end of the turn.
            before: The messages before that turn.
            tools: Tools offered to the model.

        Raises:
            TemplateError: if it is not clear where the call ends.
        """
        with contextlib.suppress(TemplateError):
            _, mark, end = self._marked([*before, _ANSWER], add_generation_prompt=False, tools=tools).rpartition(
                SENTINEL
            )
            if mark and rest.endswith(end):
                return end
        starts = [rest.rfind(str(token)) for token in self.tokenizer.all_special_tokens]
        if max(starts, default=-1) < 0:
            raise TemplateError(
                "the chat template ends a turn with a tool call without a special token, so that turns cannot be appended: "
                "send each request as a whole conversation instead"
            )
        return rest[max(starts) :]

    def _decoded(self, ids: Sequence[int]) -> list[int | str]:
        """Return the text of ids, and then their control tokens and the texts between them."""
        parts: list[int | str] = [self._text_of(ids)]
        for control, group in itertools.groupby(ids, self._control.has):
            some = list(group)
            parts += some if control else [self._text_of(some)]
        return parts

    def _text_of(self, ids: Sequence[int]) -> str:
        """Return the text of ids with their special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _marked_calls(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the calls of a placeholder: the same tools and ids, and a sentinel as the last call's argument."""
    marked = [{**call, "function": {**call["function"], "arguments": {"x": "x"}}} for call in calls]
    marked[-1]["function"]["arguments"] = {"x": SENTINEL}
    return marked


def _marked_results(messages: Sequence[Message]) -> tuple[list[Message], dict[int, str]]:
    """Return the messages with a sentinel in place of each tool's result, and the sentinels by message index."""
    marks = {index: f"{RESULT_SENTINEL}{index}E" for index, message in enumerate(messages) if message["role"] == "tool"}
    marked = (
        {**message, "content": marks[index]} if index in marks else message for index, message in enumerate(messages)
    )
    return list(marked), marks


def _calls_of_results(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return placeholders for the calls that the first messages, tools' results, answer: with the ids and names that the results give."""
    results = list(itertools.takewhile(lambda message: message["role"] == "tool", messages))
    return [
        {
            "id": result.get("tool_call_id", f"call{index}"),
            "type": "function",
            "function": {"name": result.get("name") or UNKNOWN_TOOL, "arguments": {}},
        }
        for index, result in enumerate(results)
    ]


def _with_arguments(messages: Sequence[Message], form: Callable[[Any], Any]) -> list[Message]:
    """Return messages whose calls have their arguments in another form."""
    return [
        {**message, "tool_calls": [_with_form(call, form) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_form(call: Mapping[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(call.get("function"), Mapping):  # a row of training data may have calls in another form
        return dict(call)
    function = call["function"]
    return {**call, "function": {**function, "arguments": form(function.get("arguments"))}}


def _as_object(arguments: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the arguments of a call as an object. Return anything that is not the text of an object unchanged."""
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            parsed = json.loads(arguments or "{}")
            return parsed if isinstance(parsed, dict) else arguments
    return arguments


def _as_text(arguments: Any) -> Any:  # noqa: ANN401 - JSON
    """Return the arguments of a call as text."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


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
    return frozenset().union(*(variables_read(template) for template in templates)) - reserved


@functools.lru_cache(maxsize=64)
def variables_read(template: str) -> frozenset[str]:
    """Return the names that a Jinja template reads and does not define itself.

    Raises:
        TemplateError: if it is not valid Jinja.
    """
    from jinja2 import meta  # noqa: PLC0415  only where messages are rendered

    if (fault := template_fault(template)) is not None:
        raise TemplateError(f"the model's chat template is not valid Jinja: line {fault[0]}: {fault[1]}")
    return frozenset(meta.find_undeclared_variables(_jinja().parse(template)))


def template_fault(template: str) -> tuple[int, str] | None:
    """Return the line and the reason why a template is not valid Jinja; None if it is."""
    from jinja2 import TemplateSyntaxError  # noqa: PLC0415  only where messages are rendered

    try:
        _jinja().compile(template, raw=True)
    except TemplateSyntaxError as error:
        return error.lineno, str(error.message)
    except RecursionError:
        return 1, "it is nested too deeply"
    return None


@functools.cache
def _jinja() -> Environment:
    """Return a Jinja environment that accepts the same templates as transformers. It renders nothing."""
    from jinja2 import Environment  # noqa: PLC0415  only where messages are rendered
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
    return Environment(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, loopcontrols])  # noqa: S701


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
        RewritesError: if `after` does not begin with `before`.
    """
    if not after.startswith(before):
        raise RewritesError(
            f"the chat template changes the text before message {index} once that message is added (templates that "
            "strip earlier reasoning do): give a template that only appends"
        )
    return after[len(before) :]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase, template_arguments: Mapping[str, Any] | None = None) -> str:
    """Return the digest of vocabulary, merges, normalisation, special tokens, chat template and its arguments.

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
    material: dict[str, Any] = {
        "tokenizer": content,
        "template": tokenizer.chat_template,
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
    }
    if template_arguments:  # each as text: a template may print it, so that the order of its keys becomes tokens
        material["arguments"] = {name: json.dumps(value) for name, value in template_arguments.items()}
    return hashlib.sha256(json.dumps(material, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
