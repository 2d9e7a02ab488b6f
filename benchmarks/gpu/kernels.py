"""The trainer's own kernels on a device: the output layer in tiles, and attention over packed rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.case import Case, milliseconds, rate
from benchmarks.gpu.parts import Figures, Measurements, NotRunError
from trainer_svc.batch.rows import MicroBatch, pack
from trainer_svc.engine.logprob import Entropy, fused_logprobs, logprobs_of_logits
from trainer_svc.engine.network import Packing, packed_attention

PLAIN_SHARE = 8
"""The plain output layer computes one token in this many: it holds all logits, and a gradient of the same size."""

COMPARED_TOKENS = (300, 200, 17)
"""Tokens of the rows whose attention is compared with float32."""


def output_layer(case: Case) -> Measurements:
    """Measure forward and backward pass of the output layer for different numbers of logits that it may keep, and of a plain layer."""
    for cells in case.shape.cells:
        yield f"{cells} logits", partial(_fused, case, cells, "none")
    yield f"{case.shape.cells[0]} logits, entropy measured", partial(_fused, case, case.shape.cells[0], "measure")
    yield "plain", partial(_plain, case)


def _layer(case: Case, tokens: int) -> tuple[torch.Tensor, ...]:
    """Return states in bfloat16, as layers make them under autocast, a weight in float32, targets, temperatures, a gradient."""
    generator = torch.Generator(case.device).manual_seed(0)
    width, vocabulary = int(case.shape.model["hidden_size"]), case.shape.vocabulary
    hidden = torch.randn(tokens, width, generator=generator, device=case.device).to(torch.bfloat16).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator, device=case.device).div_(width**0.5).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device=case.device)
    arriving = torch.randn(tokens, generator=generator, device=case.device)
    return hidden, weight, targets, torch.full((tokens,), 0.9, device=case.device), arriving


def _fused(case: Case, cells: int, entropy: Entropy) -> Figures:
    tokens = case.shape.scored
    hidden, weight, targets, temperatures, arriving = _layer(case, tokens)

    def compute() -> torch.Tensor:
        with torch.autocast(case.device.type, dtype=torch.bfloat16):
            return fused_logprobs(hidden, weight, targets, temperatures, entropy=entropy, cells=cells)[0]

    return _passes(case, compute, (hidden, weight), arriving)


def _plain(case: Case) -> Figures:
    hidden, weight, targets, temperatures, arriving = _layer(case, max(1, case.shape.scored // PLAIN_SHARE))

    def compute() -> torch.Tensor:
        with torch.autocast(case.device.type, dtype=torch.bfloat16):
            logits = hidden @ weight.t()
        return logprobs_of_logits(logits, targets, temperatures, entropy="none")[0]

    return _passes(case, compute, (hidden, weight), arriving)


def _passes(
    case: Case, compute: Callable[[], torch.Tensor], learning: tuple[torch.Tensor, torch.Tensor], arriving: torch.Tensor
) -> Figures:
    """Measure both passes; `least_products` are the necessary operations: one product forward, two backward."""
    hidden, weight = learning

    def both() -> None:
        torch.autograd.grad(compute(), learning, arriving)

    forward = case.seconds(compute)
    seconds = case.seconds(both)
    least = 6 * len(hidden) * weight.numel()
    return {
        "tokens": len(hidden),
        "vocabulary": len(weight),
        "forward_ms": milliseconds(forward),
        "both_ms": milliseconds(seconds),
        "peak_bytes": case.peak_bytes(both),
        "least_products_tflop": least / 1e12,
        "tflops": rate(least, seconds, 1e12),
    }


def attention(case: Case) -> Measurements:
    """Measure attention forward and backward with the varlen kernel and in blocks, and how far both are from float32."""
    for heads in case.shape.heads:
        for varlen in (True, False):
            kind = "varlen" if varlen else "blocks"
            yield f"{_named(heads)}, {kind}, difference", partial(_difference, case, heads, varlen=varlen)
    for count, tokens in case.shape.attended:
        for varlen in (True, False):
            name = f"{_named(case.shape.heads[0])}, {'varlen' if varlen else 'blocks'}, {count} x {tokens} tokens"
            yield name, partial(_attention_speed, case, count, tokens, varlen=varlen)


def _named(heads: tuple[int, int, int]) -> str:
    return f"{heads[0]}/{heads[1]} heads of {heads[2]}"


def _needs_cuda(case: Case, *, varlen: bool) -> None:
    if varlen and case.device.type != "cuda":
        raise NotRunError("the varlen kernel needs CUDA")


def _inputs(case: Case, heads: tuple[int, int, int], tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(case.device).manual_seed(0)
    queries, keys, size = heads
    return [
        torch.randn(1, count, tokens, size, generator=generator, device=case.device).to(dtype).requires_grad_()
        for count in (queries, keys, keys)
    ]


def _attend(batch: MicroBatch, inputs: list[torch.Tensor], *, varlen: bool) -> torch.Tensor:
    packing = Packing(batch.attention, varlen=varlen)
    output: torch.Tensor = packed_attention(torch.nn.Identity(), *inputs, None, packing=packing)[0]
    return output


def _difference(case: Case, heads: tuple[int, int, int], *, varlen: bool) -> Figures:
    """Compare output and gradients in bfloat16 with blocks in float32, relative to the largest value."""
    _needs_cuda(case, varlen=varlen)
    shortest = min(case.shape.token_budget, sum(COMPARED_TOKENS))
    lengths = [max(4, tokens * shortest // sum(COMPARED_TOKENS)) for tokens in COMPARED_TOKENS]
    rows = [case.rows(tokens, 1)[0] for tokens in lengths]
    [batch] = [each.to(case.device) for each in pack(rows, sum(lengths))]
    found = []
    for dtype, kernel in ((torch.float32, False), (torch.bfloat16, varlen)):
        inputs = [
            each.detach().to(dtype).requires_grad_()
            for each in _inputs(case, heads, batch.packed_tokens, torch.bfloat16)
        ]
        output = _attend(batch, inputs, varlen=kernel)
        found.append([output.detach(), *torch.autograd.grad(output, inputs, torch.ones_like(output))])
    names = ("output", "query_gradient", "key_gradient", "value_gradient")
    return {
        name: float(f"{float((ours.float() - exact).abs().max() / exact.abs().max()):.3g}")
        for name, exact, ours in zip(names, *found, strict=True)
    }


def _attention_speed(case: Case, count: int, tokens: int, *, varlen: bool) -> Figures:
    _needs_cuda(case, varlen=varlen)
    [batch] = [each.to(case.device) for each in pack(case.rows(tokens + 1, count), count * tokens)]
    inputs = _inputs(case, case.shape.heads[0], batch.packed_tokens, torch.bfloat16)

    def both() -> None:
        output = _attend(batch, inputs, varlen=varlen)
        torch.autograd.grad(output, inputs, torch.ones_like(output))

    forward = case.seconds(lambda: _attend(batch, inputs, varlen=varlen))
    seconds = case.seconds(both)
    heads, _, size = case.shape.heads[0]
    # Two products forward and five backward, over the pairs of tokens that see each other.
    least = 7 * 2 * batch.attention.pairs * heads * size
    return {
        "forward_ms": milliseconds(forward),
        "both_ms": milliseconds(seconds),
        "peak_bytes": case.peak_bytes(both),
        "tflops": rate(least, seconds, 1e12),
    }
