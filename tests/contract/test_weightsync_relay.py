"""Relays: what they give out, what they refuse, and what they do while upstream is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import torch
from relay_stack import Engine, Link, Node, linked, listing, push, running, sources
from safetensors.torch import load_file
from simulated_clock import SimulatedClock
from weightsync_stack import RESOURCE, RUN, equal_bits, error_of, eventually, weights

from sluice.config import ConfigError, SecurityConfig
from sluice.host_files import host_id
from sluice.rpc import connect
from sluice.rpc.principals import add_token
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.publisher import AdapterPublisher, WeightPublisher

pytestmark = pytest.mark.slow

TIMEOUT_S = 60.0
LEASE_S = 60.0
STEP_S = 0.2
"""Simulated seconds between two looks of a test that waits for somebody's next attempt."""


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest_asyncio.fixture
async def root(tmp_path: Path, clock: SimulatedClock) -> AsyncIterator[Node]:
    async with running(Node(tmp_path / "root", clock=clock, lease_s=LEASE_S)) as node:
        yield node


@pytest_asyncio.fixture
async def link(root: Node) -> AsyncIterator[Link]:
    async with linked(root.target) as opened:
        yield opened


@pytest_asyncio.fixture
async def relay(root: Node, link: Link, tmp_path: Path) -> AsyncIterator[Node]:
    async with running(Node(tmp_path / "relay", upstream=link.address, clock=root.clock, lease_s=LEASE_S)) as node:
        yield node


