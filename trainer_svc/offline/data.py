"""The data of offline training: render rows of a file or a dataset to examples, hold out a part, and draw shuffled batches.

An example is one training row for a demonstration, and two rows of one group for a pair of answers.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from sluice.config import ConfigError
from sluice.environments.datasets import Row, mixed_rows
from sluice.progress import doing
from sluice.render import ChatRenderer, Rendered, TemplateError
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.offline.config import OfflineConfig
from trainer_svc.parallel.mesh import ALONE, Ranks

Render: TypeAlias = Callable[[Row], Sequence[tuple[Rendered, ...]]]
"""Renders a row of the data to examples. An example is one training row for a demonstration, or two (chosen, rejected) for a pair."""

CHOSEN, REJECTED = 1.0, 0.0
"""Rewards of a pair's rows, by which the loss tells the answers apart."""


_LEARNED = ("weight", "loss", "train")
"""Fields of a message in which data sets say whether it is learned."""

SAME = "chosen and rejected are the same: drop the row"


# Rendering: one row of the data to one or two lists of token ids.


ASSISTANT = frozenset({"assistant"})
"""The role whose turns are learned by default."""


def roles_of(row: Row) -> set[str]:
    """Return the roles of the messages of a demonstration."""
    parts = (row.get(name) for name in ("messages", "prompt", "completion"))
    return {message["role"] for part in parts if isinstance(part, list) for message in part}


def render_demonstration(
    renderer: ChatRenderer, row: Row, roles: Container[str] = ASSISTANT
) -> list[tuple[Rendered, ...]]:
    """Return the examples of a demonstration, each with one row: token ids and their loss mask.

    There are several if the chat template changes earlier turns (`ChatRenderer.render_turns`). Turns of a prompt are not learned.

    Args:
        renderer: Renders the messages.
        row: The demonstration.
        roles: Roles whose turns are learned, unless a field of the message says whether it is learned.

    Raises:
        TemplateError: if the row has neither `messages` nor `prompt` and `completion`, or cannot be rendered.
    """
    _check_messages(row)
    prompt, completion, tools = row.get("prompt"), row.get("completion"), row.get("tools")
    if row.get("messages"):
        return [(each,) for each in renderer.render_turns(*_learned(row["messages"], tools, roles))]
    if isinstance(prompt, str) and isinstance(completion, str):
        return [(renderer.render_completion(prompt, completion),)]
    if isinstance(prompt, list) and isinstance(completion, list):
        turns = renderer.render_turns(*_learned([*prompt, *completion], tools, roles, len(prompt)))
        return [(each,) for each in turns]
    raise TemplateError(
        "a row needs `messages`, or `prompt` and `completion`, both texts or both lists of messages; this one has "
        + _described(row)
    )


_Messages: TypeAlias = Sequence[Mapping[str, Any]]


def _learned(
    messages: _Messages, tools: _Messages | None, roles: Container[str], first: int = 0
) -> tuple[_Messages, _Messages | None, set[int]]:
    """Return the messages without the fields of `_LEARNED`, the tools, and the places of the messages that are learned.

    Args:
        messages: The conversation.
        tools: The tools of the conversation.
        roles: Roles whose turns are learned if no field of the message says so.
        first: Place of the first message that may be learned.

    Raises:
        TemplateError: if a field asks for something that is not supported here.
    """
    bare: list[Mapping[str, Any]] = []
    learned: set[int] = set()
    for index, message in enumerate(messages):
        said = {name: message[name] for name in _LEARNED if message.get(name) is not None}
        for name, value in said.items():
            if value not in (0, 1):
                raise TemplateError(
                    f"message {index} has {name} = {value!r}: a turn is learned (1, true) or not (0, false)"
                )
        bare.append({name: value for name, value in message.items() if name not in _LEARNED})
        if index >= first and (all(said.values()) if said else message["role"] in roles):
            learned.add(index)
    return bare, tools, learned


