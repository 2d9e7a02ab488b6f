"""Reads the settings out of a shell script that starts a training run. Nothing is executed.

Variables that the script sets are put in, with `${NAME:-default}` and sums such as `$((1024 * 2))`. A setting with any other variable is
reported as not resolved, and so is one that only a branch of the script gives.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias, cast

from sluice.config.schema import Value
from sluice_convert.table import Unresolved

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Stand around the name of a variable that is not known, until words are split."""

_ASSIGNED = re.compile(r"\s*(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_SETTING = re.compile(r"(\+{0,2}|~)([A-Za-z_]\w*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACED = re.compile(r"(\w+(?:\[[@*]\])?|@(?::\d+)?)(?:(:?[-=+?])(.*))?", re.DOTALL)
_FUNCTION = re.compile(r"\s*(?:function\s+\w+(?:\s*\(\))?|\w+\s*\(\))\s*(?:\{(?P<body>.*))?$", re.DOTALL)
_KEYWORD = re.compile(r"\s*(if|elif|else|fi|then|case|esac|for|select|while|until|do|done|[{}])(?=\s|$)")
_CASE = re.compile(r"\s*(\S.*?)\s+in(?:\s|$)", re.DOTALL)
_PATTERN = re.compile(r"\s*\(?([^()\s]+(?:\s*\|\s*[^()\s]+)*)\s*\)(?=\s|$)")
"""What a branch of `case` begins with."""

_TESTS = re.compile(r"\s*(?:\[|test\s|!\s)")
_COMPARED: Mapping[str, Callable[[str, str], bool]] = {
    "=": fnmatch.fnmatchcase,
    "==": fnmatch.fnmatchcase,
    "!=": lambda first, second: not fnmatch.fnmatchcase(first, second),
    "-eq": lambda first, second: int(first) == int(second),
    "-ne": lambda first, second: int(first) != int(second),
    "-gt": lambda first, second: int(first) > int(second),
    "-ge": lambda first, second: int(first) >= int(second),
    "-lt": lambda first, second: int(first) < int(second),
    "-le": lambda first, second: int(first) <= int(second),
}

_BRANCH = "a branch of the script sets it, which may not be taken: add it if yours is"

_LIST = re.compile(r"(?:^|[\s;])[A-Za-z_]\w*\+?=\((?!\()")

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

    def in_branch(self) -> Word:
        """Return the setting as one that may not be given."""
        if isinstance(self.value, Unresolved):
            return self
        shown = self.value if isinstance(self.value, str) else " ".join(map(str, cast("list[str]", self.value)))
        return replace(self, value=Unresolved(shown, _BRANCH))


@dataclass
class Script:
    """The settings of a script, in its order."""

    settings: list[Word] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flags: bool = False


@dataclass(frozen=True)
class _Text:
    """A word of a command, its line, and whether only a branch of the script gives it."""

    text: str
    line: int
    in_branch: bool = False


@dataclass
class _Variables:
    """Variables that the script sets, lists among them."""

    texts: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[_Text]] = field(default_factory=dict)
    conditional: set[str] = field(default_factory=set)


_Command: TypeAlias = list[tuple[str, int]]
"""The lines of a command, with their numbers."""


def read_script(text: str) -> Script:
    """Return the settings that the commands of a script are given: `a.b=value` of Hydra, and `--name value`.

    A branch whose test the script itself decides is read or left out. Otherwise what it appends to a list, and what is given to one
    of several commands, is not resolved, unless each of them is given the same.
    """
    script, variables = Script(), _Variables({"HOME": "~"})
    flow = _Flow(variables)
    always: list[list[Word]] = []
    perhaps: list[list[Word]] = []
    for command in _commands(text):
        for part, joint in _parts(command):
            runs = flow.runs(part, joint)
            if runs is False or not part or _assigned(part, variables, conditional=runs is None):
                continue
            if given := _read_command(part, variables, script):
                (perhaps if runs is None else always).append(given)
    certain = _agreed([*always, *perhaps])
    for given in perhaps:
        script.settings += [each if each.name in certain else each.in_branch() for each in given]
    for given in always:
        script.settings += given
    return script


def _agreed(commands: list[list[Word]]) -> set[str]:
    """Return the names of the settings that each command is given, with the same value."""
    values = [{each.name: each.value for each in given} for given in commands]
    return {name for name in chain(*values[:1]) if all(each.get(name) == values[0][name] for each in values)}


_Known: TypeAlias = bool | None
"""Whether something is so; None where the script does not say."""


def _both(first: _Known, second: _Known) -> _Known:
    return False if first is False or second is False else None if first is None or second is None else True


def _either(first: _Known, second: _Known) -> _Known:
    return _not(_both(_not(first), _not(second)))


def _not(known: _Known) -> _Known:
    return None if known is None else not known


@dataclass
class _Block:
    """A compound command that is not at its end.

    Attributes:
        runs: Whether its present branch runs.
        before: Whether a branch before that one runs.
        test: What the test says that is being read, or was read last.
        testing: Whether one is being read.
        word: What `case` compares with its patterns; None in any other block.
    """

    runs: _Known = None
    before: _Known = False
    test: _Known = None
    testing: bool = False
    word: str | None = None

    def branch(self, test: _Known) -> None:
        """Begin a branch, which runs if its test holds and no branch before it runs."""
        self.runs, self.testing = _both(_not(self.before), test), False
        self.before = _either(self.before, self.runs)


class _Flow:
    """Follows which commands of a script run. Other commands than tests are taken to succeed."""

    def __init__(self, variables: _Variables) -> None:
        self._variables = variables
        self._blocks: list[_Block] = []
        self._last: _Known = True

    def runs(self, part: _Command, joint: str) -> _Known:
        """Return whether a command runs. Of the command is left what is no test, and no word of the shell's grammar.

        Args:
            part: The command.
            joint: `&&` or `||` before it, else empty.
        """
        while part and self._take_word(part):
            pass
        while part and not part[0][0].strip():
            del part[0]
        runs: _Known = (self._last if joint == "&&" else _not(self._last)) if joint else True
        testing = bool(self._blocks) and self._blocks[-1].testing
        if part and (testing or _TESTS.match(part[0][0])):
            text = " ".join(line.removesuffix("\\") for line, _ in part)
            holds = _holds(_words(text, self._variables))
            before = self._blocks[-1].test if testing else self._last
            holds = _both(before, holds) if joint == "&&" else _either(before, holds) if joint else holds
            if testing:
                self._blocks[-1].test = holds
            self._last = True if testing else holds
            part.clear()
        elif not joint:
            self._last = True
        for block in self._blocks:
            runs = _both(runs, block.runs)
        return runs

    def _take_word(self, part: _Command) -> bool:
        """Take a word of the grammar off a command, and follow it; return whether there was one."""
        line, number = part[0]
        top = self._blocks[-1] if self._blocks else None
        if top is not None and top.word is not None and (pattern := _PATTERN.match(line)):
            top.branch(_matches(top.word, pattern[1]))
            rest = line[pattern.end() :]
        elif function := _FUNCTION.match(line):
            if not (function["body"] or "").rstrip().endswith("}"):
                self._blocks.append(_Block())
            rest = ""
        elif keyword := _KEYWORD.match(line):
            rest = self._follow(keyword[1], line[keyword.end() :], top or _Block())
        else:
            return False
        part[0] = (rest, number)
        return bool(rest)

    def _follow(self, keyword: str, rest: str, top: _Block) -> str:
        """Follow a word of the grammar; return what is left of its line."""
        match keyword:
            case "case":
                named = _CASE.match(rest)
                word = _words(named[1], self._variables) if named else []
                self._blocks.append(_Block(word=word[0] if word else ""))
                return rest[named.end() :] if named else ""
            case "for" | "select" | "while" | "until":
                self._blocks.append(_Block())
                return ""
            case "if" | "{":
                self._blocks.append(_Block(testing=keyword == "if", runs=True if keyword == "{" else None))
            case "fi" | "esac" | "done" | "}":
                del self._blocks[-1:]
            case "elif":
                top.testing = True
            case "then" | "else":
                top.branch(top.test if keyword == "then" else True)
        return rest


def _matches(word: str, patterns: str) -> _Known:
    if _OPEN in word or _OPEN in patterns:
        return True if patterns == "*" else None
    return any(fnmatch.fnmatchcase(word, each.strip().strip("\"'")) for each in patterns.split("|"))


def _holds(words: list[str]) -> _Known:
    """Return whether a test holds."""
    if words[:1] == ["!"]:
        return _not(_holds(words[1:]))
    if words[:1] not in (["["], ["[["], ["test"]) or any(_OPEN in word for word in words):
        return None
    match words[1:] if words[0] == "test" else words[1:-1]:
        case ["-z" | "-n" as operation, word]:
            return bool(word) == (operation == "-n")
        case [first, operation, second] if operation in _COMPARED:
            try:
                return _COMPARED[operation](first, second)
            except ValueError:
                return None
    return None


def _parts(command: _Command) -> Iterator[tuple[_Command, str]]:
    """Yield what stands between `;`, `&&`, `||` and `|` outside of quotes and brackets, and the `&&` or `||` before it."""
    part: _Command = []
    quote, depth, joint = "", 0, ""
    for line, number in command:
        begin = place = 0
        while place < len(line):
            letter = line[place]
            if letter == "\\" and quote != "'":
                place += 1
            elif quote:
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            elif letter in "({":
                depth += 1
            elif letter in ")}":
                depth = max(0, depth - 1)
            elif letter == "#" and not depth and (place == 0 or line[place - 1].isspace()):
                break
            elif depth == 0 and letter in ";|&" and (cut := re.compile(r";+|&&|\|\|?(?!&)").match(line, place)):
                yield [*part, (line[begin:place], number)], joint
                part, joint = [], cut[0] if cut[0] in {"&&", "||"} else ""
                begin = cut.end()
                place = begin - 1
            place += 1
        part.append((line[begin:], number))
    yield part, joint


def _commands(text: str) -> Iterator[_Command]:
    """Yield the commands of a script, each as its lines with their numbers."""
    command: _Command = []
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


def _unclosed(command: _Command) -> bool:
    """Return whether a quote or a list is still open at the end of these lines."""
    text = "\n".join(line.removesuffix("\\") for line, _ in command)
    if (opened := _LIST.search(text)) and not re.search(r"\)\s*(#.*|;.*)?$", text[opened.end() :]):
        return True
    try:
        shlex.split(_without_comment(text))
    except ValueError:
        return True
    return False


_COMMENT_OR_TEXT = re.compile(r"""(?<!\S)#[^\n]*|(\\.|'[^']*'|"(?:[^"\\]|\\.)*"|[^\s'"\\])""", re.DOTALL)


def _without_comment(text: str) -> str:
    return _COMMENT_OR_TEXT.sub(lambda found: found[1] or "", text)


def _assigned(command: _Command, variables: _Variables, *, conditional: bool) -> bool:
    """Take an assignment to the variables; return whether it is one."""
    text = "\n".join(line.removesuffix("\\") for line, _ in command)
    match = _ASSIGNED.fullmatch(_without_comment(text) if len(command) == 1 else text)
    if match is None:
        return False
    name, appends, value = match[1], match[2] == "+", match[3].strip()
    if value.startswith("(") and not value.startswith("(("):
        _take_list(name, command, variables, appends=appends, conditional=conditional)
        return True
    expanded = _expand(value, variables)
    try:
        words = shlex.split(expanded)
    except ValueError:
        return True
    if len(words) > 1:
        return False  # variables before a command
    if conditional or (appends and name not in variables.texts):
        variables.conditional.add(name)
        variables.texts.pop(name, None)
    else:
        variables.conditional.discard(name)
        variables.texts[name] = (variables.texts[name] if appends else "") + (words[0] if words else "")
    return True


def _take_list(name: str, command: _Command, variables: _Variables, *, appends: bool, conditional: bool) -> None:
    """Take the words of a list, or of what is appended to it. A branch makes uncertain what it appends, or replaces."""
    new: list[_Text] = []
    for place, (line, number) in enumerate(command):
        inner = line.removesuffix("\\")
        inner = inner.partition("(")[2] if place == 0 else inner
        if place == len(command) - 1:
            inner = re.sub(r"\)\s*(#.*)?$", "", inner)
        new += [_Text(word, number, conditional) for word in _words(inner, variables)]
    old = variables.lists.get(name, [])
    if not appends:
        old = [replace(each, in_branch=True) for each in old] if conditional else []
    variables.lists[name] = [*old, *new]


def _words(line: str, variables: _Variables) -> list[str]:
    """Return the words of a line, with the variables put in."""
    text = _expand(_without_comment(line.removesuffix("\\")), variables)
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _read_command(command: _Command, variables: _Variables, script: Script) -> list[Word]:
    """Return the settings that a command is given."""
    words: list[_Text] = []
    text = "\n".join(line for line, _ in command)
    several = _spans_lines(command)
    for line, number in [(text.replace("\\\n", " "), command[0][1])] if several else command:
        for word in _words(line, variables):
            spliced = re.fullmatch(rf"{_OPEN}(\w+)\[[@*]\]{_CLOSE}", word)
            words += variables.lists.get(spliced[1], []) if spliced else [_Text(word, number)]
    return [each for each in map(_setting, words) if each is not None] or _read_flags(words, script)


def _spans_lines(command: _Command) -> bool:
    """Return whether a quoted text goes over the end of a line."""
    for line, _ in command:
        try:
            shlex.split(_without_comment(line.removesuffix("\\")))
        except ValueError:
            return True
    return False


def _setting(word: _Text) -> Word | None:
    match = _SETTING.fullmatch(word.text)
    if match is None:
        return None
    found = Word(match[2], _known(match[3]), word.line, match[1])
    return found.in_branch() if word.in_branch else found


def _read_flags(words: list[_Text], script: Script) -> list[Word]:
    """Read `--name value` of a command that starts a Python program or a subcommand of `trl`; those before it are its launcher's."""
    texts = [word.text for word in words]
    start = next((place for place, word in enumerate(texts) if word.endswith(".py")), None)
    if start is None:
        start = next((place for place, word in enumerate(texts[:-1]) if word == "trl"), None)
        start = None if start is None else start + 1
    if start is None:
        return []
    script.flags = True
    return [*_flags(words[:start], "launcher."), *_flags(words[start + 1 :], "")]


def _flags(words: list[_Text], prefix: str) -> Iterator[Word]:
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not word.text.startswith("--") or len(word.text) == 2:
            continue
        name, equals, value = word.text[2:].partition("=")
        values = [value] if equals else []
        while not equals and place < len(words) and not words[place].text.startswith("--"):
            values.append(words[place].text)
            place += 1
        unknown = next((known for known in map(_known, values) if isinstance(known, Unresolved)), None)
        found = Word(prefix + name.replace("-", "_"), unknown or values, word.line, flag=True)
        yield found.in_branch() if word.in_branch else found


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
    if variables.texts.get(name) or (name in variables.texts and not operation.startswith(":")):
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
