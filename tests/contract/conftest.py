"""Real engines on small models, one start per module; an engine that passes the conformance tests is one more row."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
from small_models import CONTEXT, save_model

from rollout_svc.engines.base import InferenceEngine
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.engines.vllm.engine import VllmEngine, VllmOptions


def vllm(model: Path, kv_policy: str) -> InferenceEngine:
    return VllmEngine(
        str(model),
        VllmOptions(engine_args={"max_model_len": CONTEXT, "kv_cache_memory_bytes": 32 << 20}, kv_policy=kv_policy),
    )


def transformers(model: Path, kv_policy: str) -> InferenceEngine:
    return TransformersEngine(
        str(model), SlotOptions(max_model_len=CONTEXT, kv_cache_bytes=32 << 20, kv_policy=kv_policy)
    )


FACTORIES: dict[str, Callable[[Path, str], InferenceEngine]] = {"transformers": transformers, "vllm": vllm}


@dataclass(frozen=True)
class Models:
    """Three sets of weights of one architecture, and two of its tied form."""

    base: Path
    second: Path
    third: Path
    tied: Path
    tied_second: Path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    return Models(
        save_model(root / "base", 1),
        save_model(root / "second", 2),
        save_model(root / "third", 3),
        save_model(root / "tied", 4, tied=True),
        save_model(root / "tied_second", 5, tied=True),
    )


async def running(engine: InferenceEngine) -> AsyncIterator[InferenceEngine]:
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FACTORIES)
async def engine(request: pytest.FixtureRequest, models: Models) -> AsyncIterator[InferenceEngine]:
    async for started in running(FACTORIES[request.param](models.base, "recompute")):
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FACTORIES)
async def keeping_engine(request: pytest.FixtureRequest, models: Models) -> AsyncIterator[InferenceEngine]:
    """Keeps keys and values across an update."""
    async for started in running(FACTORIES[request.param](models.base, "keep")):
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=FACTORIES)
async def tied_engine(request: pytest.FixtureRequest, models: Models) -> AsyncIterator[InferenceEngine]:
    async for started in running(FACTORIES[request.param](models.tied, "recompute")):
        yield started
