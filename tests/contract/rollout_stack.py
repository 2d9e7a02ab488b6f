"""A replica in this process: a real engine behind the gRPC and the HTTP servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from small_models import CONTEXT, save_model
from transformers import AutoTokenizer

from rollout_svc.admin import RolloutAdminServicer
from rollout_svc.config import LimitsConfig, RolloutConfig
from rollout_svc.engines.base import InferenceEngine, PauseMode
from rollout_svc.engines.slots.engine import SlotOptions, TransformersEngine
from rollout_svc.http import create_app
from rollout_svc.replica import EngineSupervisor, ReplicaWeights
from rollout_svc.servicer import RolloutServicer
from rollout_svc.tokenizer import ModelTokenizer
from sluice.clock import CLOCK, Clock
from sluice.config import CommonConfig, SecurityConfig, ServerConfig
from sluice.openai.server import HttpServer
from sluice.rpc import RpcServer, SluiceError, connect
from sluice.rpc.drain import Drain
from sluice.v1 import rollout_pb2_grpc

RUN = "test"
DEADLINE_S = 60.0
PLACES = 8
"""Samples that the engine generates at a time."""

TEMPLATE = (
    "{%- if tools -%}{%- for tool in tools -%}{{- tool.function.name -}}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message.role not in ['user', 'assistant'] -%}{{- raise_exception('no role ' ~ message.role) -}}{%- endif -%}"
    "{{- 'Ċ' ~ message.content -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- 'ĉ' -}}{%- endif -%}"
)


def save_chat_model(directory: Path) -> Path:
    """A small model whose tokenizer has a chat template."""
    save_model(directory, 1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def build_engine(model: Path) -> InferenceEngine:
    """An engine that starts at once, in this process."""
    return TransformersEngine(
        str(model), SlotOptions(device="cpu", max_model_len=CONTEXT, max_running=PLACES, threads=1)
    )


@asynccontextmanager
async def running_engine(model: Path) -> AsyncIterator[InferenceEngine]:
    engine = build_engine(model)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@dataclass
class Replica:
    """One replica's servers; several may share an engine, one after the other."""

    model: Path
    engine: InferenceEngine
    security: SecurityConfig = field(default_factory=SecurityConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    max_requests: int = 64
    request_s: float = 60.0
    call_log: Path | None = None
    clock: Clock = CLOCK
    drain: Drain = field(init=False)
    supervisor: EngineSupervisor = field(init=False)
    servicer: RolloutServicer = field(init=False)
    target: str = field(init=False)
    http_port: int = field(init=False)
    admin: RolloutAdminServicer = field(init=False)
    http: HttpServer = field(init=False)

    async def __aenter__(self) -> Replica:
        common = CommonConfig(run=RUN, model=str(self.model), security=self.security)
        config = RolloutConfig(follow_weights=False, replica="one", limits=self.limits)
        self.drain = Drain(self.clock)
        self.supervisor = EngineSupervisor(self.engine, 0, lambda _serving: None)
        tokenizer = ModelTokenizer(AutoTokenizer.from_pretrained(self.model))
        self.servicer = RolloutServicer(
            f"runs/{RUN}",
            self.supervisor,
            tokenizer,
            self.limits,
            request_s=self.request_s,
            drain=self.drain,
            clock=self.clock,
        )
        weights = ReplicaWeights(common, config, self.supervisor)
        self.admin = RolloutAdminServicer("one", self.supervisor, weights, self.servicer, drain=self.drain, drain_s=5.0)
        self._rpc = RpcServer("rollout", ServerConfig(), self.security, run=RUN, call_log=self.call_log)
        self._rpc.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, self.servicer, "sluice.v1.RolloutService")
        self._rpc.add(
            rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, self.admin, "sluice.v1.RolloutAdminService"
        )
        app = create_app(
            self.servicer,
            self.admin,
            str(self.model),
            self._rpc.access,
            "127.0.0.1",
            max_requests=self.max_requests,
            call_log=self._rpc.call_log,
        )
        self.http = HttpServer(app, "127.0.0.1", 0, self.security)
        await self._rpc.start()
        self.target = self._rpc.target
        self.http_port = await self.http.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.http.stop(0)
        await self._rpc.stop(0)

    @property
    def url(self) -> str:
        """Where HTTP is served."""
        return f"http://127.0.0.1:{self.http_port}"

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[None]:
        """The engine takes requests but samples nothing, so that they stay under way."""
        await self.engine.pause(PauseMode.KEEP)
        try:
            yield
        finally:
            await self.engine.resume()
            await self.until_idle()

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[rollout_pb2_grpc.RolloutServiceStub]:
        async with connect(self.target, self.security) as channel:
            yield rollout_pb2_grpc.RolloutServiceStub(channel)

    @asynccontextmanager
    async def admin_stub(self) -> AsyncIterator[rollout_pb2_grpc.RolloutAdminServiceStub]:
        async with connect(self.target, self.security) as channel:
            yield rollout_pb2_grpc.RolloutAdminServiceStub(channel)

    async def until_idle(self) -> None:
        """Wait until the engine samples nothing and nobody waits."""
        await until(lambda: self.servicer.samples + self.engine.status().running + self.engine.status().queued == 0)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state of the engine, which is meant to be polled."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def refused(call: grpc.aio.UnaryUnaryCall) -> SluiceError:
    """The error that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return SluiceError.from_rpc(error)
    raise AssertionError("the call succeeded")
