"""RolloutService on the wire."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import grpc

from rollout_svc import greedy
from rollout_svc.answers import chunk_message, generate_response, loaded_adapters
from rollout_svc.config import LimitsConfig
from rollout_svc.engines.adapter_slots import UnknownAdapterError
from rollout_svc.engines.base import EngineBusyError, EngineError, GenerationRequest, ModelInfo
from rollout_svc.engines.lora import LoraEngine
from rollout_svc.prompts import Prompts
from rollout_svc.repeats import Repeats
from rollout_svc.requests import generation_request
from rollout_svc.supervision import EngineSupervisor
from sluice.rpc import SluiceError
from sluice.v1 import rollout_pb2, rollout_pb2_grpc
from sluice.versions import Version

__all__ = ["RolloutServicer"]

DEFAULT_COALESCE_S = 0.02

RETRY_AFTER_S = 0.5
"""When to try again where the queue is full: a few engine steps."""


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Samples for callers.

    Args:
        run: `runs/{run}` that this replica belongs to.
        engine: The engine under its supervision.
        prompts: Tokenizer and template.
        limits: How much to take on.
    """

    def __init__(self, run: str, engine: EngineSupervisor, prompts: Prompts, limits: LimitsConfig) -> None:
        self._run, self._engine, self._prompts, self._limits = run, engine, prompts, limits
        self._repeats = Repeats(limits.answer_ttl_s, limits.max_answers, limits.max_answer_bytes)
        self._live: dict[int, GenerationRequest] = {}
        self.samples = 0
        """Samples that callers wait for, queued or running."""

    @property
    def prompts(self) -> Prompts:
        """Tokenizer and template."""
        return self._prompts

    @property
    def model_info(self) -> ModelInfo:
        """What is served."""
        return self._engine.current.info

    def serving_version(self) -> Version:
        """The version that requests are sampled from now.

        Raises:
            SluiceError: UNAVAILABLE while the engine is started again.
        """
        return self._engine.serving.status().version

    @property
    def live_requests(self) -> list[str]:
        """Names of the requests that callers wait for."""
        return [request.request_id for request in self._live.values()]

    async def Generate(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.GenerateRequest, rollout_pb2.GenerateResponse],
    ) -> rollout_pb2.GenerateResponse:
        """Sample and answer when all samples have ended."""
        del context
        return await self.generate(request)

    async def generate(self, request: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateResponse:
        """As the RPC; also what the OpenAI dialect calls."""
        if not request.request_id:
            return await self._generate(request)
        content = request.SerializeToString(deterministic=True)
        return await self._repeats.once(request.request_id, content, lambda: self._generate(request))

    async def _generate(self, request: rollout_pb2.GenerateRequest) -> rollout_pb2.GenerateResponse:
        asked = self._admit(request)
        self._enter(asked)
        try:
            result = await greedy.agenerate(self._engine.current, asked)
        except (EngineError, EngineBusyError, ValueError) as error:
            raise _translated(error) from error
        finally:
            self._leave(asked)
        decode = self._prompts.decode if request.return_text else None
        return generate_response(asked, result, self._prompts.digest, decode)

    async def GenerateStream(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.GenerateStreamRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.GenerateStreamRequest, rollout_pb2.GenerateStreamResponse],
    ) -> AsyncGenerator[rollout_pb2.GenerateStreamResponse, None]:
        """Sample and send tokens as they come."""
        del context
        async with contextlib.aclosing(self.stream(request)) as messages:
            async for message in messages:
                yield message

    async def stream(
        self, request: rollout_pb2.GenerateStreamRequest
    ) -> AsyncGenerator[rollout_pb2.GenerateStreamResponse, None]:
        """As the RPC; also what the OpenAI dialect calls. Closing it aborts the sampling."""
        asked = self._admit(request.request)
        coalesce = request.coalesce.ToNanoseconds() / 1e9 if request.HasField("coalesce") else DEFAULT_COALESCE_S
        text = _TextDeltas(self._prompts, wanted=request.request.return_text)
        self._enter(asked)
        try:
            yield rollout_pb2.GenerateStreamResponse(
                opening=rollout_pb2.StreamOpening(
                    request_id=asked.request_id,
                    prompt_token_ids=asked.prompt_ids,
                    tokenizer_digest=self._prompts.digest,
                )
            )
            async with contextlib.aclosing(greedy.stream(self._engine.current, asked, coalesce_s=coalesce)) as chunks:
                async for chunk in chunks:
                    yield chunk_message(
                        chunk, text.after(chunk.index, chunk.token_ids, last=chunk.finish_reason is not None)
                    )
        except (EngineError, EngineBusyError, ValueError) as error:
            raise _translated(error) from error
        finally:
            self._leave(asked)

    async def GetModel(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.GetModelRequest, rollout_pb2.GetModelResponse],
    ) -> rollout_pb2.GetModelResponse:
        """Describe the served model."""
        del request, context
        engine = self._engine.current
        info = engine.info
        lora = engine.lora_limits if isinstance(engine, LoraEngine) else None
        return rollout_pb2.GetModelResponse(
            model=info.model,
            vocabulary_size=info.vocabulary_size,
            max_model_len=info.max_model_len,
            dtype=info.dtype,
            tokenizer_digest=self._prompts.digest,
            eos_token_ids=info.eos_token_ids,
            engine=info.engine,
            policy_version=engine.status().version.to_proto(),
            architecture=info.architecture,
            adapters=loaded_adapters(engine),
            max_adapters=lora.max_loras if lora else 0,
            max_adapter_rank=lora.max_rank if lora else 0,
        )

    async def Tokenize(  # noqa: N802 - gRPC's name
        self,
        request: rollout_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[rollout_pb2.TokenizeRequest, rollout_pb2.TokenizeResponse],
    ) -> rollout_pb2.TokenizeResponse:
        """Turn text or messages into token ids."""
        del context
        return rollout_pb2.TokenizeResponse(
            token_ids=self._prompts.tokenize(request), tokenizer_digest=self._prompts.digest
        )

    def _enter(self, request: GenerationRequest) -> None:
        self._live[id(request)] = request
        self.samples += request.n

    def _leave(self, request: GenerationRequest) -> None:
        del self._live[id(request)]
        self.samples -= request.n

    def _admit(self, request: rollout_pb2.GenerateRequest) -> GenerationRequest:
        """Check a request against the replica, then against the model."""
        if request.run and request.run != self._run:
            raise SluiceError.failed_precondition(
                "WRONG_RUN", f"this replica belongs to {self._run}, the request to {request.run}"
            )
        engine = self._engine.serving
        asked = generation_request(request, self._prompts.ids_of(request), engine.info)
        if request.HasField("min_policy_version"):
            wanted, present = Version.from_proto(request.min_policy_version), engine.status().version
            if present < wanted:
                raise SluiceError.failed_precondition(
                    "VERSION_TOO_OLD", f"this replica serves version {present}, the request needs {wanted}"
                )
        if self.samples + asked.n > self._limits.max_queued:
            raise SluiceError.resource_exhausted(
                "QUEUE_FULL",
                f"{self.samples} samples are under way and at most {self._limits.max_queued} are taken on; "
                "retry later, or add replicas",
                RETRY_AFTER_S,
            )
        return asked


class _TextDeltas:
    """Text that new tokens complete; a character that is still half way is held back."""

    def __init__(self, prompts: Prompts, *, wanted: bool) -> None:
        self._prompts, self._wanted = prompts, wanted
        self._ids: dict[int, list[int]] = {}
        self._given: dict[int, int] = {}

    def after(self, index: int, new_ids: list[int], *, last: bool) -> str:
        if not self._wanted:
            return ""
        ids = self._ids.setdefault(index, [])
        ids += new_ids
        text = self._prompts.decode(ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and not last:
            return ""
        given = self._given.get(index, 0)
        self._given[index] = len(text)
        return text[given:]


def _translated(error: EngineError | EngineBusyError | ValueError) -> SluiceError:
    if isinstance(error, UnknownAdapterError):
        return SluiceError.failed_precondition("ADAPTER_NOT_LOADED", str(error))
    if isinstance(error, ValueError):
        return SluiceError.invalid_argument("sampling", str(error))
    if isinstance(error, EngineBusyError):
        return SluiceError.resource_exhausted("QUEUE_FULL", str(error), RETRY_AFTER_S)
    return SluiceError.unavailable("ENGINE_FAILED", f"{error}; retry, or use another replica", RETRY_AFTER_S)