def _check_messages(row: Row) -> None:
    """Refuse lists of messages with an element that is not a message.

    Raises:
        TemplateError: with the name of the field.
    """
    if not isinstance(row.get("messages"), list | None):
        raise TemplateError(
            f"messages is {type(row['messages']).__name__}, not a list: give objects with role and content"
        )
    for name in ("messages", "prompt", "completion", "chosen", "rejected"):
        for index, message in enumerate(row[name] if isinstance(row.get(name), list) else ()):
            if not isinstance(message, Mapping):
                problem = f"is {type(message).__name__}, not an object"
            elif not isinstance(message.get("role"), str):
                problem = (
                    "has no role"
                    if message.get("role") is None
                    else f"has the role {message['role']!r}, which is no text"
                )
            else:
                continue
            raise TemplateError(f"{name}[{index}] {problem}: give objects with role and content")


def render_pair(renderer: ChatRenderer, row: Row) -> list[tuple[Rendered, ...]]:
    """Return the example of a pair: token ids and loss masks of prompt and chosen answer, and of prompt and rejected answer.

    The prompt is not learned.

    Raises:
        TemplateError: if the row is not a pair, or cannot be rendered.
    """
    _check_messages(row)
    prompt, chosen, rejected = row.get("prompt"), row.get("chosen"), row.get("rejected")
    if chosen == rejected and chosen is not None:
        raise TemplateError(SAME)
    if isinstance(prompt, list) and isinstance(chosen, str) and isinstance(rejected, str):
        chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        pair = (renderer.render_completion(prompt, chosen), renderer.render_completion(prompt, rejected))
    elif isinstance(chosen, list) and isinstance(rejected, list):
        if prompt is None:  # whole conversations: their common first messages are the prompt
            common = list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
            prompt, chosen, rejected = chosen[: len(common)], chosen[len(common) :], rejected[len(common) :]
        elif isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        tools, first = row.get("tools"), len(prompt)
        pair = (
            renderer.render_sft(*_learned([*prompt, *chosen], tools, ASSISTANT, first)),
            renderer.render_sft(*_learned([*prompt, *rejected], tools, ASSISTANT, first)),
        )
    else:
        raise TemplateError(
            "a row needs `prompt`, `chosen` and `rejected`, all texts or all lists of messages; this one has "
            + _described(row)
        )
    if pair[0].ids == pair[1].ids:
        raise TemplateError(SAME)
    return [pair]


def _described(row: Row) -> str:
    """Return the keys of a row and the types of their values, for a message."""
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in row.items()) or "nothing"


# Examples: training rows by index, created on access.


@dataclass(frozen=True, slots=True)
class Examples:
    """Examples to train on, by index."""

    count: int
    rows: Callable[[int], list[TrainingRow]]
    """Returns the training rows of one example: one for a demonstration, the chosen and the rejected one for a pair."""
    dropped_long: int = 0
    """Rows of the data that were left out as too long."""

    def __len__(self) -> int:
        return self.count


def _unwritable(error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write the tokens of the examples beside the output: {error.strerror}; make room, or set output to another disk"
    )


