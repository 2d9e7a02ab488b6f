"""`sluice init-model`: a small Qwen3 from scratch with a character tokenizer and a chat template."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.config import Options, whole_number
from sluice.host_files import whole_directory
from sluice.imports import large_imports
from sluice.progress import doing

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|unk|>")
"""Ids 0, 1, ...: padding, end of turn, the roles, and the token of every character outside of the vocabulary."""

DEFAULT_CHARACTERS = "".join(chr(code) for code in range(0x20, 0x7F)) + "\n"
"""Printable ASCII and the line feed."""

MOST = 1 << 20
"""A larger size is a typing mistake."""

ROW_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, which suits matrix kernels."""

CALL_MARKERS = ("<tool_call>", "</tool_call>")
"""The last two ids: one token each around a tool call, as in Qwen's vocabulary. They stay in decoded text."""

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|system|>' -}}
{%- for tool in tools -%}
{%- set function = tool.function or tool -%}
{%- set parameters = function.parameters or {} -%}
{{- ('' if loop.first else '\\n') ~ function.name ~ '(' -}}
{%- for name, schema in (parameters.properties or {})|dictsort(true) -%}
{{- ('' if loop.first else ', ') ~ name ~ ('' if name in (parameters.required or []) else '?') -}}
{{- ': ' ~ schema.type if schema.type is string -}}
{%- endfor -%}
{{- ')' ~ (' ' ~ function.description if function.description else '') -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('unknown role ' ~ message.role ~ '; use system, user, assistant or tool') -}}
{%- endif -%}
{{- '<|' ~ message.role ~ '|>' ~ ('' if message.content is none else message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '<tool_call>' ~ {'name': function.name, 'arguments': function.arguments}|tojson(separators=(',', ':')) ~ '</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
"""A turn is role token, content, calls, end token; rendering more messages only appends.

Calls are JSON between `<tool_call>` and `</tool_call>`. Tools stand in a system turn of their own, one signature a line, such as
`price(item: string) Price of an item.`: as JSON schemas they would be hundreds of tokens, since each character is one.
"""

DTYPES = ("float32", "bfloat16", "float16")

SIZES = {
    "hidden": "width of the residual stream",
    "layers": "decoder layers",
    "heads": "query heads",
    "kv_heads": "key-value heads; divides the number of heads",
    "head_dim": "width of a head; even",
    "mlp": "width of the feed-forward layers",
    "max_positions": "longest sequence in tokens",
}
"""The numbers of a `ModelShape`, and what they are."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model, explained in `SIZES`; the defaults give 0.6 million parameters.

    Attributes:
        vocabulary_characters: Characters with a token of their own.
        tie: Share the input and output embeddings.
    """

    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 384
    vocabulary_characters: str = DEFAULT_CHARACTERS
    tie: bool = False
    max_positions: int = 512

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary position embeddings need an even one")
        if len(set(self.vocabulary_characters)) < 2:
            raise ValueError("the vocabulary needs at least two characters")


def vocabulary(characters: str) -> list[str]:
    """Return the tokens in order of their ids: special ones, characters, reserved ones up to a round size, marks of tool calls."""
    tokens = [*SPECIAL_TOKENS, *dict.fromkeys(characters)]
    fill = -(len(tokens) + len(CALL_MARKERS)) % ROW_MULTIPLE
    return [*tokens, *(f"<|reserved_{number}|>" for number in range(fill)), *CALL_MARKERS]


def init_model(directory: Path, shape: ModelShape, *, seed: int = 0, dtype: str = "float32") -> int:
    """Write a randomly initialised model directory, whole or not at all, and return the number of its parameters.

    Raises:
        FileExistsError: if the directory exists.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists: remove it or choose another directory")
    with large_imports():
        import torch  # noqa: PLC0415  seconds of import that `sluice --help` must not pay
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

    tokenizer = character_tokenizer(shape)
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tie,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, **ends)
    with whole_directory(directory) as staging:
        model.to(getattr(torch, dtype)).save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    return int(model.num_parameters())


def character_tokenizer(shape: ModelShape) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; characters outside of the vocabulary become `<|unk|>`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokens = vocabulary(shape.vocabulary_characters)
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<|unk|>"))  # noqa: S106  not a secret
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    special = [token for token in tokens if token.startswith("<|")]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in CALL_MARKERS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",  # noqa: S106
        eos_token="<|end|>",  # noqa: S106
        unk_token="<|unk|>",  # noqa: S106
        additional_special_tokens=special[2:6],
        chat_template=CHAT_TEMPLATE,
        model_max_length=shape.max_positions,
        clean_up_tokenization_spaces=False,
    )


def run(argv: Sequence[str]) -> int:
    """Read the command line, write the model and say what it is."""
    arguments = _parser().parse_args(argv)
    try:
        sizes = {name: getattr(arguments, name) for name in SIZES}
        shape = ModelShape(**sizes, vocabulary_characters=arguments.vocab_chars, tie=arguments.tie)
        with doing(f"make {arguments.directory}"):
            from transformers.utils import logging  # noqa: PLC0415  seconds of import that `--help` must not pay

            logging.disable_progress_bar()
            parameters = init_model(arguments.directory, shape, seed=arguments.seed, dtype=arguments.dtype)
    except (ValueError, OSError) as error:
        print(f"sluice init-model: {error}", file=sys.stderr)
        return 2
    size = len(vocabulary(shape.vocabulary_characters))
    print(
        f"{arguments.directory}: Qwen3 with {parameters / 1e6:.1f} M parameters, {shape.layers} layers, vocabulary {size}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice init-model", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("directory", type=Path, help="directory to write; must not exist")
    defaults = ModelShape()
    for name, meaning in SIZES.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=whole_number(1, MOST), default=getattr(defaults, name), help=meaning)
    parser.add_argument("--vocab-chars", default=DEFAULT_CHARACTERS, help="characters with a token of their own")
    parser.add_argument("--tie", action="store_true", help="share the input and output embeddings")
    parser.add_argument("--seed", type=whole_number(0, (1 << 32) - 1), default=0, help="seed of the weights")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="precision of the weights in the file")
    return parser
