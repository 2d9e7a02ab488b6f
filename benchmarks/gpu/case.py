"""The device and sizes at which parts measure, and shared helpers: the model, rows, times and peaks of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from sluice.cli.init_model import ModelShape, character_tokenizer
from sluice.host_files import whole_directory
from trainer_svc.batch.rows import TrainingRow

PROMPT_SHARE = 16
"""One token in this many is part of the prompt, which is not trained."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that parts measure at.

    Attributes:
        model: Sizes of a Qwen3, as its configuration names them.
        lengths: Tokens per sequence, the most important first.
        batch_tokens: Tokens of a batch, at any length.
        token_budget: Smallest token budget; a longer sequence raises it.
        rounds: Counted repetitions, after one that is not counted.
        matrix: Rows and columns of the factors of a plain matrix product.
        copied_bytes: Bytes of a plain copy.
        heads: Heads, key-value heads and head_dim of the attention layers.
        attended: Numbers of rows and of tokens per row that attention is measured on.
        scored: Loss tokens of the output layer.
        cells: Values of `logit_cells`, the trainer's default first.
        requests: Samples whose log-probabilities are compared.
        sampled: Tokens of a sample.
        updates: Versions that come while one request is sampled.
        steps: Steps of a whole run, whose model is that of `sluice init-model`.
    """

    model: Mapping[str, Any]
    lengths: tuple[int, ...]
    batch_tokens: int
    token_budget: int
    rounds: int
    matrix: int
    copied_bytes: int
    heads: tuple[tuple[int, int, int], ...]
    attended: tuple[tuple[int, int], ...]
    scored: int
    cells: tuple[int, ...]
    requests: int
    sampled: int
    updates: int
    steps: int

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.model["vocab_size"])


QWEN3_06B = Shape(
    model={
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,  # more than Qwen3-0.6B has, for the longest sequences
        "rope_theta": 1e6,
    },
    lengths=(16_384, 4096, 65_536),
    batch_tokens=131_072,
    token_budget=16_384,
    rounds=2,
    matrix=8192,
    copied_bytes=1 << 32,
    heads=((16, 8, 128), (32, 8, 128), (32, 4, 128), (64, 8, 128)),
    attended=((4, 4096), (1, 16_384), (1, 65_536)),
    scored=16_384,
    cells=(3 << 24, 1 << 27, 1 << 29),
    requests=64,
    sampled=256,
    updates=3,
    steps=60,
)
"""Qwen3-0.6B, by its config.json."""

TINY = Shape(
    model={
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "rope_theta": 1e6,
    },
    lengths=(48, 96),
    batch_tokens=192,
    token_budget=48,
    rounds=1,
    matrix=64,
    copied_bytes=1 << 16,
    heads=((4, 2, 32),),
    attended=((2, 24),),
    scored=32,
    cells=(1 << 13, 1 << 15),
    requests=4,
    sampled=24,
    updates=2,
    steps=2,
)
"""Sizes that a CPU computes in seconds. They only show that the parts run."""

SHAPES = {"qwen3-0.6b": QWEN3_06B, "tiny": TINY}


@dataclass(frozen=True, slots=True)
class Case:
    """The device and directory of a part.

    Attributes:
        device: Device of PyTorch: cuda or cpu.
        directory: Directory for files of all parts, in shared memory if there is room.
    """

    shape: Shape
    device: torch.device
    directory: Path

    def model(self) -> Path:
        """Return the directory of a model of the shape, with random weights that are made on the device once for all parts."""
        directory = self.directory / "model"
        if directory.exists():
            return directory
        logging.disable_progress_bar()
        tokenizer = character_tokenizer(ModelShape(max_positions=int(self.shape.model["max_position_embeddings"])))
        ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        torch.manual_seed(0)
        with self.device:
            model = Qwen3ForCausalLM(Qwen3Config(**self.shape.model, **ends)).to(torch.bfloat16)
        model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
        with whole_directory(directory) as staging:
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        return directory

    def rows(self, tokens: int, count: int) -> list[TrainingRow]:
        """Draw sequences without common prompts, so that neither folding nor skipping helps; advantages have both signs."""
        generator = torch.Generator().manual_seed(0)
        trained = torch.arange(tokens) >= max(1, tokens // PROMPT_SHARE)
        vocabulary = self.shape.vocabulary
        behaviour = torch.full((tokens,), -float(torch.tensor(float(vocabulary)).log()))
        return [
            TrainingRow(
                input_ids=torch.randint(vocabulary, (tokens,), generator=generator),
                loss_mask=trained,
                behaviour_logprobs=behaviour,
                advantages=torch.full((tokens,), 1.0 if number % 2 else -1.0),
            )
            for number in range(count)
        ]

    def batch(self, tokens: int) -> list[TrainingRow]:
        """Draw a whole batch of sequences of a length."""
        return self.rows(tokens, max(2, self.shape.batch_tokens // tokens))

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median of the seconds that a piece of work takes, device included, after one run that does not count."""
        work()
        return median(self.seconds_once(work) for _ in range(self.shape.rounds))

    def seconds_once(self, work: Callable[[], object]) -> float:
        """Return the seconds that a piece of work takes, device included."""
        self.wait()
        begun = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_bytes(self, work: Callable[[], object]) -> int | None:
        """Return the peak bytes of tensors during `work`, above those before it; None on a CPU, which does not count them."""
        if self.device.type != "cuda":
            work()
            return None
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        return int(torch.cuda.max_memory_allocated(self.device) - before)


def rate(amount: float, seconds: float, unit: float) -> float:
    """Return an amount per second, divided by `unit`, with three digits: `unit` is 1e12 for TFLOP/s."""
    return float(f"{amount / seconds / unit:.3g}")


def milliseconds(seconds: float) -> float:
    """Return milliseconds with four digits."""
    return float(f"{seconds * 1e3:.4g}")
