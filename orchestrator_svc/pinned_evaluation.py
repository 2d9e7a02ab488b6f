"""Evaluation inside a run: one replica is held at its version while it lasts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import grpc
import structlog

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.envs.base import Task
from orchestrator_svc.envs.scoring import Scorer
from orchestrator_svc.evaluation import EvalPlan, EvalResult, evaluate
from orchestrator_svc.replicas import PolicyEngine, Replica, ReplicaPool
from orchestrator_svc.workflows import RolloutWorkflow
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2
from sluice.versions import Version

__all__ = ["PinnedEvaluation"]

OWNER = "orchestrator-evaluation"

_RELEASE_S = 10.0
"""Seconds to release a hold; if that fails its time to live does it."""

log = structlog.get_logger(__name__)


class PinnedEvaluation:
    """Evaluates the weights that a replica serves, without their changing under it.

    Of several replicas the held one still takes training episodes as long as the staleness bound allows; with a single
    one all updates wait until the evaluation ends, and dispatch stops by the bound.

    Args:
        pool: The replicas.
        engine: What samples, not yet pinned.
        workflow: How an episode runs.
        scorer: Scores completions.
        tasks: Tasks of the evaluated split.
        config: Settings of the orchestrator.
        request_prefix: Begins the names of all requests; unique to the run and this process.
    """

    def __init__(
        self,
        *,
        pool: ReplicaPool,
        engine: PolicyEngine,
        workflow: RolloutWorkflow,
        scorer: Scorer | None,
        tasks: Sequence[Task],
        config: OrchestratorConfig,
        request_prefix: str,
    ) -> None:
        self.holds_all = False
        self._pool, self._engine, self._workflow, self._scorer = pool, engine, workflow, scorer
        self._request_prefix = request_prefix
        self._tasks, self._config = tasks[: config.evaluation.prompts], config

    async def run(self, wanted: Version) -> tuple[Version, EvalResult]:
        """Evaluate `wanted`, or what a replica serves after it.

        Raises:
            SluiceError: if no replica can be held.
            TimeoutError: if it takes longer than `evaluation.deadline_s`.
        """
        settings = self._config.evaluation
        async with asyncio.timeout(settings.deadline_s):
            replica = await self._pool.choose(wanted)
            self.holds_all = len(self._pool.replicas) == 1
            async with self._held(replica) as version:
                plan = EvalPlan(
                    samples=settings.samples,
                    temperature=settings.temperature,
                    greedy=settings.greedy,
                    max_tokens=self._config.sampling.max_tokens,
                    stop=tuple(self._config.sampling.stop),
                    concurrency=settings.concurrency,
                    version=version,
                    name=f"{self._request_prefix}/eval-{version}",
                )
                engine = self._engine.pinned(replica)
                return version, await evaluate(engine, self._workflow, self._scorer, self._tasks, plan)

    @contextlib.asynccontextmanager
    async def _held(self, replica: Replica) -> AsyncIterator[Version]:
        request = rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_HOLD, owner=OWNER)
        request.ttl.FromMilliseconds(int(self._config.deadlines.hold_s * 1000))
        try:
            answer = await replica.admin.SetWeightPolicy(request)
        except grpc.aio.AioRpcError as error:
            raise SluiceError.from_rpc(error) from error
        try:
            yield Version.from_proto(answer.policy_version)
        finally:
            follow = rollout_pb2.SetWeightPolicyRequest(mode=rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW, owner=OWNER)
            try:
                await replica.admin.SetWeightPolicy(follow, timeout=_RELEASE_S)
            except grpc.aio.AioRpcError as error:
                log.warning(
                    "the hold ends by its time to live", replica=replica.name, error=str(SluiceError.from_rpc(error))
                )
