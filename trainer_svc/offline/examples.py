"""Examples of offline training, rendered: demonstrations, and pairs of a chosen and a rejected answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.render import ChatRenderer, Rendered, TemplateError
from trainer_svc.batch.rows import Sequence
from trainer_svc.offline.rows import DataError, Row, described, named, read_rows

__all__ = ["CHOSEN", "REJECTED", "Demonstrations", "Preferences", "ScoredAnswers", "render_pair", "render_row"]


def render_row(renderer: ChatRenderer, row: Row) -> Rendered:
    """Return the token ids and the loss mask of one row.

    Raises:
        TemplateError: if the row has neither `messages` nor `prompt` and `completion`, or cannot be rendered.
    """
    if row.get("messages"):
        return renderer.render_sft(row["messages"], row.get("tools"))
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return renderer.render_completion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        return renderer.render_sft([*prompt, *completion], row.get("tools"))
    raise TemplateError(
        "a row needs `messages`, or `prompt` and `completion`, both texts or both lists of messages; this one has "
        + described(row)
    )


def _read(
    data: str,
    split: str,
    what: str,
    render: Callable[[Row], T],
    length: Callable[[T], int],
    *,
    max_length: int,
    drop_long: bool,
) -> tuple[list[T], int]:
    """Read and render all rows.

    Returns:
        The rendered rows that are not too long, and the number of those that are.

    Raises:
        DataError: if a row cannot be used or none is left.
    """
    kept: list[T] = []
    dropped = 0
    for name, row in read_rows(data, split):
        with named(name):
            rendered = render(row)
        if length(rendered) <= max_length:
            kept.append(rendered)
        elif drop_long:
            dropped += 1
        else:
            raise DataError(
                f"{name} has {length(rendered)} tokens, more than max_length {max_length}: raise it, or set on_long to drop"
            )
    if not kept:
        raise DataError(f"{data} holds no usable {what} ({dropped} were longer than max_length)")
    return kept, dropped


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Rendered demonstrations.

    Attributes:
        ids: Token ids of each.
        masks: Its loss mask.
        dropped_long: Rows that were dropped because they were too long.
    """

    ids: list[NDArray[np.int32]]
    masks: list[NDArray[np.bool_]]
    dropped_long: int

    @classmethod
    def load(cls, data: str, split: str, renderer: ChatRenderer, *, max_length: int, drop_long: bool) -> Demonstrations:
        """Read and render all rows.

        Args:
            data: JSONL file or hub dataset id.
            split: Split of a hub dataset.
            renderer: Renderer of the model's tokenizer.
            max_length: Longest demonstration in tokens.
            drop_long: Drop longer ones instead of raising.

        Raises:
            DataError: if a row cannot be used or none is left.
        """
        rendered, dropped = _read(
            data,
            split,
            "demonstration",
            lambda row: render_row(renderer, row),
            lambda each: len(each.ids),
            max_length=max_length,
            drop_long=drop_long,
        )
        ids = [np.array(each.ids, dtype=np.int32) for each in rendered]
        return cls(ids, [np.array(each.loss_mask) for each in rendered], dropped)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: int) -> list[Sequence]:
        """Return one demonstration as a training row."""
        length = len(self.ids[index])
        row = Sequence(
            input_ids=torch.from_numpy(self.ids[index].astype(np.int64)),
            loss_mask=torch.from_numpy(self.masks[index]),
            behaviour_logprobs=torch.full((length,), torch.nan),
            advantages=torch.ones(length),
            trajectory_id=str(index),
        )
        return [row]


T = TypeVar("T")

SAME = "chosen and rejected are the same: drop the row"

CHOSEN, REJECTED = 1.0, 0.0
"""Rewards of a pair's rows; the loss tells the answers apart by them."""


