"""Tells the control tokens that a chat template has written from their names in the texts of a conversation, and encodes both.

To tell them apart, a conversation is rendered again with *stand-ins* for the characters in its texts that a control token could begin
with. Where both renderings are the same apart from these characters, the control tokens that the second one still has are the
template's. This holds whatever the template does to a text: trim it, cut it, write it as JSON, look for a word in it. If the
template looks for a character that was replaced, other characters of the control tokens are replaced instead.

Stand-ins are low surrogates: no text that a tokenizer accepts contains one, each replaces exactly one character, and Python counts
them neither as letters nor as white space.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

FIRST_STAND_IN = 0xDC00
"""The first of 1024 low surrogates."""

ENDS = (0, -1)
"""Characters of a control token's name that a stand-in may replace: the first and the last."""

SURROGATE = re.compile("[\ud800-\udfff]")
"""A character that no UTF-8 text has."""

REASONING = frozenset({"<think>", "</think>"})
"""Tokens that are always text, even if the tokenizer declares them as special: data sets have reasoning in the assistant's text."""


class ControlTokens:
    """The control tokens of a tokenizer.

    These are the tokens that it declares as special, except the unknown token, and further added tokens with a bar in their names, such
    as `<｜User｜>` of DeepSeek's models, which are not declared. Other added tokens, such as `<tool_call>`, are text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        declared = {*tokenizer.all_special_tokens}
        added = {
            str(token): (id_, token.special or str(token) in declared)
            for id_, token in tokenizer.added_tokens_decoder.items()
            if str(token)
        }
        self.ids = {
            text: id_
            for text, (id_, special) in added.items()
            if text not in REASONING
            and text != tokenizer.unk_token
            and (special or "|" in text or "\N{FULLWIDTH VERTICAL LINE}" in text)
        }
        self._tokenizer = tokenizer
        self._id_set = frozenset(self.ids.values())
        self.pattern = re.compile(_any_of(self.ids))
        self._beginning = re.compile(f"(?={self.pattern.pattern})")
        outer = sorted({text[at] for text in self.ids for at in ENDS})
        self._stand_ins = {each: chr(FIRST_STAND_IN + index) for index, each in enumerate(outer)}
        self._originals = {ord(stand_in): each for each, stand_in in self._stand_ins.items()}
        others = _any_of(text for text in added if text not in self.ids)
        self._other_or_end = {
            at: re.compile(f"{others}|(?P<end>{_any_of({text[at] for text in self.ids})})") for at in ENDS
        }

    def has(self, id_: int) -> bool:
        """Return whether a token is a control token."""
        return id_ in self._id_set

    def as_text(self, name: str) -> str:
        """Return the name of a control token with a stand-in for its first character."""
        return self._stand_ins[name[0]] + name[1:]

    def may_be_in(self, text: str) -> bool:
        """Return whether a text has a character with which a control token begins."""
        return any(match.lastgroup for match in self._other_or_end[0].finditer(text)) or bool(self.pattern.search(text))

    def hiding(self) -> Iterator[Callable[[str], str]]:
        """Yield functions that replace characters of the control tokens in a text by stand-ins, in order of preference.

        The first two replace the character wherever it stands, so that no control token arises when the template joins texts. Only
        within other added tokens the character stays, since templates look for these tokens.
        """
        for everywhere in (True, False):
            for at in ENDS:
                yield functools.partial(self._hidden, everywhere, at)

    def _hidden(self, everywhere: bool, at: int, text: str) -> str:
        def character(match: re.Match[str]) -> str:
            return self._stand_ins[match[0]] if match.lastgroup else match[0]

        def token(match: re.Match[str]) -> str:
            name = match[0]
            return self.as_text(name) if at == 0 else name[:-1] + self._stand_ins[name[-1]]

        if everywhere:
            text = self._other_or_end[at].sub(character, text)
        while self.pattern.search(text):  # again, since control tokens may overlap
            text = self.pattern.sub(token, text)
        return text

    def plain(self, text: str) -> str:
        """Return a text without its stand-ins."""
        return text.translate(self._originals)

    def marked(self, hidden: str) -> str:
        """Return a rendering with stand-ins for the first characters of the control tokens that the template has not written."""
        plain = self.plain(hidden)
        characters = list(plain)
        for match in self._beginning.finditer(plain):
            if not self.pattern.match(hidden, match.start()):
                characters[match.start()] = self._stand_ins[plain[match.start()]]
        return "".join(characters)

    def encode(self, marked: str, plainly: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of a text. Names of control tokens that begin with a stand-in are encoded as text.

        Args:
            marked: The text.
            plainly: Encodes a text with the tokenizer, which makes a control token of each name.

        Raises:
            ValueError: if the tokenizer has no way to encode a control token as text.
        """
        written = [self.ids[match[0]] for match in self.pattern.finditer(marked)]
        plain = self.plain(marked)
        ids = plainly(plain)
        if [id_ for id_ in ids if id_ in self._id_set] == written:
            return ids
        if getattr(self._tokenizer, "backend_tokenizer", None) is not None:
            return self._in_text.encode(marked, self)
        if marked == plain:
            return ids
        raise ValueError("the model's tokenizer cannot encode control tokens as text, and these messages have one")

    @functools.cached_property
    def _in_text(self) -> _TextTokenizer:
        return _TextTokenizer(self._tokenizer, self.ids)


