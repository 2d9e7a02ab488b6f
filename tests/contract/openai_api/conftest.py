"""A served model and a client of the OpenAI dialect."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio
from openai_dialect import client_of
from rollout_stack import Replica, running_engine, save_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("openai") / "small")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model):
    async with running_engine(model) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica(model, engine):
    async with Replica(model, engine) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(replica):
    async with client_of(replica) as made:
        yield made
