"""Forward and backward pass of an output layer: fused, against full logits, log_softmax and autograd.

Both sides get the same states, weight and targets, and compute the gradients of states and weight. Every measurement runs in
a process of its own. It measures the peak of resident memory above what the inputs need, and the time of the second pass. The sides
take turns within each round; a ratio is the median over rounds.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from benchmarks.children import PeakMemory, in_child, median_ratio
from trainer_svc.engine.logprob import fused_logprobs, logprobs_of_logits

VOCABULARY = 151_936
"""Token ids of Qwen3."""

TOKENS = 2048
"""Loss tokens of the micro-batch."""

WIDTH = 1024
"""Size of a hidden state in a model of 0.6 B parameters."""

ROUNDS = 3


def measure_fused_logprob() -> dict[str, Any]:
    """Return peak memory and time of the fused layer, and their ratios to those of plain autograd."""
    peak_mb: dict[str, list[float]] = {"naive": [], "fused": []}
    seconds: dict[str, list[float]] = {"naive": [], "fused": []}
    for number in range(1, ROUNDS + 1):
        for side in ("naive", "fused"):
            peak_bytes, taken_s = in_child(_measure, side, len(os.sched_getaffinity(0)))
            peak_mb[side].append(round(peak_bytes / 1e6, 1))
            seconds[side].append(round(taken_s, 2))
            print(f"{side} log-probability, round {number}: {peak_mb[side][-1]} MB {taken_s:.2f} s", flush=True)
    return {
        "ratios": {
            "fused_logprob_peak_memory_over_naive": median_ratio(peak_mb["fused"], peak_mb["naive"]),
            "fused_logprob_time_over_naive": median_ratio(seconds["fused"], seconds["naive"]),
        },
        "peak_mb": peak_mb,
        "seconds": seconds,
    }


def _measure(side: str, threads: int) -> tuple[int, float]:
    """Return the peak bytes above the inputs over two passes, and the seconds of the second."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight = torch.empty(VOCABULARY, WIDTH).normal_(std=WIDTH**-0.5).requires_grad_()
    targets, temperatures = torch.randint(VOCABULARY, (TOKENS,)), torch.full((TOKENS,), 0.9)
    arriving = torch.randn(TOKENS)
    memory = PeakMemory()
    memory.restart()
    for _ in range(2):
        hidden.grad = weight.grad = None
        begun = time.perf_counter()
        if side == "fused":
            logprobs, _ = fused_logprobs(hidden, weight, targets, temperatures)
        else:
            logprobs, _ = logprobs_of_logits(hidden @ weight.t(), targets, temperatures, entropy="none")
        (logprobs * arriving).sum().backward()
        seconds = time.perf_counter() - begun
    return memory.bytes, seconds
