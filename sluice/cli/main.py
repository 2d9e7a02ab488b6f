"""The `sluice` program: find a command by its name, import only its module, and run it.

A command is built in (a module of `sluice.cli`), added by an installed package (entry-point group ``sluice.commands``), or a
service (group ``sluice.services``); it is looked for in this order. Every function imports what it alone needs, so that the
program starts at once.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from sluice.config import (
    ConfigError,
    FailedForGoodError,
    MissingPeerError,
    Options,
    RunConfig,
    Section,
    SecurityConfig,
    ServerConfig,
    Service,
    TooMuchSetAsideError,
    UnfinishedError,
    command_names,
    find_command,
    load_run,
    load_service,
    seconds,
    service_names,
)
from sluice.config.secrets import redact_text, secret_values
from sluice.errors import BindError
from sluice.supervise.restart_policy import (
    EXIT_BIND,
    EXIT_CONFIG,
    EXIT_FOR_GOOD,
    EXIT_MISSING_PEER,
    EXIT_SET_ASIDE,
    EXIT_UNFINISHED,
)

if TYPE_CHECKING:
    import asyncio
    from types import FrameType

BUILT_IN = {
    "rl": "run reinforcement learning: all services as child processes, one live view",
    "training-api": "serve training loops of yours: weight service, replicas and tuner as child processes",
    "plan": "show what a run would start on which machines, as a table or for an engine",
    "ranks": "start the processes of a trainer on this machine, and join those of other machines",
    "ray": "run reinforcement learning on a Ray cluster: `sluice ray rl`",
    "slurm": "run reinforcement learning as a Slurm job",
    "quickstart": "train a small model by RL from nothing, in minutes",
    "examples": "copy the examples of this version into a directory",
    "proto": "copy the contracts (.proto files) of this version into a directory",
    "init-model": "make a small model from scratch with a tokenizer and a chat template",
    "fetch-model": "download a small pretrained model and check its digests",
    "env": "list environments, show what one needs, play one of its episodes",
    "report": "summarise a finished run",
    "monitor": "look at a run, live or ended: what is wrong with it, its metrics, its samples",
    "status": "show the state of a run while it lives",
    "pause": "stop drawing tasks of a run",
    "resume": "draw tasks of a paused run again",
    "stop": "end a run after the batches that are made",
    "set": "change settings of a run while it lives",
    "token": "make a token for a principal, or list the principals of a file",
    "certs": "make certificates for mutual TLS, renew them, show when they expire",
    "drain": "let a service finish its calls and end",
    "doctor": "look at this machine, a run's settings and its services, and say what is wrong and what to do",
    "health": "ask a server by grpc.health.v1 whether it serves, and what it waits for; exit code 0 or 1",
    "config": "convert settings of TRL, verl, PRIME-RL or AReaL; write the reference of all settings",
}
"""Help line of each built-in command; `_command` says where each is."""

STEER = ("status", "pause", "resume", "stop", "set")
"""Commands for a run that lives."""

PACKAGED = ("examples", "proto")
"""Commands that copy what the package holds."""

ADDED_HELP = {
    "sft": "fine-tune a model on demonstrations",
    "dpo": "train a model on preferences (DPO, IPO)",
    "reward-model": "train a reward model on preferences",
    "distill": "train a model on a teacher's log-probabilities",
    "merge-adapter": "add a LoRA adapter to the weights of its base",
    "objective": "evaluate an objective and its gradient on given numbers",
    "eval": "score a model directory or a running server on an environment",
    "export": "write the weights of a run as a Hugging Face directory with a model card",
    "rescore": "apply another reward to the stored trajectories of a run",
    "synthesize": "let a model attempt tasks, and write its good attempts as data for sft",
    "audit": "prove that every accepted trajectory was trained exactly once",
    "trace": "show what external agents did: who called what, when, which tokens, which version",
    "fork": "begin another run from a checkpoint of a run",
    "bench": "measure a part of the system side by side with its alternative",
    "weights": "list, show, verify and compare the weight versions of a run",
}
"""Help line of each command that the services add, so that `sluice --help` imports none of them."""

SERVICE_HELP = {
    "agents": "play the episodes of a run with a Python class of yours",
    "envserver": "serve an environment of yours to runs on other machines",
    "gateway": "serve agents that hold their own conversations, and record them",
    "orchestrator": "serve the run: tasks, rewards, advantages, batches",
    "rollout": "serve generation from the policy",
    "trainer": "serve the optimizer",
    "tuner": "train adapters of one model for loops of callers",
    "weightsync": "serve weight versions from the trainer to the replicas",
}

_USAGE = """usage: sluice COMMAND [ARGUMENTS]
       sluice --help | --version

