"""Reads the settings of a file in any of the formats that the other systems take."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from sluice.config.schema import Value
from sluice.errors import ConfigError, reason_of
from sluice_convert.shell import read_script
from sluice_convert.table import Leaf, Source, Unresolved

_DEEPEST = 20
"""References that lead to references, after which they go in a circle."""

_NAME = r"[A-Za-z_][\w-]*(?:\.[\w-]+)*"
_OVERRIDE = re.compile(rf"(?P<sign>\+{{0,2}}|~)(?P<name>{_NAME})=(?P<value>.*)|~(?P<removed>{_NAME})", re.DOTALL)
_REFERENCE = re.compile(r"\$\{([^${}]+)\}")


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf and TRL read it: `1e-6` is a number, which YAML 1.1 takes for a text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def read(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Read a file of settings: TOML, YAML or JSON by its suffix, otherwise a shell script or lines of `key=value`.

    Args:
        path: The file.
        overrides: Settings as `key=value`, which replace those of the file.

    Raises:
        ConfigError: if it cannot be read; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the file of settings to convert") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: give a TOML, YAML or JSON file, or a shell script") from error
    leaves, notes = _parsed(path, text)
    for each in overrides:
        match = _OVERRIDE.fullmatch(each)
        if match is None:
            raise ConfigError(f"cannot read {each!r}: settings after the file are given as key=value")
        if match["removed"]:
            override(leaves, "~", match["removed"], "", 0)
        else:
            override(leaves, match["sign"], match["name"], match["value"], 0)
    return Source(str(path), _resolved(leaves), notes)


def _parsed(path: Path, text: str) -> tuple[dict[str, Leaf], list[str]]:
    match path.suffix.lower():
        case ".toml":
            try:
                return dict(_leaves(tomllib.loads(text))), []
            except tomllib.TOMLDecodeError as error:
                raise ConfigError(f"{path} is not TOML: {error}") from error
        case ".json":
            try:
                data = json.loads(text)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path} is not JSON: {error.msg} (line {error.lineno})") from error
            if not isinstance(data, dict):
                raise ConfigError(f"{path} holds no settings: give a JSON object")
            return dict(_leaves(data)), []
        case ".yaml" | ".yml":
            return dict(_yaml_leaves(path, text)), []
    return _script(path, text)


def _script(path: Path, text: str) -> tuple[dict[str, Leaf], list[str]]:
    script = read_script(text)
    leaves: dict[str, Leaf] = {}
    for word in script.settings:
        if word.flag:
            leaves[word.name] = Leaf(
                word.value if isinstance(word.value, Unresolved) else _flag_value(word.value), word.line
            )
        elif isinstance(word.value, Unresolved):
            leaves[word.name] = Leaf(word.value, word.line)
        else:
            override(leaves, word.sign, word.name, str(word.value), word.line)
    if "config" in leaves and script.flags:
        named = Path(str(leaves.pop("config").value))
        file = next((each for each in (path.parent / named, named) if each.is_file()), None)
        if file is None:
            raise ConfigError(f"{path} takes its settings from {named}, which is not there: put that file beside it")
        base, notes = _parsed(file, file.read_text(encoding="utf-8"))
        return base | leaves, [*script.notes, *notes]
    return leaves, script.notes


def _flag_value(words: Value) -> Value:
    values = [_scalar(word) for word in words]
    return values[0] if len(values) == 1 else values or True


def _scalar(text: str) -> Value:
    """Return what a word of a command line means: a number, a boolean, a list, or the text itself."""
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError:
        return text
    return text if value is None and text not in ("null", "~", "None", "") else value


def override(leaves: dict[str, Leaf], sign: str, name: str, text: str, line: int) -> None:
    """Apply one setting of the form `key=value`, `+key=value` or `~key`."""
    for below in [each for each in leaves if each == name or each.startswith(f"{name}.")]:
        del leaves[below]
    if sign == "~":
        return
    value = None if text == "None" else _scalar(text)
    parts = name.split(".")
    for end in range(1, len(parts)):  # a value in place of the table that now gets entries
        leaves.pop(".".join(parts[:end]), None)
    for key, leaf in _leaves({name: value}):
        leaves[key] = leaf._replace(line=line)


def _leaves(value: Value, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of nested tables. A list with a table in it has numbers as names; any other list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield from _leaves(each, f"{prefix}.{number}")
    else:
        yield prefix, Leaf(value)


def _yaml_leaves(path: Path, text: str) -> Iterator[tuple[str, Leaf]]:
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # such as a character that YAML does not allow
        raise ConfigError(f"{path} is not YAML: {reason_of(error)}") from error
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path} holds no settings: give lines of `key: value`")
        yield from _below(loader, node, "")
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ConfigError(f"{path} is not YAML: {error.problem or error}{line}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    finally:
        loader.dispose()


def _below(loader: _Loader, node: yaml.Node, prefix: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(node, yaml.MappingNode) and node.value:
        loader.flatten_mapping(node)
        for key, inner in node.value:
            name = str(loader.construct_object(key, deep=True))
            yield from _below(loader, inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(node, yaml.SequenceNode) and any(isinstance(each, yaml.MappingNode) for each in node.value):
        for number, each in enumerate(node.value):
            yield from _below(loader, each, f"{prefix}.{number}")
    else:
        value = loader.construct_object(node, deep=True)
        yield prefix, Leaf(None if value == "???" else value, node.start_mark.line + 1)


def _resolved(leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Replace references such as `${actor.path}` by what they name, tables included."""
    found: dict[str, Leaf] = dict(leaves)
    for _ in range(_DEEPEST):
        referring = [
            name for name, leaf in found.items() if isinstance(leaf.value, str) and _REFERENCE.search(leaf.value)
        ]
        if not referring:
            return found
        for name in referring:
            found = _replaced(found, name)
    circular = {
        name: Leaf(Unresolved(leaf.value, "its references go in a circle: put a value in its place"), leaf.line)
        for name, leaf in found.items()
        if isinstance(leaf.value, str) and _REFERENCE.search(leaf.value)
    }
    return found | circular


