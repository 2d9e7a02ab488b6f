"""Which failures of a push are repeated, and how a push is given up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from weightsync_stack import ShardSource, manifest_of, read_source

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import Version
from weightsync.format.manifest import ManifestError
from weightsync.publish.push import Destination, Payload, PushReport, VersionPush
from weightsync.publish.shards import KeptCopy
from weightsync.publisher import Agreement, PolicyPublisher, Update, WeightPublisher
from weightsync.service.upload import Upload, complete_manifest, translated

V1 = Version(1, 1)
DEADLINE_S = 60.0
DONE = PushReport(bytes_sent=1, push_s=0.0, commit_s=0.0, digest="", duplicate=False)

LOST = SluiceError.unavailable("STARTING", "the service starts")
BROKEN = SluiceError(grpc.StatusCode.INTERNAL, "", "the connection broke")
CANCELLED = SluiceError(grpc.StatusCode.CANCELLED, "", "the stream broke")
SUPERSEDED = SluiceError.aborted("SUPERSEDED", "a newer stream pushes this shard")
MISSING = SluiceError.failed_precondition("SHARDS_MISSING", "shards missing")
REFUSED = SluiceError.invalid_argument("manifest", "file and manifest disagree")


class Failing(VersionPush):
    """A push whose attempts fail with the given errors, one after another, and then succeed."""

    def __init__(self, *failures: SluiceError) -> None:
        to = Destination(None, "runs/test", V1, time.monotonic() + DEADLINE_S)
        super().__init__(to, [Payload(pb.Manifest(), None)], None, chunk_bytes=1)
        self._failures: Iterator[SluiceError] = iter(failures)

    async def _attempt(self, payload: Payload, *, resume: bool) -> PushReport:
        if (failure := next(self._failures, None)) is not None:
            raise failure
        return DONE


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.publish.push._FIRST_PAUSE_S", 0.0)


@pytest.mark.parametrize(
    "failures",
    [
        (BROKEN,),
        (LOST, LOST, BROKEN),
        (BROKEN, LOST, BROKEN, MISSING, CANCELLED),
        (SUPERSEDED,),
        (LOST, LOST, MISSING, LOST, LOST),
    ],
)
async def test_what_may_pass_is_repeated(failures: tuple[SluiceError, ...]) -> None:
    assert await Failing(*failures).run() == DONE


@pytest.mark.parametrize(
    "failures",
    [
        (BROKEN, BROKEN),
        (LOST, BROKEN, CANCELLED),
        (BROKEN, LOST, BROKEN, BROKEN),
        (SUPERSEDED, SUPERSEDED),
        (SUPERSEDED, BROKEN),
        (REFUSED,),
        (LOST, REFUSED),
    ],
)
async def test_what_does_not_pass_ends_the_push(failures: tuple[SluiceError, ...]) -> None:
    with pytest.raises(SluiceError) as ended:
        await Failing(*failures).run()
    assert ended.value is failures[-1]


def test_a_file_with_other_entries_than_its_manifest_is_refused_for_good(tmp_path: Path) -> None:
    pushed, announced = (ShardSource("model", {name: torch.ones(4)}) for name in ("a", "b"))
    upload = Upload(tmp_path / "shard", pushed.describe(), 0.0)
    ticket, _ = upload.take_over()
    upload.append(ticket, 0, read_source(pushed, 0, pushed.size))
    upload.finish(ticket)
    manifest = manifest_of(V1, announced)
    manifest.digest = ""
    with pytest.raises(ManifestError, match="disagree on the entries a, b") as refused:
        complete_manifest(manifest, {"model": upload})
    assert translated(refused.value).code is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(SluiceError) as missing:
        complete_manifest(manifest, {})
    assert missing.value.reason == "SHARDS_MISSING"


def holding() -> tuple[WeightPublisher, Update]:
    """A publisher to nowhere, and the version that it holds."""
    publisher = WeightPublisher(None, "test")
    return publisher, publisher.encode(V1, {"w": torch.ones(4)})


async def test_a_push_is_given_up_before_it_begins_and_the_next_one_is_not() -> None:
    weights, update = holding()
    pushing = asyncio.create_task(weights.publish(update, deadline_s=DEADLINE_S))
    weights.give_up()
    with pytest.raises(SluiceError) as ended:
        await pushing
    assert ended.value.reason == "OVERTAKEN"
    with pytest.raises(SluiceError) as tried:
        await weights.publish(update, deadline_s=DEADLINE_S)
    assert tried.value.reason == "PUSH_FAILED", "there is no service"


async def test_a_push_whose_caller_leaves_while_ranks_agree_on_its_form_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, update = holding()
    agreeing, waits, left = weights._agree, asyncio.Event(), asyncio.Event()

    async def agree_late(update: Update, copy: KeptCopy, deadline: float) -> Agreement:
        waits.set()
        await left.wait()
        return await agreeing(update, copy, deadline)

    monkeypatch.setattr(weights, "_agree", agree_late)
    policy = PolicyPublisher(weights, announce=lambda _version, _deadline_s: None)
    publishing = asyncio.create_task(policy.publish(update, deadline_s=DEADLINE_S))
    await waits.wait()
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    left.set()
    assert policy._pushing is not None
    with pytest.raises(SluiceError) as ended:
        await policy._pushing
    assert ended.value.reason == "OVERTAKEN"