Reinforcement-learning post-training for language models as gRPC services.
Settings: `@ file.toml`, `--key value`, SLUICE_A__B; see `sluice rl --help`.
"""

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

_GAVE_UP = {
    FailedForGoodError: EXIT_FOR_GOOD,
    TooMuchSetAsideError: EXIT_SET_ASIDE,
    MissingPeerError: EXIT_MISSING_PEER,
}
"""Exit code of a service that gave up, by the error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after the program's name; None takes the process's own.

    Returns:
        The exit code: 0 done, 1 failed, 2 wrong settings or usage, 4 a port is taken, 130 interrupted, also by SIGTERM; for a service
        those of `run_service` too.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except ConfigError as error:
        print(f"sluice: {error}", file=sys.stderr)
        return EXIT_BIND if isinstance(error, BindError) else EXIT_CONFIG
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
    command = _command(name)
    if command is not None:
        with _signals_interrupt():
            return command(arguments)
    if name in service_names():
        return run_service(name, arguments)
    near = difflib.get_close_matches(name, [*BUILT_IN, *command_names(), *service_names()], n=1)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"no command {name!r}{guess}; `sluice --help` lists them")


def _command(name: str) -> Callable[[list[str]], int] | None:
    """Return the function that runs a command; None if there is no such command."""
    if name in STEER:
        return partial(importlib.import_module("sluice.cli.steer").run, name)
    if name in PACKAGED:
        return partial(importlib.import_module("sluice.cli.packaged").run, name)
    if name == "health":
        return _health
    if name in BUILT_IN:
        found: Callable[[list[str]], int] = importlib.import_module(f"sluice.cli.{name.replace('-', '_')}").run
        return found
    command = find_command(name)
    return None if command is None else command.run


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP do what Ctrl-C does, so that a command removes its temporary directories and ends its children.

    Commands that handle signals themselves, such as `sluice rl`, replace this.
    """
    owner = os.getpid()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a library forked this process: the signal must end the fork by default
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if signal.SIGHUP in taken:
            signal.signal(
                signal.SIGHUP, signal.SIG_IGN
            )  # a terminal that closes sends it more than once: the clean-up goes on
        handler = signal.getsignal(signal.SIGINT)
        (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)

    taken: list[signal.Signals] = []
    # torchrun ends ranks that wait for each other in native code, where Python's signal handlers do not run.
    of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if not of_torchrun and threading.current_thread() is threading.main_thread():
        # A signal that is ignored, as under nohup, stays ignored.
        taken = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def _overview() -> str:
    sections = (
        ("commands", BUILT_IN),
        ("commands of installed packages", {name: ADDED_HELP.get(name, "see its --help") for name in command_names()}),
        ("services", {name: SERVICE_HELP.get(name, "see its --help") for name in service_names()}),
    )
    width = max(len(name) for _, entries in sections for name in entries)
    lines = [_USAGE]
    for title, entries in sections:
        if entries:
            lines += [f"{title}:", *(f"  {name:<{width}}  {line}" for name, line in entries.items()), ""]
    return "\n".join(lines).rstrip()


def run_service(name: str, argv: list[str]) -> int:
    """Run a service, or under torchrun one rank of it, until SIGTERM or SIGINT. Only the first rank serves metrics.

    Returns:
        0 after a clean stop, 1 after a failure, which is logged, 3 if the service gave up, 6 if a peer never served, 143 if a signal came
        before its work was done.

    Raises:
        BindError: if it cannot listen at its address.
        ConfigError: if the settings are wrong.
    """
    import asyncio
    import atexit
    import gc

    import structlog

    from sluice.rpc import SluiceError
    from sluice.telemetry import configure_logging

    run = load_run(argv, service=name, check=lambda run: run.section(name).check_start(run))
    # Only the trainer has ranks. Other services ignore RANK, which a pod may set for another reason.
    rank = int(os.environ.get("RANK", "0")) if name == "trainer" else 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from sluice.supervise.rank_launcher import end_with_launcher

        end_with_launcher()
    secrets = frozenset(secret_values(run))
    configure_logging(f"{name}.{rank}" if rank else name, run.log_level, secrets=secrets)
    log = structlog.get_logger(__name__)
    section = run.section(name)
    server = getattr(section, "server", None)
    new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None
    if importlib.util.find_spec("uvloop"):  # vLLM brings it
        new_loop = importlib.import_module("uvloop").new_event_loop
    try:
        if isinstance(server, ServerConfig) and not rank:
            _begin_to_listen(name, server, run.security)
        service = load_service(name)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            started = runner.run(_serve_until_signal(service, run, section))
        if not started:
            log.info("stopped while starting")
            # A thread may still be loading the model. If it is inside torch when the interpreter ends, it aborts the process.
            atexit._run_exitfuncs()  # noqa: SLF001 - what the interpreter runs at its exit; os._exit would leave it out
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    except ConfigError as error:
        raise type(error)(redact_text(str(error), secrets)) from error
    except UnfinishedError as stop:
        log.info("stopped before the end", reason=str(stop))
        return EXIT_UNFINISHED
    except (FailedForGoodError, MissingPeerError) as error:
        log.error("gave up", reason=str(error))  # noqa: TRY400 - the message has the reason
        return _GAVE_UP[type(error)]
    except SluiceError as error:
        log.error("service failed", code=error.code.name, reason=error.reason, message=error.message)  # noqa: TRY400 - a typed error says all
        return EXIT_FAILURE
    except Exception:
        log.exception("service failed")
        return EXIT_FAILURE
    finally:
        # The process ends next. Without this the garbage collector examines all objects of torch and vLLM, for seconds.
        gc.freeze()
    return 0


def _begin_to_listen(name: str, server: ServerConfig, security: SecurityConfig) -> None:
    """Serve metrics, and refuse ports that are taken, before the service loads anything slow."""
    from sluice.rpc.metrics_server import start_metrics_server
    from sluice.rpc.server import check_ports_free

    check_ports_free(name, server)
    if server.metrics_port is not None:
        start_metrics_server(server.metrics_port, server.metrics_host, security)


async def _serve_until_signal(service: Service, run: RunConfig, section: Section) -> bool:
    """Serve. A signal cancels the service until it has loaded; from then on it handles signals itself.

    Returns:
        False if a signal came while the service was starting.

    Raises:
        RuntimeError: if the service was cancelled without a signal.
    """
    import asyncio

    serving: asyncio.Future[None] = asyncio.ensure_future(service.serve(run, section))
    asked = asyncio.Event()

    def stop() -> None:
        asked.set()
        serving.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError as error:
        if not asked.is_set():
            raise RuntimeError("the service was cancelled from inside, without a signal; this is a defect") from error
        return False
    return True


def _health(argv: list[str]) -> int:
    """`sluice health HOST:PORT`: the container healthcheck."""
    import asyncio

    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckResponse

    from sluice.rpc import SluiceError
    from sluice.rpc.channel import health_status, waits_of
    from sluice.rpc.readiness import READY_SERVICE

    parser = Options(
        prog="sluice health",
        description="Ask a server by grpc.health.v1 whether it serves, and print what it waits for. Further words are settings"
        " (`@ file.toml`, `--security.tls-ca ca.pem`). The exit code is 0 if it serves; with --ready, if it also has what it needs of others.",
    )
    parser.add_argument("target", help="host:port, dns:///name:port or unix:/path")
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--service", default="", help="fully qualified service name; empty asks for the whole server")
    of.add_argument(
        "--ready",
        dest="service",
        action="store_const",
        const=READY_SERVICE,
        help="ask whether the server waits for something, such as for another service",
    )
    parser.add_argument("--timeout", type=seconds, default=5.0, help="seconds to wait for the answer (default: 5)")
    arguments, settings = parser.parse_known_args(argv)
    security, target = load_run(settings).security, arguments.target
    try:
        status = asyncio.run(health_status(target, security, arguments.service, arguments.timeout))
    except grpc.aio.AioRpcError as error:
        print(f"{target}: {SluiceError.from_rpc(error)}", file=sys.stderr)
        return EXIT_FAILURE
    print(f"{target}: {HealthCheckResponse.ServingStatus.Name(status)}")
    try:
        for text in asyncio.run(waits_of(target, security, arguments.timeout)):
            print(f"{target}: waits for {text}")
    except grpc.aio.AioRpcError as error:  # unlike the health check, this call needs a token
        print(f"{target}: what it waits for is not known: {SluiceError.from_rpc(error)}", file=sys.stderr)
    return 0 if status == HealthCheckResponse.SERVING else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
