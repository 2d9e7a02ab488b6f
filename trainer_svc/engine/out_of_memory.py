"""Recognise errors of running out of memory, and hold the token budget, which is halved for a batch that ran out of memory."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

_TEXTS = (
    "DefaultCPUAllocator",
    "not enough memory",
    "CUDA error: out of memory",
    "Cuda failure 2 'out of memory'",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Parts of the messages of PyTorch's CPU allocator, CUDA, NCCL and cuBLAS, which raise a plain RuntimeError."""

REMEDY = (
    "lower token_budget, set gradient_checkpointing or optimizer_offload, or shard the model over more devices"
    " (parallel.dp_shard)"
)
"""What to change in the settings of the trainer."""


class HalfAppliedError(RuntimeError):
    """Memory ran out while an optimizer applied a gradient: some weights and moments are changed, others are not."""


class MemoryShortError(RuntimeError):
    """A pass ran out of memory and cannot be repeated by this process alone.

    Attributes:
        at_half: Whether the pass already ran with half of the token budget.
        row_tokens: Forwarded tokens of the row that was alone in the largest micro-batch; 0 if no single row is at fault.
    """

    def __init__(self, message: str, *, at_half: bool = False, row_tokens: int = 0) -> None:
        super().__init__(message)
        self.at_half, self.row_tokens = at_half, row_tokens


@dataclass(slots=True)
class TokenBudget:
    """The largest number of tokens in a micro-batch.

    Attributes:
        whole: The budget in the settings.
        halved: Whether half of it applies, for the rest of the batch in training.
        row_tokens: Forwarded tokens of the row that is alone in the largest micro-batch of the newest pass; 0 if that micro-batch
            has several rows.
    """

    whole: int
    halved: bool = False
    row_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The budget that applies now."""
        return max(1, self.whole // 2) if self.halved else self.whole


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | HalfAppliedError | MemoryShortError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def first_line(error: BaseException) -> str:
    """Return the name of an error and the first line of its text. The rest is PyTorch's statistics and advice."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def free_memory() -> None:
    """Give unused memory back to the device, so that blocks of another size fit.

    Call it outside of the `except` block: the exception holds the activations of the failed pass.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
