"""A second set of weights in a CPU worker: the next version is built beside the one that samples, then swapped in.

On a CPU a weight is not only copied but packed for the matrix kernels, which takes many times as long as the copy. A thread
does that beside the engine's steps, so that the pause only swaps references. It costs the memory of the weights once more.
An accelerator copies in place instead: its memory is scarcer, and CUDA graphs hold on to addresses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

__all__ = ["PACKED", "NextModel", "why_no_swap"]

PREFIX = "sluice_next"
"""Keeps the layers of the second model apart in vLLM's registry of layers."""

PACKED = "cpu_linear"
"""Attribute in which vLLM's CPU layers keep the kernel with the packed weight."""


def why_no_swap(vllm_config: Any, model: torch.nn.Module) -> str:  # noqa: ANN401 - vLLM's VllmConfig
    """Return why this model's weights cannot be swapped; empty if they can."""
    if not current_platform.is_cpu():
        return "weights are copied in place on an accelerator"
    if vllm_config.lora_config is not None or vllm_config.speculative_config is not None:
        return "adapters and draft models hold on to layers"
    if vllm_config.compilation_config.mode != CompilationMode.NONE:
        return "compiled graphs hold on to weights"
    known = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    methods = {type(method) for module in model.modules() if (method := getattr(module, "quant_method", None))}
    strange = sorted(method.__name__ for method in methods if not issubclass(method, known))
    return f"layers keep weights in forms that are not known here: {strange}" if strange else ""


class NextModel:
    """The second model of one worker.

    Args:
        vllm_config: The engine's configuration.
        model: The model that samples.
        reload: Loads a version into a model that was loaded before.
    """

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - vLLM's VllmConfig
        model: torch.nn.Module,
        reload: Callable[[torch.nn.Module, list[str]], None],
    ) -> None:
        self._live = model
        self._model_config = vllm_config.model_config
        self._reload = reload
        self._loaded = False
        self._thread: threading.Thread | None = None
        self._paths: list[str] = []
        self._outcome: tuple[str, Any] = ("pending", None)
        layers = vllm_config.compilation_config.static_forward_context
        known = set(layers)
        with set_default_torch_dtype(self._model_config.dtype), torch.device("cpu"):
            self._next = initialize_model(vllm_config=vllm_config, prefix=PREFIX)
        for name in set(layers) - known:  # its attention layers never run and own no KV cache
            del layers[name]
        leave_out_shared(self._next, model)
        self._pairs = pairs(model, self._next)

    def begin(self, paths: list[str], tensors: Callable[[list[str]], Iterator[tuple[str, torch.Tensor]]]) -> None:
        """Start to build a version in a thread."""
        self.join()
        self._paths, self._outcome = paths, ("pending", None)
        self._thread = threading.Thread(target=self._build, args=(paths, tensors), name="sluice-next", daemon=True)
        self._thread.start()

    @property
    def outcome(self) -> tuple[str, Any]:
        """("pending", None), ("ok", seconds) or ("err", why)."""
        return self._outcome

    def holds(self, paths: list[str]) -> bool:
        """Whether the version of these files is built. Wait for it if it is being built."""
        if paths != self._paths:
            return False
        self.join()
        return self._outcome[0] == "ok"

    def join(self) -> None:
        """Wait for the end of the build."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _build(self, paths: list[str], tensors: Callable[[list[str]], Iterator[tuple[str, torch.Tensor]]]) -> None:
        begun = time.perf_counter()
        try:
            with torch.no_grad():
                if self._loaded:
                    self._reload(self._next, paths)
                else:
                    self._next.load_weights(tensors(paths))
                    process_weights_after_loading(self._next, self._model_config, torch.device("cpu"))
                    self._loaded = True
        except Exception as error:  # noqa: BLE001 - nothing may be raised into vLLM; the caller asks for the outcome
            self._outcome = ("err", f"{type(error).__name__}: {error}")
        else:
            self._outcome = ("ok", time.perf_counter() - begun)

    def swap(self) -> None:
        """Exchange the two sets of weights; the former ones are overwritten by the next build."""
        for live, built in self._pairs:
            live._parameters, built._parameters = built._parameters, live._parameters  # noqa: SLF001
            if PACKED in built.__dict__:
                live.__dict__[PACKED], built.__dict__[PACKED] = built.__dict__[PACKED], live.__dict__[PACKED]
        self._paths = []


def pairs(live: torch.nn.Module, built: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return the modules of the same name that may exchange their weights: all but shared ones and attention, which owns KV cache."""
    others = dict(built.named_modules())
    return [
        (module, other)
        for name, module in live.named_modules()
        if (other := others.get(name)) is not None
        and type(other) is type(module)
        and not is_deferred_attention_layer(module)
    ]


def leave_out_shared(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Put empty modules where a model uses modules of another one: vLLM shares rotary embeddings between all models.

    A reload takes modules apart, and those are in use.
    """
    shared = {id(module) for module in other.modules()}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if id(child) in shared:
                setattr(parent, name, torch.nn.Module())
