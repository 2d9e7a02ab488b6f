"""A Hugging Face causal language model that reads and writes the slots of `slot_cache`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollout_svc.engines.adapter_slots import Adapter
from rollout_svc.engines.base import EngineError, ModelInfo
from rollout_svc.engines.base_model import model_directory
from rollout_svc.engines.slot_adapters import SlotAdapters
from rollout_svc.engines.slot_cache import DecodeView, KvShape, PrefillView, SlotCache
from rollout_svc.engines.slot_shapes import Keys, Logits, PickedLogits, Queries
from rollout_svc.start_check import check_length

__all__ = ["SlotModel"]

ATTENTION = "sluice_slots"
"""Name under which `slot_attention` is registered with transformers."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SlotModel:
    """The model on its device, with the two kinds of forward pass.

    Args:
        model: Directory or hub id.
        device: "auto" takes CUDA where there is one.
        dtype: "auto" takes the model's own.
        max_model_len: Most tokens of prompt and continuation; None takes the model's own limit.

    Raises:
        EngineError: if the model cannot be loaded or its architecture needs more than plain causal attention.
    """

    def __init__(self, model: str, device: str, dtype: str, max_model_len: int | None) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM  # noqa: PLC0415 - takes seconds
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

        disable_progress_bar()  # a log is no terminal
        AttentionInterface.register(ATTENTION, slot_attention)
        self.device = torch.device(_device(device))
        try:
            self.directory = model_directory(model)
            self.module = AutoModelForCausalLM.from_pretrained(
                self.directory, dtype=DTYPES.get(dtype, "auto"), attn_implementation=ATTENTION
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise EngineError(f"cannot load {model}: {error}") from error
        self.module.requires_grad_(requires_grad=False).eval().to(self.device)
        self.adapters = SlotAdapters(self.module)
        self.info = _info(model, self.module, max_model_len)
        self._picked: tuple[Tensor, Tensor] | None = None
        head = self.module.get_output_embeddings()
        if head is None:
            raise EngineError(f'{self.info.architecture} has no output layer of its own; use engine = "vllm"')
        head.register_forward_pre_hook(self._pick)

    @property
    def kv_shape(self) -> KvShape:
        """What one position of one sample takes."""
        text = self.module.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return KvShape(text.num_hidden_layers, heads, head_dim, self.module.dtype, self.device)

    def check(self) -> None:
        """Run a prompt and a step, so that an architecture that we do not serve is found at the start.

        Raises:
            EngineError: naming what it needs.
        """
        shape = self.kv_shape
        cache = SlotCache(shape, 2 * LENGTH_CHECKED * shape.position_bytes)
        cache.reserve(2, 2, used=0)
        name = self.info.architecture
        try:
            logits = self.prefill(cache, 0, [[0], [0]], [0, 1], [(0, 0), (1, 0)], adapters=[None] * 2)
            self.decode(cache, [0, 0], [1, 1], [None] * 2)
        except (NotImplementedError, RuntimeError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise EngineError(
                f'{name} is not served by the transformers engine: {error}; use engine = "vllm"'
            ) from error
        if logits.shape != (2, self.info.vocabulary_size):
            raise EngineError(f'{name} gives logits of shape {list(logits.shape)}; use engine = "vllm"')

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def prefill(
        self,
        cache: SlotCache,
        first: int,
        prompts: Sequence[Sequence[int]],
        sources: Sequence[int],
        picked: Sequence[tuple[int, int]],
        *,
        adapters: Sequence[Adapter | None],
    ) -> PickedLogits:
        """Fill rows with prompts.

        Args:
            cache: Where keys and values go.
            first: First row to fill.
            prompts: Token ids, each forwarded once.
            sources: For each row, which prompt it takes.
            picked: Prompt and position of each of the wanted logits.
            adapters: What each prompt runs on beside the weights.

        Returns:
            Logits at the picked positions.
        """
        length = max(map(len, prompts))
        # Padding stands on the right, where causal attention keeps it out of sight of the tokens.
        ids = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts], device=self.device)
        view = PrefillView(cache, first, torch.tensor(sources, device=self.device))
        positions = torch.arange(length, device=self.device).expand(len(prompts), -1)
        with self._picking(picked):
            inputs = {"input_ids": ids, "position_ids": positions, "past_key_values": view}
            output = self.adapters.forward(inputs | {"use_cache": True, "logits_to_keep": 0}, adapters)
        if len(view.layers_seen) != cache.keys.shape[0]:
            raise NotImplementedError("not all of its layers are attention layers with keys and values")
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def decode(
        self,
        cache: SlotCache,
        tokens: Sequence[int],
        positions: Sequence[int],
        adapters: Sequence[Adapter | None],
    ) -> Logits:
        """One step of the first rows.

        Args:
            cache: Their keys and values.
            tokens: The last token of each, not forwarded yet.
            positions: Its position.
            adapters: What each row runs on beside the weights.

        Returns:
            Logits of the next token.
        """
        width = max(positions) + 1
        at = torch.tensor(positions, device=self.device)
        seen = torch.arange(width, device=self.device) <= at[:, None]
        inputs = {
            "input_ids": torch.tensor(tokens, device=self.device)[:, None],
            "position_ids": at[:, None],
            "attention_mask": seen[:, None, None],
            "past_key_values": DecodeView(cache, at, width),
            "use_cache": True,
        }
        output = self.adapters.forward(inputs, adapters)
        logits: Tensor = output.logits[:, 0]
        return logits

    @contextmanager
    def _picking(self, picked: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Within this, the output layer computes logits of these positions alone."""
        prompts, positions = torch.tensor(picked, device=self.device).unbind(1)
        self._picked = (prompts, positions)
        try:
            yield
        finally:
            self._picked = None

    def _pick(self, _head: object, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Select from hidden states ``[prompts, positions, hidden]`` before the output layer sees them."""
        return None if self._picked is None else inputs[0][self._picked][None]


LENGTH_CHECKED = 128


def slot_attention(
    module: torch.nn.Module,
    query: Queries,
    key: Keys,
    value: Keys,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **features: object,
) -> tuple[Tensor, None]:
    """Causal attention for transformers' ``AttentionInterface``: whole prompts, or one query per row under a mask.

    Query heads that share keys become the queries of one head, so that nothing is copied per query head.

    Raises:
        NotImplementedError: for attention of another kind.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if features.get(name) is not None]
    if sliding_window is not None or unknown:
        raise NotImplementedError(f"its attention has {unknown or 'a sliding window'}")
    if attention_mask is None:
        if query.shape[2] != key.shape[2]:
            raise NotImplementedError("its attention looks beyond the prompt")
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return output.transpose(1, 2), None
    batch, heads, _, dim = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(batch, 1, heads, -1), None


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError('device = "cuda" but there is no CUDA device; set device = "auto"')
    return name


def _info(model: str, module: Any, max_model_len: int | None) -> ModelInfo:  # noqa: ANN401 - transformers is not typed
    text = module.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or max_model_len
    if longest is None:
        raise EngineError(f"the configuration of {model} names no longest sequence; set max_model_len")
    try:
        check_length(model, max_model_len or longest, longest)
    except ValueError as error:
        raise EngineError(str(error)) from error
    ends: set[int] = set()
    for source in (text, module.generation_config):
        named = getattr(source, "eos_token_id", None)
        ends.update([named] if isinstance(named, int) else named or ())
    return ModelInfo(
        model=model,
        architecture=type(module).__name__,
        vocabulary_size=text.vocab_size,
        max_model_len=max_model_len or longest,
        dtype=str(module.dtype).removeprefix("torch."),
        eos_token_ids=tuple(sorted(id_ for id_ in ends if id_ < text.vocab_size)),
        engine="transformers",
    )
