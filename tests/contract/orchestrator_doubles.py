# ruff: noqa: N802 - gRPC names the methods
"""A replica and a trainer that keep their contracts over real gRPC without a model: what they do is scripted by a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc

from orchestrator_svc.config import OrchestratorConfig
from rollout_svc.servicer import ResponseCache
from sluice.config import CommonConfig, PeersConfig, SecurityConfig, ServerConfig
from sluice.digests import batch_digest, trajectory_digest
from sluice.rows_at_fault import ROWS, ranges, rows_of
from sluice.rpc import RpcServer, SluiceError
from sluice.v1 import checkpoint_pb2, rollout_pb2, rollout_pb2_grpc, tokens_pb2, trainer_pb2, trainer_pb2_grpc
from sluice.versions import BASE, Lineage, Version

DIGEST = "same-tokenizer"

VOCABULARY = 1 << 20
"""Token ids that the real admission takes where a double uses it: these are code points."""

ENVIRONMENT = '''
import os
import signal
import time

from sluice.environments.base import Task

class Letters:
    """Scores how many letters of the completion are an a; scoring may fail, a question may break, hang or kill its process."""
    name = "letters"

    def __init__(self, fail="", broken_split="", slow="", deadly=(), count=40):
        self.fail, self.broken_split, self.slow = fail, broken_split, slow
        self.deadly, self.count = deadly, count

    def tasks(self, split, seed):
        return [Task(f"{split}-{index}", {"text": "abc"}) for index in range(self.count)]

    def messages(self, task):
        if self.broken_split and task.task_id.startswith(self.broken_split):
            raise KeyError(task.task_id)
        if task.task_id in self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if task.task_id == self.slow:
            time.sleep(3600.0)
        return [{"role": "user", "content": task.data["text"]}]

    def score(self, task, completion):
        if self.fail and self.fail in completion:
            raise RuntimeError("cannot score this")
        return completion.count("a") / max(1, len(completion))
'''


@dataclass
class Sampled:
    """A Generate call as it was answered."""

    request: rollout_pb2.GenerateRequest
    version: Version


@dataclass
class RolloutDouble(rollout_pb2_grpc.RolloutServiceServicer, rollout_pb2_grpc.RolloutAdminServiceServicer):
    """Answers with ``n`` samples whose text is scripted.

    Like a real replica it answers a repeated request id from memory, and refuses the id for any other content. Before `gate`
    a request waits in its queue, or is worked at if it `works`; one that is not `gated` does not wait.
    """

    name: str = "replica-0"
    digest: str = DIGEST
    version: Version = BASE
    state: int = rollout_pb2.REPLICA_STATE_SERVING
    calls: list[Sampled] = field(default_factory=list)
    policies: list[rollout_pb2.SetWeightPolicyRequest] = field(default_factory=list)
    failures: list[SluiceError] = field(default_factory=list)
    status_failure: SluiceError | None = None
    refuses_holds: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    gated: Callable[[rollout_pb2.GenerateRequest], bool] = lambda request: True
    works: bool = False
    text: Callable[[rollout_pb2.GenerateRequest, int], str] = lambda request, index: "a" * (index + 1) + "b"
    prompt: Callable[[rollout_pb2.GenerateRequest], list[int]] = lambda request: [1, 2, 3]
    finish: Callable[[rollout_pb2.GenerateRequest], int] = lambda request: tokens_pb2.FINISH_REASON_STOP
    decode: Callable[[list[int]], str] = lambda token_ids: "".join(map(chr, token_ids))
    repeats: ResponseCache = field(default_factory=lambda: ResponseCache(300.0, 100_000, 1 << 30))

    def __post_init__(self) -> None:
        self.gate.set()

    async def GenerateStream(self, request, context):
        asked = request.request
        content = asked.SerializeToString(deterministic=True)
        messages = self._messages(asked)
        if asked.request_id:
            messages = self.repeats.once("GenerateStream", asked.request_id, content, lambda: self._messages(asked))
        async for message in messages:
            yield message

    async def _messages(self, request):
        if self.works:
            yield rollout_pb2.GenerateStreamResponse(chunk={"stage": rollout_pb2.REQUEST_STAGE_RUNNING})
        answer = await self._sample(request)
        yield rollout_pb2.GenerateStreamResponse(
            opening={
                "prompt_token_ids": answer.prompt_token_ids,
                "tokenizer_digest": answer.tokenizer_digest,
                "continued": answer.continued,
            }
        )
        deltas = [rollout_pb2.SampleDelta(tokens=each) for each in answer.samples]
        yield rollout_pb2.GenerateStreamResponse(
            chunk={"deltas": deltas, "stage": rollout_pb2.REQUEST_STAGE_RUNNING, "engine_steps": len(self.calls)}
        )

    async def _sample(self, request):
        if self.failures:
            raise self.failures[0] if len(self.failures) == 1 else self.failures.pop(0)
        if self.version < Version.from_proto(request.min_policy_version):
            raise SluiceError.failed_precondition("VERSION_TOO_OLD", "not there yet")
        version = self.version
        self.calls.append(Sampled(request, version))
        if self.gated(request):
            await self.gate.wait()
        prompt = list(request.token_ids.ids) or self.prompt(request)
        begun = prompt[len(prompt) - request.continued_tokens :]
        samples = []
        for index in range(request.n or 1):
            text = self.text(request, index)
            samples.append(
                rollout_pb2.GeneratedSample(
                    index=index,
                    token_ids=[ord(letter) for letter in text],
                    logprobs=[-0.5] * len(text),
                    version_spans=[tokens_pb2.VersionSpan(start=0, policy_version=version.to_proto())] if text else [],
                    finish_reason=self.finish(request),
                    text=self.decode([*begun, *map(ord, text)]),
                )
            )
        return rollout_pb2.GenerateResponse(prompt_token_ids=prompt, samples=samples, tokenizer_digest=self.digest)

    async def Tokenize(self, request, context):
        new = [ord(letter) for message in request.conversation.messages for letter in message.content]
        return rollout_pb2.TokenizeResponse(token_ids=[*request.continues.ids, *new, 0], tokenizer_digest=self.digest)

    async def GetModel(self, request, context):
        return rollout_pb2.GetModelResponse(model="double", tokenizer_digest=self.digest, dtype="bfloat16")

    async def GetStatus(self, request, context):
        if self.status_failure is not None:
            raise self.status_failure
        return rollout_pb2.GetStatusResponse(
            replica=self.name,
            state=self.state,
            policy_version=self.version.to_proto(),
            generated_tokens=len(self.calls),
        )

    async def SetWeightPolicy(self, request, context):
        self.policies.append(request)
        if self.refuses_holds and request.mode != rollout_pb2.WEIGHT_POLICY_MODE_FOLLOW:
            raise SluiceError.aborted("HELD", "somebody else holds it")
        if request.mode == rollout_pb2.WEIGHT_POLICY_MODE_TARGET:
            self.version = Version.from_proto(request.version)
        return rollout_pb2.SetWeightPolicyResponse(policy_version=self.version.to_proto())


@dataclass
class TrainerDouble(trainer_pb2_grpc.TrainerServiceServicer):
    """Applies batches, at once if `automatic`, and publishes each version to the replicas.

    Like a real trainer it takes a repeated batch id for a duplicate only if the trajectories are the same. Checkpoints wait
    for `saving`.
    """

    replicas: list[RolloutDouble] = field(default_factory=list)
    automatic: bool = True
    busy: bool = False
    keeps_record: bool = True
    publishes: bool = True
    skips: bool = False
    kept: list[str] = field(default_factory=list)
    version: Version = BASE
    checkpoint: Version = BASE
    epochs: list[int] = field(default_factory=list)
    waiting: list[tuple[trainer_pb2.BatchHeader, list[tokens_pb2.Trajectory]]] = field(default_factory=list)
    known: dict[str, bytes] = field(default_factory=dict)
    history: dict[int, list[tokens_pb2.Trajectory]] = field(default_factory=dict)
    headers: list[trainer_pb2.BatchHeader] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    saving: asyncio.Event = field(default_factory=asyncio.Event)
    saved: list[trainer_pb2.Checkpoint] = field(default_factory=list)
    on_save: Callable[[], None] = lambda: None
    restored: list[str] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    record: list[checkpoint_pb2.BatchRecord] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reports: dict[int, trainer_pb2.StepReport] = field(default_factory=dict)
    last_batch_ids: dict[int, str] = field(default_factory=dict)
    phase: int = trainer_pb2.TRAINER_PHASE_READY
    estimator: str = ""
    objectives: Sequence[str] = ()
    admission: object | None = None  # a TrainerConfig: the real admission judges each batch
    refuses: Callable[[tokens_pb2.Trajectory], str] = lambda trajectory: ""
    refusals: list[SluiceError] = field(default_factory=list)
    verdict: Callable[[tokens_pb2.Trajectory], str] = lambda trajectory: ""

    def __post_init__(self) -> None:
        self.saving.set()

    async def ListCheckpoints(self, request, context):
        return trainer_pb2.ListCheckpointsResponse(checkpoints=self.saved[::-1])

    async def BeginEpoch(self, request, context):
        self.epochs.append(request.epoch)
        if request.checkpoint in self.damaged:
            raise SluiceError.data_loss("CHECKPOINT_DAMAGED", f"a file of {request.checkpoint} was changed")
        self.restored.append(request.checkpoint)
        named = [each.policy_version for each in self.saved if each.name == request.checkpoint]
        origin = Version.from_proto(named[-1]) if named else self.checkpoint
        self.version = Version(request.epoch, origin.number)
        self.waiting.clear()
        self.known.clear()
        self.reports = {number: _past(report) for number, report in self.reports.items() if number <= origin.number}
        if not self.keeps_record:
            self.reports.clear()
        self.history = {number: batch for number, batch in self.history.items() if number <= origin.number}
        self.phase = trainer_pb2.TRAINER_PHASE_WAITING
        self.publish()
        return trainer_pb2.BeginEpochResponse(
            policy_version=self.version.to_proto(),
            restored_version=origin.to_proto(),
            last_batch_id=self.last_batch_ids.get(origin.number, ""),
            next_sequence_no=origin.number + 1,
        )

    def crash(self) -> None:
        """Lose the epoch, as a process that was killed and came back."""
        self.phase = trainer_pb2.TRAINER_PHASE_READY
        self.version = BASE
        self.waiting.clear()
        self._wake()

    async def SubmitBatch(self, request_iterator, context):
        requests = aiter(request_iterator)
        header = (await anext(requests)).header
        if self.admission is None:
            trajectories = [each async for part in requests for each in part.trajectories.trajectories]
            if len(trajectories) < header.trajectory_count:  # whoever sent them was killed
                raise SluiceError.data_loss("BATCH_INCOMPLETE", f"{len(trajectories)} trajectories arrived")
        else:
            trajectories = await self._admitted(header, requests)
        self._refuse(trajectories)
        if header.target_version.epoch != self.version.epoch:
            raise SluiceError.failed_precondition("WRONG_EPOCH", "another epoch")
        self.headers.append(header)
        content = trainer_pb2.TrajectoryPart(trajectories=trajectories).SerializeToString(deterministic=True)
        if header.batch_id in self.known:
            if self.known[header.batch_id] != content:
                raise SluiceError.already_exists("BATCH_ID_REUSED", f"batch {header.batch_id} held other trajectories")
            return trainer_pb2.SubmitBatchResponse(batch_id=header.batch_id, duplicate=True)
        expected = self.version.number + len(self.waiting) + 1
        if header.sequence_no != expected:
            raise SluiceError.failed_precondition("WRONG_SEQUENCE_NO", f"expected {expected}")
        if self.busy or len(self.waiting) >= 2:
            raise SluiceError.resource_exhausted("QUEUE_FULL", "full", 0.01)
        self.known[header.batch_id] = content
        self.waiting.append((header, trajectories))
        if self.automatic:
            self.run_freely()
        return trainer_pb2.SubmitBatchResponse(batch_id=header.batch_id, queued_batches=len(self.waiting))

    async def _admitted(self, header: trainer_pb2.BatchHeader, requests) -> list[tokens_pb2.Trajectory]:
        """Receive a batch as the real trainer does, and let its admission judge it."""
        from trainer_svc.service import servicer

        servicer.check_header(header, self.admission)
        trajectories = await servicer.receive(header, requests)
        digests = [trajectory_digest(each) for each in trajectories]
        lineage = Lineage({header.target_version.epoch: BASE})
        servicer.admitted(header, digests, trajectories, config=self.admission, vocabulary=VOCABULARY, lineage=lineage)
        return trajectories

    def _refuse(self, trajectories: list[tokens_pb2.Trajectory]) -> None:
        """Refuse what `refuses` names, or the batch as a whole."""
        if self.refusals:
            raise self.refusals.pop(0)
        problems = {f"trajectories[{row}].token_ids": self.refuses(each) for row, each in enumerate(trajectories)}
        if problems := {field: problem for field, problem in problems.items() if problem}:
            raise SluiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "BAD_TRAJECTORY",
                f"{len(problems)} faults in the batch",
                violations=problems,
                metadata={ROWS: ranges(rows_of(problems))},
            )

    def run_freely(self) -> None:
        """Apply what waits, and from now on whatever comes."""
        self.automatic = True
        while self.waiting:
            self.apply()

    def apply(self) -> None:
        """Apply the oldest batch."""
        header, trajectories = self.waiting.pop(0)
        self.version = Version(self.version.epoch, header.sequence_no)
        self.history[header.sequence_no] = trajectories
        self.last_batch_ids[header.sequence_no] = header.batch_id
        self.reports[header.sequence_no] = trainer_pb2.StepReport(
            policy_version=self.version.to_proto(),
            batch_id=header.batch_id,
            sequence_no=header.sequence_no,
            skipped=self.skips,
            metrics={"loss": 0.25, "mismatch_kl": 0.5},
            results=[self._result(each) for each in trajectories],
            content_digest=batch_digest(map(trajectory_digest, trajectories)),
        )
        report = self.reports[header.sequence_no]
        self.record.append(
            checkpoint_pb2.BatchRecord(
                policy_version=report.policy_version,
                batch_id=report.batch_id,
                sequence_no=report.sequence_no,
                content_digest=report.content_digest,
                results=report.results,
            )
        )
        if self.publishes:
            self.publish()
        self._wake()

    def _result(self, trajectory: tokens_pb2.Trajectory) -> trainer_pb2.TrajectoryResult:
        reason = self.verdict(trajectory)
        trained, dropped = tokens_pb2.TRAJECTORY_OUTCOME_TRAINED, tokens_pb2.TRAJECTORY_OUTCOME_DROPPED
        return trainer_pb2.TrajectoryResult(
            trajectory_id=trajectory.trajectory_id,
            outcome=dropped if reason else trained,
            reason=reason,
            trained_tokens=0 if reason else sum(trajectory.mask_runs[1::2]),
            digest=trajectory_digest(trajectory),
        )

    def publish(self) -> None:
        """Let the replicas serve the present version."""
        for replica in self.replicas:
            replica.version = self.version

    async def GetTrainerState(self, request, context):
        return trainer_pb2.GetTrainerStateResponse(
            phase=self.phase,
            policy_version=self.version.to_proto(),
            advantage_estimator=self.estimator,
            objectives=self.objectives,
            queued_batches=len(self.waiting),
            next_sequence_no=self.version.number + len(self.waiting) + 1,
            oldest_reported_number=min(self.reports, default=self.version.number + 1),
        )

    async def WatchSteps(self, request, context):
        number, epoch = request.from_number, self.version.epoch
        while True:
            changed = self.changed
            if number <= self.version.number and number not in self.reports:
                raise SluiceError.not_found("REPORT_NOT_KEPT", f"the report of version {number} is not kept")
            while number in self.reports:
                yield trainer_pb2.WatchStepsResponse(step=self.reports[number])
                number += 1
            if self.phase == trainer_pb2.TRAINER_PHASE_READY or self.version.epoch != epoch:
                raise SluiceError.aborted("EPOCH_CHANGED", "watch again")
            await changed.wait()

    async def SaveCheckpoint(self, request, context):
        await self.saving.wait()
        self.on_save()
        if self.phase == trainer_pb2.TRAINER_PHASE_READY:
            raise SluiceError.failed_precondition("NO_EPOCH", "no epoch is open: call BeginEpoch first")
        self.checkpoints.append(self.version.number)
        self.checkpoint = self.version
        name = f"step_{self.version.number}"
        saved = trainer_pb2.Checkpoint(
            name=name, policy_version=self.version.to_proto(), journal_position=request.journal_position
        )
        self.saved.append(saved)
        return trainer_pb2.SaveCheckpointResponse(checkpoint=saved)

    async def KeepCheckpoint(self, request, context):
        self.kept.append(request.checkpoint)
        return trainer_pb2.KeepCheckpointResponse()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def _past(report: trainer_pb2.StepReport) -> trainer_pb2.StepReport:
    """What a record on disk still knows of a batch: no metrics."""
    return trainer_pb2.StepReport(
        policy_version=report.policy_version,
        batch_id=report.batch_id,
        sequence_no=report.sequence_no,
        results=report.results,
    )


@contextlib.asynccontextmanager
async def served(*registrations, security: SecurityConfig | None = None) -> AsyncIterator[str]:
    """Serve some servicers on a free loopback port; gives the address."""
    server = RpcServer("double", ServerConfig(), security or SecurityConfig())
    for add, servicer, name in registrations:
        server.add(add, servicer, name)
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def serve_rollout(replica: RolloutDouble, security: SecurityConfig | None = None):
    """Serve one replica."""
    return served(
        (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, replica, "sluice.v1.RolloutService"),
        (rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, replica, "sluice.v1.RolloutAdminService"),
        security=security,
    )


def serve_trainer(trainer: TrainerDouble):
    """Serve the trainer."""
    return served((trainer_pb2_grpc.add_TrainerServiceServicer_to_server, trainer, "sluice.v1.TrainerService"))


def common_settings(directory, trainer: str, replicas: list[str], orchestrator: str = "", **settings) -> CommonConfig:
    """Common keys of a run between doubles."""
    peers = PeersConfig(trainer=trainer, rollout=replicas, orchestrator=orchestrator or "127.0.0.1:1")
    return CommonConfig(**{"run": "test", "output_dir": directory, "model": "double", "peers": peers, **settings})


def orchestrator_settings(directory, host: str, **settings) -> OrchestratorConfig:
    """A small run: two groups of two episodes a batch, four steps. It is served at `host`, such as ``unix:/path``."""
    environment = directory / "letters_env.py"
    environment.write_text(ENVIRONMENT)
    given = {
        "environment": f"{environment}:Letters",
        "batch_size": 2,
        "group_size": 2,
        "max_steps": 4,
        "server": {"host": host},
        "load_report_s": 0.05,
        "disk": {"min_free_mb": 0},
        "deadlines": {"watchers_s": 60.0, "start_s": 60.0, "lost_s": 60.0},
    }
    return OrchestratorConfig.model_validate({**given, **settings})
