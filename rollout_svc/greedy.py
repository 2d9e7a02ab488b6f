"""Greedy requests for several samples: all are the same, so one is sampled and copied (vLLM refuses more)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from rollout_svc.engines.base import GenerationChunk, GenerationRequest, GenerationResult, InferenceEngine

__all__ = ["agenerate", "stream"]


async def agenerate(engine: InferenceEngine, request: GenerationRequest) -> GenerationResult:
    """As the engine's own."""
    if not _copies(request):
        return await engine.agenerate(request)
    result = await engine.agenerate(replace(request, n=1))
    return replace(result, samples=[replace(result.samples[0], index=index) for index in range(request.n)])


async def stream(
    engine: InferenceEngine, request: GenerationRequest, *, coalesce_s: float
) -> AsyncGenerator[GenerationChunk, None]:
    """As the engine's own."""
    copies = request.n if _copies(request) else 1
    asked = replace(request, n=1) if copies > 1 else request
    async with aclosing(engine.stream(asked, coalesce_s=coalesce_s)) as chunks:
        async for chunk in chunks:
            yield chunk
            for index in range(1, copies):
                yield replace(chunk, index=index)


def _copies(request: GenerationRequest) -> bool:
    return request.sampling.temperature == 0 and request.n > 1