class _TextTokenizer:
    """A copy of a tokenizer in which control tokens have other, secret names, so that it encodes their own names as text.

    A whole text is encoded in one call, so that the ids next to a control token do not change.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: Mapping[str, int]) -> None:
        from tokenizers import AddedToken, Tokenizer  # noqa: PLC0415 - only services that render need it

        content = json.loads(tokenizer.backend_tokenizer.to_str())
        secret = f"\N{OBJECT REPLACEMENT CHARACTER}{secrets.token_hex(16)}"
        self._names = {text: f"{secret}{index};" for index, text in enumerate(control)}
        ids = {}
        for token in content["added_tokens"]:
            name = self._names.get(token["content"])
            ids[name or token["content"]] = token["id"]
            if name is not None:
                token.update(content=name, normalized=False)
        self._backend: Tokenizer = Tokenizer.from_str(json.dumps(content))
        self._backend.no_padding()
        self._backend.no_truncation()
        self._ids = {self._backend.token_to_id(name): [id_] for name, id_ in ids.items()}
        model = content["model"]
        unknown = model["unk_id"] if "unk_id" in model else self._vocabulary_id(model.get("unk_token"))
        self._stray = frozenset(control.values()) - {unknown}
        """Control tokens that must not result from encoding a text."""
        # If the name of a control token is also a word of the vocabulary, encode that name character by character.
        words = [text for text, id_ in control.items() if self._raw(text) == [id_]]
        self._spelled = {text: f"{secret}{index};text;" for index, text in enumerate(words)}
        self._backend.add_tokens([AddedToken(name, normalized=False) for name in self._spelled.values()])
        for text, name in self._spelled.items():
            characters = [self._vocabulary_id(each) for each in text]
            known = [unknown if each is None else each for each in characters]
            self._ids[self._backend.token_to_id(name)] = [each for each in known if each is not None]

    def encode(self, marked: str, control: ControlTokens) -> list[int]:
        """Return the ids of a text with stand-ins.

        Raises:
            ValueError: if encoding a text gives a control token.
        """
        text = control.pattern.sub(lambda match: self._names[match[0]], marked)
        if self._spelled:
            names = {control.as_text(name): secret for name, secret in self._spelled.items()}
            text = re.sub(_any_of(names), lambda match: names[match[0]], text)
        ids: list[int] = []
        for id_ in self._raw(control.plain(text)):
            given = self._ids.get(id_)
            if given is None and id_ in self._stray:
                raise ValueError("the model's tokenizer makes a control token of a text of these messages")
            ids += [id_] if given is None else given
        return ids

    def _raw(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    def _vocabulary_id(self, word: str | None) -> int | None:
        return None if word is None else self._backend.token_to_id(word)


@functools.lru_cache(maxsize=4)
def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer. They are examined once, for all renderers."""
    return ControlTokens(tokenizer)


def texts_of(value: Any) -> Iterator[str]:  # noqa: ANN401 - JSON
    """Yield each text in JSON, keys included."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            left += each


def with_texts(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - JSON
    """Return JSON with each text changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {with_texts(key, change): with_texts(each, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(each, change) for each in value]
    return value


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of some texts at a position. It is a tree, since there may be thousands."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[0], []).append(text)
    if not branches:
        return "(?!)"
    return f"(?:{'|'.join(_branch(each) for each in branches.values())})"


def _branch(texts: list[str]) -> str:
    shared = commonprefix(texts)  # noqa: RUF071 - of characters
    rests = [text[len(shared) :] for text in texts if text != shared]
    rest = _any_of(rests) + ("?" if shared in texts else "") if rests else ""
    return re.escape(shared) + rest
