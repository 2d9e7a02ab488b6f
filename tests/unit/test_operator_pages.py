"""The pages for operators name only what there is: commands, flags, settings, metrics, alerts, reasons, messages, tests and links."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import shlex
import string
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
import yaml

from sluice.cli.main import BUILT_IN
from sluice.config import command_names, run_config_class, service_names
from sluice.config.schema import leaf_paths, table_class
from sluice.v1 import errors_pb2, orchestrator_pb2, rollout_pb2

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

PAGES = ("run-books.md", "debugging.md", "scale-out.md")
PACKAGES = (
    "sluice",
    "orchestrator_svc",
    "trainer_svc",
    "rollout_svc",
    "weightsync",
    "gateway_svc",
    "agents_svc",
    "envserver_svc",
)

PLACEHOLDERS = frozenset(
    {"RUN", "NAME", "HOST", "PORT", "FILE", "DIRECTORY", "SERVICE", "EPISODE", "TASK", "REQUEST_ID", "FACT"}
)
"""Capital words of the pages that stand for something."""

OF_OTHERS = frozenset(
    {
        "CAP_SYS_PTRACE",
        "OMP_NUM_THREADS",
        "OTEL_EXPORTER_OTLP_HEADERS",
        "SHM_SIZE",
        "SIGKILL",
        "SLUICE_LOG_LEVEL",
        "SMALL",
        "TOP_P",
    }
)
"""Capital words that are no reasons: signals, variables, words of commands."""

SUFFIXES = ("_total", "_bucket", "_sum", "_count")


class Span(NamedTuple):
    """A piece of code on a page: a line of a block, or the text between backticks."""

    text: str
    is_line: bool


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@cache
def spans(name: str) -> tuple[Span, ...]:
    """Return the pieces of code of a page. Blocks are fenced, or indented by four spaces or more."""
    found: list[Span] = []
    fenced = False
    for line in page(name).splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or (line.startswith("    ") and not line.lstrip().startswith(("|", "*"))):
            found.append(Span(line.strip(), is_line=True))
        else:
            found += [Span(text, is_line=False) for text in re.findall("`([^`]+)`", line)]
    return tuple(found)


def inline() -> Iterator[str]:
    for name in PAGES:
        yield from (span.text for span in spans(name) if not span.is_line)


# Commands.


def commands() -> Iterator[str]:
    """Yield every command that begins with `sluice`, without variables before it, comments and pipes behind it."""
    for name in PAGES:
        for text, is_line in spans(name):
            words = re.sub(r"^(\$ |([A-Z_]+=\S+ ))+", "", text)
            if re.match(r"sluice [a-z]", words) and not (is_line and words.startswith("sluice: ")):
                yield re.split(r"\s#\s|\s*\||\s&$", words)[0].replace("...", "")


@pytest.mark.parametrize("command", sorted({*commands()}))
def test_a_command_is_one_that_the_program_takes(command: str) -> None:
    _, name, *words = shlex.split(command)
    known = {*BUILT_IN, *command_names(), *service_names()}
    assert name in known
    if not words:
        return
    path = [name, *words[:1]] if name in {"ray", "env"} else [name]
    found = helped(*path)
    left = parsed(found, words[len(path) - 1 :]) if isinstance(found, argparse.ArgumentParser) else words
    check_settings(name, left, "" if isinstance(found, argparse.ArgumentParser) else found)


@cache
def helped(*path: str) -> argparse.ArgumentParser | str:
    """Return the parser of a command, or its help, as the reference of the commands finds them."""
    return reference()(*path)


@cache
def reference() -> Callable[..., argparse.ArgumentParser | str]:
    read: Callable[..., argparse.ArgumentParser | str] = runpy.run_path(str(DOCS / "write_references.py"))["helped"]
    return read


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Parse words as the command does, and return the words that it treats as settings."""
    if parser.prog == "sluice set":  # the command's own settings come after the run's
        words = [word for word in words if not word.startswith("--")]
    return parser.parse_known_args(words)[1]


def check_settings(command: str, words: Sequence[str], text: str) -> None:
    """Check that each flag is a setting of the command, or stands in the text of its help."""
    for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
        in_help = re.search(rf"(^|\s){re.escape(flag)}(?![\w-])", text, re.MULTILINE)
        in_help = in_help or re.search(rf"(^|\s){re.escape(flag.replace('-', '_').replace('__', '--'))}\b", text)
        assert in_help or flag in {"--help", "--dry-run"} or is_setting(flag.removeprefix("--"), command), flag