def large(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {f"layer.{index}": torch.randn(1 << 18, generator=random) for index in range(8)}


async def test_a_relay_gives_out_what_upstream_has(root: Node, relay: Node, tmp_path: Path) -> None:
    await push(root, Version(1, 1), weights(1))
    engine = Engine("replica")
    async with engine.receiving(relay.target, tmp_path / "shm"):
        await eventually(lambda: engine.version == Version(1, 1))
        await push(root, Version(1, 2), weights(2))
        await eventually(lambda: engine.version == Version(1, 2))
    assert equal_bits(engine.tensors, weights(2))
    assert equal_bits(load_file(relay.directory / "v1.2" / "model.safetensors"), weights(2))
    ours, theirs = await listing(root), await listing(relay)
    assert [each.digest for each in ours.versions] == [each.digest for each in theirs.versions]


async def test_a_relay_changes_no_version(root: Node, relay: Node) -> None:
    await push(root, Version(1, 1), weights(1))
    async with connect(relay.target, SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
        manifest = pb.Manifest(run=RESOURCE, version=Version(1, 2).to_proto(), kind=pb.VERSION_KIND_ANCHOR)
        for call in (
            stub.PushWeights(iter([pb.PushWeightsRequest(header=pb.PushHeader(run=RESOURCE))]), timeout=TIMEOUT_S),
            stub.CommitVersion(pb.CommitVersionRequest(manifest=manifest), timeout=TIMEOUT_S),
            stub.DeleteVersion(
                pb.DeleteVersionRequest(run=RESOURCE, version=Version(1, 1).to_proto()), timeout=TIMEOUT_S
            ),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            error = error_of(caught.value)
            assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "RELAY")
            assert "call 127.0.0.1:" in error.message


async def test_each_byte_crosses_the_link_once(root: Node, link: Link, relay: Node, tmp_path: Path) -> None:
    await eventually(lambda: relay.serving.relay is not None and relay.serving.relay.connected("test-run"))
    before = link.received
    engines = [Engine(f"replica-{index}") for index in range(3)]
    async with (
        engines[0].receiving(relay.target, tmp_path / "shm"),
        engines[1].receiving(relay.target, tmp_path / "shm"),
        engines[2].receiving(relay.target, tmp_path / "shm"),
    ):
        await push(root, Version(1, 1), large(1))
        await eventually(lambda: all(engine.version == Version(1, 1) for engine in engines))
    size = sum(tensor.nbytes for tensor in large(1).values())
    assert size <= link.received - before < size * 1.02


async def test_a_broken_pull_goes_on_where_it_broke(root: Node, link: Link, relay: Node) -> None:
    await eventually(lambda: relay.serving.relay is not None and relay.serving.relay.connected("test-run"))
    tensors = {f"layer.{index}": torch.full((1 << 20,), float(index)) for index in range(16)}
    size = sum(tensor.nbytes for tensor in tensors.values())
    link.stall_at = link.received + size // 2  # or it may be over before it is cut
    await push(root, Version(1, 1), tensors)
    run = await relay.serving.runs.open(RESOURCE)
    await eventually(lambda: any(upload.stored > size // 4 for upload in run.uploads.values()))
    link.cut()
    link.stall_at = None
    await eventually(lambda: relay.newest() == Version(1, 1))
    assert equal_bits(load_file(relay.directory / "v1.1" / "model.safetensors"), tensors)
    assert link.received < size * 1.6


async def test_a_relay_serves_on_without_upstream_and_catches_up(
    root: Node, relay: Node, clock: SimulatedClock, tmp_path: Path
) -> None:
    await push(root, Version(1, 1), weights(1))
    await eventually(lambda: relay.newest() == Version(1, 1))
    await root.stop()
    engine = Engine("replica")
    async with engine.receiving(relay.target, tmp_path / "shm"):
        await eventually(lambda: engine.version == Version(1, 1))
        await root.start()
        await push(root, Version(1, 2), weights(2))
        await clock.until(lambda: engine.version == Version(1, 2), step_s=STEP_S)
    assert equal_bits(engine.tensors, weights(2))


async def test_a_restarted_relay_has_what_it_had(root: Node, link: Link, relay: Node) -> None:
    await push(root, Version(1, 1), large(1))
    await eventually(lambda: relay.newest() == Version(1, 1))
    await relay.stop()
    before = link.received
    await relay.start()
    await eventually(lambda: relay.serving.relay is not None and relay.serving.relay.connected("test-run"))
    assert relay.newest() == Version(1, 1)
    await push(root, Version(1, 2), weights(2))
    await eventually(lambda: relay.newest() == Version(1, 2))
    assert link.received - before < sum(tensor.nbytes for tensor in large(1).values())


async def test_upstream_hears_of_the_relay_and_of_its_replicas(
    root: Node, relay: Node, clock: SimulatedClock, tmp_path: Path
) -> None:
    await push(root, Version(1, 1), weights(1))
    engine = Engine("replica")
    async with engine.receiving(relay.target, tmp_path / "shm"):
        run = await root.serving.runs.open(RESOURCE)
        lease = lambda name: run.ledger.replicas(root.clock()).get(name)  # noqa: E731
        own = f"relay:{relay.target}"
        await eventually(lambda: (found := lease("replica")) is not None and found.serving == Version(1, 1))
        await eventually(lambda: (found := lease(own)) is not None and found.serving == Version(1, 1))
        rows = {row.replica: row for row in (await listing(root)).replicas}
        assert rows[own].relay_address == relay.target
        assert not rows["replica"].relay_address
        await clock.advance(LEASE_S / 3)  # each report renews the lease, and names the number of watchers
        await eventually(lambda: [each.watchers for each in run.describe_relays(root.clock())] == [1])
        here, there = await sources(root)
    assert (here.address, here.host, here.watchers) == ("", host_id(), 1)
    assert (there.address, there.host, there.watchers) == (relay.target, host_id(), 1)
    assert Version.from_proto(there.newest) == Version(1, 1)


async def test_what_a_replica_behind_a_relay_serves_stays_at_the_root(root: Node, relay: Node) -> None:
    await push(root, Version(1, 1), weights(1))
    await push(root, Version(1, 2), weights(2))
    async with connect(relay.target, SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        response = await stub.ReportVersion(
            pb.ReportVersionRequest(
                run=RESOURCE, replica="far", version=Version(1, 1).to_proto(), phase=pb.REPLICA_PHASE_SERVING
            ),
            timeout=TIMEOUT_S,
        )
    assert response.lease.ToTimedelta().total_seconds() <= LEASE_S
    run = await root.serving.runs.open(RESOURCE)
    await eventually(lambda: "far" in run.ledger.needed_by(Version(1, 1), root.clock()))


async def test_a_relay_of_a_relay(root: Node, relay: Node, tmp_path: Path) -> None:
    async with running(Node(tmp_path / "far", upstream=relay.target, clock=root.clock, lease_s=LEASE_S)) as far:
        await push(root, Version(1, 1), weights(1))
        await eventually(lambda: far.newest() == Version(1, 1))
        run = await root.serving.runs.open(RESOURCE)
        await eventually(lambda: f"relay:{far.target}" in run.ledger.replicas(root.clock()))
        assert {source.address for source in await sources(root)} == {"", relay.target, far.target}


async def test_a_relay_whose_disk_damaged_a_delta_begins_anew(tmp_path: Path, clock: SimulatedClock) -> None:
    delay_s = 60.0
    async with (
        running(Node(tmp_path / "root", clock=clock, dense_delay_s=0.0, lease_s=LEASE_S)) as root,
        running(
            Node(tmp_path / "relay", upstream=root.target, clock=clock, dense_delay_s=delay_s, lease_s=LEASE_S)
        ) as relay,
        connect(root.target, SecurityConfig()) as channel,
    ):
        publisher = WeightPublisher(channel, RUN)
        run = await relay.serving.runs.open(RESOURCE)

        async def publish(number: int) -> dict[str, torch.Tensor]:
            tensors = large(1)
            tensors["layer.0"][:number] += 1
            update = await asyncio.to_thread(publisher.encode, Version(1, number), tensors)
            await publisher.publish(update, deadline_s=TIMEOUT_S)
            return tensors

        for number in (1, 2):
            await publish(number)
            await eventually(lambda: relay.newest() == Version(1, number))  # noqa: B023 - awaited in this round
        delta = next(relay.directory.glob(".deltas/v1.2/*.safetensors"))
        content = bytearray(delta.read_bytes())
        content[-1] ^= 1
        delta.write_bytes(content)
        await clock.until(lambda: run.ledger.committed[Version(1, 2)].damaged, step_s=delay_s)
        tensors = await publish(3)
        await clock.until(lambda: relay.newest() == Version(1, 3), step_s=STEP_S)
        assert equal_bits(load_file(relay.directory / "v1.3" / "model.safetensors"), tensors)


async def test_an_adapter_comes_with_the_weights_that_it_belongs_to(root: Node, tmp_path: Path) -> None:
    adapter = {"model.layers.0.q_proj.lora_A.weight": torch.randn(4, 16)}
    await push(root, Version(1, 1), weights(1))
    async with connect(root.target, SecurityConfig()) as channel:
        publisher = AdapterPublisher(channel, RUN, base=Version(1, 1))
        await publisher.push(Version(1, 2), adapter, {"peft_type": "LORA", "r": 4}, deadline_s=TIMEOUT_S)
    async with running(Node(tmp_path / "late", upstream=root.target, clock=root.clock, lease_s=LEASE_S)) as late:
        await eventually(lambda: late.newest() == Version(1, 2))
        assert equal_bits(load_file(late.directory / "v1.1" / "model.safetensors"), weights(1))
        assert equal_bits(load_file(late.directory / "v1.2" / "adapter_model.safetensors"), adapter)


async def test_a_cycle_of_relays_is_refused(tmp_path: Path, clock: SimulatedClock) -> None:
    near = Node(tmp_path / "near", upstream="127.0.0.1:1", clock=clock, lease_s=LEASE_S)
    await near.start()
    far = Node(tmp_path / "far", upstream=near.target, clock=clock, lease_s=LEASE_S)
    await far.start()
    await near.stop()
    near.settings["upstream"] = far.target  # the operator's mistake
    await near.start()
    # Whichever gets its own report back first; the other one then may or may not.
    await clock.until(lambda: near.serving.failed.is_set() or far.serving.failed.is_set(), step_s=STEP_S)
    reasons = []
    for node in (near, far):
        try:
            await node.stop()
        except ConfigError as error:
            reasons.append(str(error))
    assert reasons
    assert all("takes its versions from this relay" in reason for reason in reasons)


async def test_a_replica_cannot_call_itself_a_relay(tmp_path: Path) -> None:
    file = tmp_path / "principals.toml"
    sent = {}
    for role in ("agent", "replica", "trainer"):
        (tmp_path / f"{role}.token").write_text(add_token(file, role, role))
        sent[role] = SecurityConfig(token_file=tmp_path / f"{role}.token")
    request = pb.ReportVersionRequest(
        run=RESOURCE, replica="r", version=Version(1, 1).to_proto(), phase=pb.REPLICA_PHASE_SERVING
    )
    taking_its_name = pb.ReportVersionRequest(
        run=RESOURCE, replica="relay:a:1", version=request.version, phase=request.phase
    )
    announcing = pb.ReportVersionRequest(relay_address="evil.example:1")
    announcing.MergeFrom(request)

    async def report(role: str, what: pb.ReportVersionRequest) -> str:
        async with connect(root.target, sent[role]) as channel:
            try:
                await weightsync_pb2_grpc.WeightDeliveryServiceStub(channel).ReportVersion(what, timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.code().name
        return "OK"

    async with running(Node(tmp_path / "root", security=SecurityConfig(principals_file=file))) as root:
        assert await report("agent", request) == "PERMISSION_DENIED"
        assert await report("replica", request) == "OK"
        assert [await report("replica", wrong) for wrong in (taking_its_name, announcing)] == ["PERMISSION_DENIED"] * 2
        assert await report("trainer", announcing) == "OK"
        run = await root.serving.runs.open(RESOURCE)
        assert [each.address for each in run.describe_relays(root.clock())] == ["evil.example:1"]


async def test_a_relay_takes_up_runs_that_upstream_has_and_no_others(root: Node, relay: Node) -> None:
    async with connect(root.target, SecurityConfig()) as channel:
        await WeightPublisher(channel, "other").update(Version(1, 1), weights(1), deadline_s=TIMEOUT_S)
    async with connect(relay.target, SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListSources(pb.ListSourcesRequest(run="runs/typo"), timeout=TIMEOUT_S)
        assert (error_of(caught.value).code, error_of(caught.value).reason) == (
            grpc.StatusCode.NOT_FOUND,
            "NO_SUCH_RUN",
        )
        async for announced in stub.WatchVersions(pb.WatchVersionsRequest(run="runs/other"), timeout=TIMEOUT_S):
            if announced.HasField("manifest"):
                break
    assert sorted(run.name for run in relay.serving.runs) == ["other", RUN]
    assert sorted(run.name for run in root.serving.runs) == ["other", RUN]


async def test_a_relay_whose_upstream_is_away_cannot_tell_whether_a_run_exists(relay: Node, link: Link) -> None:
    await link.close()
    async with connect(relay.target, SecurityConfig()) as channel:
        stub = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListSources(pb.ListSourcesRequest(run="runs/typo"), timeout=TIMEOUT_S)
    assert caught.value.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
