"""How well deltas code the versions of a real training run: the trainer's own engine, AdamW, policy-gradient steps.

The bytes are compared with a dense bf16 copy, with two simpler codes, and with the entropy of the changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray
from transformers import AutoTokenizer

from sluice.render import ChatRenderer
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.config import TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.objectives.config import ObjectiveConfig
from trainer_svc.objectives.objective import Objective
from trainer_svc.update.policy import PolicyUpdate
from weightsync.codec.slices import Encoding, encode
from weightsync.codec.streams import WIDTHS, changed_positions, patterns, step_codes

LETTERS = 12
"""Length of each string that the policy is to reverse."""

GROUPS = 2
"""Tasks per step; each with a right and a wrong answer, of advantage 1 and -1."""

OUTER = ("embed_tokens", "lm_head")
"""Left out of the main figure: with a small vocabulary training changes these weights as often as others, with a large one hardly."""


@dataclass
class DeltaSizes:
    """Sums over tensors, in bytes; `changed` and `elements` count weights."""

    elements: int = 0
    changed: int = 0
    dense: int = 0
    sent: int = 0
    xor_zstd: int = 0
    pairs: int = 0
    bound: float = 0.0
    worst_over_dense: float = 0.0

    def add(self, other: DeltaSizes) -> None:
        """Add another sum to this one."""
        for name in ("elements", "changed", "dense", "sent", "xor_zstd", "pairs", "bound"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.worst_over_dense = max(self.worst_over_dense, other.worst_over_dense)

    def summary(self) -> dict[str, float]:
        """Return the figures as ratios; if nothing changed, only the changed fraction."""
        changed = {"changed_fraction": round(self.changed / self.elements, 6)}
        if not self.changed:
            return changed
        return changed | {
            "dense_over_sent": round(self.dense / self.sent, 1),
            "xor_zstd_over_sent": round(self.xor_zstd / self.sent, 2),
            "pairs_over_sent": round(self.pairs / self.sent, 2),
            "sent_over_bound": round(self.sent / self.bound, 3),
            "worst_tensor_over_dense": round(self.worst_over_dense, 4),
        }


def measure_deltas(model: Path, lr: float, *, steps: int, measured: int, threads: int) -> Mapping[str, DeltaSizes]:
    """Train, and code the difference between the versions of the last steps.

    Args:
        model: Its directory.
        lr: Learning rate, constant.
        steps: Optimizer steps in all.
        measured: How many of the last of them are coded.
        threads: CPU threads.

    Returns:
        Sizes by class of tensor, and of "all" and "inner" (all but embeddings and head).
    """
    config = TrainerConfig(
        lr=lr, threads=threads, objective=ObjectiveConfig(preset="grpo"), dtype="bfloat16"
    )  # masters stay fp32
    engine = TrainEngine(config, model)
    update = PolicyUpdate(engine, Objective.of(config.objective))
    batches = _batches(model)
    classes: dict[str, DeltaSizes] = defaultdict(DeltaSizes)
    before: dict[str, torch.Tensor] = {}
    for step in range(steps):
        if step >= steps - measured:
            before = before or engine.named_tensors(torch.bfloat16)
        update.apply(_on_policy(engine, next(batches)))
        if step >= steps - measured:
            after = engine.named_tensors(torch.bfloat16)
            _add(classes, before, after)
            before = after
    return dict(classes)


def _batches(model: Path) -> Iterator[list[TrainingRow]]:
    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model))
    random = Random(0)  # noqa: S311 - tasks, not secrets
    while True:
        tasks = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=LETTERS)) for _ in range(GROUPS)]
        yield [
            _row(renderer, task, answer, advantage, group=str(index))
            for index, task in enumerate(tasks)
            for answer, advantage in ((task[::-1], 1.0), (task, -1.0))
        ]


def _row(renderer: ChatRenderer, task: str, answer: str, advantage: float, group: str) -> TrainingRow:
    messages = [{"role": "user", "content": f"Reverse: {task}"}, {"role": "assistant", "content": answer}]
    rendered = renderer.render_sft(messages)
    ids = torch.tensor(rendered.ids)
    mask = torch.tensor(rendered.loss_mask, dtype=torch.bool)
    nothing = torch.full((len(ids),), torch.nan)
    return TrainingRow(ids, mask, nothing, torch.full((len(ids),), advantage), group_id=group)


def _on_policy(engine: TrainEngine, rows: list[TrainingRow]) -> list[TrainingRow]:
    logprobs = engine.forward(rows)
    return [
        TrainingRow(row.input_ids, row.loss_mask, values, row.advantages, group_id=row.group_id)
        for row, values in zip(rows, logprobs, strict=True)
    ]


def _add(classes: dict[str, DeltaSizes], before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in after.items():
        sizes = _measure_tensor(_bytes(tensor), _bytes(before[name]))
        for kind in _classes_of(name):
            classes[kind].add(sizes)


def _classes_of(name: str) -> Iterable[str]:
    outer = any(part in name for part in OUTER)
    kind = "embeddings" if outer else next((part for part in ("attn", "mlp") if part in name), "norms")
    return ("all", kind) if outer else ("all", "inner", "norms" if "norm" in name else kind)


def _measure_tensor(new: NDArray[np.uint8], base: NDArray[np.uint8]) -> DeltaSizes:
    encoded = encode(new, base, "BF16")
    changed = int(np.count_nonzero(new.view(np.uint16) != base.view(np.uint16)))
    sent = 0 if encoded.encoding is Encoding.UNCHANGED else len(encoded.data)
    return DeltaSizes(
        elements=new.size // 2,
        changed=changed,
        dense=new.size,
        sent=sent,
        xor_zstd=len(zstandard.ZstdCompressor(level=1).compress(np.bitwise_xor(new, base).tobytes())),
        pairs=changed * (4 + 2),
        bound=entropy_bound_bytes(new, base, "BF16"),
        worst_over_dense=sent / new.size,
    )


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return array


def entropy_bound_bytes(new: NDArray[np.uint8], base: NDArray[np.uint8], dtype: str) -> float:
    """Return the least size of a difference in bytes, if the changes were independent of each other (Shannon 1948).

    It is the entropy of the set of changed elements, `n H(p)` bits for a share p of n, plus the entropy of their steps. A code that
    knows more, such as which rows change, may be below it.

    Args:
        new: Dense little-endian bytes, one dimension, contiguous.
        base: Bytes of the same slice in the previous version.
        dtype: BF16, F16 or F32.

    Raises:
        ValueError: for another type.
    """
    if dtype not in WIDTHS:
        raise ValueError(f"{dtype} has no delta encoding; the bound is defined for {', '.join(WIDTHS)}")
    left, right = patterns(new, WIDTHS[dtype]), patterns(base, WIDTHS[dtype])
    positions = changed_positions(left, right)
    counts = np.unique(step_codes(left[positions], right[positions]), return_counts=True)[1]
    where = [positions.size, left.size - positions.size]
    return (_total_bits(np.array(where)) + _total_bits(counts)) / 8


def _total_bits(counts: NDArray[np.int64]) -> float:
    """Return the bits of a sequence whose symbols occur this often."""
    total = int(counts.sum())
    present = counts[counts > 0]
    return math.fsum(present * np.log2(total / present))
