"""A Hugging Face causal language model that reads and writes the slots of a cache, with its adapters and its live weights."""
# mypy: disable-error-code="name-defined"
# ruff: noqa: F722  (jaxtyping's axis names are strings, not forward references)

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from rollout_svc.engines.adapters import Adapter
from rollout_svc.engines.base import (
    OWN_TEMPLATE,
    EngineError,
    EngineSettingsError,
    ModelInfo,
    ServedTemplate,
    UnfitVersionError,
)
from rollout_svc.engines.model_files import TIED_HEAD, BaseModel, check_length, model_directory
from rollout_svc.engines.slots.sampling import Logits, PerRow
from sluice.end_tokens import find_end_tokens
from sluice.imports import large_imports
from sluice.models import TOKENIZERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTENTION = "sluice_slots"
"""Name under which `slot_attention` is registered with transformers."""

RowIndices: TypeAlias = Int64[Tensor, " rows"]
PickedLogits: TypeAlias = Float[Tensor, "picked vocabulary"]
Queries: TypeAlias = Float[Tensor, "rows heads queries dim"]
Keys: TypeAlias = Float[Tensor, "rows kv_heads keys dim"]

LENGTH_STEP = 128
"""Number of positions by which the cache grows, so that it is seldom copied."""

FIRST_ROWS = 8

NONE = "__base__"
"""PEFT's name for rows without an adapter."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SlotModel:
    """The model on its device, with a forward pass for prompts and one for single tokens.

    Args:
        model: Directory or hub id.
        device: "auto" takes CUDA if available.
        dtype: "auto" takes the model's own.
        max_model_len: Maximum number of tokens of prompt and continuation; None takes the model's own limit.

    Raises:
        EngineSettingsError: if the model cannot be loaded or its architecture needs more than plain causal attention.
    """

    def __init__(
        self, model: str, device: str, dtype: str, max_model_len: int | None, template: ServedTemplate = OWN_TEMPLATE
    ) -> None:
        with large_imports():
            from transformers import AttentionInterface, AutoModelForCausalLM  # noqa: PLC0415 - takes seconds
            from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

        disable_progress_bar()  # it would fill the log
        AttentionInterface.register(ATTENTION, slot_attention)
        self.device = torch.device(_device(device))
        try:
            self.directory = model_directory(model)
            self.module = AutoModelForCausalLM.from_pretrained(
                self.directory, dtype=DTYPES.get(dtype, "auto"), attn_implementation=ATTENTION
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise EngineSettingsError(f"cannot load {model}: {error}") from error
        self.module.requires_grad_(requires_grad=False).eval().to(self.device)
        self.adapters = SlotAdapters(self.module)
        self.tokenizer = _tokenizer(self.directory)
        if self.tokenizer is not None and template.text is not None:
            self.tokenizer.chat_template = template.text
        self.info = _info(model, self.module, self.tokenizer, max_model_len, template.arguments)
        self._picked: tuple[Tensor, Tensor] | None = None
        head = self.module.get_output_embeddings()
        if head is None:
            raise EngineSettingsError(f'{self.info.architecture} has no output layer of its own; use engine = "vllm"')
        head.register_forward_pre_hook(self._pick)
        if type(head) is torch.nn.Linear and head.weight.dtype in (torch.bfloat16, torch.float16):
            head.forward = partial(_float32_logits, head)

    def known_of(self, base: BaseModel) -> BaseModel:
        """Return the base model with only those tensors of its files that the model has; see `BaseModel.known_to` for the error."""
        weights = [name for name, _ in self.module.named_parameters()]  # tied weights appear once
        return base.known_to(self.module.state_dict().keys(), weights)

    @property
    def kv_shape(self) -> KvShape:
        """Return the size of one position of one sample."""
        text = self.module.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        return KvShape(text.num_hidden_layers, heads, head_dim, self.module.dtype, self.device)

    def check(self) -> None:
        """Run a prompt and a step, to detect an unsupported architecture at start.

        Raises:
            EngineSettingsError: if the architecture is not supported, with the reason.
        """
        shape = self.kv_shape
        cache = SlotCache(shape, 2 * LENGTH_CHECKED * shape.position_bytes)
        cache.reserve(2, 2, used=0)
        name = self.info.architecture
        try:
            logits = self.prefill(cache, 0, [[0], [0]], [0, 1], [(0, 0), (1, 0)], adapters=[None] * 2)
            self.decode(cache, [0, 0], [1, 1], [None] * 2)
        except (NotImplementedError, RuntimeError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise EngineSettingsError(
                f'{name} is not served by the transformers engine: {error}; use engine = "vllm"'
            ) from error
        if logits.shape != (2, self.info.vocabulary_size):
            raise EngineSettingsError(f'{name} gives logits of shape {list(logits.shape)}; use engine = "vllm"')

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
            cache: The cache to write to.
            first: First row to fill.
            prompts: Token ids, each forwarded once.
            sources: For each row, the index of its prompt.
            picked: Prompt and position of each wanted output.
            adapters: The adapter of each prompt, or None.

        Returns:
            Logits at the picked positions.
        """
        length = max(map(len, prompts))
        # Padding is on the right, where causal attention hides it from the tokens.
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
        self, cache: SlotCache, tokens: Sequence[int], positions: Sequence[int], adapters: Sequence[Adapter | None]
    ) -> Logits:
        """Forward the last token of each of the first rows, at its position, and return the logits of the next."""
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
        """Make the output layer compute the logits of these positions only."""
        prompts, positions = torch.tensor(picked, device=self.device).unbind(1)
        self._picked = (prompts, positions)
        try:
            yield
        finally:
            self._picked = None

    def _pick(self, _head: object, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Select from the hidden states ``[prompts, positions, hidden]`` before the output layer."""
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
    """Compute causal attention for transformers' ``AttentionInterface``: whole prompts, or one query per row under a mask.

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


def _float32_logits(head: torch.nn.Linear, states: Tensor) -> Tensor:
    """Compute an output layer without rounding its products, as the trainer does."""
    if states.is_cuda and head.bias is None:
        return torch.mm(states.flatten(0, -2), head.weight.t(), out_dtype=torch.float32).unflatten(0, states.shape[:-1])
    bias = None if head.bias is None else head.bias.float()
    return linear(states.float(), head.weight.float(), bias)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineSettingsError('device = "cuda" but there is no CUDA device; set device = "auto"')
    return name


def _tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a model; None if it has none.

    If there are no files, transformers makes an empty tokenizer for some architectures, such as GPT-2. Its end token means nothing.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - loaded with the model

    if not any(any(directory.glob(pattern)) for pattern in TOKENIZERS):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError):
        return None


