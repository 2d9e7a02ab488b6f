"""`sluice slurm rl @ rl.toml --machines 4x8`: run reinforcement learning as a Slurm job.

The command writes the settings and a batch script to ``outputs/<run>/slurm``, and submits the script. The script runs `sluice slurm
job` on the first node, which starts each part as a step of the job. The directory of outputs must be shared by all nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from sluice.certificates import issue_once
from sluice.cli.live_view import RunView
from sluice.cli.plan_options import add_plan_options, arranging, plan_flags, plan_with
from sluice.cli.rl import (
    EXIT_CODES,
    check_run,
    claim,
    describe_finished,
    describe_resume,
    report_outcome,
    supervise,
    view_of,
    write_settings,
)
from sluice.config import ConfigError, Options, RunConfig, SecurityConfig, dump_toml, load_run
from sluice.config.decide import assume_devices
from sluice.models import check_hub
from sluice.plan import Machines, Plan
from sluice.plan.local import LEFT, child_environment, load_first
from sluice.plan.machines import add_machines_options, machines_of, text_of
from sluice.plan.plan import Restart, relay_flags
from sluice.plan.slurm import Group, Host, Job, groups_of, hosts_of, label, script, step, with_control_node
from sluice.rpc.access import Access
from sluice.rpc.channel import wait_until_serving
from sluice.rpc.principals import Role, add_token, new_token, replace_private
from sluice.run_files import is_held
from sluice.supervise import slurm_step
from sluice.supervise.restart_policy import EXIT_SET_ASIDE
from sluice.supervise.supervisor import ChildSpec, Ending, LogLimit, Outcome, Supervisor

FOLDER = "slurm"
"""Folder in the directory of the run: script, output and private files of its job."""

SETTINGS_FILE = "settings.toml"
"""The settings as they were submitted, with secrets."""

MACHINES_FILE = "machines.toml"
"""File with the machines that the job requests, next to the settings."""

CERTIFICATES = "certs"
"""Folder with the certificates of the job's nodes, next to the settings."""

ROLES: Mapping[str, Role] = {
    "orchestrator": "admin",
    "trainer": "trainer",
    "weightsync": "trainer",  # as a relay, which calls the weight service
    "rollout": "replica",
    "gateway": "gateway",
    "agents": "agent",
    "operator": "admin",
    "agent": "agent",
}
"""Role of each principal that is created for a job: services, commands of people, and agents outside of the job."""

ANSWER_S = 60.0
"""Seconds that a program of Slurm gets to answer."""

LOCK_WAIT_S = 120.0
"""Seconds that a requeued job waits until processes of its last start, on a lost node, release the run's directory."""

STOP_MARGIN_S = 15.0
"""Seconds that a part gets in addition to its drain, because finding and signalling its step requires calls to Slurm's controller."""

REQUEUE_S = 120.0
"""Seconds that Slurm gets to end this process after it has agreed to requeue the job."""

POLL_S = 1.0

EXIT_FAILURE = 1


def run(argv: list[str]) -> int:
    """Submit a run, or run it inside of its job.

    Returns:
        0 once the job is submitted. Within the job: the same as `sluice rl`.

    Raises:
        ConfigError: if a setting is wrong, Slurm refuses the job, or the run exists and `--resume` is missing.
    """
    commands: Mapping[str, Callable[[list[str]], int]] = {"rl": submit, "job": run_job}
    if not argv or argv[0] not in commands:
        print(_parser().format_help())
        return 0 if {"--help", "-h"} & set(argv) else 2
    return commands[argv[0]](argv[1:])


