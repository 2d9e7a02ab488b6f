"""The trainer's half: pushes versions of the weights, and of LoRA adapters, and commits them."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import grpc
import structlog
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from sluice.rpc import SluiceError
from sluice.slices import TensorSlice
from sluice.tasks import discard_outcome
from sluice.v1 import weightsync_pb2 as pb
from sluice.versions import BASE, Version
from weightsync.format.chunks import MAX_CHUNK_BYTES
from weightsync.format.manifest import ManifestError, check_manifest, check_sendable, run_resource
from weightsync.publish.push import Destination, Payload, PushReport, RankExchange, VersionPush
from weightsync.publish.shards import HOST_DIRECTORY, Diff, FileSource, KeptCopy, local_slices, share_out, total_bytes

__all__ = ["AdapterPublisher", "AdapterUpdate", "PolicyPublisher", "PushReport", "Update", "WeightPublisher"]

_SHARD = "model"
"""Name of the only shard of a version that one process pushes."""

_ADAPTER_SHARD = "adapter_model"
"""Name of an adapter's only shard."""

_PLAN = "plan"
"""Name of the exchange in which ranks learn who holds what."""

_AGREE_S = 600.0
"""Longest wait for the other ranks if `encode` is given no deadline."""

_MOST_SKIPPED = 16
"""Most versions to skip between two tries. Deltas get small again as the learning rate decays, and shared memory may be freed."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """An encoded version, ready to be published as long as the kept copy holds it.

    Attributes:
        base: Version that it was compared with; None if it was not compared.
        serial: Tells whether the kept copy still holds it.
    """

    version: Version
    base: Version | None
    diff: Diff
    serial: int


class WeightPublisher:
    """Publishes versions of one run's weights.

    It keeps one copy of the last pushed version. It sends the difference from that copy, exact to the bit, if the difference
    has at most half the bytes of a dense version:

        update = publisher.encode(version, tensors)      # in the thread that owns the weights; they must not change
        report = await publisher.publish(update, ...)    # in the background; the weights may change

    The copy is the only one: 1x the shard's size, for as long as the publisher lives. It may be written only while nothing
    reads it. `publish` therefore holds it until the version is committed or given up, `encode` waits for that within its
    deadline, and an update that was overtaken by a later `encode` is refused rather than sent.

    The copy is known to equal the service's version only after the service answered the commit. After any failure, at the
    first version of an epoch and after a restart, a dense version is sent.

    With a `group`, each rank has a publisher over its own channel and calls the same methods in the same order with the
    tensors that it holds: DTensors of FSDP2 or tensor parallelism, or plain ones. If several ranks hold the same slice, one
    of them sends it. If one rank fails, all ranks fail.

    Args:
        channel: To the weight service, with the admin role.
        run: The run's name.
        chunk_bytes: Bytes per chunk, at most 1 MiB.
        encoding: "auto" compares with the previous version; "dense" always sends dense versions.
        local: Whether to name files in shared memory to the service, which takes them if it runs on the same host.
        group: Ranks that publish one model together: a gloo group that nothing else uses; None: this process is alone.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run: str,
        *,
        chunk_bytes: int = MAX_CHUNK_BYTES,
        encoding: Literal["auto", "dense"] = "auto",
        local: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; the contract allows 1 to {MAX_CHUNK_BYTES}")
        self._channel = channel
        self._run = run_resource(run)
        self._chunk_bytes = chunk_bytes
        self._encoding = encoding
        self._directory = HOST_DIRECTORY if local and HOST_DIRECTORY.is_dir() else None
        self._exchange = None if group is None else RankExchange(group)
        self._shard = _SHARD if self._exchange is None else f"rank-{self._exchange.rank:05d}"
        self._comparisons, self._hand_overs = Trials(), Trials()
        self._in_use = threading.Lock()
        """Held while the kept copy is written or read."""
        self._copy: KeptCopy | None = None
        self._dense_bytes = 0
        self._layout: list[pb.TensorSlice] | None = None
        self._committed: Version | None = None
        """Version that the kept copy holds, if its commit was answered."""
        self._serial = self._noted = 0
        self._given_up = False
        """Whether to end the push in progress, or the announced push that begins next."""

    def encode(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        deadline_s: float = _AGREE_S,
    ) -> Update:
        """Compare live tensors with the last pushed version, then overwrite the kept copy with them. Blocking; not for the event loop.

        Args:
            version: The version of these tensors.
            tensors: Live tensors by Hugging Face name, on any device; unchanged until this returns. Tied ones travel once.
            dtype: Precision to publish floating-point tensors in, cast one by one; None: as they are.
            deadline_s: Seconds to wait for the previous push to end, and, at the first call, for the other ranks.

        Raises:
            SluiceError: DEADLINE_EXCEEDED if the previous push takes longer; with several ranks, the failure of any rank.
            ValueError: if a tensor cannot travel.
        """
        deadline = time.monotonic() + deadline_s
        if not self._in_use.acquire(timeout=max(0.0, deadline_s)):
            raise SluiceError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "PUSH_IN_PROGRESS",
                f"the version before {version} is still being pushed: wait for its publish to end, or allow more than {deadline_s:g} s",
            )
        try:
            self._serial += 1
            base, self._committed = self._base_of(version), None
            held = local_slices(tensors, dtype)
            layout = [each for each, _ in held]
            if self._copy is None or layout != self._layout:
                base, self._copy = None, self._new_copy(layout, deadline)  # the copy holds nothing yet
            diff = self._copy.renew(held, compare=base is not None, most_bytes=self._dense_bytes // 2)
        except SluiceError:  # every rank raises it
            raise
        except Exception as error:
            if self._exchange is not None:
                self._report_failure(self._exchange, version, error, deadline)
            raise
        finally:
            self._in_use.release()
        return Update(version, base, diff, self._serial)

    def publish(
        self, update: Update, *, deadline_s: float, labels: Mapping[str, str] | None = None
    ) -> Coroutine[Any, Any, PushReport]:
        """Push and commit the version that `encode` kept. Engines see all of it when this returns.

        Idempotent while the copy holds the version. After a transient failure, retry from where it broke off, until the deadline.
        If the service no longer holds a delta's base, the dense version is sent at once.
        `labels` are free facts for the manifest.

        Raises:
            SluiceError: as the contract says of PushWeights and CommitVersion; FAILED_PRECONDITION OVERTAKEN if a later
                `encode` took the copy, RANK_LOST if a rank is gone; with several ranks, the failure of any rank.
        """
        if not self._in_use.locked():  # a push that still reads the copy keeps its end
            self._given_up = False  # now and not when the coroutine begins: it may be given up before
        return self._publish(update, deadline_s, labels or {})

    async def _publish(self, update: Update, deadline_s: float, labels: Mapping[str, str]) -> PushReport:
        if not self._in_use.acquire(blocking=False):
            raise _overtaken(update.version)
        try:
            copy = self._copy
            if copy is None or update.serial != self._serial:
                raise _overtaken(update.version)
            self._committed = None
            to = Destination(self._channel, self._run, update.version, time.monotonic() + deadline_s)
            agreement = await self._agree(update, copy, to.deadline)
            if agreement.compared and update.serial != self._noted:  # not again when a push is repeated
                self._comparisons.note(worth=agreement.delta)
                self._noted = update.serial
            payloads = _payloads(copy, update, agreement, labels)
            directory = self._directory if self._hand_overs.due() else None
            push = VersionPush(
                to,
                payloads,
                self._exchange,
                chunk_bytes=self._chunk_bytes,
                directory=directory,
                given_up=lambda: self._given_up,
            )
            report = await push.run()
            if push.handed_over is not None:
                self._hand_overs.note(worth=push.handed_over)
            self._committed = update.version
            return replace(
                report,
                dense_bytes=agreement.dense_bytes,
                diff_s=agreement.diff_s,
                changed_fraction=agreement.changed_fraction,
            )
        finally:
            self._in_use.release()

    def give_up(self) -> None:
        """End the push of the last call of `publish` at its next attempt, on all ranks: it raises FAILED_PRECONDITION OVERTAKEN."""
        self._given_up = True

    async def update(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        deadline_s: float,
        labels: Mapping[str, str] | None = None,
    ) -> PushReport:
        """Call `encode` in a thread, then `publish`; the tensors must not change until this returns."""
        deadline = time.monotonic() + deadline_s
        encoded = await asyncio.to_thread(self.encode, version, tensors, dtype=dtype, deadline_s=deadline_s)
        return await self.publish(encoded, deadline_s=deadline - time.monotonic(), labels=labels)

    async def close(self) -> None:
        """Release the kept copy; `publish` must have ended. The next version is then a dense one."""
        copy, self._copy, self._layout, self._committed = self._copy, None, None, None
        if copy is not None:
            await asyncio.to_thread(copy.close)

    def _base_of(self, version: Version) -> Version | None:
        """Return the version to compare with, None if a dense version is to be sent."""
        base = self._committed
        if self._encoding == "dense" or base is None or base.epoch != version.epoch or base >= version:
            return None
        return base if self._comparisons.due() else None

    def _new_copy(self, layout: list[pb.TensorSlice], deadline: float) -> KeptCopy:
        """Make the kept copy: at the first call, and again if the layout of the slices changed.

        Raises:
            SluiceError: the failure of any rank.
            ValueError: if the slices of all ranks do not make up a model (every rank raises it then), or if several ranks
                publish and the layout changed.
        """
        if self._copy is not None and self._exchange is not None:
            raise ValueError("the layout of the model's slices changed: make a new publisher on every rank")
        self._copy = None  # free its memory before the next copy takes as much
        mine, held = layout, [pb.Shard(name="held", tensors=layout)]
        try:
            if self._exchange is not None:
                answers = self._exchange.all_gather(_PLAN, held[0].SerializeToString(), deadline)
                held = [pb.Shard.FromString(answer) for answer in answers]
                share = share_out(held)[self._exchange.rank]
                mine = [each for each in layout if TensorSlice.from_proto(each) in share]
            else:
                check_manifest(pb.Manifest(shards=held))
            check_sendable(held)
        except ManifestError as error:
            raise ValueError(f"the ranks' slices do not make up a version: {error}") from error
        self._layout = layout
        copy = KeptCopy(self._shard, mine, self._directory)
        self._dense_bytes = copy.dense_bytes if self._exchange is None else total_bytes(held)
        return copy

    def _report_failure(self, exchange: RankExchange, version: Version, error: Exception, deadline: float) -> None:
        """Tell the other ranks, which wait for this one's layout or proposal, to end at once."""
        step = _PLAN if self._layout is None else f"proposal {version}"
        failure = SluiceError(grpc.StatusCode.INTERNAL, "ENCODE_FAILED", f"{type(error).__name__}: {error}")
        try:
            exchange.all_gather(step, failure, deadline)
        except SluiceError as answer:  # the failure itself, if it reached the other ranks
            if answer.reason == "RANK_LOST":
                log.warning("this rank failed, and its failure did not reach the other ranks", error=str(answer))

    async def _agree(self, update: Update, copy: KeptCopy, deadline: float) -> Agreement:
        """Agree with all ranks on the form of the version; raise the failure of any rank."""
        proposal = pb.Manifest(
            version=update.version.to_proto(),
            kind=pb.VERSION_KIND_DELTA if update.diff.compared else pb.VERSION_KIND_ANCHOR,
            base=update.base.to_proto() if update.base is not None else None,
            size_bytes=update.diff.encoded_bytes,
            dense_bytes=copy.dense_bytes,
            push_timings=_timings(update.diff.seconds, update.diff.changed_fraction),
        )
        if self._exchange is None:
            return agree([proposal])
        step = f"proposal {update.version}"
        answers = await asyncio.to_thread(self._exchange.all_gather, step, proposal.SerializeToString(), deadline)
        return agree([pb.Manifest.FromString(answer) for answer in answers])


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know of a version before its bytes travel.

    Attributes:
        delta: Whether it travels as the difference from the previous version.
        compared: Whether every rank compared its shard with the previous version.
        dense_bytes: Size of a dense copy, over all ranks.
        diff_s: Seconds of the slowest rank's comparison.
        changed_fraction: Fraction of all values that differ; 1 if nothing was compared.
    """

    delta: bool
    compared: bool
    dense_bytes: int
    diff_s: float
    changed_fraction: float


def agree(proposals: Sequence[pb.Manifest]) -> Agreement:
    """Decide from every rank's proposal; all ranks decide the same. Pure.

    A delta is pushed if every rank has one based on the same version, and they have at most half the bytes of a dense copy.

    Raises:
        SluiceError: FAILED_PRECONDITION if the ranks publish different versions.
    """
    versions = {Version.from_proto(proposal.version) for proposal in proposals}
    if len(versions) > 1:
        raise SluiceError.failed_precondition(
            "RANKS_DIFFER",
            f"the ranks publish different versions ({', '.join(map(str, sorted(versions)))}): begin a new epoch on all of them",
        )
    dense = sum(proposal.dense_bytes for proposal in proposals)
    bases = {Version.from_proto(proposal.base) for proposal in proposals if proposal.HasField("base")}
    compared = len(bases) == 1 and all(proposal.HasField("base") for proposal in proposals)
    small = 2 * sum(proposal.size_bytes for proposal in proposals) <= dense
    encoded = all(proposal.kind == pb.VERSION_KIND_DELTA for proposal in proposals)
    weighted = sum(proposal.push_timings.changed_fraction * proposal.dense_bytes for proposal in proposals)
    return Agreement(
        delta=compared and encoded and small,
        compared=compared,
        dense_bytes=dense,
        diff_s=max(proposal.push_timings.diff.ToNanoseconds() for proposal in proposals) / 1e9,
        changed_fraction=weighted / dense if dense else float(not compared),
    )


def _payloads(copy: KeptCopy, update: Update, agreement: Agreement, labels: Mapping[str, str]) -> list[Payload]:
    """Return what can be pushed of an update: a delta if the ranks agreed on it, and the dense version."""

    def make(shard: Callable[[Diff], tuple[FileSource, pb.Shard]]) -> Callable[[], tuple[FileSource, pb.Shard]] | None:
        return partial(shard, update.diff) if copy.slices else None

    timings = _timings(agreement.diff_s, 1.0)
    dense = pb.Manifest(kind=pb.VERSION_KIND_ANCHOR, labels=dict(labels), push_timings=timings)
    payloads = [Payload(dense, make(copy.dense), copy.local)]
    if agreement.delta and update.base is not None:
        timings.changed_fraction = agreement.changed_fraction
        base = update.base.to_proto()
        delta = pb.Manifest(kind=pb.VERSION_KIND_DELTA, base=base, labels=dict(labels), push_timings=timings)
        payloads.insert(0, Payload(delta, make(copy.delta)))
    return payloads


def _timings(diff_s: float, changed_fraction: float) -> pb.PushTimings:
    timings = pb.PushTimings(changed_fraction=changed_fraction)
    timings.diff.FromNanoseconds(int(diff_s * 1e9))
    return timings


class AdapterPublisher:
    """Publishes LoRA adapters of one run as versions of their own, which engines load beside the weights.

    `base` is the version of the weights that the adapters belong to; the default is the model on disk.
    """

    def __init__(self, channel: grpc.aio.Channel, run: str, *, base: Version = BASE) -> None:
        self._channel, self._run, self.base = channel, run_resource(run), base

    async def push(
        self,
        version: Version,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, object],
        *,
        deadline_s: float,
        labels: Mapping[str, str] | None = None,
    ) -> PushReport:
        """Publish an adapter. It is visible as a whole when this returns, or not at all if it raises before the commit.

        Transient failures are retried until the deadline.

        Args:
            version: The version of the policy that base and adapter make together.
            tensors: Tensors as `peft.get_peft_model_state_dict` names them; unchanged until this returns.
            config: PEFT's configuration, as `LoraConfig.to_dict` or ``adapter_config.json`` gives it.
            deadline_s: Seconds for everything.
            labels: Free facts for the manifest.

        Raises:
            SluiceError: as the contract says of PushWeights and CommitVersion.
            ValueError: if a tensor cannot travel, or there are more tensors than a manifest can name.
        """
        # One by one, because tied tensors have names of their own in an adapter's file.
        held = [each for name, tensor in tensors.items() for each in local_slices({name: tensor})]
        check_sendable([pb.Shard(name=_ADAPTER_SHARD, tensors=[each for each, _ in held])])
        copy = KeptCopy(_ADAPTER_SHARD, [each for each, _ in held])
        manifest = pb.Manifest(
            kind=pb.VERSION_KIND_ADAPTER,
            base=self.base.to_proto(),
            labels=dict(labels or {}),
            adapter_config=json.dumps(config, default=_plain, indent=1, sort_keys=True),
        )
        payload = Payload(manifest, lambda: copy.dense(copy.renew(held, compare=False, most_bytes=0)))
        to = Destination(self._channel, self._run, version, time.monotonic() + deadline_s)
        report = await VersionPush(to, [payload], None, chunk_bytes=MAX_CHUNK_BYTES).run()
        return replace(report, dense_bytes=copy.dense_bytes)

    async def push_directory(self, version: Version, directory: Path, *, deadline_s: float) -> PushReport:
        """Publish the adapter that `PeftModel.save_pretrained` wrote into a directory. Otherwise like `push`."""
        tensors = await asyncio.to_thread(load_file, directory / "adapter_model.safetensors")
        config = json.loads((directory / "adapter_config.json").read_text())
        return await self.push(version, tensors, config, deadline_s=deadline_s)


@dataclass(frozen=True, slots=True)
class AdapterUpdate:
    """An adapter that is ready to be published, with its settings as PEFT writes them. Later steps do not change it."""

    version: Version
    tensors: Mapping[str, torch.Tensor]
    settings: Mapping[str, object]


class PolicyPublisher:
    """Publishes the versions of one policy: its weights, or its adapter if the replicas have the base.

    Args:
        weights: Publishes weights, and encodes them.
        adapters: Publishes adapters of the model that the run starts from, which every replica loads from disk; None on
            ranks that only help to collect one.
        announce: Makes the other ranks publish a version of the weights together with this rank, within the given seconds; None:
            this process is alone, or another rank leads.
    """

    def __init__(
        self,
        weights: WeightPublisher,
        adapters: AdapterPublisher | None = None,
        announce: Callable[[Version, float], object] | None = None,
    ) -> None:
        self.weights, self._adapters, self._announce = weights, adapters, announce
        self._pushing: asyncio.Task[PushReport] | None = None

    async def publish(self, update: Update | AdapterUpdate, *, deadline_s: float) -> PushReport:
        """Push a version; it is committed when this returns.

        With several ranks a push of weights continues if its caller is cancelled, because the other ranks do not stop. It ends
        before its next attempt.

        Raises:
            SluiceError: the failure of the push.
        """
        if isinstance(update, AdapterUpdate):
            if self._adapters is None:
                raise RuntimeError(f"this rank publishes no adapters, but was given {update.version}; this is a defect")
            return await self._adapters.push(update.version, update.tensors, update.settings, deadline_s=deadline_s)
        if self._announce is None:
            return await self.weights.publish(update, deadline_s=deadline_s)
        self._announce(update.version, deadline_s)
        self._pushing = asyncio.create_task(self.weights.publish(update, deadline_s=deadline_s))
        discard_outcome(self._pushing)
        try:
            return await asyncio.shield(self._pushing)
        except asyncio.CancelledError:
            self.weights.give_up()
            raise

    async def close(self, grace_s: float) -> None:
        """Release the kept copy, unless a push whose caller was cancelled still reads it after `grace_s` seconds."""
        if self._pushing is not None and not self._pushing.done():
            await asyncio.wait({self._pushing}, timeout=grace_s)
            if not self._pushing.done():
                return
        await self.weights.close()


class Trials:
    """Decide for which versions to try an optimisation that may not pay off: a delta to the previous version, or handing over a file. Pure.

    After a failed try, skip one version; after the next failed try two, then four, up to sixteen. A successful try resets this.
    Ranks that note the same outcomes decide the same.
    """

    def __init__(self) -> None:
        self._left_out = 0
        self._pause = 1

    def due(self) -> bool:
        """Return whether to try with the next version; call it once per version."""
        if self._left_out:
            self._left_out -= 1
            return False
        return True

    def note(self, *, worth: bool) -> None:
        """Note whether a try was worth its time."""
        if worth:
            self._pause = 1
            return
        self._left_out = self._pause
        self._pause = min(2 * self._pause, _MOST_SKIPPED)


def _overtaken(version: Version) -> SluiceError:
    return SluiceError.failed_precondition(
        "OVERTAKEN",
        f"version {version} is no longer kept or is being published: publish what encode returned last, once",
    )


def _plain(value: object) -> object:
    """Convert sets and enumerations, which PEFT keeps in its configuration, to JSON types."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