def _info(
    model: str,
    module: Any,  # noqa: ANN401 - transformers is not typed
    tokenizer: PreTrainedTokenizerBase | None,
    max_model_len: int | None,
    template_arguments: Mapping[str, Any],
) -> ModelInfo:
    text = module.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or max_model_len
    if longest is None:
        raise EngineSettingsError(f"the configuration of {model} names no longest sequence; set max_model_len")
    try:
        check_length(model, max_model_len or longest, longest)
    except ValueError as error:
        raise EngineSettingsError(str(error)) from error
    ends = find_end_tokens(
        tokenizer, text, module.generation_config, vocabulary_size=text.vocab_size, arguments=template_arguments
    )
    return ModelInfo(
        model=model,
        architecture=type(module).__name__,
        vocabulary_size=text.vocab_size,
        max_model_len=max_model_len or longest,
        dtype=str(module.dtype).removeprefix("torch."),
        eos_token_ids=ends.ids,
        engine="transformers",
    )


@dataclass(frozen=True, slots=True)
class KvShape:
    """The size of one position of one sample."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def position_bytes(self) -> int:
        """Return the bytes of the keys and values of one position in all layers."""
        return 2 * self.layers * self.heads * self.head_dim * int(self.dtype.itemsize)


class SlotCache:
    """Keys and values, ``[layers, rows, heads, positions, head_dim]`` each.

    Args:
        budget_bytes: Maximum number of bytes of all rows and positions.
    """

    def __init__(self, shape: KvShape, budget_bytes: int) -> None:
        self._shape = shape
        self._positions = budget_bytes // shape.position_bytes
        self.keys = self._zeros(0, 0)
        self.values = self._zeros(0, 0)

    def _zeros(self, rows: int, length: int) -> Tensor:
        # Zeros and not `empty`: masked positions count as 0 times the stored value, and 0 times NaN is NaN.
        shape = self._shape
        size = (shape.layers, rows, shape.heads, length, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)

    def fits(self, rows: int, length: int) -> bool:
        """Return whether `rows` rows of `length` positions fit the budget."""
        return rows * length <= self._positions

    def usage(self, lengths: int) -> float:
        """Return the fraction of the budget that `lengths` positions take."""
        return lengths / self._positions

    def reserve(self, rows: int, length: int, used: int) -> None:
        """Make room for `rows` rows of `length` positions.

        Args:
            rows: Rows that are needed.
            length: Positions that are needed in each.
            used: Rows at the front whose contents are kept.
        """
        have_rows, have_length = self.keys.shape[1], self.keys.shape[3]
        if rows <= have_rows and length <= have_length:
            return
        roomy = (max(have_rows, FIRST_ROWS, 1 << (rows - 1).bit_length()), _round_up(max(have_length, length)))
        size = roomy if self.fits(*roomy) else (rows, length)
        kept = min(have_length, size[1])
        for name in ("keys", "values"):
            old, new = getattr(self, name), self._zeros(*size)
            new[:, :used, :, :kept] = old[:, :used, :, :kept]
            setattr(self, name, new)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first positions of one row to another."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def clean(self, row: int) -> None:
        """Zero a row that holds a NaN. A later sample in this row would read it in masked positions."""
        self.keys[:, row] = 0
        self.values[:, row] = 0


def _round_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class PrefillView:
    """Stores whole prompts, which attend only to themselves.

    Args:
        first: Row of the first prompt.
        sources: For each row from `first` on, the index of its prompt in the batch.
    """

    def __init__(self, cache: SlotCache, first: int, sources: RowIndices) -> None:
        self._cache, self._sources = cache, sources
        self._rows = slice(first, first + len(sources))
        self.layers_seen: set[int] = set()

    def update(self, keys: Keys, values: Keys, layer: int, *_args: object, **_kwargs: object) -> tuple[Keys, Keys]:
        """Store keys and values ``[prompts, heads, positions, head_dim]`` of a layer (transformers' signature)."""
        length = keys.shape[2]
        self.layers_seen.add(layer)
        self._cache.keys[layer, self._rows, :, :length] = keys[self._sources]
        self._cache.values[layer, self._rows, :, :length] = values[self._sources]
        return keys, values


class DecodeView:
    """Stores the next position of each of the first rows.

    Args:
        width: Number of positions to attend to; above the greatest of `positions`.
    """

    def __init__(self, cache: SlotCache, positions: PerRow, width: int) -> None:
        self._cache, self._positions, self._width = cache, positions, width
        self._rows = torch.arange(len(positions), device=positions.device)

    def update(self, keys: Keys, values: Keys, layer: int, *_args: object, **_kwargs: object) -> tuple[Keys, Keys]:
        """Store keys and values ``[rows, heads, 1, head_dim]`` of a layer. Return all of the rows so far (transformers' signature)."""
        rows, width = len(self._rows), self._width
        all_keys, all_values = self._cache.keys[layer], self._cache.values[layer]
        all_keys[self._rows, :, self._positions] = keys[:, :, 0]
        all_values[self._rows, :, self._positions] = values[:, :, 0]
        return all_keys[:rows, :, :width], all_values[:rows, :, :width]


class SlotAdapters:
    """The adapters of one model. Used by the thread that samples.

    PEFT wraps the linear layers of the model when the first adapter is loaded. The weights stay where they are, so that they
    can still be changed in place.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._wrapped: Any = None

    def add(self, adapter: Adapter) -> None:
        """Load an adapter.

        Raises:
            EngineError: if PEFT fails.
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
        """Unload an adapter that no row uses. Idempotent."""
        if self._wrapped is None or _label(adapter) not in self._wrapped.peft_config:
            return
        if len(self._wrapped.peft_config) == 1:  # PEFT needs at least one
            self._wrapped.unload()
            self._wrapped = None
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that no adapter is active; here each row names its adapter
            self._wrapped.delete_adapter(_label(adapter))

    def forward(self, inputs: Mapping[str, object], adapters: Sequence[Adapter | None]) -> Any:  # noqa: ANN401 - untyped
        """Forward a batch, each row with its own adapter or with none."""
        if self._wrapped is None:
            return self._module(**inputs)
        return self._wrapped(**inputs, adapter_names=[NONE if each is None else _label(each) for each in adapters])


def _label(adapter: Adapter) -> str:
    """Return the name of an adapter in PEFT: a name of a PyTorch module, which has no dots."""
    return adapter.label.replace(".", "_")


class InPlaceWeights:
    """The live tensors of a model, by the names that versions use; copies files into them in place.

    Args:
        module: The model.
        base: Its files, as returned by `BaseModel.known_to`.
    """

    def __init__(self, module: torch.nn.Module, base: BaseModel) -> None:
        live = module.state_dict()
        self._live = {name: live[name] for name in base.shapes}
        self._base = base
        self._device = next(iter(self._live.values())).device

    @property
    def base_paths(self) -> Sequence[Path]:
        """Return the files of the base model."""
        return self._base.paths

    def check(self, paths: Sequence[Path]) -> None:
        """Compare the headers of the files with the model, before anything changes.

        Raises:
            UnfitVersionError: if they do not hold exactly the model's tensors.
            EngineError: if they are not complete safetensors files.
        """
        seen: set[str] = set()
        with ExitStack() as stack:
            for name, stored, file in self._tensors(paths, stack):
                if name == TIED_HEAD and name not in self._live:
                    continue
                shape = tuple(file.get_slice(stored).get_shape())
                expected = self._base.shapes.get(name)
                if shape != expected or name in seen:
                    raise UnfitVersionError(
                        f"the version does not fit the model: {name} is {list(shape)}, the model has {expected};"
                        " push every tensor of the base model once, under its own name"
                    )
                seen.add(name)
        missing = sorted(self._live.keys() - seen)
        if missing:
            raise UnfitVersionError(
                f"the version does not fit the model: missing {missing[:3]} ({len(missing)}); push every tensor of the base"
                " model under its own name"
            )

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def copy(self, paths: Sequence[Path]) -> None:
        """Copy the files into the model.

        Raises:
            EngineError: if a file cannot be read; the model may then hold parts of two versions.
        """
        with ExitStack() as stack:
            try:
                for name, stored, file in self._tensors(paths, stack):
                    if name in self._live:
                        self._live[name].copy_(file.get_tensor(stored))
            except (SafetensorError, OSError, RuntimeError) as error:
                raise EngineError(f"the weights could not be copied: {error}") from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._live)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def differs(self, name: str, paths: Sequence[Path]) -> bool:
        """Return whether a live tensor differs from the files in any bit, after the rounding of a copy.

        Raises:
            EngineError: if no file has it.
        """
        live = self._live[name]
        with ExitStack() as stack:
            for given, stored, file in self._tensors(paths, stack):
                if given == name:
                    wanted = file.get_tensor(stored).to(device=live.device, dtype=live.dtype)
                    return wanted.shape != live.shape or not torch.equal(_bits(live), _bits(wanted))
        raise EngineError(f"{name} is in none of the version's files; stage it again")

    def _tensors(self, paths: Sequence[Path], stack: ExitStack) -> Iterator[tuple[str, str, Any]]:
        """Yield each tensor: the name that versions use, its name in the file, and the open file.

        In the base model's own files, tensors that the model does not have are left out.
        """
        own = paths == self._base.paths
        for stored, file in _tensors(paths, stack):
            name = self._base.renamed.get(stored, stored) if own else stored
            if not own or name in self._live:
                yield name, stored, file


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _tensors(paths: Sequence[Path], stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """Yield the name of every tensor and its open file.

    Raises:
        EngineError: if a file is not a complete safetensors file.
    """
    for path in paths:
        try:
            file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise EngineError(f"{path} is not a whole safetensors file: {error}; stage it again") from error
        for name in file.keys():  # noqa: SIM118 - not a mapping
            yield name, file
