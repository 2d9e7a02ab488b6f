"""GetServerInfo, which every server answers, and what can be read off its servicers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import version

from google.protobuf import descriptor_pool

from sluice.rpc.limits import CONTRACT_VERSION, MAX_MESSAGE_BYTES
from sluice.v1 import common_pb2, common_pb2_grpc

__all__ = ["SERVICE_NAME", "ServerInfoServicer", "missing_methods"]

SERVICE_NAME = "sluice.v1.ServerInfoService"


class ServerInfoServicer(common_pb2_grpc.ServerInfoServiceServicer):
    """Answers with facts fixed at start."""

    def __init__(
        self,
        service: str,
        *,
        services: Sequence[str],
        features: Sequence[str],
        unimplemented: Sequence[str],
        max_concurrent_rpcs: int,
        run: str,
    ) -> None:
        self._answer = common_pb2.GetServerInfoResponse(
            service=service,
            software_version=version("sluice"),
            contract_version=CONTRACT_VERSION,
            services=services,
            features=features,
            unimplemented_rpcs=unimplemented,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_concurrent_rpcs=max_concurrent_rpcs,
            run=f"runs/{run}" if run else "",
        )

    async def GetServerInfo(self, request: object, context: object) -> common_pb2.GetServerInfoResponse:  # noqa: N802
        """Describe the server."""
        del request, context
        return self._answer


def missing_methods(service_name: str, servicer: object) -> Iterator[str]:
    """Methods of a service that a servicer inherits from the generated base, as "package.Service/Method"."""
    service = descriptor_pool.Default().FindServiceByName(service_name)  # type: ignore[no-untyped-call, unused-ignore]
    for method in service.methods:
        owner = next((base for base in type(servicer).__mro__ if method.name in vars(base)), None)
        if owner is None or owner.__module__.endswith("_pb2_grpc"):
            yield f"{service_name}/{method.name}"