def submit(argv: list[str]) -> int:
    """Write settings and script of a run, and submit the script; only print it if `--dry-run` is given."""
    parser = _parser()
    if {"--help", "-h"} & set(argv):
        print(parser.format_help())
    options, words = parser.parse_known_args(argv)
    notes: list[str] = []
    config = _settings(options, words, notes)
    machines = _machines(options)
    plan = _plan(config, options, machines)
    groups = groups_of(plan, options.sbatch)
    job = job_of(config, plan, options)
    text = script(plan, groups, job)
    for line in (*(f"decided: {note}" for note in notes), *filter(None, [plan.idle])):
        print(line, file=sys.stderr)
    if options.dry_run:
        print(text, end="")
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "this machine has no sbatch: submit from a login node of the cluster; --dry-run prints the script"
        )
    for setting, model in {"model": config.model, **config.section("trainer").models_beside()}.items():
        check_hub(model, setting)
    with claim(config, resume=options.resume) as directory:
        if options.resume and (done := describe_finished(config)):
            print(done)
            return 0
        folder = directory / FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        replace_private(folder / SETTINGS_FILE, dump_toml(config, redacted=False).encode())
        replace_private(folder / MACHINES_FILE, text_of(machines).encode())
        file = folder / "job.sh"
        replace_private(file, text.encode())
    number = _ask("sbatch", "--parsable", str(file)).split(";")[0]
    print(f"job {number} of run {config.run} is submitted: {_summary(groups)}; its output: {job.log}")
    return 0


def job_of(config: RunConfig, plan: Plan, options: argparse.Namespace) -> Job:
    """Return the contents of a run's script. From its flags and the files in its folder, the job makes the same plan again."""
    folder = config.run_dir.absolute() / FOLDER
    flags = [f"--machines={folder / MACHINES_FILE}", *plan_flags(options)]
    flags += [f"--{name}" for name in _SWITCHES if getattr(options, name.replace("-", "_"), False)]
    flags += [f"--sbatch={each}" for each in getattr(options, "sbatch", ())]
    command = (sys.executable, "-m", "sluice.cli.main", "slurm", "job", "@", str(folder / SETTINGS_FILE), *flags)
    return Job(folder / "job.log", Path.cwd(), command, plan.drain_s + STOP_MARGIN_S)


def run_job(argv: list[str]) -> int:
    """Run inside of a job, on its first node: start each part as a step, restart those that die, and drain all at the end."""
    requeue = _Requeue()
    options, words = _parser().parse_known_args(argv)
    config = _settings(options, words)
    plan = _plan(config, options, _machines(options))
    groups = groups_of(plan, options.sbatch)
    hosts = hosts_of(groups, os.environ, _expanded, _address)
    config = config.model_copy(update={"peers": plan.peers([each.address for each in hosts])})
    starts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    resume = options.resume or starts > 0
    console = Console()
    view = view_of(config, console, live=False, verbose=options.verbose)
    view.say(f"job {os.environ['SLURM_JOB_ID']}, start {starts + 1}, on {', '.join(each.name for each in hosts)}")
    if starts:
        _wait_for_lock(config.run_dir)
    with claim(config, resume=resume) as directory:
        if resume and (done := describe_finished(config)):
            view.say(done)
            return 0
        folder = directory / FOLDER
        config = _with_tokens(_with_certificates(config, folder, [each.address for each in hosts]), folder)
        write_settings(config)
        settings = folder / "job.toml"
        replace_private(settings, dump_toml(config, redacted=False).encode())
        if resume:
            view.say(describe_resume(directory))
        specs = _children(plan, config, hosts, settings, own_threads=options.threads is not None)
        orphans_s = plan.drain_s + STOP_MARGIN_S
        supervisor = Supervisor(
            specs, view, max_restarts=plan.most_restarts, stop_margin_s=STOP_MARGIN_S, orphan_grace_s=orphans_s
        )
        view.say(f"run {config.run}: starting {len(specs)} parts, logs in {directory / 'logs'}")
        began = time.monotonic()
        outcome = asyncio.run(_supervise(supervisor, view, config, requeue))
    report_outcome(view, outcome, config, time.monotonic() - began)
    if outcome.ending is Ending.STOPPED and requeue.asked:
        return requeue.carry_out(view)
    return EXIT_SET_ASIDE if outcome.set_aside else EXIT_CODES[outcome.ending]


