"""`sluice status | pause | resume | stop | set RUN`: look at a run while it lives, and steer it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import grpc
from google.protobuf.json_format import MessageToJson
from rich.console import Console

from sluice.client import OrchestratorClient
from sluice.config import ConfigError, Options, RunConfig, load_run
from sluice.progress import doing
from sluice.rpc import SluiceError
from sluice.run_files import CONFIG_FILE, JOURNAL_FILE, REPORT_FILE, is_held
from sluice.v1 import orchestrator_pb2
from sluice.versions import Version
from sluice.watch.live import STATES

_AFTER = "After them: settings of this command, such as `--output-dir DIR`, where the run is, or `--security.token-file FILE`."

DESCRIPTIONS: Mapping[str, str] = {
    "status": "Show the state of a run: step, version, who waits for whom, replicas, and what was dropped. " + _AFTER,
    "pause": "Stop drawing tasks of a run. What was begun is finished and trained; nothing is lost. " + _AFTER,
    "resume": "Draw tasks of a paused run again. To start a run again that has ended, use `sluice rl ... --resume`. "
    + _AFTER,
    "stop": "End a run after the batches that are made, with a checkpoint and the report. `sluice rl ... --resume` continues it. "
    + _AFTER,
    "set": "Change settings of a run while it lives, all of them or none (docs/live-settings.md). " + _AFTER,
}
"""What each command does."""

Act = Callable[[OrchestratorClient], Awaitable[None]]
"""Does what a command says, and prints the outcome."""


def run(command: str, argv: list[str]) -> int:
    """Run one of the commands; exit code 1 if the orchestrator refused or did not answer.

    Raises:
        ConfigError: if there is no such run, or the words are no settings.
    """
    parser = Options(prog=f"sluice {command}", description=DESCRIPTIONS[command])
    parser.add_argument("run", metavar="RUN", help="name of the run")
    if command == "status":
        parser.add_argument(
            "--json", action="store_true", help="print the whole state as JSON, as the contract names it"
        )
    if command == "stop":
        parser.add_argument("--reason", default="", help="why, for the run's report")
    if command == "set":
        parser.add_argument(
            "values", metavar="KEY=VALUE", nargs="+", help="a setting and its value, such as trainer.lr=5e-7"
        )
    own = 0
    while own < len(argv) and (not argv[own].startswith(("--", "@")) or argv[own] in {"--json", "--help", "--reason"}):
        own += 2 if argv[own] == "--reason" else 1
    arguments, settings = parser.parse_args(argv[:own]), argv[own:]
    acts: Mapping[str, Act] = {
        "status": partial(_status, name=arguments.run, as_json=getattr(arguments, "json", False)),
        "pause": partial(_pause, name=arguments.run),
        "resume": partial(_resume, name=arguments.run),
        "stop": partial(_stop, name=arguments.run, reason=getattr(arguments, "reason", "")),
        "set": partial(_set, name=arguments.run, values=_values(getattr(arguments, "values", []))),
    }
    return asyncio.run(_ask(arguments.run, _settings_of(arguments.run, settings), acts[command]))


async def _ask(name: str, config: RunConfig, act: Act) -> int:
    target = config.peers.orchestrator
    try:
        async with OrchestratorClient(target, config.security) as orchestrator:
            with doing(f"wait for the orchestrator at {target}"):
                await act(orchestrator)
    except SluiceError as error:
        nobody = (
            error.code is grpc.StatusCode.UNAVAILABLE and error.reason == error.code.name
        )  # no server gave a reason
        said = _why_silent(name, config, error) if nobody else f"the orchestrator at {target} says: {error}"
        print(f"sluice: {said}", file=sys.stderr)
        return 1
    return 0


def _why_silent(name: str, config: RunConfig, error: SluiceError) -> str:
    """Return why the orchestrator of a run does not answer, and what to do, as far as the run's files tell."""
    directory = config.output_dir / name
    *_, reason = error.message.split("last error: ")
    silent = f"nothing answers at {config.peers.orchestrator} ({reason})"
    if not (directory / JOURNAL_FILE).exists():
        return f"{silent}: start the run, or correct its address (--peers.orchestrator HOST:PORT)"
    if is_held(directory):
        return f"run {name} is starting, or an orchestrator that ended is started again: {silent}; try again in a moment, or see {directory / 'logs'}"
    try:
        report = json.loads((directory / REPORT_FILE).read_text(encoding="utf-8"))
        ended = f"has ended ({report['state']} after {report['steps']} steps)"
    except (OSError, ValueError, KeyError, TypeError):
        ended = f"is not running: no `sluice rl` holds {directory}, and {silent}"
    return f"run {name} {ended}; `sluice rl ... --resume` continues it, `sluice report {directory}` shows what it did"


