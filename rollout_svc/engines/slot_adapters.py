"""LoRA adapters beside the weights of a `SlotModel`, by PEFT: rows of one batch may each have another."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rollout_svc.engines.adapter_slots import Adapter
from rollout_svc.engines.adapters import Asked
from rollout_svc.engines.base import EngineError, FinishReason
from rollout_svc.engines.slot_requests import LiveRequest
from sluice.versions import Version

if TYPE_CHECKING:
    from rollout_svc.engines.slot_loop import SlotLoop

__all__ = ["SlotAdapterHost", "SlotAdapters"]

NONE = "__base__"
"""PEFT's name for rows without an adapter."""


class SlotAdapters:
    """The adapters of one model. Used by the thread that samples.

    PEFT wraps the linear layers of the model when the first adapter comes; the weights themselves stay where they are, so that
    they can still be swapped in place.

    Args:
        module: The model.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._wrapped: Any = None

    def add(self, adapter: Adapter) -> None:
        """Load an adapter.

        Raises:
            EngineError: if PEFT cannot.
        """
        from peft import PeftConfig, PeftModel  # noqa: PLC0415 - only where adapters are served

        path, label = str(adapter.staged.path), _label(adapter)
        try:
            if self._wrapped is None:
                config = PeftConfig.from_pretrained(path)
                config.inference_mode = True
                self._wrapped = PeftModel(self._module, config, adapter_name=label, autocast_adapter_dtype=False).eval()
            result = self._wrapped.load_adapter(path, label, is_trainable=False, autocast_adapter_dtype=False)
            self._wrapped.eval()
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            self.remove(adapter)
            raise EngineError(f"adapter {adapter.version} was not loaded: {error}") from error
        if result.unexpected_keys:
            self.remove(adapter)
            raise EngineError(
                f"adapter {adapter.version} has layers that the model lacks: {result.unexpected_keys[:3]}"
            )

    def remove(self, adapter: Adapter) -> None:
        """Forget an adapter that no row runs on. Idempotent."""
        if self._wrapped is None or _label(adapter) not in self._wrapped.peft_config:
            return
        if len(self._wrapped.peft_config) == 1:  # PEFT cannot be without any
            self._wrapped.unload()
            self._wrapped = None
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that none is active then is what we want: rows name theirs
            self._wrapped.delete_adapter(_label(adapter))

    def forward(self, inputs: Mapping[str, object], adapters: Sequence[Adapter | None]) -> Any:  # noqa: ANN401 - untyped
        """Forward a batch, each row with its own adapter or with none."""
        if self._wrapped is None:
            return self._module(**inputs)
        return self._wrapped(**inputs, adapter_names=[NONE if each is None else _label(each) for each in adapters])


class SlotAdapterHost:
    """An `AdapterHost`: what the transformers engine does for its adapters, between two steps of its loop.

    Args:
        loop: Gives the loop, or raises EngineError.
        shapes: Gives the base model's tensors.
        live: Gives the requests under way.
    """

    def __init__(
        self,
        loop: Callable[[], SlotLoop],
        shapes: Callable[[], Mapping[str, tuple[int, ...]]],
        live: Callable[[], Iterable[LiveRequest]],
    ) -> None:
        self._loop, self._shapes, self._live = loop, shapes, live

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The base model's tensors."""
        return self._shapes()

    @property
    def version(self) -> Version:
        """The version of its weights."""
        return self._loop().version

    async def add(self, adapter: Adapter) -> None:
        """Load an adapter beside the weights.

        Raises:
            EngineError: if it cannot be loaded.
        """
        loop = self._loop()
        await asyncio.wrap_future(loop.call(lambda: loop.batch.adapters.add(adapter)))

    async def remove(self, adapter: Adapter) -> None:
        """Forget an adapter that no request runs on."""
        loop = self._loop()
        await asyncio.wrap_future(loop.call(lambda: loop.batch.adapters.remove(adapter)))

    async def end_requests(self, which: Callable[[Asked], bool]) -> None:
        """End some requests."""
        loop = self._loop()
        ending = [live for live in self._live() if which(live)]

        def end() -> None:
            for live in ending:
                loop.abort(live, FinishReason.VERSION_RETIRED)

        await asyncio.wrap_future(loop.call(end))


def _label(adapter: Adapter) -> str:
    """PEFT's names are those of PyTorch modules: without dots."""
    return adapter.label.replace(".", "_")
