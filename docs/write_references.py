"""Write the generated pages of docs/, from contracts, parsers, limits, rules and names of metrics: `make references`.

With `--check` nothing is written, and the exit code is 1 if a page is not what it would be.
"""

import argparse
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from sluice.cli import main as program
from sluice.config import command_names, service_names
from sluice.limits import LIMITS
from sluice.metric_names import METRICS, OWN_LOSS, SECTIONS
from sluice.rpc.access import roles_for
from sluice.watch.rules import RULES, Family, Rule

DOCS = Path(__file__).parent
PROTOS = DOCS.parent / "proto"
GENERATED = (
    "<!-- Written by `make references`: change the comments of the contracts, or the help of the commands. -->\n"
)


def contracts() -> list[FileDescriptorProto]:
    """Compile the contracts, comments included; return those of ours, by name."""
    files = sorted(str(path) for path in PROTOS.glob("sluice/v1/*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "set"
        known = Path(protoc.__file__).parent / "_proto"
        options = [f"-I{PROTOS}", f"-I{known}", "--include_source_info", f"--descriptor_set_out={output}"]
        if protoc.main(["protoc", *options, *files]):
            raise SystemExit("the contracts do not compile: `make proto` says where")
        return list(FileDescriptorSet.FromString(output.read_bytes()).file)


class Comments:
    """What stands above each part of a file."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._said = {tuple(each.path): each.leading_comments for each in file.source_code_info.location}

    def of(self, *path: int) -> str:
        """Return a comment as one paragraph; a path is that of SourceCodeInfo."""
        return " ".join(self._said.get(path, "").split())


def rpc_page(files: Sequence[FileDescriptorProto]) -> str:
    """Return the reference of services, messages and enums."""
    parts = [
        "# RPC reference",
        GENERATED
        + "\nEvery service, message and enum of [`proto/sluice/v1`](../proto/sluice/v1). [protocol.md](protocol.md) shows the calls of an agent in their order,"
        " [security.md](security.md) what roles are. A role that is not named may not call; `admin` may call everything.",
    ]
    for file in files:
        comments = Comments(file)
        for number, service in enumerate(file.service):
            parts += [f"## {service.name}", f"[`{file.name}`](../proto/{file.name}). {comments.of(6, number)}"]
            for index, method in enumerate(service.method):
                sends = ("stream of " * method.client_streaming) + reference(method.input_type)
                gives = ("stream of " * method.server_streaming) + reference(method.output_type)
                roles = roles_for(f"{file.package}.{service.name}", method.name)
                callers = "anyone" if roles is None else ", ".join(sorted(roles - {"admin"})) or "`admin` alone"
                said = comments.of(6, number, 2, index)
                parts.append(f"**`{method.name}`**: {sends} → {gives}. Roles: {callers}.\n{said}")
    parts.append("# Messages")
    for file in files:
        comments = Comments(file)
        for number, message in enumerate(file.message_type):
            parts += message_parts(message, message.name, comments, (4, number))
        for number, enum in enumerate(file.enum_type):
            rows = [
                (f"`{each.name}`", str(each.number), comments.of(5, number, 2, index))
                for index, each in enumerate(enum.value)
            ]
            parts += [f"## {enum.name}", comments.of(5, number), table(("value", "number", ""), rows)]
    return "\n\n".join(part for part in parts if part) + "\n"


def message_parts(message: DescriptorProto, name: str, comments: Comments, path: tuple[int, ...]) -> Iterator[str]:
    """Yield the section of a message, and those of the messages and enums inside it."""
    maps = {each.name: each for each in message.nested_type if each.options.map_entry}
    rows = []
    for index, field in enumerate(message.field):
        entry = maps.get(field.type_name.rpartition(".")[2])
        kind = f"map of {field_type(entry.field[0])} to {field_type(entry.field[1])}" if entry else field_type(field)
        choice = f"one of `{message.oneof_decl[field.oneof_index].name}`: " if in_choice(field) else ""
        rows.append((f"`{field.name}`", choice + kind, str(field.number), comments.of(*path, 2, index)))
    yield f"## {name}"
    yield comments.of(*path)
    if rows:
        yield table(("field", "type", "number", ""), rows)
    for index, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            yield from message_parts(inner, f"{name}.{inner.name}", comments, (*path, 3, index))
    for number, enum in enumerate(message.enum_type):
        values = [
            (f"`{each.name}`", str(each.number), comments.of(*path, 4, number, 2, at))
            for at, each in enumerate(enum.value)
        ]
        yield from (f"## {name}.{enum.name}", comments.of(*path, 4, number), table(("value", "number", ""), values))


def in_choice(field: FieldDescriptorProto) -> bool:
    """Return whether a field is one of several of which one is set."""
    return field.HasField("oneof_index") and not field.proto3_optional


def field_type(field: FieldDescriptorProto) -> str:
    """Return the type of a field."""
    scalar = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    kind = reference(field.type_name) if field.type_name else scalar
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    return f"optional {kind}" if field.proto3_optional else kind


def reference(full_name: str) -> str:
    """Return the name of a message; where this page has it, as a link."""
    name = full_name.removeprefix(".sluice.v1.")
    return f"`{name.lstrip('.')}`" if name.startswith(".") else f"[{name}](#{name.lower().replace('.', '')})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *([each.replace("|", "\\|") for each in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Parser(BaseException):
    """Brings the parser of a command out of it."""


def cli_page() -> str:
    """Return the reference of the commands."""
    parts = [
        "# Commands",
        GENERATED
        + "\nEvery command of `sluice`. Services and `sluice rl` read the settings of [configuration.md](configuration.md), from flags, files and variables alike.",
    ]
    kinds = [
        ("Commands", {**program.BUILT_IN, **{name: program.ADDED_HELP.get(name, "") for name in command_names()}}),
        ("Services", {name: program.SERVICE_HELP.get(name, "") for name in service_names()}),
    ]
    for title, names in kinds:
        rows = [(f"[`sluice {name}`](#sluice-{name})", said) for name, said in names.items()]
        parts += [f"# {title}", table(("command", ""), rows)]
        for name, said in names.items():
            parts += command_parts(name, said, settings=title == "Services" or name == "rl")
    return "\n\n".join(parts) + "\n"


def command_parts(name: str, said: str, *, settings: bool) -> Iterator[str]:
    """Yield the section of a command. With `settings` those that its help prints are left out: another page has them."""
    yield f"## `sluice {name}`"
    yield said[:1].upper() + said[1:] + "."
    if name == "env":  # its words choose a parser each
        for action in ("list", "show", "try"):
            yield from parser_parts(helped(name, action), depth=3)
        return
    found = helped(name)
    if isinstance(found, str):
        yield (
            "Its settings are those of [configuration.md](configuration.md)."
            if settings
            else f"```text\n{found.strip()}\n```"
        )
    else:
        yield from parser_parts(found, depth=2)


def helped(*words: str) -> argparse.ArgumentParser | str:
    """Return the parser that a command asks, or, if it asks none, its help."""

    def caught(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Parser(parser)

    printed = io.StringIO()
    with patch.object(argparse.ArgumentParser, "parse_known_args", caught), contextlib.redirect_stdout(printed):
        try:
            program.main([*words, "--help"])
        except Parser as found:
            return found.args[0]
        except SystemExit:
            pass
    return printed.getvalue()


def parser_parts(parser: argparse.ArgumentParser, depth: int) -> Iterator[str]:
    """Yield the section of a parser, and those of its subcommands."""
    if depth > 2:  # the section of a command has its title
        yield f"{'#' * depth} `{parser.prog}`"
    if parser.description:
        yield " ".join(parser.description.split())
    rows, actions = [], []
    for each in parser._actions:  # noqa: SLF001 - argparse has no other way to list them
        if isinstance(each, argparse._SubParsersAction):  # noqa: SLF001
            actions = list(each.choices.values())
        elif each.dest != "help":
            said = (each.help or "") % {**vars(each), "prog": parser.prog}
            rows.append((argument(each), " ".join(said.split())))
    if rows:
        yield table(("argument", ""), rows)
    for each in actions:
        yield from parser_parts(each, depth=3)


def argument(action: argparse.Action) -> str:
    """Return how an argument is written."""
    value = "|".join(map(str, action.choices)) if action.choices else str(action.metavar or action.dest).upper()
    if not action.option_strings:
        return f"`{value}`"
    flags = ", ".join(action.option_strings)
    written = f"`{flags}`" if action.nargs == 0 else f"`{flags} {value}`"
    return f"{written} (required)" if action.required else written


def limits_page() -> str:
    """Return the page of the limits, and of what happens to what exceeds them."""
    rows = [(f"`{each.name}`", f"{each.value:,.12g}", each.unit, each.meaning) for each in LIMITS]
    return (
        "\n\n".join(
            [
                "# Limits, and what can never be trained",
                "<!-- Written by `make references` from sluice/limits.py. -->",
                LIMITS_OPENING,
                table(("limit", "largest value", "of", "what is larger"), rows),
                LIMITS_TEXT,
            ]
        )
        + "\n"
    )


LIMITS_OPENING = """Every server says these limits in `GetServerInfo`. Whoever lets data in checks it there, before anything is sampled or
written. Settings may be lower; see [configuration.md](configuration.md)."""

LIMITS_TEXT = """## At the door

An agent, an environment or a client that exceeds a limit is refused (`INVALID_ARGUMENT`, with the limit's name and the
remedy). Refusals are counted by principal and task in `GetRun.refused`, in `report.json` and in `sluice_run_refused_total`. If 60 rewards of a
principal were refused within a minute, the principal has to wait (`REFUSED_TOO_OFTEN` with RetryInfo). Such refusals never pause a run.

## Behind the door

Data that was accepted but can never be trained is **set aside**, and the run continues. The trajectories are set aside if the trainer names them, else
their group; a whole batch only if the group is unknown. The journal records this as a fact. It is counted under a reason in
`trajectories_dropped`, and listed under `set_aside` in `GetRun` and `report.json` with the problem and the remedy:

| reason | what | what to do |
|---|---|---|
| `REWARDS_UNFIT` | the estimator cannot take the rewards of a group: negative ones for `maxrl`, or such that advantages exceed float32 | another `orchestrator.advantage`, a smaller `orchestrator.max_reward`, or other rewards |
| `BATCH_TOO_LARGE` | groups that do not fit into a batch together with the others: the largest go | a smaller `batch_size` or `group_size`, or sessions that fork less |
| `TRAINER_REFUSES` | what the trainer's admission refuses, such as a row that does not fit in its memory: the text says which field and why | by that text |

Episodes that may not be trained from the start are dropped as before, each under its own reason; two of them are limits:
`TOO_LONG`, and `REWARD_TOO_LARGE` of an environment, which counts towards the quarantine of its task.

**Too much set aside.** If more than `orchestrator.max_set_aside` (5%) of the trajectories of 20 batches are set aside, the rest may be biased: the run
pauses and says why. `sluice resume` accepts what was set aside so far. If nobody resumes it within `orchestrator.deadlines.set_aside_s`
(an hour), the run writes a checkpoint and ends with exit code 5. Correct the cause and start it again, and it continues.

Data never ends a run in any other way. Other causes do: settings that do not fit each other, a trainer that is lost again and again, a
disk that cannot be written."""


def rules_page() -> str:
    """Return the page of the rules that say what is wrong with a run."""
    parts = ["# Rules of a run", "<!-- Written by `make references` from sluice/watch/rules.py. -->", RULES_OPENING]
    for family in Family:
        rows = [(f"`{each.name}`", lasts(each), each.why, each.remedy) for each in RULES if each.family is family]
        parts += [f"## {family.capitalize()}", table(("rule", "wrong for", "why it matters", "what to do"), rows)]
    return "\n\n".join(parts) + "\n"


def lasts(rule: Rule) -> str:
    """Return for how long something must be wrong."""
    return f"{rule.seconds:g} s" if rule.seconds else "a step" if rule.steps == 1 else f"{rule.steps} steps"


RULES_OPENING = """What says that something is wrong with a run ([monitor.md](monitor.md) has who shows it). The limits are settings of the
table `watch` ([configuration.md](configuration.md)); a rule counts once it is wrong for as long as its row says, without a break."""


def metrics_page() -> str:
    """Return the page of a run's metrics."""
    parts = [
        "# Metrics of a run",
        "<!-- Written by `make references` from sluice/metric_names.py. -->",
        METRICS_OPENING,
    ]
    for section, question in SECTIONS.items():
        rows = [(f"`{each.name}`", each.unit, each.text) for each in (*METRICS, OWN_LOSS) if each.section == section]
        parts += [f"## {section}", question, table(("metric", "unit", "meaning"), rows)]
    return "\n\n".join([*parts, METRICS_END]) + "\n"


METRICS_OPENING = """Every step of a run writes these metrics into `metrics.jsonl` and for TensorBoard; a metric that was not measured is left out. Words in
capital letters stand for a name or a number, and a part in brackets may be missing: `eval[/ENVIRONMENT]/reward_mean` is `eval/reward_mean`
in a run with one environment, and `eval/sums/reward_mean` in a run with several. A share is a number from 0 to 1."""

METRICS_END = """## In TensorBoard

    tensorboard --logdir outputs/RUN/tensorboard

The logs of a run lie in `outputs/RUN/tensorboard/RUN`, so that its curves have its name. `--logdir outputs` shows all runs, each as
`RUN/tensorboard/RUN`. Nothing is sent anywhere.

| tab | shows |
|---|---|
| Custom Scalars | the charts that matter in the five sections of this page, several curves in one chart. A chart stays empty if the run does not measure it. Look here first |
| Scalars | every metric, with the sentence of this page behind the (i) of its card |
| Time Series | the same without the sentences; cards can be pinned |
| Text | `samples`: five samples of step 1 and of each 25th step, from the worst to the best reward, with prompt, completion and numbers. Not with `write_trajectories = false` |
| HParams | the runs as a table: the settings that are compared most, beside the last reward, evaluation and seconds of a step |

A run that continues appends to its curves. Layout and settings are those of its first start."""


def main() -> None:
    """Write the pages, or compare them.

    Raises:
        SystemExit: if a page is not fresh, and is only compared.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is not fresh")
    check = parser.parse_args().check
    os.environ["COLUMNS"] = "100"  # of what prints its help without a parser
    stale = []
    for name, text in (
        ("rpc-reference.md", rpc_page(contracts())),
        ("cli.md", cli_page()),
        ("limits.md", limits_page()),
        ("rules.md", rules_page()),
        ("metrics.md", metrics_page()),
    ):
        path = DOCS / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(f"docs/{name}")
            if not check:
                path.write_text(text, encoding="utf-8")
    if check and stale:
        raise SystemExit(f"{', '.join(stale)}: not fresh; run `make references` and commit the result")


if __name__ == "__main__":
    main()
