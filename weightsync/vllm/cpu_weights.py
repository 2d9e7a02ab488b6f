"""Handling of packed weights in vLLM's CPU workers. Packing for the matrix kernels takes many times as long as a copy.

So a second model is loaded beside the one that samples, and the two swap their weights. Weights that vLLM does not pack again are
packed here, and packed weights are compared with the tensors of a file. The norms are in `weightsync.vllm.cpu_norms`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from vllm._custom_ops import cpu_prepack_moe_weight
from vllm.config import CompilationMode
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from weightsync.vllm.load_plan import PlannedCopy

NEXT_PREFIX = "sluice_next"
"""Keeps the layers of the second model apart in vLLM's registry of layers."""

PACKED = "cpu_linear"
"""Attribute in which vLLM's CPU layers keep the kernel with the packed weight."""

PARTS_OF_EXPERTS = {"w13_weight": 2, "w2_weight": 1}
"""For each parameter of vLLM's experts: how many tensors of a file it holds per expert, stacked by rows (gate and up, or down)."""

_IDENTITY_COLUMNS = 32
"""Columns of the identity per product, which takes some milliseconds for the largest layers of today's models."""


# --- the second model of a CPU worker ---------------------------------------------------------------------------------


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
    """The second model of a CPU worker: the next version is loaded into it beside the one that samples, then swapped in.

    On a CPU a weight is not only copied but packed for the matrix kernels, which takes many times as long as the copy. A thread
    does that beside the engine's steps, so that the pause only swaps references. The second model needs the memory of the weights
    a second time. An accelerator copies in place instead: its memory is scarcer, and CUDA graphs refer to fixed addresses.

    The modules are built at the first update, between two steps. vLLM's registry of layers and torch's default data type are global
    to the process, so a thread would change them during a step. That takes about 1 ms per layer, once: 35 ms for 30 layers.

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
            self._next = initialize_model(vllm_config=vllm_config, prefix=NEXT_PREFIX)
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
        """Return ("pending", None), ("ok", seconds) or ("err", why)."""
        return self._outcome

    def holds(self, paths: list[str]) -> bool:
        """Return whether the version of these files is built. Wait if it is being built."""
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
        """Exchange the two sets of weights. The next build overwrites the old ones."""
        for live, built in self._pairs:
            live._parameters, built._parameters = built._parameters, live._parameters  # noqa: SLF001
            if PACKED in built.__dict__:
                live.__dict__[PACKED], built.__dict__[PACKED] = built.__dict__[PACKED], live.__dict__[PACKED]
        self._paths = []


def pairs(live: torch.nn.Module, built: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """Return the pairs of modules of the same name that may exchange weights: all except shared modules and attention (KV cache)."""
    others = dict(built.named_modules())
    return [
        (module, other)
        for name, module in live.named_modules()
        if (other := others.get(name)) is not None
        and type(other) is type(module)
        and not is_deferred_attention_layer(module)
    ]


def leave_out_shared(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Replace modules that a model shares with `other` by empty modules: vLLM shares rotary embeddings between all models.

    A reload takes modules apart, which must not happen to modules that the other model uses.
    """
    shared = {id(module) for module in other.modules()}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if id(child) in shared:
                setattr(parent, name, torch.nn.Module())


# --- packing ----------------------------------------------------------------------------------------------------------


def refresh_tied_head(model: torch.nn.Module) -> None:
    """Pack the output layer again: on a CPU it holds a packed copy of the embedding, which the reload does not update."""
    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextmanager
def experts_packed_again(model: torch.nn.Module) -> Iterator[None]:
    """On a CPU, make vLLM pack the weights of experts that are loaded in the block.

    vLLM packs them only for a layer without a kernel. If the layer has a kernel, vLLM copies plain weights to the place of the
    packed ones, and the kernel misreads them. On an accelerator the kernels stay, because CUDA graphs refer to their addresses.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()] if current_platform.is_cpu() else []
    kernels = {method: method.moe_kernel for method in methods if isinstance(method, UnquantizedFusedMoEMethod)}
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:  # nothing was loaded into its layer
                method.moe_kernel = kernel


def packed_expert(rows: torch.Tensor, packing: str) -> torch.Tensor:
    """Pack rows [rows, columns] of an expert as vLLM packs them for an instruction set."""
    packed: torch.Tensor = cpu_prepack_moe_weight(rows[None], packing)[0]
    return packed


def packing_of_experts(module: torch.nn.Module) -> str:
    """Return the instruction set for which vLLM packed the weights of experts; empty if that is not known."""
    method = getattr(module, "quant_method", None)
    if not isinstance(method, UnquantizedFusedMoEMethod) or method.moe_kernel is None:
        return ""
    experts = method.moe_kernel.fused_experts
    known = isinstance(experts, CPUUnquantizedExperts) and not experts._use_zentorch  # noqa: SLF001 - no public name for it
    return str(experts.isa) if known else ""


def places_in_experts(
    live: torch.Tensor, shape: tuple[int, ...], copies: Sequence[PlannedCopy], parts: int
) -> dict[PlannedCopy, torch.Tensor]:
    """Return, for each copy that fills one part of an expert, the packed rows [rows, columns] of that part.

    Args:
        live: Packed weights [experts, rows, columns]; each part may have more rows and columns than the loaded tensor.
        shape: Shape of the weights before packing.
        copies: The loader's copies into these weights.
        parts: Tensors per expert.
    """
    if not live.is_contiguous():
        return {}
    experts, rows, columns = shape
    rows //= parts
    of_parts = live.detach().view(experts * parts, live.shape[1] // parts, live.shape[2])
    filled = ((rows, columns), (columns, 1))
    return {
        copy: of_parts[copy.target.offset // (rows * columns)]
        for copy in copies
        if (copy.target.sizes, copy.target.strides) == filled and copy.target.offset % (rows * columns) == 0
    }


def unpacked(module: torch.nn.Module, values: torch.Tensor) -> Iterator[None]:
    """Recover the weight [outputs, inputs] of a packed kernel, some columns at a time."""
    inputs = values.shape[1]
    for begin in range(0, inputs, _IDENTITY_COLUMNS):
        count = min(_IDENTITY_COLUMNS, inputs - begin)
        identity = torch.zeros(count, inputs, dtype=values.dtype)
        identity[:, begin : begin + count].fill_diagonal_(1.0)
        values[:, begin : begin + count] = module.__dict__[PACKED](identity, module.weight, None).t()
        yield
