"""`sluice env list | show NAME | try NAME`: which environments there are, what one needs, and one of its episodes played at once."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeAlias

from sluice.chat_endpoint import KEY_VARIABLE, ChatEndpoint, EndpointError
from sluice.config import ConfigError, Options, seconds, whole_number
from sluice.environments.base import Message, Task
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.loading import BUILT_IN, ENVIRONMENT_GROUP, SERVED, locate
from sluice.environments.processes import EnvironmentProcesses
from sluice.environments.worker import EnvironmentFailedError
from sluice.progress import doing
from sluice.telemetry import LEVEL_VARIABLE, configure_logging

_USAGE = "usage: sluice env list | show NAME | try NAME [key=value ...]"

_NAME_HELP = "name of an environment, module:Attr, path/to/env.py:Attr, or grpc://host:port"

Player: TypeAlias = Callable[[Sequence[Message], Sequence[Mapping[str, Any]]], Awaitable[Message]]
"""Returns what the assistant says next, from the messages and the tools."""


def run(argv: list[str]) -> int:
    """Run `list`, `show` or `try`; return 0, or 1 if an episode failed.

    Raises:
        ConfigError: if there is no such environment, or it cannot be used.
    """
    verbs = {"list": _list, "show": _show, "try": _try}
    configure_logging("env", os.environ.get(LEVEL_VARIABLE) or "warning", for_people=True)
    if not argv or argv[0] in {"--help", "-h"}:
        print(f"{_USAGE}\n\n{__doc__}")
        return 0
    if argv[0] not in verbs:
        raise ConfigError(f"no command `sluice env {argv[0]}`; {_USAGE}")
    return verbs[argv[0]](argv[1:])


def _list(argv: list[str]) -> int:
    Options(prog="sluice env list", description="List the environments that have a name.").parse_args(argv)
    installed = {point.name: point.value for point in entry_points(group=ENVIRONMENT_GROUP)}
    found = {**BUILT_IN, **installed}
    width = max(map(len, found))
    for name, location in sorted(found.items()):
        print(f"{name:{width}}  {_Source.of(location).summary}")
    print("\nAny class: path/to/env.py:Class. One: sluice env show NAME")
    return 0


def _show(argv: list[str]) -> int:
    parser = Options(prog="sluice env show", description="Say what an environment is, and which arguments it takes.")
    parser.add_argument("name", help=_NAME_HELP)
    name = parser.parse_args(argv).name
    if name.startswith(SERVED):
        raise ConfigError(f"what {name} is only its server knows: `sluice env try {name}` plays one of its episodes")
    source = _Source.of(locate(name))
    print(f"{name}\n\n{source.text}")
    if source.arguments:
        print(f"\narguments: {source.arguments}")
    print(f"\nsluice env try {name}{''.join(f' {each}=...' for each in source.required)}")
    return 0


@dataclass(frozen=True)
class _Source:
    """Facts from the source of an environment. It is not imported, since its packages may not be installed here."""

    text: str
    arguments: str = ""
    required: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        return self.text.split("\n", 1)[0]

    @classmethod
    def of(cls, location: str) -> _Source:
        module, _, attribute = location.rpartition(":")
        path = Path(module)
        if path.suffix != ".py":
            try:
                spec = importlib.util.find_spec(module)
            except ModuleNotFoundError:
                spec = None
            if spec is None or spec.origin is None:
                return cls(f"({module} is not installed here)")
            path = Path(spec.origin)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        found = next((each for each in tree.body if isinstance(each, kinds) and each.name == attribute), None)
        if found is None:
            raise ConfigError(f"{path} defines no {attribute!r}")
        makers = [each for each in ast.walk(found) if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        maker = makers[0] if makers else found
        text = ast.get_docstring(found) or "(it has no docstring)"
        if isinstance(maker, ast.ClassDef):
            return cls(text)
        return cls(text, _signature(maker.args), _required(maker.args))


def _signature(arguments: ast.arguments) -> str:
    if arguments.args and arguments.args[0].arg == "self":
        arguments.args.pop(0)
    return ast.unparse(arguments).replace("*, ", "")


def _required(arguments: ast.arguments) -> tuple[str, ...]:
    """Return the names of the arguments without a default."""
    plain = arguments.args[: len(arguments.args) - len(arguments.defaults)]
    named = [each for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value is None]
    return tuple(each.arg for each in (*plain, *named))


def _try(argv: list[str]) -> int:
    parser = Options(
        prog="sluice env try",
        description="Play episodes of an environment and print them. Without --url you are the model: type its answers, and end each with an empty line.",
    )
    parser.add_argument("name", help=_NAME_HELP)
    parser.add_argument(
        "arguments",
        nargs="*",
        type=_argument,
        help="arguments of the environment, as key=value; values are JSON or text",
    )
    parser.add_argument("--url", default="", help="OpenAI-compatible endpoint, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="policy", help="name of the model there")
    parser.add_argument(
        "--key-variable", default=KEY_VARIABLE, help="environment variable that has the API key (default: %(default)s)"
    )
    parser.add_argument("--split", default="train", help="split of the tasks (default: %(default)s)")
    parser.add_argument("--first", type=whole_number(0), default=0, help="number of the first task (default: 0)")
    parser.add_argument("--count", type=whole_number(1), default=1, help="tasks that are played (default: 1)")
    parser.add_argument("--seed", type=whole_number(0), default=0, help="seed of tasks and episodes (default: 0)")
    parser.add_argument("--max-turns", type=whole_number(1), default=8, help="most answers of an episode (default: 8)")
    parser.add_argument(
        "--max-tokens", type=whole_number(1), default=512, help="most tokens of an answer (default: 512)"
    )
    parser.add_argument(
        "--chat-template-kwargs",
        type=_template_arguments,
        default={},
        metavar="JSON",
        help="arguments of the model's chat template, as a JSON object; with --url",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="temperature of the model (default: 1)")
    parser.add_argument(
        "--timeout", type=seconds, default=300.0, help="seconds for an answer of the model (default: 300)"
    )
    parser.add_argument(
        "--python", default="", help="interpreter that has the environment's packages (default: this one)"
    )
    return asyncio.run(_tried(parser.parse_args(argv)))


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"give arguments of the environment as key=value, not {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _template_arguments(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError('--chat-template-kwargs takes a JSON object, such as {"enable_thinking": false}')
    return given


async def _tried(options: Any) -> int:  # noqa: ANN401 - the parsed options
    config = EnvironmentProcessesConfig(count=1, python=options.python)
    limit = (300.0, "a fixed limit of `sluice env try`")
    async with contextlib.AsyncExitStack() as stack:
        with doing(f"start {options.name}"):
            processes = EnvironmentProcesses(options.name, dict(options.arguments), config, limit)
            environment = await stack.enter_async_context(processes)
            tasks = (await environment.tasks(options.split, options.seed))[options.first :]
        print(f"{environment.name}: {len(tasks) + options.first:,} tasks of split {options.split}")
        if not tasks:
            raise ConfigError(
                f"split {options.split!r} has no task {options.first}: lower --first, or correct the arguments"
            )
        if not options.url:
            return await _play_all(environment, tasks, options, _typed)
        endpoint = ChatEndpoint(
            options.url, options.model, key_variable=options.key_variable, timeout_s=options.timeout
        )
        more = {"chat_template_kwargs": options.chat_template_kwargs} if options.chat_template_kwargs else {}
        async with endpoint:

            async def ask(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
                choice = await endpoint.ask(
                    messages, tools, max_tokens=options.max_tokens, temperature=options.temperature, **more
                )
                said: Message = choice["message"]
                kept = {name: said[name] for name in ("role", "content", "tool_calls", "reasoning") if said.get(name)}
                return {"content": "", **kept}

            return await _play_all(environment, tasks, options, ask)


async def _play_all(environment: EnvironmentProcesses, tasks: Sequence[Task], options: Any, player: Player) -> int:  # noqa: ANN401 - the parsed options
    failed = 0
    for number, task in enumerate(tasks[: options.count]):
        print(f"\n── task {task.task_id} {'─' * 40}")
        play = partial(_episode, max_turns=options.max_turns) if environment.multi_turn else _question
        try:
            await play(environment, task, options.seed + number, player)
        except (EnvironmentFailedError, EndpointError) as error:
            print(f"failed: {error.message if isinstance(error, EnvironmentFailedError) else error}")
            failed += 1
        except EOFError:
            print("(no more input)")
            return 1
    return int(failed > 0)


async def _question(environment: EnvironmentProcesses, task: Task, _seed: int, player: Player) -> None:
    if not environment.single_turn:
        raise ConfigError(
            f"environment {environment.name} leaves its episodes to agents: it has neither `reset`, nor `messages` with `score`"
        )
    messages = await environment.messages(task)
    _print_messages(messages)
    said = await player(messages, ())
    _print_said(said, player)
    (score,) = await environment.judge(task, [said["content"]])
    _print_metrics(score.metrics)
    print(f"reward {'missing' if score.reward is None else f'{score.reward:g}'}")


async def _episode(environment: EnvironmentProcesses, task: Task, seed: int, player: Player, *, max_turns: int) -> None:
    total: float | None = None
    async with environment.episode(task, seed) as episode:
        messages = list(episode.messages)
        if episode.tools:
            print(f"tools: {', '.join(tool.get('function', tool)['name'] for tool in episode.tools)}")
        _print_messages(messages)
        for number in range(max_turns):
            said = await player(messages, episode.tools)
            _print_said(said, player)
            last = number == max_turns - 1
            turn = await episode.step(said if episode.tools else said["content"], last=last)
            _print_messages(turn.messages)
            messages += [said, *turn.messages]
            if turn.reward is not None:
                total = (total or 0.0) + turn.reward
            _print_metrics(turn.metrics)
            if turn.done and not (last and turn.truncated):
                break
        else:
            print(f"ended after {max_turns} answers (--max-turns)")
    print(f"reward {'missing' if total is None else f'{total:g}'}")


def _print_metrics(metrics: Mapping[str, float]) -> None:
    if metrics:
        print("  ".join(f"{name} {value:g}" for name, value in metrics.items()))


def _print_messages(messages: Sequence[Message]) -> None:
    for message in messages:
        print(f"{message['role']}:\n{textwrap.indent(str(message.get('content') or ''), '    ')}")


def _print_said(said: Message, player: Player) -> None:
    if player is _typed:
        return
    calls = "".join(
        f"\n→ {call['function']['name']}({call['function']['arguments']})" for call in said.get("tool_calls", ())
    )
    _print_messages([{"role": "assistant", "content": f"{said['content']}{calls}".strip()}])


async def _typed(_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
    """Let a person answer. A line `name {"key": "value"}` with the name of a tool calls it."""
    print("assistant (you):", flush=True)
    lines = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        if not line.strip():
            break
        lines.append(line.rstrip("\n"))
    if not lines and not line:
        raise EOFError
    names = [tool.get("function", tool)["name"] for tool in tools]
    calls = [each for each in lines if each.split(" ", 1)[0] in names]
    said: dict[str, Any] = {"role": "assistant", "content": "\n".join(each for each in lines if each not in calls)}
    if calls:
        said["tool_calls"] = [
            {"id": f"call-{number}", "type": "function", "function": {"name": name, "arguments": arguments or "{}"}}
            for number, (name, _, arguments) in enumerate(each.partition(" ") for each in calls)
        ]
    return said