def _settings_of(name: str, settings: list[str]) -> RunConfig:
    """Return the settings in a run's directory, overridden by those of this command.

    Raises:
        ConfigError: if there is no such run here and no address of its orchestrator is given.
    """
    given = load_run(settings)
    path = given.output_dir / name / CONFIG_FILE
    if path.is_file():
        return load_run(["@", str(path), *settings])
    if "orchestrator" in given.peers.model_fields_set:
        return given
    raise ConfigError(
        f"there is no run {name!r} in {given.output_dir}: name its directory with --output-dir DIR, or its orchestrator with"
        " --peers.orchestrator HOST:PORT"
    )


async def _status(orchestrator: OrchestratorClient, *, name: str, as_json: bool) -> None:
    found = await orchestrator.run(name)
    if as_json:
        print(MessageToJson(found, preserving_proto_field_name=True))
        return
    console = Console(soft_wrap=True, highlight=False)
    for label, text in _lines(found):
        console.print(f"{label:<14} {text}", markup=False)


def _lines(run: orchestrator_pb2.Run) -> list[tuple[str, str]]:
    """Return the state of a run for people, as labels and texts."""
    waits = {"rollout": "the trainer waits for trajectories", "trainer": "rollout waits for the trainer"}
    under_way = f"{run.live_groups} of at most {run.max_live_groups} groups, {run.running_episodes} episodes"
    trained = f"{run.trajectories_trained} trained of {run.trajectories_accepted} accepted{_by_reason(run.trajectories_dropped)}"
    lines = [
        ("state", STATES.get(run.state, "unknown") + (f": {run.error}" if run.error else "")),
        ("step", f"{run.step} of {run.max_steps}, version {Version.from_proto(run.policy_version)}"),
        ("under way", under_way + (f"; {waits[run.bottleneck]}" if run.bottleneck in waits else "")),
        ("staleness", f"at most {run.max_staleness_seen} so far, bound {run.max_staleness}"),
        ("trajectories", trained),
    ]
    lines += [("waits for", each) for each in run.waits_for]
    if run.groups_failed:
        lines.append(("failed groups", _by_reason(run.groups_failed).removeprefix("; not trained: ")))
    lines += [("set aside", f"{each.trajectories} as {each.reason}: {each.problem}") for each in run.set_aside]
    lines += [
        (f"metric {each}", f"{run.metrics[each]:.4g}")
        for each in ("reward/mean", "trainer/mismatch_kl")
        if each in run.metrics
    ]
    for each in run.replicas:
        serves = f"version {Version.from_proto(each.policy_version)} at {each.address}, {each.running} samples"
        lines.append((each.replica, serves + ("" if each.eligible else f"; gets no work: {each.reason}")))
    lines += [
        ("was set", f"{each.key} = {each.new_value} from batch {each.from_sequence_no} on")
        for each in run.changed_settings
    ]
    return lines


def _by_reason(counts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{number} {reason}" for reason, number in sorted(counts.items()))
    return f"; not trained: {listed}" if listed else ""


async def _pause(orchestrator: OrchestratorClient, *, name: str) -> None:
    now = await orchestrator.pause(name)
    print(
        f"paused at step {now.step}: no task is drawn until `sluice resume {name}`; {now.live_groups} groups are finished"
    )


async def _resume(orchestrator: OrchestratorClient, *, name: str) -> None:
    print(f"resumed at step {(await orchestrator.resume(name)).step}")


async def _stop(orchestrator: OrchestratorClient, *, name: str, reason: str) -> None:
    now = await orchestrator.stop(name, reason)
    print(f"ends after the batches that are made, at step {now.step} now, with a checkpoint and the report")


def _values(words: list[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` words.

    Raises:
        ConfigError: if a word does not have this form, or a key comes twice.
    """
    values: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key in values:
            raise ConfigError(f"{word!r}: write KEY=VALUE, each key once, such as trainer.lr=5e-7")
        values[key.strip()] = value.strip()
    return values


async def _set(orchestrator: OrchestratorClient, *, name: str, values: Mapping[str, str]) -> None:
    changed = await orchestrator.set(name, values)
    for each in changed:
        print(
            f"{each.key}: {each.old_value or 'as started'} -> {each.new_value}, from batch {each.from_sequence_no} on"
        )
    if not changed:
        print("nothing changed: the run has these values")
