"""What vLLM does for LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rollout_svc.engines.adapter_slots import Adapter
from rollout_svc.engines.adapters import Asked
from rollout_svc.engines.base import EngineError
from rollout_svc.engines.vllm_spans import TrackedRequest
from rollout_svc.engines.vllm_types import Llm
from rollout_svc.engines.vllm_weights import Weights, step
from sluice.versions import Version

__all__ = ["VllmAdapterHost", "lora_request"]


class VllmAdapterHost:
    """An `AdapterHost`.

    Args:
        llm: Gives the running ``AsyncLLM``, or raises EngineError.
        weights: What its workers hold.
        live: Gives the requests under way.
        deadline_s: For each call to the engine.
    """

    def __init__(
        self, llm: Callable[[], Llm], weights: Weights, live: Callable[[], Iterable[TrackedRequest]], deadline_s: float
    ) -> None:
        self._llm, self._weights, self._live, self._deadline_s = llm, weights, live, deadline_s

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The base model's tensors."""
        return self._weights.base.shapes if self._weights.base else {}

    @property
    def version(self) -> Version:
        """The version of its weights."""
        return self._weights.version

    async def add(self, adapter: Adapter) -> None:
        """Let the workers load an adapter; they sample on.

        Raises:
            EngineError: if one refuses it; then none has it.
            HalfLoadedError: if the engine failed.
        """
        llm = self._llm()
        arguments = {"label": adapter.label, "number": adapter.number, "path": str(adapter.staged.path)}
        call = llm.collective_rpc("sluice_add_adapter", kwargs=arguments)
        answers = await step(llm, "loading an adapter", call, self._deadline_s)
        why = next((answer[1] for answer in answers if answer[0] != "ok"), None)
        if why is not None:
            await self.remove(adapter)
            raise EngineError(f"adapter {adapter.version} was not loaded: {why}; what served before serves on")

    async def remove(self, adapter: Adapter) -> None:
        """Let the workers forget an adapter.

        Raises:
            HalfLoadedError: if the engine failed.
        """
        llm = self._llm()
        await step(llm, "unloading an adapter", llm.remove_lora(adapter.number), self._deadline_s)

    async def end_requests(self, which: Callable[[Asked], bool]) -> None:
        """End some requests; the engine has let go of them before it answers a later call."""
        for tracked in [each for each in self._live() if which(each)]:
            tracked.retired = True
            await self._llm().abort(tracked.internal_id, internal=True)


def lora_request(adapter: Adapter) -> object:
    """What vLLM knows an adapter by, a ``LoRARequest``."""
    from vllm.lora.request import LoRARequest  # noqa: PLC0415 - vLLM is loaded by start()

    return LoRARequest(adapter.label, adapter.number, str(adapter.staged.path))
