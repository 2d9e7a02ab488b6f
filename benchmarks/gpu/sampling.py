"""An engine on the trainer's device: its log-probabilities against the trainer's, an update in flight, and its pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median

import torch
from safetensors.torch import load_file

from benchmarks.gpu.case import Case
from benchmarks.gpu.parts import Figures, Measurements
from benchmarks.gpu.training import settings
from benchmarks.pauses import stage_files, update_in_flight
from rollout_svc.engines.base import GenerationRequest, InferenceEngine, Sampling
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions
from trainer_svc.batch.rows import TrainingRow
from trainer_svc.engine.engine import TrainEngine

SAMPLE_S = 240.0
"""Seconds for all samples of a measurement."""

PROMPT_TOKENS = 32

VLLM_SHARE = 0.4
"""Share of the device's memory that vLLM may take; the trainer uses the same device."""

CLIPPED = 0.2
"""A ratio further from 1 than this is clipped by the usual objectives."""


def transformers(case: Case) -> Measurements:
    """Measure the engine that needs no vLLM."""

    def engine() -> InferenceEngine:
        return TransformersEngine(str(case.model()), SlotOptions(device=case.device.type, max_model_len=_longest(case)))

    return _engine(case, engine)


def vllm(case: Case) -> Measurements:
    """Measure vLLM, which loads each version whole."""
    return _engine(case, lambda: _vllm(case, patch=False))


def vllm_patch(case: Case) -> Measurements:
    """Measure vLLM with `rollout.patch_on_device`."""
    return _engine(case, lambda: _vllm(case, patch=True))


def _vllm(case: Case, *, patch: bool) -> InferenceEngine:
    arguments: dict[str, float] = {"max_model_len": _longest(case)}
    if case.device.type == "cuda":
        arguments["gpu_memory_utilization"] = VLLM_SHARE
    return VllmEngine(str(case.model()), VllmOptions(engine_args=arguments, patch=patch))


def _longest(case: Case) -> int:
    return PROMPT_TOKENS + case.shape.sampled


def _engine(case: Case, build: Callable[[], InferenceEngine]) -> Measurements:
    with asyncio.Runner() as runner:
        engine = build()

        def start() -> Figures:
            seconds = case.seconds_once(lambda: runner.run(engine.start()))
            return {"start_s": round(seconds, 2), "engine": engine.info.engine, "precision": engine.info.dtype}

        try:
            yield "start", start
            yield "log-probabilities", lambda: runner.run(_log_probabilities(case, engine))
            yield "update in flight", lambda: runner.run(_in_flight(case, engine))
        finally:
            runner.run(engine.stop())


async def _log_probabilities(case: Case, engine: InferenceEngine) -> Figures:
    """Compare the log-probabilities of sampled tokens with the trainer's for the same tokens and weights."""
    generator = torch.Generator().manual_seed(0)
    begun = asyncio.get_running_loop().time()
    requests = [
        GenerationRequest(
            f"sample-{number}",
            torch.randint(case.shape.vocabulary, (PROMPT_TOKENS,), generator=generator).tolist(),
            Sampling(max_tokens=case.shape.sampled, ignore_eos=True, seed=number),
        )
        for number in range(case.shape.requests)
    ]
    async with asyncio.timeout(SAMPLE_S):
        results = await asyncio.gather(*map(engine.sample, requests))
    seconds = asyncio.get_running_loop().time() - begun
    rows = []
    for request, result in zip(requests, results, strict=True):
        [sample] = result.samples
        ids = torch.tensor([*request.prompt_ids, *sample.token_ids])
        logprobs = torch.full((len(ids),), torch.nan)
        logprobs[PROMPT_TOKENS:] = torch.tensor(sample.logprobs)
        rows.append(TrainingRow(ids, torch.arange(len(ids)) >= PROMPT_TOKENS, logprobs, torch.zeros(len(ids))))
    trainer = TrainEngine(settings(case), case.model())
    ours = torch.cat(await asyncio.to_thread(trainer.forward, rows)).double()
    theirs = torch.cat([row.behaviour_logprobs for row in rows]).double()
    sampled = ~theirs.isnan()
    gap = (ours - theirs)[sampled]
    ratio = gap.exp()
    return {
        "tokens": len(gap),
        "tokens_per_s": round(len(gap) / seconds),
        "trainer_precision": str(trainer.network.compute_dtype).removeprefix("torch."),
        "mean_nats": float(f"{float(gap.abs().mean()):.3g}"),
        "largest_nats": float(f"{float(gap.abs().max()):.3g}"),
        "bias_nats": float(f"{float(gap.mean()):.3g}"),
        "kl_nats": float(f"{float((ratio - 1 - gap).mean()):.3g}"),
        "clipped_fraction": float((abs(ratio - 1) > CLIPPED).double().mean()),
        "mean_logprob": float(f"{float(theirs[sampled].mean()):.4g}"),
    }


async def _in_flight(case: Case, engine: InferenceEngine) -> Figures:
    """Apply versions while one request is sampled; then compare the live weights with the last version's file, bit for bit."""
    staged = await asyncio.to_thread(stage_files, case.model(), case.directory, case.shape.updates)
    base = await asyncio.to_thread(load_file, case.model() / "model.safetensors")
    target = {name: tensor.to(case.device) for name, tensor in base.items()}
    spans, pauses, copies = await update_in_flight(engine, staged, target, case.shape.sampled)
    wrong = await engine.verify_weights(staged[-1])
    status = engine.status()
    return {
        "bytes": sum(each.nbytes for each in target.values()),
        "spans": [[span.start, str(span.version)] for span in spans],
        "versions_in_one_request": len(spans),
        "serves": str(status.version),
        "pause_s": [round(each, 4) for each in pauses],
        "median_pause_s": round(median(pauses), 4),
        "plain_copy_s": round(median(copies), 4),
        "wrong": wrong,
        "unchecked": sum(each.tensors for each in status.unchecked),
    }
