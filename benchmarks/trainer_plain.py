"""The loop that people write by hand: a padded batch, transformers' own forward, log_softmax, the clipped loss, AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.children import PeakMemory
from benchmarks.trainer_workload import (
    ADAM_EPS,
    BETAS,
    CLIP,
    GRAD_CLIP,
    LEARNING_RATE,
    Commands,
    Row,
    UpdateBatch,
    side_arguments,
)


def main() -> None:
    """Update on command."""
    arguments = side_arguments(__doc__).parse_args()
    commands = Commands()
    torch.set_num_threads(arguments.threads)
    memory = PeakMemory()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=ADAM_EPS, weight_decay=0.0, fused=True
    )
    rows = list(UpdateBatch.load(arguments.batch).rows())
    commands.answer(ready=True)
    commands.serve(memory, lambda: _update(model, optimizer, rows, arguments.micro_batch))


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[Row], size: int) -> dict[str, Any]:
    """Make one optimizer step; return the loss and the forwarded tokens, padding included."""
    loss, cells = 0.0, 0
    for start in range(0, len(rows), size):
        part = _loss(model, rows[start : start + size], len(rows))
        part[0].backward()
        loss += part[0].item()
        cells += part[1]
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "forward_tokens": cells}


def _loss(model: torch.nn.Module, rows: Sequence[Row], batch_size: int) -> tuple[torch.Tensor, int]:
    """Return the micro-batch's share of the mean over sequences, and its tokens with padding."""
    prompts = _pad([row.prompt for row in rows], side="left")
    completions = _pad([row.completion for row in rows])
    behaviour = _pad([row.behaviour for row in rows])
    mask = _pad([torch.ones_like(row.completion) for row in rows])
    ids = torch.cat([prompts, completions], 1)
    attended = torch.cat([_pad([torch.ones_like(row.prompt) for row in rows], side="left"), mask], 1)
    kept = completions.shape[1] + 1
    logits = model(input_ids=ids, attention_mask=attended, use_cache=False, logits_to_keep=kept).logits[:, :-1]
    logprobs = torch.log_softmax(logits, -1).gather(-1, completions.unsqueeze(-1)).squeeze(-1)
    ratio = torch.exp(logprobs - behaviour)
    advantages = torch.tensor([[row.advantage] for row in rows])
    each = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return ((each * mask).sum(1) / mask.sum(1)).sum() / batch_size, ids.numel()


def _pad(rows: list[torch.Tensor], side: str = "right") -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)


if __name__ == "__main__":
    main()
