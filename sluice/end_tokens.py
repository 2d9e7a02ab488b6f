"""Which tokens end a turn of the assistant: sampling stops at each of them, and training teaches them.

A model names them in up to four places, which often differ: `config.json`, `generation_config.json`, the tokenizer's `eos_token`, and the
token that its chat template writes after a turn. All of them count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sluice.control_tokens import control_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, GENERATION_CONFIG, TOKENIZER, TEMPLATE = "config.json", "generation_config.json", "tokenizer", "chat template"
"""Where a model names its end tokens."""

SENTINEL = "SLUICEturnSENTINEL"
"""Content of a placeholder for an assistant turn. Only letters, so that no template or tokenizer treats it specially."""

_PROBE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": SENTINEL})


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The tokens that end a turn.

    Attributes:
        sources: For each token id, the places that name it.
    """

    sources: Mapping[int, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids, in ascending order."""
        return tuple(sorted(self.sources))

    @property
    def appended(self) -> int | None:
        """The token that training appends if the template wrote no end token; None if no place names a token.

        The tokenizer's token is preferred, since texts without a template end with it. The template's token is the last choice,
        because the template just did not write it.
        """
        for place in (TOKENIZER, GENERATION_CONFIG, CONFIG, TEMPLATE):
            named = [id_ for id_, places in self.sources.items() if place in places]
            if named:
                return named[0]
        return None


def find_end_tokens(
    tokenizer: PreTrainedTokenizerBase | None,
    config: object = None,
    generation_config: object = None,
    *,
    vocabulary_size: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> EndTokens:
    """Return the tokens that end a turn, from all places that name them.

    Args:
        tokenizer: The model's tokenizer; None if it has none.
        config: The configuration of the text model, with `eos_token_id`: an id, a list of ids or None.
        generation_config: The generation configuration, with the same attribute.
        vocabulary_size: Ids from this one on are left out, since the model cannot sample them. GPT-2's configuration names one by default.
        arguments: Arguments of the chat template.
    """
    named: list[tuple[str, Iterable[int]]] = [
        (CONFIG, _listed(getattr(config, "eos_token_id", None))),
        (GENERATION_CONFIG, _listed(getattr(generation_config, "eos_token_id", None))),
    ]
    if tokenizer is not None:
        # Some architectures have a default end token, even if the token of that id is an ordinary one in this tokenizer.
        named = [(place, [each for each in ids if _is_control(tokenizer, each)]) for place, ids in named]
        named.append((TOKENIZER, _listed(tokenizer.eos_token_id)))
        named.append((TEMPLATE, _listed(_template_end(tokenizer, arguments or {}))))
    sources: dict[int, tuple[str, ...]] = {}
    for place, ids in named:
        for id_ in ids:
            if vocabulary_size is None or id_ < vocabulary_size:
                sources[id_] = (*sources.get(id_, ()), place)
    return EndTokens(sources)


def read_end_tokens(
    model: str, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None, *, offline: bool = False
) -> EndTokens:
    """Return the tokens that end a turn, with the configurations of a directory or a hub id.

    Args:
        model: The directory or hub id.
        tokenizer: Its tokenizer.
        arguments: Arguments of the chat template.
        offline: Do not ask the hub: read what is in the cache.

    Raises:
        OSError: if there is no configuration.
    """
    from transformers import AutoConfig, GenerationConfig  # noqa: PLC0415 - takes seconds

    config = AutoConfig.from_pretrained(model, local_files_only=offline).get_text_config()
    try:
        generation_config = GenerationConfig.from_pretrained(model, local_files_only=offline)
    except OSError:  # a model need not have one
        generation_config = None
    size = getattr(config, "vocab_size", None)
    return find_end_tokens(tokenizer, config, generation_config, vocabulary_size=size, arguments=arguments)


def find_padding(tokenizer: PreTrainedTokenizerBase, config: object) -> tuple[int, str] | None:
    """Return the token that pads batches in transformers, and the place that names it; None if there is none.

    Args:
        tokenizer: The model's tokenizer.
        config: The configuration of the text model. Its `pad_token_id` is preferred.
    """
    for place, named in ((CONFIG, getattr(config, "pad_token_id", None)), (TOKENIZER, tokenizer.pad_token_id)):
        if isinstance(named, int):
            return named, place
    return None


def _listed(named: int | list[int] | None) -> list[int]:
    if named is None:
        return []
    return [named] if isinstance(named, int) else list(named)


def _is_control(tokenizer: PreTrainedTokenizerBase, id_: int) -> bool:
    """Return whether a token is more than a piece of text: special or added, or not in the tokenizer's vocabulary."""
    return (
        id_ in tokenizer.all_special_ids
        or id_ in tokenizer.added_tokens_decoder
        or not 0 <= id_ < len(tokenizer)
        or tokenizer.convert_ids_to_tokens(id_) is None
    )


def _template_end(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> int | None:
    """Return the control token that the chat template writes right after the assistant's last turn; None if it writes none."""
    if not tokenizer.chat_template:
        return None
    try:
        text: Any = tokenizer.apply_chat_template(
            list(_PROBE), tokenize=False, add_generation_prompt=False, **arguments
        )
        control = control_tokens(tokenizer)
    except Exception:  # noqa: BLE001 - a template is a program: it may raise anything, and then it names no end
        return None
    _, shown, after = str(text).rpartition(SENTINEL)
    found = control.pattern.match(after.lstrip()) if shown else None
    return None if found is None else control.ids[found[0]]
