"""Two sites with a real S3 server (moto) between them, over links that count bytes and break. See docs/object-store.md.

`make .venv-ecosystem-objectstore/.installed && .venv/bin/pytest -s tests/ecosystem/test_object_store.py` prints what was moved.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from relay_stack import Engine, Link, Node, linked, listing
from weightsync_stack import RESOURCE, RUN, equal_bits, eventually

from sluice.config import SecurityConfig
from sluice.rpc import connect
from sluice.rpc.server import free_ports
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.metrics import MIRROR_DAMAGED
from weightsync.mirror.bucket import Bucket
from weightsync.publisher import WeightPublisher

pytestmark = [pytest.mark.ecosystem, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
PROGRAM = "from sluice.cli.main import main; raise SystemExit(main())"
MIB = 1 << 20
START_S = 60.0
SECRET = "not-to-be-seen-in-any-log"
FAST = {"heartbeat_s": 0.2, "mirror_poll_s": 0.1, "dense_delay_s": 0.0, "mirror_deadline_s": 20.0}


@dataclass(frozen=True)
class S3:
    """A running server with a bucket of its own for each user of this class."""

    address: str
    bucket: str

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/weights"

    def environment(self, endpoint: str | None = None, key: tuple[str, str] = ("writer", SECRET)) -> dict[str, str]:
        return {
            "AWS_ENDPOINT": f"http://{endpoint or self.address}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": key[0],
            "AWS_SECRET_ACCESS_KEY": key[1],
        }

    async def objects(self) -> dict[str, int]:
        with environment(self.environment()):
            return {each.name: each.size for each in await Bucket.open(self.url, 30).list("")}

    async def overwrite(self, name: str, change) -> None:
        with environment(self.environment()):
            bucket = Bucket.open(self.url, 30)
        await bucket.write(name, change(bytes(await bucket.read(name, 1 << 30))))


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Change the environment while the block runs."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def moto(log: Path) -> Iterator[str]:
    """Run the server; yield its address."""
    python = ROOT / ".venv-ecosystem-objectstore/bin/python"
    if not python.exists():
        pytest.skip(f"{python.parent.parent.name} is not there: run `make install-ecosystem`")
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [str(python), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=output,
            stderr=output,
            env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "1000000000"},
        )
        try:
            ends = time.monotonic() + START_S
            while True:
                try:
                    httpx.get(f"http://{address}/moto-api/", timeout=5)
                    break
                except httpx.HTTPError:
                    assert server.poll() is None, log.read_text()
                    assert time.monotonic() < ends, "moto does not answer"
                    time.sleep(0.05)
            yield address
        finally:
            server.kill()
            server.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with moto(tmp_path_factory.mktemp("moto") / "log") as address:
        yield address


def make_bucket(address: str, name: str) -> S3:
    bucket = re.sub("[^a-z0-9]", "-", name.lower())[:60].strip("-")
    httpx.put(f"http://{address}/{bucket}", timeout=10).raise_for_status()
    return S3(address, bucket)


@pytest.fixture
def s3(server: str, request: pytest.FixtureRequest) -> S3:
    return make_bucket(server, request.node.name.removeprefix("test_"))


def model(number: int, mib: int = 32) -> dict[str, torch.Tensor]:
    """Weights in bf16; each version differs from the one before in one value of two hundred, as after a small step."""
    tensors = {}
    for index in range(mib):
        random = torch.Generator().manual_seed(index)
        bits = torch.randn(MIB // 2, generator=random).bfloat16().view(torch.int16)
        places = torch.randint(0, MIB // 2, (number, MIB // 400), generator=random)
        bits.index_put_((places.flatten(),), torch.ones(places.numel(), dtype=torch.int16), accumulate=True)
        tensors[f"layer.{index}"] = bits.view(torch.bfloat16)
    return tensors


@asynccontextmanager
async def publishing(target: str, encoding: str = "auto") -> AsyncIterator[WeightPublisher]:
    async with connect(target, SecurityConfig()) as channel:
        yield WeightPublisher(channel, RUN, encoding=encoding)  # type: ignore[arg-type]


async def publish(publisher: WeightPublisher, version: Version, tensors: Mapping[str, torch.Tensor]) -> None:
    update = await asyncio.to_thread(publisher.encode, version, dict(tensors))
    await publisher.publish(update, deadline_s=60)


@asynccontextmanager
async def site(node: Node, variables: Mapping[str, str]) -> AsyncIterator[Node]:
    """Run a service of this process with credentials of its own."""
    with environment(variables):
        await node.start()
    try:
        yield node
    finally:
        await node.stop()


def mirror_of(node: Node) -> pb.MirrorState:
    runs = node.serving.runs
    return runs.describe_mirrors(next(iter(runs)))[0]


class SiteProcess:
    """`sluice weightsync` with settings and an environment, on one port and directory."""

    def __init__(self, directory: Path, variables: Mapping[str, str], *settings: str) -> None:
        (port,) = free_ports(1)
        self.target = f"127.0.0.1:{port}"
        self.directory = directory / RUN / "weights"
        self.log = directory / "log"
        self._variables = variables
        self._arguments = (
            *("--run", RUN, "--output-dir", str(directory), "--server.port", str(port), "--server.drain-s", "0"),
            *("--min-free-bytes", "0", "--keep", "8", "--mirror-poll-s", "0.1", "--heartbeat-s", "0.2", *settings),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.subprocess.Process]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, "weightsync", *self._arguments),
            stderr=self.log.open("ab"),
            stdout=asyncio.subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._variables},
        )
        try:
            async with connect(self.target, SecurityConfig()) as channel, asyncio.timeout(START_S):
                await channel.channel_ready()
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def listing(self) -> pb.ListVersionsResponse:
        async with connect(self.target, SecurityConfig()) as channel:
            stub = weightsync_pb2_grpc.WeightSyncServiceStub(channel)
            return await stub.ListVersions(pb.ListVersionsRequest(run=RESOURCE), timeout=30)

    async def newest(self) -> Version | None:
        return next((Version.from_proto(each.version) for each in (await self.listing()).versions), None)


@asynccontextmanager
async def two_links(s3: S3) -> AsyncIterator[tuple[Link, Link]]:
    async with linked(s3.address) as up, linked(s3.address) as down:
        yield up, down


async def test_two_regions_move_a_dense_version_once_and_then_deltas(s3: S3, tmp_path: Path) -> None:
    rows = []
    engine = Engine("replica of the far region")
    async with two_links(s3) as (up, down):
        home = SiteProcess(tmp_path / "home", s3.environment(up.address), "--mirror", s3.url)
        far = SiteProcess(tmp_path / "far", s3.environment(down.address), "--upstream", s3.url)
        async with (
            home.running(),
            far.running(),
            engine.receiving(far.target, tmp_path / "shm"),
            publishing(home.target) as publisher,
        ):
            up.reset(), down.reset()
            for number in range(1, 8):
                lost = number in {4, 5}
                if lost:
                    down.down = True
                    down.cut()
                await publish(publisher, Version(1, number), model(number))
                if not lost:
                    down.down = False
                    await eventually(lambda: engine.version == Version(1, number), 60)  # noqa: B023
                    assert equal_bits(engine.tensors, model(number))
                else:
                    await eventually_async(lambda: mirrored(home, Version(1, number)))  # noqa: B023
                kind = (await home.listing()).versions[0]
                rows.append((number, kind, up.reset()[0], down.reset()[1], lost))
            there = {str(Version.from_proto(each.version)): each.digest for each in (await home.listing()).versions}
            here = {str(Version.from_proto(each.version)): each.digest for each in (await far.listing()).versions}
    assert here.items() <= there.items()
    dense = rows[0][1].dense_bytes
    print(f"\nbytes moved between two regions, {dense:,} bytes of weights")
    print(f"{'version':8}{'form':8}{'to the store':>14}{'from the store':>16}{'of dense':>10}")
    for number, manifest, sent, received, lost in rows:
        form = "dense" if manifest.kind == pb.VERSION_KIND_ANCHOR else "delta"
        note = "  link of the far region lost" if lost else "  caught up" if number == 6 else ""
        print(f"{f'1.{number}':8}{form:8}{sent:14,}{received:16,}{sent / dense:10.2%}{note}")
        assert manifest.size_bytes <= sent < manifest.size_bytes + MIB, "sent once, and little beside it"
    received = {number: got for number, _, _, got, _ in rows}
    sizes = {number: manifest.size_bytes for number, manifest, *_ in rows}
    assert dense <= received[1] < dense + MIB
    assert received[4] + received[5] < MIB
    assert sizes[4] + sizes[5] + sizes[6] <= received[6] < sizes[4] + sizes[5] + sizes[6] + MIB, "by deltas alone"
    assert sum(sizes[number] for number in range(2, 8)) < dense / 3
    for process in (home, far):
        assert SECRET not in process.log.read_text()


async def eventually_async(condition, deadline_s: float = 60.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not await condition():  # noqa: ASYNC110 - any condition, of any process
            await asyncio.sleep(0.02)


async def mirrored(home: SiteProcess, version: Version) -> bool:
    (state,) = (await home.listing()).mirrors
    return Version.from_proto(state.newest) == version


async def test_an_upload_that_a_kill_interrupted_goes_on_with_the_parts_that_lack(s3: S3, tmp_path: Path) -> None:
    async with linked(s3.address) as up:
        home = SiteProcess(tmp_path / "home", s3.environment(up.address), "--mirror", s3.url)
        async with home.running() as process:
            up.stall_at = 84 * MIB  # four parts of 16 MiB are on their way at most: one at least is through
            async with publishing(home.target) as publisher:
                await publish(publisher, Version(1, 1), model(1, 96))
            await eventually_async(lambda: is_stored(s3, 16 * MIB))
            await eventually(lambda: up.stalls, 60)
            process.kill()
            await process.wait()
        up.cut()
        kept = sum((await s3.objects()).values())
        up.stall_at = None
        up.reset()
        async with home.running():
            await eventually_async(lambda: mirrored(home, Version(1, 1)))
            size = (await home.listing()).versions[0].size_bytes
        again = up.reset()[0]
    print(f"\nupload of {size:,} bytes killed with {kept:,} in the store: {again:,} sent after the restart")
    assert kept < size
    assert again < size - kept + MIB, "nothing that is whole is sent again"


async def is_stored(s3: S3, size: int) -> bool:
    return sum((await s3.objects()).values()) >= size


async def test_a_download_that_a_kill_interrupted_goes_on_with_the_parts_that_lack(s3: S3, tmp_path: Path) -> None:
    engine = Engine("replica")
    async with two_links(s3) as (up, down):
        home = SiteProcess(tmp_path / "home", s3.environment(up.address), "--mirror", s3.url)
        far = SiteProcess(tmp_path / "far", s3.environment(down.address), "--upstream", s3.url)
        async with home.running(), publishing(home.target) as publisher:
            await publish(publisher, Version(1, 1), model(1, 96))
            await eventually_async(lambda: mirrored(home, Version(1, 1)))
            size = (await home.listing()).versions[0].size_bytes
        down.stall_at = 80 * MIB
        async with far.running() as process:
            await eventually(lambda: down.stalls and incoming(far) >= 16 * MIB, 60)
            process.kill()
            await process.wait()
        kept = incoming(far) // (16 * MIB) * (16 * MIB)
        down.cut()
        down.stall_at = None
        down.reset()
        async with far.running(), engine.receiving(far.target, tmp_path / "shm"):
            await eventually(lambda: engine.version == Version(1, 1), 60)
            assert equal_bits(engine.tensors, model(1, 96))
        again = down.reset()[1]
    print(f"\ndownload of {size:,} bytes killed with {kept:,} in whole parts: {again:,} received after the restart")
    assert again < size - kept + MIB
    assert not list(far.directory.glob(".interrupted*"))


def incoming(far: SiteProcess) -> int:
    return sum(path.stat().st_size for path in far.directory.glob(".incoming/*/*") if path.is_file())


async def test_links_that_break_in_the_middle_repeat_only_the_parts_in_flight(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weightsync.app.PART_BYTES", MIB)
    async with two_links(s3) as (up, down):
        home = Node(tmp_path / "home", mirror=s3.url, **FAST)
        far = Node(tmp_path / "far", upstream=s3.url, **FAST)
        async with site(home, s3.environment(up.address)), publishing(home.target) as publisher:
            up.stall_at = 12 * MIB
            await publish(publisher, Version(1, 1), model(1))
            await eventually(lambda: up.stalls, 60)
            up.down, up.stall_at = True, None
            up.cut()
            await eventually(lambda: "cannot" in mirror_of(home).error, 60)
            assert mirror_of(home).versions_behind == 1
            up.down = False
            await eventually(lambda: mirror_of(home).versions_behind == 0, 60)
            size = (await listing(home)).versions[0].size_bytes
            assert up.sent < size + 5 * MIB
            async with site(far, s3.environment(down.address)):
                down.stall_at = 12 * MIB
                await eventually(lambda: down.stalls, 60)
                down.down, down.stall_at = True, None
                down.cut()
                await eventually(lambda: bool(mirror_of(far).error), 60)
                down.down = False
                await eventually(lambda: far.newest() == Version(1, 1), 60)
                assert down.received < size + 5 * MIB


async def test_a_part_that_is_damaged_on_the_way_is_fetched_again(s3: S3, tmp_path: Path) -> None:
    damaged = MIRROR_DAMAGED.labels(RUN)._value.get
    async with (
        linked(s3.address) as down,
        site(Node(tmp_path / "home", mirror=s3.url, **FAST), s3.environment()) as home,
        publishing(home.target) as publisher,
    ):
        await publish(publisher, Version(1, 1), model(1))
        await eventually(lambda: mirror_of(home).versions_behind == 0, 60)
        before, down.damage = damaged(), 1
        async with site(Node(tmp_path / "far", upstream=s3.url, **FAST), s3.environment(down.address)) as far:
            await eventually(lambda: far.newest() == Version(1, 1), 60)
            ours, theirs = await listing(home), await listing(far)
    assert damaged() - before >= 1
    assert ours.versions[0].digest == theirs.versions[0].digest


async def test_an_object_that_is_damaged_in_the_store_is_never_served(s3: S3, tmp_path: Path, capfd) -> None:
    engine = Engine("replica")
    async with (
        site(Node(tmp_path / "home", mirror=s3.url, anchor_every=2, **FAST), s3.environment()) as home,
        site(Node(tmp_path / "far", upstream=s3.url, **FAST), s3.environment()) as far,
        engine.receiving(far.target, tmp_path / "shm"),
        publishing(home.target) as publisher,
    ):
        await publish(publisher, Version(1, 1), model(1))
        await eventually(lambda: engine.version == Version(1, 1), 60)
        await far.stop()
        await publish(publisher, Version(1, 2), model(2))
        await eventually(lambda: mirror_of(home).newest == Version(1, 2).to_proto(), 60)
        (name,) = [name for name in await s3.objects() if "/parts/" in name and ".delta/" in name]
        await s3.overwrite(name, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
        with environment(s3.environment()):
            await far.start()
        await eventually(lambda: "damaged there: delta 1.2" in mirror_of(far).error, 60)
        assert far.newest() == Version(1, 1)
        await publish(publisher, Version(1, 3), model(3))
        await eventually(lambda: engine.version == Version(1, 3), 60)  # by the dense form that two deltas brought
        assert equal_bits(engine.tensors, model(3))
    said = capfd.readouterr().out
    print(next(line for line in said.splitlines() if "cannot be used" in line))
    assert "remove that object from the store" in said
    assert name in said


async def test_a_reader_in_the_middle_of_a_pruned_version_begins_again(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    monkeypatch.setattr("weightsync.app.PART_BYTES", MIB)
    async with (
        linked(s3.address) as down,
        site(Node(tmp_path / "home", mirror=s3.url, mirror_keep=1, **FAST), s3.environment()) as home,
        publishing(home.target, "dense") as publisher,
    ):
        await publish(publisher, Version(1, 1), model(1))
        await eventually(lambda: mirror_of(home).versions_behind == 0, 60)
        down.stall_at = 12 * MIB
        async with site(Node(tmp_path / "far", upstream=s3.url, **FAST), s3.environment(down.address)) as far:
            await eventually(lambda: down.stalls, 60)
            await publish(publisher, Version(1, 2), model(2))
            await eventually_async(lambda: only_newest(s3, 2))
            down.stall_at = None
            await eventually(lambda: far.newest() == Version(1, 2), 60)
            assert Version(1, 1) not in next(iter(far.serving.runs)).versions
    assert "was pruned from" in capfd.readouterr().out


async def only_newest(s3: S3, number: int) -> bool:
    names = await s3.objects()
    return bool(names) and all(f".{number:020d}." in name for name in names)


async def test_of_two_writers_that_create_a_manifest_one_wins(s3: S3) -> None:
    with environment(s3.environment()):
        writers = [Bucket.open(s3.url, 30) for _ in range(8)]
    won = await asyncio.gather(*(writer.create("r/manifests/m", bytes([n])) for n, writer in enumerate(writers)))
    assert sum(won) == 1
    assert bytes(await writers[0].read("r/manifests/m", 10)) == bytes([won.index(True)])


async def test_two_services_that_mirror_different_weights_under_one_name_do_not_mix_them(
    s3: S3, tmp_path: Path
) -> None:
    nodes = [Node(tmp_path / str(index), mirror=s3.url, **FAST) for index in (1, 2)]
    async with (
        site(nodes[0], s3.environment()),
        site(nodes[1], s3.environment()),
        publishing(nodes[0].target) as one,
        publishing(nodes[1].target) as other,
    ):
        await asyncio.gather(publish(one, Version(1, 1), model(1, 8)), publish(other, Version(1, 1), model(2, 8)))
        states = lambda: [mirror_of(node) for node in nodes]  # noqa: E731
        await eventually(lambda: sum("versions of another run" in state.error for state in states()) == 1, 60)
        winner = next(node for node, state in zip(nodes, states(), strict=True) if not state.error)
        await eventually(lambda: mirror_of(winner).versions_behind == 0, 60)
        async with site(Node(tmp_path / "far", upstream=s3.url, **FAST), s3.environment()) as far:
            await eventually(lambda: far.newest() == Version(1, 1), 60)
            assert (await listing(far)).versions[0].digest == (await listing(winner)).versions[0].digest


async def test_a_region_needs_leave_to_read_and_no_more(tmp_path: Path, capfd) -> None:
    with moto(tmp_path / "moto.log") as address:
        s3 = make_bucket(address, "readonly")
        writer = make_user(address, "home", "s3:*")
        reader = make_user(address, "far", "s3:GetObject", "s3:ListBucket")
        check_who_may_do_what(address)
        async with (
            site(Node(tmp_path / "home", mirror=s3.url, **FAST), s3.environment(key=writer)) as home,
            site(Node(tmp_path / "far", upstream=s3.url, **FAST), s3.environment(key=reader)) as far,
            site(Node(tmp_path / "wrong", mirror=s3.url, **FAST), s3.environment(key=reader)) as wrong,
            publishing(home.target) as publisher,
            publishing(wrong.target) as intruder,
        ):
            for number in (1, 2):
                await publish(publisher, Version(1, number), model(number, 4))
                await eventually(lambda: far.newest() == Version(1, number), 60)  # noqa: B023
            await publish(intruder, Version(2, 1), model(1, 4))
            await eventually(lambda: "AccessDenied" in mirror_of(wrong).error, 60)
            message = mirror_of(wrong).error
            await publish(intruder, Version(2, 2), model(2, 4))  # commits do not mind
    print(f"\n{message}")
    assert "check the credentials in the environment" in message
    said = capfd.readouterr()
    for key in (*writer, *reader):
        assert key not in said.out + said.err


def check_who_may_do_what(address: str) -> None:
    """Let the server refuse what a user may not do, from now on."""
    reply = httpx.post(f"http://{address}/moto-api/reset-auth", content=b"0", headers={"content-type": "text/plain"})
    reply.raise_for_status()


def make_user(address: str, name: str, *actions: str) -> tuple[str, str]:
    """Make a user of the server who may take some actions; return its key."""
    statement = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam = "AWS4-HMAC-SHA256 Credential=root/20260101/us-east-1/iam/aws4_request, SignedHeaders=host, Signature=0"

    def ask(action: str, **fields: str) -> str:
        form = {"Action": action, "Version": "2010-05-08", "UserName": name, **fields}
        return httpx.post(f"http://{address}/", data=form, headers={"authorization": iam}).raise_for_status().text

    ask("CreateUser")
    ask("PutUserPolicy", PolicyName="p", PolicyDocument=policy)
    answer = ask("CreateAccessKey")
    found = [re.search(rf"<{tag}>(.*?)</{tag}>", answer) for tag in ("AccessKeyId", "SecretAccessKey")]
    assert found[0] is not None
    assert found[1] is not None
    return found[0][1], found[1][1]
