"""Deadlines of what the sampler asks of weight sync and replicas."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sluice.config import CommonConfig, PeersConfig
from sluice.v1 import rollout_pb2
from sluice.versions import Version
from trainer_svc.tuner.config import DeadlinesConfig
from trainer_svc.tuner.sampler import PUBLISH_S, Sampler

OPERATION_S = 7.0
NOWHERE = "127.0.0.1:1"


class Calls:
    """Takes every call, and keeps its deadline."""

    def __init__(self) -> None:
        self.deadlines: dict[str, float] = {}

    def __getattr__(self, name: str) -> Callable[..., Awaitable[rollout_pb2.GenerateResponse]]:
        async def call(*_: object, **deadline: float) -> rollout_pb2.GenerateResponse:
            (self.deadlines[name],) = deadline.values()
            return rollout_pb2.GenerateResponse()

        return call


async def test_an_adapter_is_published_and_loaded_sooner_than_an_operation_may_take() -> None:
    common = CommonConfig(run="test", peers=PeersConfig(weightsync=NOWHERE, rollout=[NOWHERE]))
    sampler, calls = Sampler(common, DeadlinesConfig(operation_s=OPERATION_S), ""), Calls()
    (replica,) = sampler._replicas
    replica.admin = replica.agent = sampler._publisher = calls
    sampler._version = Version(1, 0)
    version = await sampler.publish({}, {})
    await sampler.sample(version, rollout_pb2.GenerateRequest())
    await sampler._make_room(replica, AssertionError())
    await sampler.close()
    assert calls.deadlines == dict.fromkeys(("push", "LoadAdapter", "UnloadAdapter"), PUBLISH_S) | {
        "Generate": OPERATION_S
    }