def render_pair(renderer: ChatRenderer, row: Row) -> tuple[Rendered, Rendered]:
    """Return token ids and loss masks of the chosen and of the rejected answer, each after the prompt, which is not learned.

    Raises:
        TemplateError: if the row is not a pair, or cannot be rendered.
    """
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if chosen == rejected and chosen is not None:
        raise TemplateError(SAME)
    if isinstance(prompt, list) and isinstance(chosen, str) and isinstance(rejected, str):
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        pair = (renderer.render_completion(prompt, chosen), renderer.render_completion(prompt, rejected))
    elif isinstance(chosen, list) and isinstance(rejected, list):
        if prompt is None:  # whole conversations: the messages that both begin with are the prompt
            common = list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
            prompt, chosen, rejected = chosen[: len(common)], chosen[len(common) :], rejected[len(common) :]
        elif isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        tools = row.get("tools")
        pair = (_answer(renderer, prompt, chosen, tools), _answer(renderer, prompt, rejected, tools))
    else:
        raise TemplateError(
            "a row needs `prompt`, `chosen` and `rejected`, all texts or all lists of messages; this one has "
            + described(row)
        )
    if pair[0].ids == pair[1].ids:
        raise TemplateError(SAME)
    return pair


def _answer(
    renderer: ChatRenderer,
    prompt: Rows[Mapping[str, Any]],
    answer: Rows[Mapping[str, Any]],
    tools: Rows[Mapping[str, Any]] | None,
) -> Rendered:
    rendered = renderer.render_sft([*prompt, *answer], tools)
    if not any(message["role"] == "assistant" for message in prompt):
        return rendered
    # Turns are rendered one after another, so the rendered prompt is a prefix of the whole.
    given = len(renderer.render_sft(prompt, tools).ids)
    mask = [False] * given + rendered.loss_mask[given:]
    if not any(mask):
        raise TemplateError("an answer has no assistant turn to learn: add one or drop the row")
    return Rendered(rendered.ids, mask)


@dataclass(frozen=True, slots=True)
class Preferences:
    """Rendered pairs; an example is two rows of one group, the chosen one first.

    Attributes:
        pairs: The chosen and the rejected answer of each.
        dropped_long: Pairs that were dropped because an answer was too long.
    """

    pairs: list[tuple[Rendered, Rendered]]
    dropped_long: int = 0

    @classmethod
    def load(cls, data: str, split: str, renderer: ChatRenderer, *, max_length: int, drop_long: bool) -> Preferences:
        """Read and render all rows.

        Args:
            data: JSONL file or hub dataset id.
            split: Split of a hub dataset.
            renderer: Renderer of the model's tokenizer.
            max_length: Longest prompt and answer in tokens.
            drop_long: Drop longer pairs instead of raising.

        Raises:
            DataError: if a row cannot be used or none is left.
        """
        pairs, dropped = _read(
            data,
            split,
            "pair",
            lambda row: render_pair(renderer, row),
            lambda pair: max(len(answer.ids) for answer in pair),
            max_length=max_length,
            drop_long=drop_long,
        )
        return cls(pairs, dropped)

    def __len__(self) -> int:
        return len(self.pairs)

    def rows(self, index: int) -> list[Sequence]:
        """Return one pair as training rows."""
        chosen, rejected = self.pairs[index]
        return [
            _row(chosen.ids, chosen.loss_mask, index, CHOSEN),
            _row(rejected.ids, rejected.loss_mask, index, REJECTED),
        ]


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """Pairs for a network that gives each answer one value: that of the state after its last token.

    A sequence classifier of transformers reads its score at the last token that is not padding. Padding at the end of a
    sequence, such as an end token that also pads, is therefore cut off here too.

    Attributes:
        preferences: The pairs.
        padding: The model's padding token; None where it has none.
    """

    preferences: Preferences
    padding: int | None

    @property
    def dropped_long(self) -> int:
        """Pairs that were dropped because an answer was too long."""
        return self.preferences.dropped_long

    def __len__(self) -> int:
        return len(self.preferences)

    def rows(self, index: int) -> list[Sequence]:
        """Return one pair as training rows with one loss token each, which only marks the state before it."""
        rows = []
        for answer, reward in zip(self.preferences.pairs[index], (CHOSEN, REJECTED), strict=True):
            ids = list(answer.ids)
            while len(ids) > 1 and ids[-1] == self.padding:
                ids.pop()
            rows.append(_row([*ids, 0], [False] * len(ids) + [True], index, reward))
        return rows


def _row(ids: list[int], mask: list[bool], index: int, reward: float) -> Sequence:
    return Sequence(
        input_ids=torch.tensor(ids),
        loss_mask=torch.tensor(mask),
        behaviour_logprobs=torch.full((len(ids),), torch.nan),
        advantages=torch.ones(len(ids)),
        reward=reward,
        group_id=str(index),
        trajectory_id=f"{index}/{'chosen' if reward == CHOSEN else 'rejected'}",
    )
