"""Deadlines, errors, retries, limits and names of calls."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from simulated_clock import LIMIT_S
from trainer_double import SERVICE, start_double

from sluice.config import SecurityConfig
from sluice.rpc import MAX_MESSAGE_BYTES, SluiceError, connect
from sluice.rpc.channel import IDEMPOTENT_METHODS, REQUEST_ID
from sluice.v1 import (  # noqa: F401 - the descriptors of all contracts
    common_pb2,
    common_pb2_grpc,
    environment_pb2,
    episode_pb2,
    orchestrator_pb2,
    rollout_pb2,
    session_pb2,
    tokens_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
    weightsync_pb2,
)

STATE = trainer_pb2.GetTrainerStateRequest()


@pytest.fixture
async def served():
    server, double = await start_double()
    async with connect(server.target, SecurityConfig()) as channel:
        yield trainer_pb2_grpc.TrainerServiceStub(channel), double, server
    await server.stop(0)


async def failure(call) -> SluiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return SluiceError.from_rpc(caught.value)


async def test_calls_of_every_arity_get_a_default_deadline(served):
    stub, double, _ = served
    await stub.GetTrainerState(STATE)
    await stub.SubmitBatch(iter([trainer_pb2.SubmitBatchRequest()]))
    assert [message async for message in stub.WatchSteps(trainer_pb2.WatchStepsRequest())] == []
    unary, upload, stream = double.remaining_s
    # The header carries the timeout rounded up.
    assert 0 < unary <= 31
    assert 0 < upload <= 31
    assert 31 < stream <= 25 * 3600


@pytest.mark.slow
async def test_a_given_deadline_is_kept(served):
    stub, double, _ = served
    deadline_s = 1.0
    while True:  # until the server gets the call before its deadline
        error = await failure(stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(), timeout=deadline_s))
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        if double.entered.is_set():
            break
        deadline_s *= 2
    assert double.remaining_s[0] <= deadline_s + 1  # the header carries the timeout rounded up
    await asyncio.wait_for(double.cancelled.wait(), LIMIT_S)


async def test_an_error_arrives_with_everything_that_was_raised(served):
    stub, double, _ = served
    raised = SluiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        "two batches are queued; retry after the delay",
        retry_after_s=1.5,
        violations={"batch.size": "too large", "batch.id": "missing"},
        metadata={"queued": "2"},
    )
    double.failures = [raised]
    error = await failure(stub.GetTrainerState(STATE))
    assert vars(error) == vars(raised)
    assert str(error) == "RESOURCE_EXHAUSTED QUEUE_FULL: two batches are queued; retry after the delay"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SluiceError.invalid_argument("n", "must be positive"), "INVALID_ARGUMENT"),
        (SluiceError.failed_precondition("WRONG_RUN", "m"), "FAILED_PRECONDITION"),
        (SluiceError.not_found("NO_RUN", "m"), "NOT_FOUND"),
        (SluiceError.data_loss("DIGEST", "m"), "DATA_LOSS"),
        (SluiceError.already_exists("OTHER_DIGEST", "m"), "ALREADY_EXISTS"),
        (SluiceError.aborted("RACE", "m"), "ABORTED"),
        (SluiceError.unimplemented("a.B/C"), "UNIMPLEMENTED"),
    ],
)
async def test_each_shorthand_has_its_code_on_the_wire(served, error, code):
    stub, double, _ = served
    double.failures = [error]
    assert vars(await failure(stub.GetTrainerState(STATE))) == vars(error)
    assert error.code.name == code
    error.with_traceback(None)  # the parameter outlives the test, and its frames would keep the server


async def test_a_huge_error_still_arrives_as_itself(served):
    stub, double, _ = served
    violations = {f"field[{index}]": "x" * 100 for index in range(1000)}
    double.failures = [SluiceError(grpc.StatusCode.INVALID_ARGUMENT, "BAD", "m" * 100_000, violations=violations)]
    error = await failure(stub.GetTrainerState(STATE))
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD")
    assert "field[0]" in error.violations


@pytest.mark.parametrize("letter", ["m", "é", "\U0001f600"])
async def test_an_error_that_repeats_what_a_client_sent_fits_into_the_metadata(served, letter):
    stub, double, _ = served
    text = letter * 100_000
    failing = SluiceError(grpc.StatusCode.NOT_FOUND, "BAD", text, violations={text: text}, metadata={"name": text})
    double.failures = [failing]
    error = await failure(stub.GetTrainerState(STATE))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "BAD")
    assert error.message
    assert text.startswith(error.message)
    assert error.metadata["name"]


async def test_an_unexpected_exception_reveals_only_its_type_and_the_request_id(served):
    stub, double, _ = served
    double.failures = [KeyError("a secret")]
    error = await failure(stub.GetTrainerState(STATE, metadata=(("x-request-id", "call-7"),)))
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "UNEXPECTED")
    assert error.metadata == {"request_id": "call-7"}
    assert "call-7" in error.message
    assert "a secret" not in error.message


async def test_an_abort_by_the_servicer_itself_passes_through(served):
    stub, _, _ = served
    error = await failure(stub.BeginEpoch(trainer_pb2.BeginEpochRequest(run="abort")))
    assert (error.code, error.message) == (grpc.StatusCode.NOT_FOUND, "by the servicer itself")


async def test_a_stream_keeps_its_messages_before_an_error(served):
    stub, _, _ = served
    call = stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="fail", from_number=3))
    numbers = [(await call.read()).step.sequence_no for _ in range(3)]
    assert numbers == [0, 1, 2]
    assert (await failure(call.read())).reason == "TOO_OLD"


async def test_a_watch_that_ends_while_its_first_message_is_written_tells_its_client(served):
    stub, double, server = served
    call = stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="large"))
    await double.entered.wait()
    server._calls.end_watches()  # as a drain does, and the age of a connection

    async def end() -> SluiceError:
        while await call.read() is not grpc.aio.EOF:
            pass
        raise AssertionError("it ended without a reason")

    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await asyncio.wait_for(end(), LIMIT_S)
    assert SluiceError.from_rpc(ended.value).reason == "DRAINING"


async def test_a_method_that_the_servicer_leaves_out_is_unimplemented(served):
    stub, _, _ = served
    error = await failure(stub.ListCheckpoints(trainer_pb2.ListCheckpointsRequest()))
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert error.metadata == {"rpc": f"{SERVICE}/ListCheckpoints"}


async def test_a_client_that_leaves_cancels_the_work(served):
    stub, double, _ = served
    call = stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest())
    await asyncio.wait_for(double.entered.wait(), LIMIT_S)
    call.cancel()
    await asyncio.wait_for(double.cancelled.wait(), LIMIT_S)


async def test_a_client_that_leaves_a_stream_ends_its_generator(served):
    stub, double, _ = served
    call = stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="wait", from_number=1))
    await call.read()
    call.cancel()
    await asyncio.wait_for(double.cancelled.wait(), LIMIT_S)


async def test_an_idempotent_call_is_retried_while_the_server_is_unavailable(served):
    stub, double, _ = served
    double.failures = [SluiceError.unavailable("LOADING", "m"), SluiceError.unavailable("LOADING", "m")]
    await stub.GetTrainerState(STATE)
    assert double.calls == 3


async def test_a_call_that_is_not_idempotent_is_made_once(served):
    stub, double, _ = served
    double.failures = [SluiceError.unavailable("LOADING", "m")]
    error = await failure(stub.SubmitBatch(iter([trainer_pb2.SubmitBatchRequest()])))
    assert (error.reason, double.calls) == ("LOADING", 1)


async def test_only_unavailable_is_retried(served):
    stub, double, _ = served
    double.failures = [SluiceError.resource_exhausted("FULL", "m", 0.1)]
    assert (await failure(stub.GetTrainerState(STATE))).reason == "FULL"
    assert double.calls == 1


def test_every_idempotent_method_is_a_unary_request_of_the_contracts():
    pool = descriptor_pool.Default()
    for service, methods in IDEMPOTENT_METHODS.items():
        if service.startswith("sluice."):
            found = pool.FindServiceByName(service).methods_by_name
            for method in methods:
                assert not found[method].client_streaming
                assert not found[method].server_streaming


async def test_calls_beyond_the_limit_are_refused_with_a_retry_delay():
    server, double = await start_double(max_concurrent_rpcs=1)
    async with connect(server.target, SecurityConfig()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        first = stub.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest())
        await asyncio.wait_for(double.entered.wait(), LIMIT_S)
        error = await failure(stub.GetTrainerState(STATE))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_RPCS")
        assert error.retry_after_s == 1.0
        double.release.set()
        await first
        await stub.GetTrainerState(STATE)
    await server.stop(0)


async def test_calls_that_wait_take_no_place_of_those_that_work():
    server, _ = await start_double(max_concurrent_rpcs=1, max_waiting_rpcs=2)
    async with connect(server.target, SecurityConfig()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        waiting = [stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="wait", from_number=1)) for _ in range(2)]
        for each in waiting:
            await each.read()
        await stub.GetTrainerState(STATE)
        error = await failure(stub.WatchSteps(trainer_pb2.WatchStepsRequest(run="wait")).read())
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_RPCS")
        assert error.retry_after_s == 1.0
        assert "server.max_waiting_rpcs" in error.message
        info = await common_pb2_grpc.ServerInfoServiceStub(channel).GetServerInfo(common_pb2.GetServerInfoRequest())
        assert (info.max_concurrent_rpcs, info.max_waiting_rpcs) == (1, 2)
        assert server.calls_left() == {}, "a drain ends them, and waits for none"
        for each in waiting:
            each.cancel()
    await server.stop(0)


async def test_who_needs_no_principal_cannot_fill_the_server_either():
    server, _ = await start_double(max_concurrent_rpcs=1)
    async with connect(server.target, SecurityConfig()) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        first = health.Watch(health_pb2.HealthCheckRequest())
        await first.read()
        error = await failure(health.Check(health_pb2.HealthCheckRequest()))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_RPCS")
        await trainer_pb2_grpc.TrainerServiceStub(channel).GetTrainerState(STATE)
        first.cancel()
    await server.stop(0)


async def test_a_message_of_the_full_size_passes_and_a_larger_one_does_not(served):
    stub, _, _ = served
    full = trainer_pb2.GetTrainerStateRequest(run="x" * MAX_MESSAGE_BYTES)
    assert len((await stub.GetTrainerState(full)).last_error) == MAX_MESSAGE_BYTES
    larger = trainer_pb2.GetTrainerStateRequest(run="x" * (MAX_MESSAGE_BYTES + (1 << 17)))
    refusal = await failure(stub.GetTrainerState(larger))  # gRPC's own RESOURCE_EXHAUSTED would mean "later"
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MESSAGE_TOO_LARGE")


async def test_a_call_has_an_id_that_follows_it_through_the_services(served):
    stub, double, _ = served
    await stub.GetTrainerState(STATE)
    await stub.GetTrainerState(STATE, metadata=(("x-request-id", "mine"),))
    serving = REQUEST_ID.set("of the call being served")
    await stub.GetTrainerState(STATE)
    REQUEST_ID.reset(serving)
    made_up, given, inherited = (metadata["x-request-id"] for metadata in double.metadata)
    assert len(made_up) == 32
    assert (given, inherited) == ("mine", "of the call being served")


async def test_calls_go_round_robin_over_the_addresses_of_a_name():
    first, one = await start_double()
    second, two = await start_double()
    async with connect(f"ipv4:{first.target},{second.target}", SecurityConfig()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        async with asyncio.timeout(LIMIT_S):
            while not (one.calls and two.calls):
                await stub.GetTrainerState(STATE)
        before = one.calls, two.calls
        for _ in range(10):
            await stub.GetTrainerState(STATE)
        assert (one.calls, two.calls) == (before[0] + 5, before[1] + 5)
    await first.stop(0)
    await second.stop(0)


async def test_a_server_that_is_not_there_is_unavailable_with_a_hint():
    server, _ = await start_double()
    await server.stop(0)
    async with connect(server.target, SecurityConfig()) as channel:
        call = trainer_pb2_grpc.TrainerServiceStub(channel).SubmitBatch(iter([trainer_pb2.SubmitBatchRequest()]))
        error = await failure(call)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE")
