"""The log of calls that change something: who did what, with which outcome."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pool
from structlog.testing import capture_logs
from trainer_double import start_double

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.rpc.access import ACCESS
from sluice.rpc.call_log import LOGGED, LOGGED_OF_ADMINS, CallLog
from sluice.rpc.principals import add_token
from sluice.v1 import orchestrator_pb2, rollout_pb2, trainer_pb2, trainer_pb2_grpc, weightsync_pb2

for contract in (Path(__file__).parents[2] / "proto/sluice/v1").glob("*.proto"):
    importlib.import_module(f"sluice.v1.{contract.stem}_pb2")  # the pool knows the contracts that were imported

READ_OR_TOO_MANY = {
    "RolloutService": {"Generate", "GenerateStream", "GetModel", "Tokenize"},
    "RolloutAdminService": {"GetStatus", "VerifyWeights"},
    "EpisodeService": {"LeaseTasks", "RenewLease", "Generate", "GenerateStream"},
    "SessionService": {"FindSession", "BeginGeneration", "Exchange", "GetGeneration", "WatchReplicas"},
    "EnvironmentService": {"Describe", "ListTasks", "Reset", "Step", "Score", "CloseEpisode"},
    "TrainerService": {"GetTrainerState", "WatchSteps", "ListCheckpoints"},
    "TrainingService": {"ListTrainings", "Sample", "WaitOperation"},
    "OrchestratorService": {"GetRun", "WatchRun", "Heartbeat", "ListTrajectories"},
    "WeightSyncService": {"ListVersions", "GetManifest"},
    "WeightDeliveryService": {"WatchVersions", "GetUpdatePath", "ListSources", "PullWeights", "ReportVersion"},
    "ServerInfoService": {"GetServerInfo"},
}
"""Methods that are not logged: they only read, they sample or play an episode, or they say again and again that somebody is there."""


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_of_every_method_it_was_decided_whether_it_is_logged():
    unlogged = {f"sluice.v1.{service}/{name}" for service, names in READ_OR_TOO_MANY.items() for name in names}
    every = {name for name in ACCESS if name.startswith("sluice.v1.")}
    assert sorted([*LOGGED, *LOGGED_OF_ADMINS, *unlogged]) == sorted(every), "each is in one of the three"


@pytest.mark.parametrize("method", [*LOGGED, *LOGGED_OF_ADMINS])
def test_each_field_that_is_written_is_one_of_the_request(method):
    service, _, name = method.partition("/")
    request = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type
    for field in {**LOGGED, **LOGGED_OF_ADMINS}[method]:
        message = request
        for part in field.split("."):
            found = message.fields_by_name[part]
            message = found.message_type


async def test_a_call_that_changes_something_is_one_line_with_its_principal(tmp_path):
    file, path = tmp_path / "principals.toml", tmp_path / "calls/trainer.jsonl"
    sent = {}
    for name, role in (("op", "admin"), ("rep", "replica")):
        (tmp_path / name).write_text(add_token(file, name, role))
        sent[name] = SecurityConfig(token_file=tmp_path / name)
    server, _ = await start_double(SecurityConfig(principals_file=file), call_log=path)
    request = trainer_pb2.BeginEpochRequest(run="runs/r1", epoch=3, checkpoint="step_2")
    for name in ("op", "rep"):
        async with connect(server.target, sent[name]) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.BeginEpoch(request, timeout=10, metadata=[("x-request-id", f"from-{name}")])
                await stub.GetTrainerState(trainer_pb2.GetTrainerStateRequest(run="runs/r1"), timeout=10)
    async with connect(server.target, SecurityConfig()) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await trainer_pb2_grpc.TrainerServiceStub(channel).BeginEpoch(request, timeout=10)
    await server.stop(0)
    first, second = lines(path)
    assert first["peer"].startswith("ipv4:127.0.0.1:")
    assert {key: first[key] for key in ("principal", "role", "method", "request", "code", "request_id")} == {
        "principal": "op",
        "role": "admin",
        "method": "TrainerService/BeginEpoch",
        "request": {"run": "runs/r1", "epoch": "3", "checkpoint": "step_2"},
        "code": "OK",
        "request_id": "from-op",
    }
    assert (second["principal"], second["code"]) == ("rep", "PERMISSION_DENIED")
    assert path.stat().st_mode & 0o777 == 0o600


async def submit(target: str, security: SecurityConfig) -> None:
    async with connect(target, security) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        part = trainer_pb2.SubmitBatchRequest()
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.SubmitBatch(iter([part]), timeout=10)


async def test_what_a_run_does_all_the_time_is_logged_if_an_admin_of_a_principals_file_does_it(tmp_path):
    """Services share the admin's token of a token file, and are "anyone" without principals: their calls would fill the log."""
    file, token = tmp_path / "principals.toml", tmp_path / "token"
    token.write_text(add_token(file, "op", "admin"))
    for name, known in (
        ("listed", SecurityConfig(principals_file=file)),
        ("shared", SecurityConfig(admin_token_file=token)),
        ("open", SecurityConfig()),
    ):
        path = tmp_path / f"{name}.jsonl"
        server, double = await start_double(known, call_log=path)
        await submit(server.target, SecurityConfig(token_file=token))
        assert double.calls == 1
        await server.stop(0)
        if name == "listed":
            (line,) = lines(path)
            assert (line["principal"], line["method"], line["request"]) == ("op", "TrainerService/SubmitBatch", {})
        else:
            assert not path.exists()
    assert token.read_text() not in (tmp_path / "listed.jsonl").read_text()


