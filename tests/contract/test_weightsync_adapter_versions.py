"""Adapter versions at the service: stored as PEFT directories, given out whole, with their base as long as they live."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from delta_versions import push_delta, update_path
from safetensors.torch import load_file
from weightsync_stack import ShardSource, Stack, equal_bits, error_of, eventually, manifest_of, running_stack, weights

from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import BASE, Version

V1, V2, V3 = (Version(1, number) for number in (1, 2, 3))
CONFIG = json.dumps({"peft_type": "LORA", "r": 4})
_random = torch.Generator().manual_seed(0)
ADAPTER = {
    "base_model.layers.0.q_proj.lora_A.weight": torch.randn(4, 16, generator=_random),
    "layers.0.lora_B": torch.randn(16, 4, generator=_random),
}


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path, keep=1, heartbeat_s=0.05, dense_delay_s=3600, linger_s=0) as running:
        yield running


async def push_adapter(
    stack: Stack, version: Version, base: Version | None, *sources: ShardSource, config: str = CONFIG
) -> pb.Manifest:
    shards = sources or (ShardSource("adapter", ADAPTER),)
    for source in shards:
        await stack.push_shard(source, version)
    manifest = manifest_of(version, *shards)
    manifest.kind, manifest.adapter_config = pb.VERSION_KIND_ADAPTER, config
    if base is not None:
        manifest.base.CopyFrom(base.to_proto())
    return (await stack.commit(manifest)).manifest


@pytest.mark.parametrize("parts", [1, 2])
async def test_an_adapter_is_a_peft_directory(stack: Stack, parts: int) -> None:
    sources = [ShardSource(f"rank{index}", dict(list(ADAPTER.items())[index::parts])) for index in range(parts)]
    manifest = await push_adapter(stack, V1, BASE, *sources)
    directory = stack.directory / "v1.1"
    assert equal_bits(load_file(directory / "adapter_model.safetensors"), ADAPTER)
    assert (directory / "adapter_config.json").read_text() == CONFIG
    assert (manifest.kind, manifest.adapter_config) == (pb.VERSION_KIND_ADAPTER, CONFIG)
    pulled = await stack.pull(V1, manifest.shards[0].name)
    assert pulled == (directory / "adapter_model.safetensors").read_bytes()
    assert await update_path(stack, None, None) == [(V1, pb.VERSION_KIND_ADAPTER)]
    assert await update_path(stack, None, V1) == []


async def test_the_base_of_an_adapter_stays_as_long_as_the_adapter(stack: Stack) -> None:
    await stack.push(V1, weights(), deadline_s=30)
    await push_adapter(stack, V2, V1)
    await push_adapter(stack, V3, V1)
    await eventually(lambda: not (stack.directory / "v1.2").exists())
    assert await stack.visible() == [V3, V1]
    await push_delta(stack, Version(1, 4), V1, weights(1), weights())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push_delta(stack, Version(1, 5), V3, weights(1), weights())
    assert error_of(caught.value).reason == "BASE_UNKNOWN"


@pytest.mark.parametrize("config", ["", "{", "[]"])
async def test_an_adapter_without_a_configuration_is_refused(stack: Stack, config: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await push_adapter(stack, V1, BASE, config=config)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_adapter_names_a_base_that_is_there(stack: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as none:
        await push_adapter(stack, V2, None)
    assert none.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await push_adapter(stack, V2, V1)
    assert error_of(unknown.value).reason == "BASE_UNKNOWN"


async def test_a_restart_finds_adapters(tmp_path: Path) -> None:
    async with running_stack(tmp_path) as stack:
        await stack.push(V1, weights(), deadline_s=30)
        pushed = await push_adapter(stack, V2, V1)
    async with running_stack(tmp_path) as stack:
        found = await stack.sync.GetManifest(pb.GetManifestRequest(run=pushed.run), timeout=30)
        assert found.manifest == pushed
        assert await update_path(stack, None, V1) == [(V2, pb.VERSION_KIND_ADAPTER)]