def is_setting(dotted: str, service: str = "") -> bool:
    """Return whether a run has a setting or a table; in the command of a service its table may be left out."""
    key = dotted.replace("-", "_")
    return key in settings() or f"{service}.{key}" in settings()


@cache
def settings() -> frozenset[str]:
    paths = [path for path, _ in leaf_paths(run_config_class())]
    return frozenset(".".join(path[:length]) for path in paths for length in range(1, len(path) + 1))


def test_a_flag_that_stands_alone_is_one_of_some_command() -> None:
    ray = helped("ray", "rl")  # the page of the commands has no section for it
    assert isinstance(ray, argparse.ArgumentParser)
    known = page("cli.md") + ray.format_help()
    flags = {text.split()[0] for text in inline() if text.startswith("--")}
    of_services = {flag for flag in flags if any(is_setting(flag.removeprefix("--"), each) for each in service_names())}
    unknown = {flag for flag in flags - of_services if not re.search(rf"(?<![\w-]){flag}(?![\w-])", known)}
    assert unknown <= {"--shm-size"}, "that is one of docker"


# Settings.


def test_every_setting_exists() -> None:
    tables = {name for name, field in run_config_class().model_fields.items() if table_class(field.annotation)}
    texts = [text for name in PAGES for text, _ in spans(name)]
    dotted = {each for text in texts for each in re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z_]+)+(?![\w/(])", text)}
    named = {each for each in dotted if each.partition(".")[0] in tables} - {"orchestrator.run", "trainer.state"}
    assert len(named) > 50
    assert {each for each in named if not is_setting(each) and not is_chart_value(each)} <= CALLS


CALLS = frozenset({"orchestrator.pause", "orchestrator.resume", "orchestrator.stop", "trainer.log", "rollout.log"})
"""What looks like a setting: methods of the client in the program of debugging.md, and files."""


def is_chart_value(dotted: str) -> bool:
    value = yaml.safe_load((ROOT / "deploy/helm/sluice/values.yaml").read_text(encoding="utf-8"))
    for key in dotted.split("."):
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def test_every_setting_that_is_changed_in_a_live_run_can_be() -> None:
    live = page("live-settings.md")
    for command in commands():
        if command.startswith("sluice set "):
            for key in re.findall(r"([a-z_.]+)=", command.partition(" --")[0]):
                assert f"`{key}`" in live, command


# Metrics and alerts.


class Strings(NamedTuple):
    """The texts of a module: constants, and what f-strings begin with; the holes of f-strings are `{}`."""

    constants: frozenset[str]
    formatted: frozenset[str]


@cache
def strings() -> dict[Path, Strings]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.parent.name == "v1" or "examples" in path.relative_to(ROOT).parts:
                continue
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            constants = {each.value for each in nodes if isinstance(each, ast.Constant) and isinstance(each.value, str)}
            formatted = {joined(each) for each in nodes if isinstance(each, ast.JoinedStr)}
            found[path] = Strings(frozenset(constants), frozenset(formatted))
    return found


def joined(node: ast.JoinedStr) -> str:
    return "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)


@cache
def metric_names() -> frozenset[str]:
    """Return the names of all Prometheus metrics, without the suffixes that the format adds to counters and histograms."""
    names = {"process_cpu_seconds", "process_resident_memory_bytes"}  # of the client library
    for module in strings().values():
        names |= {each.removesuffix("_total") for each in module.constants if re.fullmatch("sluice_[a-z_]+", each)}
        for text in module.formatted:
            if re.fullmatch(r"sluice_[a-z]+_\{\}", text):  # the names stand in a table of the same module
                names |= {text.replace("{}", each) for each in module.constants if re.fullmatch("[a-z_]+", each)}
    return frozenset(names)


@pytest.mark.slow
def test_every_prometheus_metric_is_served() -> None:
    named = {each for name in PAGES for each in re.findall(r"\b(?:sluice|process)_[a-z]\w*[a-z]\b", page(name))}
    assert len(named) > 30
    unknown = {each for each in named if not {each, *(each.removesuffix(end) for end in SUFFIXES)} & metric_names()}
    assert not unknown


PREFIXES = "load|staleness|groups|completion|reward|rollout|orchestrator|time|tokens|weights|trainer"


def test_every_metric_of_a_step_is_reported() -> None:
    named = {
        each
        for name in PAGES
        for text, _ in spans(name)
        for each in re.findall(rf"(?<![\w./-])(?:{PREFIXES})/[a-z_/]+[a-z](?![\w./*])", text)
    }
    texts = {each for module in strings().values() for each in module.constants}
    formatted = {each for module in strings().values() for each in module.formatted}
    words = {word for path in strings() for word in re.findall(r"[a-z_]+", path.read_text(encoding="utf-8"))}
    assert len(named) > 25
    for each in named:
        prefix, _, rest = each.partition("/")
        made = prefix in {"trainer", "weights"} and set(rest.split("/")) <= words  # fields of the trainer's report
        cut = f"{prefix}/{{}}_s" in formatted and each.endswith("_s")
        assert each in texts or made or cut, each


def alerts() -> set[str]:
    rules = yaml.safe_load((ROOT / "deploy/helm/sluice/alerts.yaml").read_text(encoding="utf-8"))
    return {rule["alert"] for group in rules["groups"] for rule in group["rules"]}


def test_the_run_books_have_every_alert_and_no_other() -> None:
    assert set(re.findall(r"\bSluice[A-Z]\w+", page("run-books.md"))) == alerts()
    for name in PAGES:
        assert set(re.findall(r"\bSluice[A-Z]\w+", page(name))) <= alerts()


# Reasons and messages.


@cache
def reasons() -> frozenset[str]:
    """Return the reasons of errors, of dropped trajectories and of environments, and also codes, states and variables."""
    listed = {each.name.removeprefix("ERROR_REASON_") for each in errors_pb2.ErrorReason.DESCRIPTOR.values}
    for module in (
        "orchestrator_svc.journal.facts",
        "orchestrator_svc.commands.fork",
        "sluice.environments.worker",
        "trainer_svc.service.batches",
    ):
        path = ROOT / f"{module.replace('.', '/')}.py"
        listed |= {each for each in strings()[path].constants if re.fullmatch("[A-Z][A-Z_]+", each)}
    codes = {each.name for each in grpc.StatusCode}
    states = {
        each
        for enum in (orchestrator_pb2.RunState, rollout_pb2.ReplicaState)
        for each in enum.keys()  # noqa: SIM118 - an enum of protobuf is no mapping
    }
    return frozenset(listed | codes | states)


def test_every_reason_exists() -> None:
    named = {
        each
        for text in inline()
        for each in re.findall(r"(?<![\w$./-])[A-Z][A-Z_]{3,}(?![\w:./]|\[)", text)
        if each[-1] != "_"
    }
    assert len(named) > 50
    assert named - reasons() - PLACEHOLDERS == OF_OTHERS


PROGRAMS = frozenset({"cat", "df", "docker", "du", "fuser", "gdb", "grep", "journalctl", "jq", "kill", "kubectl", "ls"})
PROGRAMS |= {"orchestrator.environment_args", "py-spy", "scontrol", "sluice", "tail"}
"""First words of code that is no message."""


def messages() -> Iterator[str]:
    """Yield the quoted messages: text of several words that begins like a log message and is not a command."""
    for text in inline():
        prose = re.fullmatch(r"[a-z#][^=@$\\/{}\"]*", text) and " " in text
        if prose and text.partition(" ")[0] not in PROGRAMS:
            yield text


@pytest.mark.parametrize("message", sorted({*messages()}))
def test_a_message_is_one_that_the_code_writes(message: str) -> None:
    parts = [part.strip(string.whitespace + "#:;,.'") for part in message.split("...")]
    known = all_texts()
    missing = [part for part in parts if part and part not in known]
    assert not missing


@cache
def all_texts() -> str:
    return "\n".join(each for module in strings().values() for each in (*module.constants, *module.formatted))


# Tests, links and the way to the pages.


def test_every_test_that_is_named_exists() -> None:
    named = {each for name in PAGES for each in re.findall(r"tests/[\w/]+\.py", page(name))}
    assert len(named) > 25
    assert {each for each in named if not (ROOT / each).is_file()} == set()


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page(name)):
        if re.match("[a-z]+://", target):
            continue
        file, _, anchor = target.partition("#")
        path = (DOCS / file).resolve() if file else DOCS / name
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a page's headings, as they are made where the repository is shown."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings)


@pytest.mark.parametrize("name", PAGES)
def test_the_readme_names_the_page(name: str) -> None:
    assert f"docs/{name}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_programs_of_the_pages_use_what_the_library_has() -> None:
    for name in PAGES:
        for block in re.findall("```python\n(.*?)```", page(name), re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, each.name) for each in node.names), node.module
