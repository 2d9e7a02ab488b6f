"""OrchestratorService on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
from google.protobuf.duration_pb2 import Duration

from orchestrator_svc.replicas import ReplicaPool
from orchestrator_svc.run import Run
from orchestrator_svc.status import RunStatus, TrajectoryHistory
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2, orchestrator_pb2_grpc

__all__ = ["OrchestratorServicer"]

pb = orchestrator_pb2

_NAME_CHARACTERS = 255


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Answers for one run.

    Args:
        name: Name of the run.
        run: The run.
        status: What is answered about it.
        history: Its last trajectories.
        pool: Where replicas announce themselves.
    """

    def __init__(self, name: str, run: Run, status: RunStatus, history: TrajectoryHistory, pool: ReplicaPool) -> None:
        self._name, self._run, self._status, self._history, self._pool = name, run, status, history, pool

    async def GetRun(  # noqa: N802 - gRPC's name
        self, request: pb.GetRunRequest, context: grpc.aio.ServicerContext[pb.GetRunRequest, pb.GetRunResponse]
    ) -> pb.GetRunResponse:
        """Describe the run."""
        del context
        self._check_run(request.run)
        return pb.GetRunResponse(run=self._status.describe())

    async def WatchRun(  # noqa: N802 - gRPC's name
        self, request: pb.WatchRunRequest, context: grpc.aio.ServicerContext[pb.WatchRunRequest, pb.WatchRunResponse]
    ) -> AsyncIterator[pb.WatchRunResponse]:
        """Stream the run's events until it has ended."""
        del context
        self._check_run(request.run)
        async for event in self._status.events.follow(request.from_sequence_no):
            yield pb.WatchRunResponse(event=event)

    async def PauseRun(  # noqa: N802 - gRPC's name
        self, request: pb.PauseRunRequest, context: grpc.aio.ServicerContext[pb.PauseRunRequest, pb.PauseRunResponse]
    ) -> pb.PauseRunResponse:
        """Start no more groups."""
        del context
        self._check_run(request.run)
        self._run.pause()
        return pb.PauseRunResponse(run=self._status.describe())

    async def ResumeRun(  # noqa: N802 - gRPC's name
        self,
        request: pb.ResumeRunRequest,
        context: grpc.aio.ServicerContext[pb.ResumeRunRequest, pb.ResumeRunResponse],
    ) -> pb.ResumeRunResponse:
        """Start groups again."""
        del context
        self._check_run(request.run)
        self._run.resume()
        return pb.ResumeRunResponse(run=self._status.describe())

    async def StopRun(  # noqa: N802 - gRPC's name
        self, request: pb.StopRunRequest, context: grpc.aio.ServicerContext[pb.StopRunRequest, pb.StopRunResponse]
    ) -> pb.StopRunResponse:
        """End the run in order."""
        del context
        self._check_run(request.run)
        self._run.stop(request.reason)
        return pb.StopRunResponse(run=self._status.describe())

    async def RegisterReplica(  # noqa: N802 - gRPC's name
        self,
        request: pb.RegisterReplicaRequest,
        context: grpc.aio.ServicerContext[pb.RegisterReplicaRequest, pb.RegisterReplicaResponse],
    ) -> pb.RegisterReplicaResponse:
        """Use a replica that announces itself."""
        del context
        self._check_run(request.run)
        for field, value in (("replica", request.replica), ("address", request.address)):
            if not value or len(value) > _NAME_CHARACTERS or not value.isprintable():
                raise SluiceError.invalid_argument(field, f"give 1 to {_NAME_CHARACTERS} printable characters")
        lease = Duration()
        try:
            lease.FromMilliseconds(int(self._pool.register(request.replica, request.address) * 1000))
        except ValueError as error:
            raise SluiceError.invalid_argument("address", str(error)) from error
        return pb.RegisterReplicaResponse(lease=lease)

    async def Heartbeat(  # noqa: N802 - gRPC's name
        self,
        request: pb.HeartbeatRequest,
        context: grpc.aio.ServicerContext[pb.HeartbeatRequest, pb.HeartbeatResponse],
    ) -> pb.HeartbeatResponse:
        """Renew a replica's lease."""
        del context
        self._check_run(request.run)
        lease = Duration()
        try:
            lease.FromMilliseconds(int(self._pool.heartbeat(request.replica) * 1000))
        except KeyError as error:
            raise SluiceError.not_found(
                "UNKNOWN_REPLICA", f"replica {request.replica!r} has no lease: call RegisterReplica"
            ) from error
        return pb.HeartbeatResponse(lease=lease)

    async def ListTrajectories(  # noqa: N802 - gRPC's name
        self,
        request: pb.ListTrajectoriesRequest,
        context: grpc.aio.ServicerContext[pb.ListTrajectoriesRequest, pb.ListTrajectoriesResponse],
    ) -> pb.ListTrajectoriesResponse:
        """List the last trajectories, newest first."""
        del context
        self._check_run(request.run)
        return self._history.page(request)

    def _check_run(self, run: str) -> None:
        expected = f"runs/{self._name}"
        if run != expected:
            raise SluiceError.not_found(
                "WRONG_RUN", f"this orchestrator has {expected}, not {run or '(none)'}: check the name or the address"
            )
