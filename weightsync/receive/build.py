"""Makes a version's file: from a copy of what is held and deltas, from its dense form, or from both.

What comes in is checked while tokens are produced. A way that fails is followed by the next: files of this host, sockets,
the dense form.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import grpc
import structlog

from sluice.rpc import SluiceError
from sluice.v1 import weightsync_pb2 as pb
from sluice.v1 import weightsync_pb2_grpc
from sluice.versions import Version
from weightsync.metrics import FALLBACKS
from weightsync.receive.assembly import Assembly, HeldVersion
from weightsync.receive.form_pull import BuildCost, FormPull, run_to_end
from weightsync.receive.local_files import is_local
from weightsync.receive.patching import PatchedFile, slice_digests
from weightsync.receive.pull import PullError, PullLimits, pull_call
from weightsync.receive.route import RouteError, Step, check_route, direct_step
from weightsync.receive.staging import StagingError

__all__ = ["VersionBuilder"]

_DEADLINE_S = 30.0

log = structlog.get_logger(__name__)


class VersionBuilder:
    """Makes files for one run.

    Args:
        channel: To a service that gives the run's versions out.
        run: ``runs/{run}``.
        threads: Where files are read, decoded, checked and written.
        limits: How long pulls wait.
        local_files: Read files of this host in place of a transfer, where the service names any.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        run: str,
        threads: Executor,
        limits: PullLimits,
        *,
        local_files: bool,
    ) -> None:
        self._delivery = weightsync_pb2_grpc.WeightDeliveryServiceStub(channel)
        self._pull = FormPull(pull_call(channel), threads, limits)
        self._run = run
        self._threads = threads
        self._local_files = local_files

    async def build(self, target: pb.Manifest, held: HeldVersion | None, descriptor: int) -> BuildCost:
        """Fill a file with a version, verified.

        Args:
            target: The version as it was announced.
            held: What deltas may be based on.
            descriptor: The file, open to read and write.

        Raises:
            PullError: if no way leads to the version; the message says why the last one did not.
            OSError: if there is no room.
        """
        cost = BuildCost()
        failure: Exception | None = None
        for base in (held, None) if held is not None else (None,):
            try:
                steps = await self._route(target, base)
            except (PullError, RouteError) as error:
                _raise_if_unreachable(error)
                failure = error
                continue
            start = base if steps[0].is_delta else None
            for local in (True, False) if self._any_local(steps) else (False,):
                if failure is not None:
                    _note_fallback(target, failure, start, local)
                try:
                    assembly = Assembly(self._pull, descriptor, cost, local=local)
                    await assembly.follow(steps, start)
                    await run_to_end(self._threads, partial(_check_against, descriptor, steps[-1].manifest, target))
                except (PullError, StagingError) as error:
                    _raise_if_unreachable(error)
                    failure = error
                else:
                    return cost
            if start is None:
                break  # that was the dense form
        raise PullError(str(failure)) from failure

    async def _route(self, target: pb.Manifest, base: HeldVersion | None) -> list[Step]:
        """The forms to apply, checked."""
        held = None if base is None else base.version
        direct = direct_step(target, held)
        if direct is not None and not self._local_files:
            return [direct]
        request = pb.GetUpdatePathRequest(
            run=self._run, version=target.version, held=None if held is None else held.to_proto()
        )
        try:
            steps = [
                Step(response.manifest, {file.shard: file for file in response.files})
                async for response in self._delivery.GetUpdatePath(request, timeout=_DEADLINE_S)
            ]
        except grpc.aio.AioRpcError as error:
            if direct is not None and error.code() == grpc.StatusCode.UNIMPLEMENTED:
                return [direct]
            unreachable = error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
            raise PullError(str(SluiceError.from_rpc(error)), unreachable=unreachable) from error
        check_route(steps, Version.from_proto(target.version), held)
        return steps

    def _any_local(self, steps: Sequence[Step]) -> bool:
        return self._local_files and any(is_local(file) for step in steps for file in step.files.values())


def _check_against(descriptor: int, built: pb.Manifest, target: pb.Manifest) -> None:
    """What was built by another form than was announced is the same version: the announced digests hold for it too."""
    if built.digest == target.digest:
        return
    patched = PatchedFile(descriptor, slice_digests(built))
    try:
        patched.verify(target)
    finally:
        patched.close()


def _raise_if_unreachable(error: Exception) -> None:
    if isinstance(error, PullError) and error.unreachable:
        raise error


def _note_fallback(target: pb.Manifest, failure: Exception, start: HeldVersion | None, local: bool) -> None:
    way = "dense" if start is None else "delta"
    FALLBACKS.labels(way).inc()
    log.warning("going another way to a version", version=_name(target), way=way, local=local, error=str(failure))


def _name(manifest: pb.Manifest) -> str:
    return str(Version.from_proto(manifest.version))
