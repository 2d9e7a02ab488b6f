"""Tokens per second through Generate over gRPC, against the same prompts given to ``AsyncLLM`` in one process.

Both engines have the same arguments and stay up. Rounds alternate, so that noise of the machine affects both.

A second part compares GenerateStream, as the orchestrator uses it, with Generate for groups of samples of one prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import grpc
import numpy as np
import psutil
from google.protobuf.duration_pb2 import Duration

from benchmarks.children import free_port, make_model, median_ratio, service
from rollout_svc.engines.vllm.processes import launch
from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.v1 import rollout_pb2, rollout_pb2_grpc, tokens_pb2

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

Request = Callable[[list[int]], Awaitable[int]]
"""Samples one prompt and returns the number of sampled tokens."""

Round = Callable[[list[list[int]]], Awaitable[int]]
"""Samples every prompt at once and returns the number of sampled tokens."""


def run(argv: list[str]) -> Mapping[str, Any]:
    """Measure and print; return the content of the JSON line."""
    parser = argparse.ArgumentParser(prog="sluice bench rollout", description=__doc__)
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="requests that each of them sends, one after the other")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each way")
    parser.add_argument(
        "--groups", type=int, nargs="*", default=[8, 16], help="samples of one prompt, for the second part"
    )
    return asyncio.run(_measure(parser.parse_args(argv)))


async def _measure(options: argparse.Namespace) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as scratch:
        model = make_model(Path(scratch) / "model")
        engine_args = {"max_num_seqs": options.concurrency, "max_model_len": 512}
        in_process = await launch(str(model), engine_args, fork=True, deadline_s=180)
        port = free_port()
        arguments = [
            f"--model={model}",
            f"--server.port={port}",
            f"--server.http-port={free_port()}",
            "--follow-weights=false",
            f"--engine-args={json.dumps(engine_args)}",
        ]
        target = f"127.0.0.1:{port}"
        try:
            async with service("rollout", *arguments, health=target, log=Path(scratch) / "rollout.log") as child:
                return await _compare(options, cast("AsyncLLM", in_process.llm), target, psutil.Process(child.pid))
        finally:
            await in_process.shut_down()


async def _compare(
    options: argparse.Namespace, llm: AsyncLLM, target: str, replica: psutil.Process
) -> Mapping[str, Any]:
    rng = np.random.default_rng(0)
    prompts = rng.integers(8, 100, size=(options.concurrency, options.prompt_tokens)).tolist()
    single = Work(options.new_tokens)
    async with connect(target, SecurityConfig(), role="agent", default_deadline_s=120) as channel:
        ways: dict[str, Round] = {
            "inprocess": together(in_process(llm, options.new_tokens), options.repeats),
            "grpc": together(unary(channel, single), options.repeats),
            "grpc_stream": together(stream(channel, single, Duration(nanos=20_000_000)), options.repeats),
        }
        speeds, cpu_ms = await alternate(ways, prompts, options.rounds, replica)
        ratios = {
            f"{name}_over_inprocess": median_ratio(speeds[name], speeds["inprocess"])
            for name in ("grpc", "grpc_stream")
        }
        for n in options.groups:
            group = Work(options.new_tokens, n=n, text=True)
            ways = {
                f"unary_{n}": together(unary(channel, group), options.repeats),
                f"stream_{n}": together(stream(channel, group, Duration(seconds=1)), options.repeats),
            }
            measured = await alternate(ways, prompts[: max(1, options.concurrency // n)], options.rounds, replica)
            speeds, cpu_ms = speeds | measured[0], cpu_ms | measured[1]
            ratios[f"stream_over_unary_{n}"] = median_ratio(speeds[f"stream_{n}"], speeds[f"unary_{n}"])
    return {
        "ratios": ratios,
        "tokens_per_s": {name: round(statistics.median(each)) for name, each in speeds.items()},
        "cpu_ms_per_1000_tokens": {name: round(statistics.median(each), 1) for name, each in cpu_ms.items()},
        **vars(options),
    }


async def alternate(
    ways: Mapping[str, Round], prompts: list[list[int]], rounds: int, replica: psutil.Process
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Run all ways in turns, after one round that does not count.

    Returns:
        Tokens per second, and CPU milliseconds of the replica beside its engine per 1,000 tokens, of each round by way.
    """
    for sample in ways.values():
        await sample(prompts)
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    cpu_ms: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 else reversed(list(ways)):
            begun, cpu = time.perf_counter(), replica.cpu_times()
            tokens = await ways[name](prompts)
            speeds[name].append(tokens / (time.perf_counter() - begun))
            spent, cpu_before = replica.cpu_times(), cpu.user + cpu.system
            cpu_ms[name].append((spent.user + spent.system - cpu_before) * 1e6 / tokens)
        print(f"round {number + 1}: " + "  ".join(f"{name} {each[-1]:,.0f} tok/s" for name, each in speeds.items()))
    return speeds, cpu_ms


def together(request: Request, repeats: int) -> Round:
    """Send all prompts at once, and each one again as soon as it has ended: a steady load instead of one burst."""

    async def worker(prompt: list[int]) -> int:
        return sum([await request(prompt) for _ in range(repeats)])

    async def sample(prompts: list[list[int]]) -> int:
        return sum(await asyncio.gather(*(worker(prompt) for prompt in prompts)))

    return sample


def in_process(llm: AsyncLLM, new_tokens: int) -> Request:
    """Sample with ``AsyncLLM`` in its fastest way: one final output per request."""
    from vllm.inputs import TokensPrompt  # noqa: PLC0415 - after `launch` set its environment
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415

    counter = iter(range(1 << 30))

    async def one(prompt: list[int]) -> int:
        params = SamplingParams(
            max_tokens=new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        tokens = 0
        async for output in llm.generate(TokensPrompt(prompt_token_ids=prompt), params, str(next(counter))):
            tokens = len(output.outputs[0].token_ids)
        return tokens

    return one


@dataclass(frozen=True)
class Work:
    """The parameters of one request."""

    new_tokens: int
    n: int = 1
    text: bool = False

    def of(self, prompt: list[int]) -> rollout_pb2.GenerateRequest:
        """Return the request for a prompt."""
        return rollout_pb2.GenerateRequest(
            token_ids=tokens_pb2.TokenIds(ids=prompt),
            sampling=tokens_pb2.SamplingParams(max_tokens=self.new_tokens, ignore_eos=True),
            n=self.n,
            return_text=self.text,
        )


def unary(channel: grpc.aio.Channel, work: Work) -> Request:
    """Make one Generate call per prompt."""
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)

    async def one(prompt: list[int]) -> int:
        response = await stub.Generate(work.of(prompt))
        return sum(len(sample.token_ids) for sample in response.samples)

    return one


def stream(channel: grpc.aio.Channel, work: Work, coalesce: Duration) -> Request:
    """Make one GenerateStream call per prompt."""
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)

    async def one(prompt: list[int]) -> int:
        request = rollout_pb2.GenerateStreamRequest(request=work.of(prompt), coalesce=coalesce)
        tokens = 0
        async for response in stub.GenerateStream(request, timeout=120):
            tokens += sum(len(delta.tokens.token_ids) for delta in response.chunk.deltas)
        return tokens

    return one
