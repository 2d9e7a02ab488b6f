"""Small Qwen3 models on disk, and what plain transformers says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    YoutuConfig,
)

from sluice.versions import Version, VersionSpan, span_lengths
from weightsync.staged import StagedVersion, TensorSpec

VOCABULARY = 128
EOS = 1
CONTEXT = 512


def save_model(directory: Path, seed: int, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model whose distributions are far from uniform, with a tokenizer of single characters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return _save(Qwen3ForCausalLM, config, directory, dtype)


def latent_attention(*, layers: int) -> PreTrainedConfig:
    """Return the configuration of a dense model with DeepSeek's attention: heads of 20 columns, and of 16 for values."""
    return YoutuConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def save_experts_model(directory: Path, seed: int, *, size: int, dtype: torch.dtype) -> Path:
    """Write a model of four experts of width `size`. Each token uses two of them."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=size,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return _save(Qwen3MoeForCausalLM, config, directory, dtype)


def _save(kind: type[PreTrainedModel], config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> Path:
    config.dtype = dtype
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            elif "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def tokenizer(texts: Mapping[int, str] | None = None) -> PreTrainedTokenizerFast:
    """Token i is the character 256 + i, or one of the given texts, which no text is encoded to; 0 and 1 are padding and end."""
    vocabulary = {"<pad>": 0, "<end>": 1}
    vocabulary |= {(texts or {}).get(id_, chr(256 + id_)): id_ for id_ in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<pad>")


def text_of(ids: Sequence[int]) -> str:
    """Text of ordinary tokens."""
    return "".join(chr(256 + id_) for id_ in ids)


def load(directory: Path) -> PreTrainedModel:
    """The model in transformers."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()


def written(*directories: Path) -> tuple[int, ...]:
    """Tells whether tensors in directories were written again."""
    return tuple(path.stat().st_mtime_ns for each in directories for path in sorted(each.glob("*.safetensors")))


def load_to_read(directory: Path) -> PreTrainedModel:
    """Return a transformers model that several tests share and only read, because loading takes most of the time of a short pass."""
    return _load_to_read(directory, written(directory))


@lru_cache(maxsize=8)
def _load_to_read(directory: Path, _written: tuple[int, ...]) -> PreTrainedModel:
    return load(directory)


@torch.no_grad()
def recompute(directory: Path, prompt: Sequence[int], sampled: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of sampled tokens after temperature, computed in one forward pass as a trainer does."""
    logits = load_to_read(directory)(torch.tensor([[*prompt, *sampled]])).logits[0, len(prompt) - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0]


@torch.no_grad()
def recompute_mixed(
    before: Path, after: Path, prompt: Sequence[int], sampled: Sequence[int], switch: int
) -> torch.Tensor:
    """Log-probabilities of tokens from ``switch`` on, sampled by ``after`` on keys and values that ``before`` wrote.

    The last token that ``before`` sampled had not been fed to the model when the weights changed.
    """
    ids = torch.tensor([[*prompt, *sampled]])
    fed = len(prompt) + switch - 1
    cache = load_to_read(before)(ids[:, :fed], use_cache=True).past_key_values
    logits = load_to_read(after)(ids[:, fed:-1], past_key_values=cache, use_cache=True).logits[0].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled[switch:])[:, None])[:, 0]


@torch.no_grad()
def greedy(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The most likely continuation, token by token."""
    model = load_to_read(directory)
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def staged(directory: Path, version: Version) -> StagedVersion:
    """A version as the receiver would stage it: here simply the model's own file."""
    path = directory / "model.safetensors"
    names = {torch.float32: "F32", torch.bfloat16: "BF16"}
    with safe_open(path, framework="pt") as file:
        tensors = {
            name: TensorSpec(names[file.get_tensor(name).dtype], tuple(file.get_slice(name).get_shape()))
            for name in file.keys()  # noqa: SIM118 - not a mapping
        }
    return StagedVersion(version, path, tensors, digest=f"{directory.name}")


def versions_of(spans: Sequence[VersionSpan], count: int) -> list[Version]:
    """The version of each token."""
    lengths = span_lengths([span.start for span in spans], count)
    return [span.version for span, length in zip(spans, lengths, strict=True) for _ in range(length)]