def _replaced(leaves: dict[str, Leaf], name: str) -> dict[str, Leaf]:
    value, line = leaves[name]
    whole = _REFERENCE.fullmatch(value)
    if whole is not None:
        target, _ = _target(whole[1], name)
        below = {each: leaf for each, leaf in leaves.items() if each.startswith(f"{target}.")}
        if below and target not in leaves:
            copies = {name + each.removeprefix(target): leaf for each, leaf in below.items()}
            # In the place of the reference, so that the order of the file is kept.
            return {
                key: leaf
                for each, given in leaves.items()
                for key, leaf in (copies.items() if each == name else [(each, given)])
            }
        return leaves | {name: Leaf(_named(leaves, whole[1], name), line)}
    parts: list[Value] = [_named(leaves, match[1], name) for match in _REFERENCE.finditer(value)]
    failed = next((part for part in parts if isinstance(part, Unresolved)), None)
    if failed is not None:
        return leaves | {name: Leaf(Unresolved(value, failed.reason), line)}
    texts = iter(parts)
    return leaves | {name: Leaf(_REFERENCE.sub(lambda _: str(next(texts)), value), line)}


def _target(reference: str, name: str) -> tuple[str, str | None]:
    """Return the setting that a reference names, and what holds where that is not set."""
    default: str | None = None
    if reference.startswith(("oc.select:", "oc.env:")):
        reference, comma, default = reference.partition(",")
        default = default.strip() if comma else "null"
        if reference.startswith("oc.env:"):
            return "", default
        reference = reference.removeprefix("oc.select:")
    reference = reference.strip()
    if not reference.startswith("."):
        return reference, default
    upwards = len(reference) - len(reference.lstrip("."))
    outer = name.split(".")[:-upwards]
    return ".".join([*outer, reference.lstrip(".")]), default


def _named(leaves: Mapping[str, Leaf], reference: str, name: str) -> Value:
    target, default = _target(reference, name)
    if target in leaves:
        return leaves[target].value
    if default is not None:
        return _scalar(default.strip("'\""))
    return Unresolved(f"${{{reference}}}", f"the file does not set {reference}: put the value in its place")
