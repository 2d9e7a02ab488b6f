"""Reads the settings out of a shell script that starts a training run. Nothing is executed.

Variables that the script sets are put in, with `${NAME:-default}` and sums such as `$((1024 * 2))`. A setting with any other variable is
reported as not resolved.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from sluice.config.convert.table import Unresolved
from sluice.config.schema import Value

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Stand around the name of a variable that is not known, until words are split."""

_ASSIGNED = re.compile(r"\s*(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SETTING = re.compile(r"(\+{0,2}|~)([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"(\w+(?:\[[@*]\])?|@(?::\d+)?)(?:(:?[-=+?])(.*))?", re.DOTALL)
_BEGINS = re.compile(r"\s*(?:if|for|while|until|case|function\s+\w+|\w+\s*\(\)\s*\{)\b|\s*\w+\s*\(\)\s*\{")
_ENDS = re.compile(r"\s*(?:fi|done|esac|\})(?:\s|;|$)")

_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,  # the shell divides whole numbers
    ast.Mod: operator.mod,
}


@dataclass(frozen=True)
class Word:
    """One setting of a command.

    Attributes:
        name: Dotted name, or that of a flag with underscores.
        value: Text after `=`; for a flag the words after it; or what could not be resolved.
        sign: `+`, `++` or `~` before the name, as Hydra has them.
        flag: Whether it is `--name`.
    """

    name: str
    value: Value
    line: int
    sign: str = ""
    flag: bool = False


@dataclass
class Script:
    """The settings of a script, in its order."""

    settings: list[Word] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flags: bool = False


@dataclass
class _Variables:
    """Variables that the script sets, lists among them."""

    texts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    conditional: set[str] = field(default_factory=set)


def read_script(text: str) -> Script:
    """Return the settings that the commands of a script are given: `a.b=value` of Hydra, and `--name value`."""
    script, variables, depth = Script(), _Variables({"HOME": "~"}), 0
    for command in _commands(text):
        depth += _BEGINS.match(command[0][0]) is not None
        if not _assigned(command, variables, conditional=depth > 0):
            _read_command(command, variables, script)
        if any(_ENDS.match(line) or line.endswith("; fi") for line, _ in command):
            depth = max(0, depth - 1)
    return script


def _commands(text: str) -> Iterator[list[tuple[str, int]]]:
    """Yield the commands of a script, each as its lines with their numbers."""
    command: list[tuple[str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            # Between continued lines it ends the command in the shell, which its author did not mean.
            if command:
                command.append(("\\", number))
            continue
        command.append((line.rstrip(), number))
        if not command[-1][0].endswith("\\") and not _unclosed(command):
            yield command
            command = []
    if command:
        yield command


def _unclosed(command: list[tuple[str, int]]) -> bool:
    """Return whether a quote or a list is still open at the end of these lines."""
    text = "\n".join(line.removesuffix("\\") for line, _ in command)
    match = _ASSIGNED.fullmatch(text)
    if match and match[2].startswith("(") and not re.search(r"\)\s*(#.*)?$", match[2]):
        return True
    try:
        shlex.split(_without_comment(text))
    except ValueError:
        return True
    return False


def _without_comment(line: str) -> str:
    return re.sub(r"(^|\s)#[^'\"]*$", "", line)


def _assigned(command: list[tuple[str, int]], variables: _Variables, *, conditional: bool) -> bool:
    """Take an assignment to the variables; return whether it is one."""
    text = "\n".join(line.removesuffix("\\") for line, _ in command)
    match = _ASSIGNED.fullmatch(_without_comment(text) if len(command) == 1 else text)
    if match is None:
        return False
    name, value = match[1], match[2].strip()
    if value.startswith("(") and not value.startswith("(("):
        inner = [
            (line.removesuffix("\\").partition("(")[2] if place == 0 else line, number)
            for place, (line, number) in enumerate(command)
        ]
        variables.lists[name] = [
            (word, number) for line, number in inner for word in _words(re.sub(r"\)\s*$", "", line), variables)
        ]
        return True
    expanded = _expand(value, variables)
    try:
        words = shlex.split(expanded)
    except ValueError:
        return True
    if len(words) > 1:
        return False  # variables before a command
    if conditional:
        variables.conditional.add(name)
        variables.texts.pop(name, None)
    else:
        variables.conditional.discard(name)
        variables.texts[name] = words[0] if words else ""
    return True


def _words(line: str, variables: _Variables) -> list[str]:
    """Return the words of a line, with the variables put in."""
    text = _expand(_without_comment(line.removesuffix("\\")), variables)
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _read_command(command: list[tuple[str, int]], variables: _Variables, script: Script) -> None:
    words: list[tuple[str, int]] = []
    text = "\n".join(line for line, _ in command)
    several = _spans_lines(command)
    for line, number in [(text.replace("\\\n", " "), command[0][1])] if several else command:
        for word in _words(line, variables):
            spliced = re.fullmatch(rf"{_OPEN}(\w+)\[[@*]\]{_CLOSE}", word)
            words += variables.lists.get(spliced[1], []) if spliced else [(word, number)]
    settings = [word for word in (_setting(text, number) for text, number in words) if word is not None]
    script.settings += settings
    if not settings:
        _read_flags(words, script)


def _spans_lines(command: list[tuple[str, int]]) -> bool:
    """Return whether a quoted text goes over the end of a line."""
    for line, _ in command:
        try:
            shlex.split(_without_comment(line.removesuffix("\\")))
        except ValueError:
            return True
    return False


def _setting(word: str, line: int) -> Word | None:
    match = _SETTING.fullmatch(word)
    if match is None:
        return None
    return Word(match[2], _known(match[3]), line, match[1])


def _read_flags(words: list[tuple[str, int]], script: Script) -> None:
    """Read `--name value` of a command that starts a Python program or a subcommand of `trl`; those before it are its launcher's."""
    texts = [word for word, _ in words]
    start = next((place for place, word in enumerate(texts) if word.endswith(".py")), None)
    if start is None:
        start = next((place for place, word in enumerate(texts[:-1]) if word == "trl"), None)
        start = None if start is None else start + 1
    if start is None:
        return
    script.flags = True
    _take_flags(words[:start], script, "launcher.")
    _take_flags(words[start + 1 :], script, "")


def _take_flags(words: list[tuple[str, int]], script: Script, prefix: str) -> None:
    place = 0
    while place < len(words):
        text, line = words[place]
        place += 1
        if not text.startswith("--") or len(text) == 2:
            continue
        name, equals, value = text[2:].partition("=")
        values = [value] if equals else []
        while not equals and place < len(words) and not words[place][0].startswith("--"):
            values.append(words[place][0])
            place += 1
        unknown = next((known for known in map(_known, values) if isinstance(known, Unresolved)), None)
        script.settings.append(Word(prefix + name.replace("-", "_"), unknown or values, line, flag=True))


def _known(text: str) -> Value:
    if _OPEN not in text:
        return text
    names = [name.partition("[")[0] for name in re.findall(rf"{_OPEN}([^{_CLOSE}]*){_CLOSE}", text)]
    shown = re.sub(rf"{_OPEN}([^{_CLOSE}]*){_CLOSE}", r"$\1", text)
    return Unresolved(
        shown, f"the script does not say what {', '.join(f'${name}' for name in names)} is: put the value in its place"
    )


def _expand(text: str, variables: _Variables) -> str:
    """Return a text with the variables that are known in their places."""
    out, place = "", 0
    while place < len(text):
        if text[place] == "\\" and place + 1 < len(text):
            out += text[place : place + 2]
            place += 2
        elif text[place] != "$" or place + 1 == len(text):
            out += text[place]
            place += 1
        else:
            value, place = _expansion(text, place + 1, variables)
            out += value
    return out


def _expansion(text: str, place: int, variables: _Variables) -> tuple[str, int]:
    """Return what stands for the expansion that begins after a dollar sign, and where it ends."""
    if text.startswith("((", place):
        end = _closing(text, place, "(", ")")
        return _sum(text[place + 2 : end - 2], variables), end
    if text[place] == "(":
        end = _closing(text, place, "(", ")")
        return f"{_OPEN}{text[place:end]}{_CLOSE}".replace(" ", "\u00a0"), end
    if text[place] == "{":
        end = _closing(text, place, "{", "}")
        return _braced(text[place + 1 : end - 1], variables), end
    match = _NAME.match(text, place)
    if match is None:
        return ("", place + 1) if text[place] in "@*#123456789?" else ("$", place)
    return _variable(match[0], variables), match.end()


def _closing(text: str, place: int, opening: str, closing: str) -> int:
    depth = 0
    for end in range(place, len(text)):
        depth += (text[end] == opening) - (text[end] == closing)
        if depth == 0:
            return end + 1
    return len(text)


def _braced(inner: str, variables: _Variables) -> str:
    match = _BRACED.fullmatch(inner)
    if match is None:
        return f"{_OPEN}{inner}{_CLOSE}"
    name, operation, default = match.groups("")
    if name.startswith("@") or name.isdigit():
        return _expand(default, variables) if operation in (":-", "-") else ""
    if name in variables.texts:
        return variables.texts[name]
    if operation in (":-", "-", ":=", "=") and name not in variables.conditional:
        return _expand(default, variables).strip("\"'")
    return f"{_OPEN}{name}{_CLOSE}"


def _variable(name: str, variables: _Variables) -> str:
    return variables.texts.get(name, f"{_OPEN}{name}{_CLOSE}")


def _sum(text: str, variables: _Variables) -> str:
    """Return what `$((...))` gives; a name there needs no dollar sign."""
    text = _expand(text.strip(), variables)
    while text.startswith("(") and _closing(text, 0, "(", ")") == len(text):
        text = text[1:-1].strip()
    names = {name for name in _NAME.findall(text) if name not in variables.texts}
    if _OPEN in text or names:
        return f"{_OPEN}{text.replace(_OPEN, '').replace(_CLOSE, '').replace(' ', chr(0xA0))}{_CLOSE}"
    filled = _NAME.sub(lambda name: variables.texts[name[0]], text)
    try:
        return str(_computed(ast.parse(filled, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return f"{_OPEN}{text.replace(' ', chr(0xA0))}{_CLOSE}"


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SUMS:
            return _SUMS[type(op)](_computed(left), _computed(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
    raise ValueError