class _Requeue:
    """Whether Slurm has announced by SIGUSR1 that the job must end soon, so that it should stop now and be requeued."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGUSR1, lambda *_: self._note())

    def _note(self) -> None:
        self.asked = True

    def stop_when_asked(self) -> None:
        """From now on, stop the run in progress when SIGUSR1 comes, as Ctrl-C does."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._stop)

    def _stop(self) -> None:
        self.asked = True
        os.kill(os.getpid(), signal.SIGTERM)

    def carry_out(self, view: RunView) -> int:
        """Requeue the job, whose run has stopped. Slurm then ends this process.

        Returns:
            1 if Slurm did not end it.

        Raises:
            ConfigError: if Slurm refuses.
        """
        job = os.environ["SLURM_JOB_ID"]
        _ask("scontrol", "requeue", job)
        view.say(f"job {job} is requeued: it continues when Slurm starts it again")
        time.sleep(REQUEUE_S)
        view.say(f"job {job} was requeued, but Slurm has not ended it within {REQUEUE_S:g} s", style="red")
        return EXIT_FAILURE


async def _supervise(supervisor: Supervisor, view: RunView, config: RunConfig, requeue: _Requeue) -> Outcome:
    requeue.stop_when_asked()
    if requeue.asked:  # SIGUSR1 came while the settings were read
        return Outcome(Ending.STOPPED)
    return await supervise(supervisor, view, config)


def _settings(options: argparse.Namespace, words: Sequence[str], notes: list[str] | None = None) -> RunConfig:
    """Read the settings as they apply on the nodes, not on the machine of this process. Append each derived setting to `notes`.

    Raises:
        ConfigError: if a setting is wrong.
    """
    machines = _machines(options)
    assume_devices(max(machines.devices), machines.device_bytes)
    config = load_run(
        list(words),
        arrange=arranging(options, machines, notes=notes),
        check=lambda config: check_run(config, _plan(config, options, machines)),
    )
    return config.model_copy(update={"output_dir": config.output_dir.absolute()})


def _machines(options: argparse.Namespace) -> Machines:
    """Return the machines that the job requests; without flags, one machine that computes on its CPU."""
    return machines_of(options.machines or "0", options.cores)


def _plan(config: RunConfig, options: argparse.Namespace, machines: Machines) -> Plan:
    plan = plan_with(options, config, machines)
    return with_control_node(plan) if options.control_node else plan


def _summary(groups: Sequence[Group]) -> str:
    return ", ".join(
        f"{each.nodes} node{'s' * (each.nodes > 1)} for {each.name}"
        + (f" with {each.devices} device{'s' * (each.devices > 1)} each" if each.devices else "")
        for each in groups
    )


def _with_certificates(config: RunConfig, folder: Path, addresses: Sequence[str]) -> RunConfig:
    """Return the settings with mutual TLS, using certificates for the nodes. Settings with certificates or `--insecure` stay unchanged.

    Raises:
        ConfigError: if the files cannot be written.
    """
    security = config.security
    if security.tls_cert is not None or security.insecure:
        return config
    made = folder / CERTIFICATES
    issue_once(made, sorted(set(addresses)), datetime.now(UTC))
    given = security.model_dump(exclude_unset=True) | {"certs_dir": made}
    return config.model_copy(update={"security": SecurityConfig.model_validate(given)})


def _with_tokens(config: RunConfig, folder: Path) -> RunConfig:
    """Return the settings with a principal and a private token for each service. Settings that name principals stay unchanged.

    Raises:
        ConfigError: if the files cannot be written.
    """
    security = config.security
    update: dict[str, object] = {}
    if Access(security).open:
        file = folder / "principals.toml"
        file.unlink(missing_ok=True)  # left by the job's last start
        tokens = {name: folder / f"{name}.token" for name in ROLES}
        for name, role in ROLES.items():
            replace_private(tokens[name], add_token(file, name, role).encode())
        operator = tokens["operator"]
        update = {"principals_file": file, "token_file": operator, "service_token_files": tokens}
    if security.dispatcher_token_file is None:
        path = folder / "dispatcher.token"
        replace_private(path, new_token().encode())
        update["dispatcher_token_file"] = path
    return config.model_copy(update={"security": security.model_copy(update=update)})


