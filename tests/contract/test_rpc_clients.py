# ruff: noqa: N802 - gRPC names the methods
"""The SDK's clients against a server of the real contract."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from trainer_double import TrainerDouble

from sluice.client import OrchestratorClient, RolloutClient, TrainerClient, WeightSyncClient
from sluice.config import SecurityConfig, ServerConfig
from sluice.rpc import MAX_MESSAGE_BYTES, RpcServer, SluiceError
from sluice.v1 import (
    common_pb2,
    orchestrator_pb2,
    orchestrator_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    tokens_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    weightsync_pb2,
    weightsync_pb2_grpc,
)
from sluice.versions import Version


class Trainer(TrainerDouble):
    async def SubmitBatch(self, request_iterator, context):
        self.parts = [part async for part in request_iterator]
        return trainer_pb2.SubmitBatchResponse(batch_id=self.parts[0].header.batch_id)


class Rollout(rollout_pb2_grpc.RolloutServiceServicer):
    async def Generate(self, request, context):
        self.request = request
        return rollout_pb2.GenerateResponse(samples=[rollout_pb2.GeneratedSample(text="ok")] * request.n)

    async def GenerateStream(self, request, context):
        self.request = request.request
        yield rollout_pb2.GenerateStreamResponse(opening=rollout_pb2.StreamOpening(request_id="r"))
        await asyncio.Event().wait()


class RolloutAdmin(rollout_pb2_grpc.RolloutAdminServiceServicer):
    async def UpdateWeights(self, request, context):
        return rollout_pb2.UpdateWeightsResponse(policy_version=request.version)

    async def Pause(self, request, context):
        return rollout_pb2.PauseResponse(frozen_requests=int(request.ttl.ToSeconds()))


class Orchestrator(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    async def GetRun(self, request, context):
        return orchestrator_pb2.GetRunResponse(run=orchestrator_pb2.Run(name=request.run))

    async def ListTrajectories(self, request, context):
        start = int(request.page_token or 0)
        records = [
            orchestrator_pb2.TrajectoryRecord(step=number)
            for number in range(start, min(start + request.page_size, 120))
        ]
        return orchestrator_pb2.ListTrajectoriesResponse(
            trajectories=records, next_page_token=str(start + 50) if start + 50 < 120 else ""
        )

    async def WatchRun(self, request, context):
        for number in (1, 2):
            yield orchestrator_pb2.WatchRunResponse(event=orchestrator_pb2.RunEvent(sequence_no=number))


class WeightSync(weightsync_pb2_grpc.WeightSyncServiceServicer):
    async def GetManifest(self, request, context):
        if not request.HasField("version"):
            raise SluiceError.not_found("NO_VERSION", "nothing was committed yet")
        return weightsync_pb2.GetManifestResponse(
            manifest=weightsync_pb2.Manifest(run=request.run, version=request.version)
        )


@pytest.fixture
async def server():
    rpc = RpcServer("all", ServerConfig(), SecurityConfig())
    rpc.rollout, rpc.trainer = Rollout(), Trainer()
    for add, servicer, name in (
        (trainer_pb2_grpc.add_TrainerServiceServicer_to_server, rpc.trainer, "TrainerService"),
        (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, rpc.rollout, "RolloutService"),
        (rollout_pb2_grpc.add_RolloutAdminServiceServicer_to_server, RolloutAdmin(), "RolloutAdminService"),
        (orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server, Orchestrator(), "OrchestratorService"),
        (weightsync_pb2_grpc.add_WeightSyncServiceServicer_to_server, WeightSync(), "WeightSyncService"),
    ):
        rpc.add(add, servicer, f"sluice.v1.{name}")
    await rpc.start()
    yield rpc
    await rpc.stop(0)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("text", "text"),
        ([1, 2], "token_ids"),
        ([{"role": "user", "content": "hi"}], "conversation"),
        (tokens_pb2.Conversation(messages=[tokens_pb2.ChatMessage(role="user", content="hi")]), "conversation"),
    ],
)
async def test_every_form_of_prompt_travels_as_its_own_kind(server, prompt, kind):
    async with RolloutClient(server.target) as client:
        answer = await client.generate(prompt, tokens_pb2.SamplingParams(max_tokens=3), n=2, run="r1")
    assert [sample.text for sample in answer.samples] == ["ok", "ok"]
    request = server.rollout.request
    assert (request.WhichOneof("prompt"), request.run, request.sampling.max_tokens) == (kind, "runs/r1", 3)


@pytest.mark.parametrize("prompt", [[], [1, {"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}, 1]])
async def test_a_prompt_that_is_no_single_form_is_refused_before_the_call(server, prompt):
    async with RolloutClient(server.target) as client:
        with pytest.raises(TypeError, match="prompt"):
            await client.generate(prompt)


async def test_leaving_a_stream_cancels_the_call(server):
    async with RolloutClient(server.target) as client:
        stream = client.stream("x")
        assert (await anext(stream)).opening.request_id == "r"
        await stream.aclose()


async def test_admin_calls_carry_versions_and_durations(server):
    async with RolloutClient(server.target) as client:
        updated = await client.update_weights(Version(1, 5))
        assert Version.from_proto(updated.policy_version) == Version(1, 5)
        assert (await client.pause(rollout_pb2.PAUSE_MODE_KEEP, "me", ttl_s=7)).frozen_requests == 7


async def test_a_batch_is_sent_in_parts_so_that_no_message_takes_long(server):
    lengths = [300_000, 50_000, 50_000, 50_000, 50_000, 300_000]
    trajectories = [
        tokens_pb2.Trajectory(trajectory_id=str(n), token_ids=[1 << 27] * tokens) for n, tokens in enumerate(lengths)
    ]
    async with TrainerClient(server.target) as client:
        answer = await client.submit_batch(trainer_pb2.BatchHeader(batch_id="b1"), trajectories)
    assert answer.batch_id == "b1"
    header, *parts = server.trainer.parts
    assert header.WhichOneof("part") == "header"
    assert [each.trajectory_id for part in parts for each in part.trajectories.trajectories] == list("012345")
    assert all(part.ByteSize() <= MAX_MESSAGE_BYTES for part in parts)
    assert [len(part.trajectories.trajectories) for part in parts] == [1, 2, 2, 1]


async def test_lists_are_read_page_by_page_up_to_the_limit(server):
    async with OrchestratorClient(server.target) as client:
        assert [record.step for record in await client.trajectories("r", limit=110)] == list(range(110))
        assert len(await client.trajectories("r", limit=500)) == 120
        assert (await client.run("r")).name == "runs/r"
        assert [message.event.sequence_no async for message in client.watch("r")] == [1, 2]


async def test_a_failure_is_the_error_that_the_server_raised(server):
    async with WeightSyncClient(server.target) as client:
        with pytest.raises(SluiceError) as caught:
            await client.manifest("r")
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.NOT_FOUND, "NO_VERSION")
        manifest = await client.manifest("r", Version(1, 2))
        assert manifest.version == common_pb2.PolicyVersion(epoch=1, number=2)
    async with TrainerClient(server.target) as client:
        server.trainer.failures = [SluiceError.failed_precondition("WRONG_RUN", "this is another run's trainer")]
        with pytest.raises(SluiceError, match="WRONG_RUN"):
            await client.state("r")
        server.trainer.failures = [SluiceError.not_found("TOO_OLD", "no longer kept")]
        with pytest.raises(SluiceError, match="TOO_OLD"):
            await anext(client.watch_steps("r"))
