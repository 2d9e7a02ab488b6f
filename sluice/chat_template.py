"""The chat template of a model, or the file that replaces it: checked before anything is loaded, and set when the tokenizer is."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.errors import ConfigError, reason_of
from sluice.render import ChatRenderer, TemplateError, template_fault, template_variables, variables_read

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_FILE = "chat_template.jinja"
"""Name of the template in a model's directory."""


def check_chat_template(
    model: str, file: Path | None, arguments: Mapping[str, Any], setting: str = "chat_template_kwargs"
) -> None:
    """Refuse a chat template that is not valid Jinja, or arguments that it does not read. Nothing is loaded.

    Without a file the templates in the model's directory are checked; those of a hub id are checked once they are loaded.

    Args:
        model: A model's directory or hub id.
        file: The file that replaces its template; None: there is none.
        arguments: Arguments of the template.
        setting: Where they are set.

    Raises:
        ConfigError: with the file and the line at fault.
    """
    templates = {f"chat_template: {file}": read_template(file)} if file is not None else dict(_templates_of(model))
    for where, template in templates.items():
        if (fault := template_fault(template)) is not None:
            line, reason = fault
            raise ConfigError(f"{where}, line {line} is not valid Jinja: {reason}; correct the template")
    if arguments and (templates or Path(model).is_dir()):
        read = frozenset[str]().union(*map(variables_read, templates.values()))
        if unknown := sorted(arguments.keys() - read):
            raise ConfigError(
                f"{setting}: the chat template reads no variable {unknown[0]!r}: remove it, or correct its name"
            )


def read_template(file: Path) -> str:
    """Return the text of a template file.

    Raises:
        ConfigError: if it is not there, or not UTF-8.
    """
    return _read(file, "chat_template")


def template_text(file: Path | None) -> str | None:
    """Return the text of a template file, or None without a file. Raise ConfigError as `read_template` does."""
    return None if file is None else read_template(file)


def set_chat_template(
    tokenizer: PreTrainedTokenizerBase, template: str | None, arguments: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Replace the chat template of a tokenizer, unless `template` is None, and return the tokenizer.

    Args:
        tokenizer: A tokenizer, which is changed.
        template: The template; None: the tokenizer's own.
        arguments: Arguments of the template.

    Raises:
        ConfigError: if the template is not valid Jinja, or an argument is not one of its variables.
    """
    if template is not None:
        tokenizer.chat_template = template
    try:
        if tokenizer.chat_template:
            template_variables(tokenizer)
        if arguments:
            ChatRenderer(tokenizer, arguments)
    except TemplateError as error:
        raise ConfigError(f"chat_template: {error}") from error
    return tokenizer


def save_tokenizer(model: str, directory: Path, template: str | None) -> None:
    """Write the tokenizer of a model into a directory, with another chat template if one is given."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - takes seconds; only where a model is written

    tokenizer = AutoTokenizer.from_pretrained(model)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)


def _templates_of(model: str) -> Iterator[tuple[str, str]]:
    """Yield each chat template in a model's directory, with the words by which a message names it."""
    directory = Path(model)
    file = directory / TEMPLATE_FILE
    settings = directory / "tokenizer_config.json"
    if file.is_file():
        yield f"model: {file}", _read(file, "model")
    elif settings.is_file():
        try:
            given = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"model: cannot read {settings}: {reason_of(error)}; copy or download it again"
            ) from error
        several = given if isinstance(given, list) else [{"name": "default", "template": given}]
        for each in several:
            if isinstance(each, dict) and isinstance(each.get("template"), str):
                yield f"model: {settings}, chat_template {each.get('name')!r}", each["template"]
    for each in sorted(directory.glob("additional_chat_templates/*.jinja")):
        yield f"model: {each}", _read(each, "model")


def _read(file: Path, setting: str) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{setting}: cannot read {file}: {error.strerror or error}; give a file with a Jinja template"
        ) from error
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{setting}: {file}, line {line} is not UTF-8: save the template as UTF-8") from error
