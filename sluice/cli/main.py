"""The `sluice` program: find a command by its name, import only its module, and run it.

A command is built in (a module of `sluice.cli`), added by an installed package (entry-point group ``sluice.commands``), or a
service (group ``sluice.services``); it is looked for in this order.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from sluice.config import Command, ConfigError, command_names, find_command, service_names

__all__ = ["main"]

BUILT_IN = {
    "rl": ("sluice.cli.rl", "run reinforcement learning: all services as child processes, one live view"),
    "quickstart": ("sluice.cli.quickstart", "train a small model by RL from nothing, in minutes"),
    "init-model": ("sluice.cli.init_model", "make a small model from scratch with a tokenizer and a chat template"),
    "fetch-model": ("sluice.cli.fetch_model", "download a small pretrained model and check its digests"),
    "report": ("sluice.cli.report", "summarise a finished run"),
    "health": ("sluice.cli.health", "ask a server by grpc.health.v1 whether it serves; exit code 0 or 1"),
    "config": ("sluice.cli.config_docs", "write the reference of all settings"),
}
"""Module and help line of each built-in command. The module exposes COMMAND."""

ADDED_HELP = {
    "sft": "fine-tune a model on demonstrations",
    "dpo": "train a model on preferences (DPO, IPO)",
    "reward-model": "train a reward model on preferences",
    "distill": "train a model on a teacher's log-probabilities",
    "merge-adapter": "add a LoRA adapter to the weights of its base",
    "objective": "evaluate an objective and its gradient on given numbers",
    "eval": "score a model directory or a running server on an environment",
    "bench": "measure a part of the system side by side with its alternative",
    "weights": "list, show, verify and compare the weight versions of a run",
}
"""Help line of each command that the services add, so that `sluice --help` imports none of them."""

SERVICE_HELP = {
    "orchestrator": "serve the run: tasks, rewards, advantages, batches",
    "rollout": "serve generation from the policy",
    "trainer": "serve the optimizer",
    "weightsync": "serve weight versions from the trainer to the replicas",
}

_USAGE = """usage: sluice COMMAND [ARGUMENTS]
       sluice --help | --version

Reinforcement-learning post-training for language models as four gRPC services.
Settings: `@ file.toml`, `--key value`, SLUICE_A__B; see `sluice rl --help`.
"""

EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; None takes the process's own.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong settings or usage, 130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except ConfigError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone, as in `sluice rl --help | head`. The interpreter must not write to it either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in {"--help", "-h", "help"}:
        print(_overview())
        return 0 if words else EXIT_CONFIG
    if words[0] == "--version":
        print(f"sluice {version('sluice')}")
        return 0
    name, *arguments = words
    if name in BUILT_IN:
        command: Command | None = importlib.import_module(BUILT_IN[name][0]).COMMAND
    else:
        command = find_command(name)
    if command is not None:
        return command.run(arguments)
    if name in service_names():
        from sluice.cli.serve import serve  # noqa: PLC0415 - only a service needs asyncio and logging

        return serve(name, arguments)
    raise ConfigError(f"no command {name!r}; `sluice --help` lists them")


def _overview() -> str:
    sections = (
        ("commands", {name: line for name, (_, line) in BUILT_IN.items()}),
        ("commands of installed packages", {name: ADDED_HELP.get(name, "see its --help") for name in command_names()}),
        ("services", {name: SERVICE_HELP.get(name, "see its --help") for name in service_names()}),
    )
    width = max(len(name) for _, entries in sections for name in entries)
    lines = [_USAGE]
    for title, entries in sections:
        if entries:
            lines += [f"{title}:", *(f"  {name:<{width}}  {line}" for name, line in entries.items()), ""]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    sys.exit(main())