async def test_a_call_that_the_client_gave_up_is_logged_too(tmp_path):
    path = tmp_path / "trainer.jsonl"
    server, double = await start_double(call_log=path)
    async with connect(server.target, SecurityConfig()) as channel:
        call = trainer_pb2_grpc.TrainerServiceStub(channel).SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(run="r1"))
        await asyncio.wait_for(double.entered.wait(), 10)
        call.cancel()
        await asyncio.wait_for(double.cancelled.wait(), 10)
    await server.stop(5)
    assert [(line["principal"], line["code"]) for line in lines(path)] == [("anyone", "CANCELLED")]


async def record_all(log: CallLog, count: int, **fields: str) -> None:
    for number in range(count):
        request = orchestrator_pb2.StopRunRequest(run="runs/r1", reason=f"{number}", **fields)
        log.record("sluice.v1.OrchestratorService/StopRun", request, "here", "OK")
    await log.close()


async def test_values_are_those_of_the_request_and_long_ones_are_cut(tmp_path):
    log = CallLog(tmp_path / "log.jsonl", SecurityConfig())
    requests = {
        "OrchestratorService/SetRun": orchestrator_pb2.SetRunRequest(run="runs/r", values={"trainer.lr": "1e-4"}),
        "OrchestratorService/StopRun": orchestrator_pb2.StopRunRequest(run="runs/r", reason="x" * 10_000),
        "RolloutAdminService/UpdateWeights": rollout_pb2.UpdateWeightsRequest(),
        "RolloutAdminService/Pause": rollout_pb2.PauseRequest(mode="PAUSE_MODE_KEEP", owner="me\n"),
        "RolloutAdminService/AbortRequests": rollout_pb2.AbortRequestsRequest(request_ids=["r" * 255] * 1000),
        "WeightSyncService/CommitVersion": weightsync_pb2.CommitVersionRequest(
            manifest=weightsync_pb2.Manifest(run="runs/r", version={"epoch": 1, "number": 7})
        ),
    }
    for method, request in requests.items():
        log.record(f"sluice.v1.{method}", request, "here", "OK")
    await log.close()
    written = {line["method"]: line["request"] for line in lines(tmp_path / "log.jsonl")}
    assert written == {
        "OrchestratorService/SetRun": {"run": "runs/r", "values": {"trainer.lr": "1e-4"}},
        "OrchestratorService/StopRun": {"run": "runs/r", "reason": "x" * 256 + "..."},
        "RolloutAdminService/UpdateWeights": {},
        "RolloutAdminService/Pause": {"mode": "PAUSE_MODE_KEEP", "owner": "me\n"},
        "RolloutAdminService/AbortRequests": "left out, it is too long",
        "WeightSyncService/CommitVersion": {"run": "runs/r", "version": {"epoch": "1", "number": "7"}},
    }


async def test_old_lines_give_way_in_whole_files(tmp_path):
    log = CallLog(tmp_path / "log.jsonl", SecurityConfig(call_log_files=2))
    log._most_bytes = 10_000
    await record_all(log, 200)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["log.1.jsonl", "log.2.jsonl", "log.jsonl"]
    assert all(path.stat().st_size <= 10_000 for path in tmp_path.iterdir())
    kept = [
        line["request"]["reason"] for name in ("log.2", "log.1", "log") for line in lines(tmp_path / f"{name}.jsonl")
    ]
    assert kept == [str(number) for number in range(200 - len(kept), 200)]


async def test_a_disk_that_takes_nothing_fails_no_call_and_is_told_once(tmp_path):
    (tmp_path / "calls").write_text("a file where the folder would be")
    log = CallLog(tmp_path / "calls/log.jsonl", SecurityConfig())
    with capture_logs() as told:
        await record_all(log, 5)
        (tmp_path / "calls").unlink()
        await record_all(log, 1)
    assert [line["log_level"] for line in told] == ["error", "warning"]
    assert told[1]["lost"] == 5
    assert len(lines(tmp_path / "calls/log.jsonl")) == 1


async def test_a_file_that_cannot_be_moved_is_told_as_what_it_is(tmp_path):
    log = CallLog(tmp_path / "log.jsonl", SecurityConfig(call_log_files=1))
    log._most_bytes = 100
    (tmp_path / "log.1.jsonl").mkdir()
    with capture_logs() as told:
        await record_all(log, 2)
    assert [line["log_level"] for line in told] == ["error"]
    assert "Is a directory" in told[0]["error"]


async def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    log = CallLog(tmp_path / "log.jsonl", SecurityConfig())
    await record_all(log, 1)
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:20]))
    with capture_logs() as told:
        await record_all(log, 1)
    monkeypatch.setattr(os, "write", real_write)
    await record_all(log, 1)
    assert [line["log_level"] for line in told] == ["error"]
    assert len(lines(tmp_path / "log.jsonl")) == 2
