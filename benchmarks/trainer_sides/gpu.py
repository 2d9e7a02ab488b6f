"""A model of the shape of Qwen3-0.6B with random weights, trained on long sequences on one GPU."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from sluice.config import ConfigError
from trainer_svc.batch.rows import Sequence
from trainer_svc.config import ObjectiveConfig, TrainerConfig
from trainer_svc.engine.engine import TrainEngine
from trainer_svc.objectives.objective import Objective
from trainer_svc.update.policy import PolicyUpdate

__all__ = ["QWEN3_06B", "LongRows", "measure_gpu", "measure_lengths"]

QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
}
"""As in the model's own config.json, with room for longer sequences."""

BATCH_TOKENS = 131_072
"""Tokens of a batch, at whatever length."""

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class LongRows:
    """Random sequences without common prompts, so that neither prompt folding nor skipping helps.

    Attributes:
        tokens: Tokens of each sequence.
        count: Number of sequences.
        vocabulary: Token ids.
        prompt_share: Share of a sequence's tokens that is not trained.
    """

    tokens: int
    count: int
    vocabulary: int
    prompt_share: float = 1 / 16

    def draw(self) -> list[Sequence]:
        """Return the sequences, with advantages of both signs."""
        generator = torch.Generator().manual_seed(0)
        trained = torch.arange(self.tokens) >= max(1, int(self.tokens * self.prompt_share))
        behaviour = torch.full((self.tokens,), -float(torch.tensor(float(self.vocabulary)).log()))
        return [
            Sequence(
                input_ids=torch.randint(self.vocabulary, (self.tokens,), generator=generator),
                loss_mask=trained,
                behaviour_logprobs=behaviour,
                advantages=torch.full((self.tokens,), 1.0 if number % 2 else -1.0),
            )
            for number in range(self.count)
        ]


def measure_gpu(lengths: Rows[int], *, rounds: int, compiled: bool = False) -> dict[str, Any]:
    """Measure tokens per second, MFU and memory by length of the sequences.

    Args:
        lengths: Tokens per sequence.
        rounds: Counted updates at each length.
        compiled: Compile the decoder layers.

    Raises:
        ConfigError: if there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "--gpu needs a CUDA device, and PyTorch finds none: run it where there is one, with `pip install -e .[gpu]`"
        )
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    found = measure_lengths(QWEN3_06B, lengths, rounds=rounds, batch_tokens=BATCH_TOKENS, compiled=compiled)
    return {"ratios": {}, "device": torch.cuda.get_device_name(), "by_tokens": found}


def measure_lengths(
    sizes: dict[str, Any],
    lengths: Rows[int],
    *,
    rounds: int,
    batch_tokens: int,
    device: str = "cuda",
    compiled: bool = False,
) -> dict[str, dict[str, Any]]:
    """Measure as `measure_gpu` does, for any Qwen3, batch size and device.

    Args:
        sizes: Of the model, as its configuration names them.
        lengths: Tokens per sequence.
        rounds: Counted updates at each length.
        batch_tokens: Tokens of a batch; a longer sequence makes one alone.
        device: Where to compute.
        compiled: Compile the decoder layers.
    """
    logging.disable_progress_bar()
    found = {}
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        model = Path(scratch) / "model"
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(model)
        for tokens in lengths:
            rows = LongRows(tokens, max(1, batch_tokens // tokens), sizes["vocab_size"]).draw()
            found[str(tokens)] = _without_recomputing(model, rows, rounds, device=device, compiled=compiled)
            print(f"{len(rows)} x {tokens} tokens: {found[str(tokens)]}", flush=True)
    return found


def _without_recomputing(
    model: Path, rows: list[Sequence], rounds: int, *, device: str, compiled: bool
) -> dict[str, Any]:
    """Keep all activations if they fit into memory, else use activation checkpointing."""
    for checkpointing in (False, True):
        try:
            return _measure(model, rows, rounds, device=device, compiled=compiled, checkpointing=checkpointing)
        except torch.OutOfMemoryError:
            if checkpointing:
                raise
        gc.collect()  # the engine that did not fit
        torch.cuda.empty_cache()
    raise AssertionError("the last way returns or raises")


def _measure(
    model: Path, rows: list[Sequence], rounds: int, *, device: str, compiled: bool, checkpointing: bool
) -> dict[str, Any]:
    config = TrainerConfig(
        objective=ObjectiveConfig(preset="grpo"),
        device=device,
        token_budget=max(16_384, len(rows[0])),
        gradient_checkpointing=checkpointing,
        compile=compiled,
    )
    update = PolicyUpdate(TrainEngine(config, model), Objective.of(config.objective))
    update.apply(rows)  # compiles and allocates
    flat = [update.apply(rows).metrics.as_flat() for _ in range(rounds)]

    def middle(name: str) -> float | None:
        return median(each[name] for each in flat) if name in flat[0] else None

    speed, mfu = middle("tokens_per_s") or 0.0, middle("mfu")
    return {
        "tokens_per_s": round(speed),
        "mfu": None if mfu is None else round(mfu, 4),
        "peak_memory_gib": round((middle("peak_memory_bytes") or 0.0) / GIB, 1),
        "seconds": round(middle("seconds/total") or 0.0, 2),
        "activation_checkpointing": checkpointing,
    }
