"""Demonstrations for supervised fine-tuning: from rows of text to token ids and loss masks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.render import ChatRenderer, Rendered, TemplateError
from trainer_svc.engine.batch import Sequence

__all__ = ["DataError", "Demonstrations", "read_rows", "render_row"]

Row = Mapping[str, Any]


class DataError(ValueError):
    """The demonstrations cannot be read or rendered; the message names the row."""


def read_rows(data: str, split: str) -> Iterator[tuple[str, Row]]:
    """Rows of a JSONL file, of a dataset directory or of a hub dataset, each with a name for messages.

    Raises:
        DataError: if there is no such file or a line is not a JSON object.
    """
    path = Path(data)
    if not path.is_file():
        if not path.exists() and (path.suffix in {".jsonl", ".json"} or path.is_absolute()):
            raise DataError(f"there is no file {data}")
        yield from _hub_rows(data, split)
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{data}:{number} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{data}:{number} is not a JSON object")
            yield f"{data}:{number}", row


def _hub_rows(name: str, split: str) -> Iterator[tuple[str, Row]]:
    from datasets import load_dataset  # noqa: PLC0415  seconds of import that local files do not need

    for number, row in enumerate(load_dataset(name, split=split)):
        yield f"{name}[{split}][{number}]", row


def render_row(renderer: ChatRenderer, row: Row) -> Rendered:
    """Token ids and loss mask of one row.

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
        + (", ".join(f"{name} ({type(value).__name__})" for name, value in row.items()) or "nothing")
    )


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Rendered demonstrations.

    Attributes:
        ids: Token ids of each.
        masks: Its loss mask.
        dropped_long: Rows left out because they were longer than allowed.
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
            drop_long: Leave longer ones out instead of failing.

        Raises:
            DataError: if a row cannot be used or none is left.
        """
        ids: list[NDArray[np.int32]] = []
        masks: list[NDArray[np.bool_]] = []
        dropped = 0
        for name, row in read_rows(data, split):
            try:
                rendered = render_row(renderer, row)
            except TemplateError as error:
                raise DataError(f"{name}: {error}") from error
            if len(rendered.ids) > max_length:
                if not drop_long:
                    raise DataError(
                        f"{name} has {len(rendered.ids)} tokens, more than max_length {max_length}: raise it, or set on_long to drop"
                    )
                dropped += 1
                continue
            ids.append(np.array(rendered.ids, dtype=np.int32))
            masks.append(np.array(rendered.loss_mask))
        if not ids:
            raise DataError(f"{data} holds no usable demonstration ({dropped} were longer than max_length)")
        return cls(ids, masks, dropped)

    def __len__(self) -> int:
        return len(self.ids)

    def sequence(self, index: int) -> Sequence:
        """One demonstration as a training row."""
        length = len(self.ids[index])
        return Sequence(
            input_ids=torch.from_numpy(self.ids[index].astype(np.int64)),
            loss_mask=torch.from_numpy(self.masks[index]),
            behaviour_logprobs=torch.full((length,), torch.nan),
            advantages=torch.ones(length),
            trajectory_id=str(index),
        )

    def batches(self, size: int, seed: int) -> Iterator[list[Sequence]]:
        """Endless batches; every pass is a fresh permutation, and a batch may span two passes."""
        generator = np.random.default_rng(seed)
        waiting: list[int] = []
        while True:
            while len(waiting) < size:
                waiting.extend(generator.permutation(len(self)).tolist())
            yield [self.sequence(index) for index in waiting[:size]]
            del waiting[:size]
