"""Preferences: from rows of a prompt, a chosen and a rejected answer to pairs of training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch

from sluice.render import ChatRenderer, Rendered, TemplateError
from trainer_svc.batch.rows import MicroBatch
from trainer_svc.batch.rows import Sequence as TrainingRow
from trainer_svc.batch.shapes import Indices
from trainer_svc.offline.rows import DataError, Row, described, named, read_rows

__all__ = ["Preferences", "ScoredAnswers", "count_pairs", "pair_places", "render_pair"]

SAME = "chosen and rejected are the same: drop the row"

CHOSEN, REJECTED = 1.0, 0.0
"""Rewards of a pair's rows, by which a loss tells them apart."""


def render_pair(renderer: ChatRenderer, row: Row) -> tuple[Rendered, Rendered]:
    """Token ids and loss masks of the chosen and the rejected answer, each behind the prompt, which is not learned.

    Raises:
        TemplateError: if the row is no pair, or cannot be rendered.
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
    prompt: Sequence[Mapping[str, Any]],
    answer: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
) -> Rendered:
    rendered = renderer.render_sft([*prompt, *answer], tools)
    if not any(message["role"] == "assistant" for message in prompt):
        return rendered
    # Turns are rendered one behind the other, so that the prompt's are the beginning of all.
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
        dropped_long: Pairs left out because an answer was longer than allowed.
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
            drop_long: Leave longer pairs out instead of failing.

        Raises:
            DataError: if a row cannot be used or none is left.
        """
        pairs: list[tuple[Rendered, Rendered]] = []
        dropped = 0
        for name, row in read_rows(data, split):
            with named(name):
                pair = render_pair(renderer, row)
            longest = max(len(answer.ids) for answer in pair)
            if longest <= max_length:
                pairs.append(pair)
            elif drop_long:
                dropped += 1
            else:
                raise DataError(
                    f"{name} has {longest} tokens, more than max_length {max_length}: raise it, or set on_long to drop"
                )
        if not pairs:
            raise DataError(f"{data} holds no usable pair ({dropped} were longer than max_length)")
        return cls(pairs, dropped)

    def __len__(self) -> int:
        return len(self.pairs)

    def rows(self, index: int) -> list[TrainingRow]:
        """One pair as training rows."""
        chosen, rejected = self.pairs[index]
        return [
            _row(chosen.ids, chosen.loss_mask, index, CHOSEN),
            _row(rejected.ids, rejected.loss_mask, index, REJECTED),
        ]


@dataclass(frozen=True, slots=True)
class ScoredAnswers:
    """Pairs of which a network gives each answer one value, that of the state behind its last token.

    A sequence classifier of transformers reads its score at the last token that is not padding. So does this: padding at
    the end of a sequence, such as an end token that pads too, is cut off.

    Attributes:
        preferences: The pairs.
        padding: The model's padding token; None where it has none.
    """

    preferences: Preferences
    padding: int | None

    @property
    def dropped_long(self) -> int:
        """Pairs left out because an answer was longer than allowed."""
        return self.preferences.dropped_long

    def __len__(self) -> int:
        return len(self.preferences)

    def rows(self, index: int) -> list[TrainingRow]:
        """One pair as training rows with one loss token each, which only stands for the state before it."""
        rows = []
        for answer, reward in zip(self.preferences.pairs[index], (CHOSEN, REJECTED), strict=True):
            ids = list(answer.ids)
            while len(ids) > 1 and ids[-1] == self.padding:
                ids.pop()
            rows.append(_row([*ids, 0], [False] * len(ids) + [True], index, reward))
        return rows


def _row(ids: list[int], mask: list[bool], index: int, reward: float) -> TrainingRow:
    return TrainingRow(
        input_ids=torch.tensor(ids),
        loss_mask=torch.tensor(mask),
        behaviour_logprobs=torch.full((len(ids),), torch.nan),
        advantages=torch.ones(len(ids)),
        reward=reward,
        group_id=str(index),
        trajectory_id=f"{index}/{'chosen' if reward == CHOSEN else 'rejected'}",
    )


def pair_places(batch: MicroBatch) -> tuple[Indices, Indices]:
    """Where the chosen and the rejected sequences stand in a micro-batch, pair by pair.

    Raises:
        ValueError: if a group is no pair.
    """
    groups: dict[str, list[int]] = {}
    for place, sequence in enumerate(batch.sequences):
        groups.setdefault(sequence.group_id, []).append(place)
    rewards = [sequence.reward for sequence in batch.sequences]
    if any(sorted(rewards[place] or 0.0 for place in pair) != [REJECTED, CHOSEN] for pair in groups.values()):
        raise ValueError("a group of this micro-batch is no pair of a chosen and a rejected answer: pack whole groups")
    first = [max(pair, key=lambda place: rewards[place] or 0.0) for pair in groups.values()]
    second = [min(pair, key=lambda place: rewards[place] or 0.0) for pair in groups.values()]
    # Without a pair, too, they index: a rank that keeps others company has an empty micro-batch.
    return torch.tensor(first, dtype=torch.int64), torch.tensor(second, dtype=torch.int64)


def count_pairs(sequences: Sequence[TrainingRow]) -> float:
    """The divisor of a mean over pairs; a `LossWeight`."""
    return len(sequences) / 2