def _children(
    plan: Plan, config: RunConfig, hosts: Sequence[Host], settings: Path, *, own_threads: bool
) -> list[ChildSpec]:
    """Return the parts as children of a supervisor. Each child is an `srun`, and ends when its step ends."""
    specs = []
    for place in plan.places:
        part, host, name = plan.part(place.part), hosts[place.node], label(place)
        first = next(each for each in plan.places_of(part.name) if each.instance == place.instance)
        at = hosts[first.node].address
        rendezvous = f"{at}:{first.port('rendezvous')}" if part.nodes > 1 else ""
        flags = ["@", str(settings), "--server.host", host.address, *place.port_flags()]
        if part.name == "relay":
            directory = config.run_dir / "relays" / name
            flags += relay_flags(config.peers.weightsync, f"{host.address}:{place.port()}", str(directory))
        _, *words = part.command(flags, instance=place.instance, rank=str(place.rank), rendezvous=rendezvous)
        command = step(host, place, (sys.executable, "-m", "sluice.cli.main", *words))
        target = f"{at}:{first.port()}"
        leaves = part.restart is Restart.ON_FAILURE and not part.ends_run
        specs.append(
            ChildSpec(
                name=name,
                argv=(sys.executable, "-m", slurm_step.__name__, host.job, host.name, name, *command),
                log_path=config.run_dir / "logs" / f"{name}.log",
                wait_ready=partial(wait_until_serving, target, config.security),
                environment=child_environment(part, os.environ, own_threads=own_threads),
                ends_run=part.ends_run,
                may_leave=LEFT[part.service] if leaves else "",
                address=f"{target} (node {hosts[first.node].name})",
                start_s=part.start_s,
                after=tuple(label(other) for each in load_first(plan, part) for other in plan.places_of(each.name)),
                drain_s=part.drain_s,
                log_limit=LogLimit(config.log_mb << 20, config.log_files),
            )
        )
    return specs


def _expanded(listed: str) -> list[str]:
    """Return the nodes of a list such as ``n[0-2]``."""
    return _ask("scontrol", "show", "hostnames", listed).split()


def _address(node: str) -> str:
    """Return the address at which Slurm reaches a node. It differs from the node's name if that cannot be resolved.

    Raises:
        ConfigError: if Slurm does not know the address.
    """
    shown = _ask("scontrol", "--oneliner", "show", "node", node)
    found = [word.removeprefix("NodeAddr=") for word in shown.split() if word.startswith("NodeAddr=")]
    if not found:
        raise ConfigError(f"`scontrol show node {node}` names no NodeAddr: {shown.strip()}")
    return found[0]


def _wait_for_lock(directory: Path) -> None:
    """Wait at most `LOCK_WAIT_S` until no process holds the run: processes of the job's last start may still be ending."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while is_held(directory) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _ask(*words: str) -> str:
    """Run a program of Slurm, and return what it prints.

    Raises:
        ConfigError: if it fails, with its output, or does not answer.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=False)  # noqa: S603 - our own words
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {words[0]} on this machine: Slurm's programs must be on the path") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"`{' '.join(words)}` did not answer within {ANSWER_S:g} s: is slurmctld reachable?"
        ) from error
    if done.returncode:
        raise ConfigError(f"`{' '.join(words)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


_SWITCHES = ("control-node", "resume", "verbose")
"""Options that the script hands to `sluice slurm job`."""


def _parser() -> argparse.ArgumentParser:
    parser = Options(
        prog="sluice slurm",
        usage="sluice slurm rl @ rl.toml [--key value ...] [options]",
        description=__doc__,
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_machines_options(parser, "one that computes on its CPU")
    add("--control-node", action="store_true", help="a further node, without devices, for all that does not compute")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="[ROLE:]OPTION",
        help="an option of sbatch, such as --sbatch=--account=x, or --sbatch=trainer:--partition=h100 for the nodes of rollout,"
        " trainer or control alone; may be repeated",
    )
    add("--resume", action="store_true", help="resume the run if it exists; otherwise start a new one")
    add("--dry-run", action="store_true", help="print the batch script, and submit nothing")
    add_plan_options(parser, ("gateway", "relay"))
    add("--verbose", action="store_true", help="show every log line, not just warnings and errors")
    return parser