class _TokenFile:
    """Token ids and loss masks of examples in a file (5 bytes per token), so that they may exceed the memory.

    The file has no name and disappears with the process. Memory holds 8 bytes per example and 8 bytes per row.

    Args:
        directory: A directory on the disk on which the file is created.
    """

    def __init__(self, directory: Path | None) -> None:
        try:
            self._file = TemporaryFile(dir=directory)  # noqa: SIM115 - it lives as long as the examples
        except OSError as error:
            raise _unwritable(error) from error
        self._rows, self._examples = array("Q", [0]), array("Q", [0])

    def append(self, rows: Sequence[Rendered]) -> None:
        """Add the rows of an example.

        Raises:
            ConfigError: if they cannot be written.
        """
        for row in rows:
            content = np.array(row.ids, np.int32).tobytes() + np.array(row.loss_mask, np.bool_).tobytes()
            try:
                self._file.write(content)
            except OSError as error:
                raise _unwritable(error) from error
            self._rows.append(self._rows[-1] + len(content))
        self._examples.append(len(self._rows) - 1)

    def close(self) -> None:
        """Write buffered data. Nothing may be added afterwards."""
        try:
            self._file.flush()
        except OSError as error:
            raise _unwritable(error) from error

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._examples) - 1

    def __getitem__(self, index: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Read ids and mask of the rows of an example."""
        return [self._read(row) for row in range(self._examples[index], self._examples[index + 1])]

    def _read(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = self._rows[row], self._rows[row + 1]
        content = os.pread(self._file.fileno(), end - start, start)
        count = len(content) // 5
        return np.frombuffer(content, np.int32, count), np.frombuffer(content, np.bool_, count, 4 * count).copy()


def load_examples(
    data: str | Sequence[str],
    split: str,
    render: Render,
    *,
    max_length: int,
    drop_long: bool,
    directory: Path | None = None,
) -> Examples:
    """Read and render all rows of one data set or several (`sluice.environments.datasets`).

    Args:
        data: The data set, or several, each with its share if they are to be mixed.
        split: Split of the data sets.
        render: Makes the examples of a row.
        max_length: Most tokens of an example.
        drop_long: Whether to leave out longer examples instead of raising.
        directory: Directory for the file of tokens; None: the directory for temporary files.

    Raises:
        ConfigError: if a row cannot be used or no row is left.
    """
    kept = _TokenFile(directory)
    dropped = 0
    with doing("read the data", unit="rows") as step:
        for place, row in step.count(mixed_rows(data, split)):
            try:
                examples = render(row)
            except TemplateError as error:
                raise ConfigError(f"{place}: {error}") from error
            except (AttributeError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{place} contains malformed messages ({error!r}): give objects with role and content"
                ) from error
            for rendered in examples:
                length = max(len(each.ids) for each in rendered)
                if length <= max_length:
                    kept.append(rendered)
                elif drop_long:
                    dropped += 1
                else:
                    raise ConfigError(
                        f"{place} has {length} tokens, more than max_length {max_length}: raise it, or set on_long to drop"
                    )
    kept.close()
    if not len(kept):
        raise ConfigError(f"{data} holds no usable row ({dropped} were longer than max_length): raise max_length")

    def rows(index: int) -> list[TrainingRow]:
        bare = [_row(ids, mask, str(index)) for ids, mask in kept[index]]
        if len(bare) == 1:
            return bare
        names = (("chosen", CHOSEN), ("rejected", REJECTED))
        return [
            replace(row, group_id=str(index), trajectory_id=f"{index}/{name}", reward=reward)
            for row, (name, reward) in zip(bare, names, strict=True)
        ]

    return Examples(len(kept), rows, dropped)


def _row(ids: np.ndarray, mask: np.ndarray, name: str) -> TrainingRow:
    return TrainingRow(
        input_ids=torch.from_numpy(ids.astype(np.int64)),
        loss_mask=torch.from_numpy(mask),
        behaviour_logprobs=torch.full((len(ids),), torch.nan),
        advantages=torch.ones(len(ids)),
        trajectory_id=name,
    )


def scored(pairs: Examples, padding: int | None) -> Examples:
    """Return pairs for a network that gives each answer one value, computed from the state after its last token.

    Each row has one loss token, which only marks that state. A sequence classifier of transformers reads its score at the last
    token that is not padding. Padding at the end of an answer, such as an end token that also pads, is cut off here too.
    """

    def with_mark(row: TrainingRow) -> TrainingRow:
        ids = row.input_ids.tolist()
        while len(ids) > 1 and ids[-1] == padding:
            ids.pop()
        mask = np.arange(len(ids) + 1) == len(ids)
        marked = _row(np.array([*ids, 0]), mask, row.trajectory_id)
        return replace(marked, reward=row.reward, group_id=row.group_id)

    return replace(pairs, rows=lambda index: [with_mark(row) for row in pairs.rows(index)])


@dataclass(frozen=True, slots=True)
class Data:
    """Examples of one run, to train on and to evaluate on."""

    train: Examples
    held_out: Examples | None

    def each(self, change: Callable[[Examples], Examples]) -> Data:
        """Return the data with `change` applied to both parts."""
        return Data(change(self.train), self.held_out and change(self.held_out))


def load_data(config: OfflineConfig, render: Render) -> Data:
    """Read the examples to train on and those held out."""
    read = partial(
        load_examples,
        render=render,
        max_length=config.max_length,
        drop_long=config.on_long == "drop",
        directory=config.output.parent,
    )
    data = read(config.data, config.split)
    if config.eval_data:
        return Data(data, read(config.eval_data, config.eval_split))
    return hold_out(data, config.eval_share, config.seed)


def hold_out(examples: Examples, share: float, seed: int) -> Data:
    """Hold out a random share of the examples. A share of 0 holds out none.

    Raises:
        ConfigError: if one of the two parts would be empty.
    """
    if not share:
        return Data(examples, None)
    held = round(share * len(examples))
    if not 0 < held < len(examples):
        raise ConfigError(
            f"eval_share {share:g} of {len(examples)} examples holds out {held}: give more examples, another share, or eval_data"
        )
    order = np.random.default_rng([seed, 1]).permutation(len(examples)).tolist()

    def part(chosen: list[int]) -> Examples:
        return replace(examples, count=len(chosen), rows=lambda index: examples.rows(chosen[index]))

    return Data(part(sorted(order[held:])), part(sorted(order[:held])))


# Batches.


def batches(
    examples: Examples, size: int, seed: int, ranks: Ranks = ALONE, *, first: int = 0
) -> Iterator[list[TrainingRow]]:
    """Yield batches without end. Every pass over the examples is a new permutation; a batch may span two passes.

    Args:
        examples: The examples to draw from.
        size: Examples per batch, over all ranks.
        seed: Seed of the permutations, the same on every rank.
        ranks: Each rank gets every `ranks.size`-th example of a batch.
        first: Number of the first batch to yield, from 0. Earlier batches are drawn, to keep the order, but not created.
    """
    generator = np.random.default_rng(seed)
    waiting: list[int] = []
    for number in count():
        while len(waiting) < size:
            waiting.extend(generator.permutation(len(examples)).tolist())
        if number >= first:
            yield _rows(examples, waiting[:size][ranks.index :: ranks.size])
        del waiting[:size]


def every_row(examples: Examples, ranks: Ranks = ALONE) -> list[TrainingRow]:
    """Return this rank's share of all examples, in order."""
    return _rows(examples, list(range(ranks.index, len(examples), ranks.size)))


def _rows(examples: Examples, chosen: list[int]) -> list[TrainingRow]:
    """Return the rows of some examples. Groups get new numbers, because a batch can contain an example twice."""
    return [
        replace(row, group_id=str(place)) if row.group_id else row
        for place, index in enumerate(chosen)
        for row in examples.rows(index)
    ]


# Log-probabilities of a frozen model.


Column = Literal["reference_logprobs", "teacher_logprobs"]

FORWARDED_ROWS = 256
"""Examples per rank and call: enough to fill micro-batches, but few enough that the results of a call are small."""


def precompute_logprobs(engine: TrainEngine, examples: Examples, column: Column) -> Examples:
    """Compute a model's log-probabilities of all examples once, in nats, for the loss tokens.

    Each rank forwards its share; all ranks get everything.
    """
    counts = [sum(row.loss_tokens for row in examples.rows(index)) for index in range(len(examples))]
    flat = torch.zeros(sum(counts))
    logprobs = list(flat.split(counts))
    ranks = engine.ranks
    block = FORWARDED_ROWS * ranks.size
    with doing(f"compute {column.replace('_', ' ')}", len(examples), "examples") as step:
        for start in range(0, len(examples), block):
            mine = range(start, min(start + block, len(examples)))[ranks.index :: ranks.size]
            rows = [examples.rows(index) for index in mine]
            answers = iter(engine.forward([row for pair in rows for row in pair]))
            for index, parts in zip(mine, rows, strict=True):
                logprobs[index].copy_(torch.cat([next(answers)[row.loss_mask] for row in parts]))
            step.advance(min(block, len(examples) - start))
    if ranks.group is not None:
        dist.all_reduce(flat, group=ranks.group)  # one rank has filled each place, the others have 0 there

    def rows_of(index: int) -> list[TrainingRow]:
        rows = examples.rows(index)
        parts = logprobs[index].split([row.loss_tokens for row in rows])
        columns = [torch.full((len(row),), torch.nan) for row in rows]
        for row, values, part in zip(rows, columns, parts, strict=True):
            values[row.loss_mask] = part
        return [replace(row, **{column: values}) for row, values in zip(rows, columns, strict=True)]

    return replace(examples, rows=rows_of)
