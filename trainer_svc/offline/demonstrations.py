"""Demonstrations for supervised fine-tuning: from rows of text to token ids and loss masks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.render import ChatRenderer, Rendered, TemplateError
from trainer_svc.batch.rows import Sequence
from trainer_svc.offline.rows import DataError, Row, described, named, read_rows

__all__ = ["Demonstrations", "render_row"]


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
        + described(row)
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
            with named(name):
                rendered = render_row(renderer, row)
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

    def rows(self, index: int) -> list[Sequence]:
        """One demonstration as a training row."""
        length = len(self.ids[index])
        row = Sequence(
            input_ids=torch.from_numpy(self.ids[index].astype(np.int64)),
            loss_mask=torch.from_numpy(self.masks[index]),
            behaviour_logprobs=torch.full((length,), torch.nan),
            advantages=torch.ones(length),
            trajectory_id=str(index),
        )
        return [row]
