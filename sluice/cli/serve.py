"""`sluice weightsync|trainer|rollout|orchestrator`: one service, from settings to a clean stop."""

from __future__ import annotations

import asyncio
import gc
import importlib
import importlib.util
import os
import signal
from collections.abc import Callable

import structlog

from sluice.config import (
    ConfigError,
    FailedForGoodError,
    RunConfig,
    Section,
    ServerConfig,
    Service,
    UnfinishedError,
    load_run,
    load_service,
)
from sluice.config.secrets import redact_text, secret_values
from sluice.rpc import SluiceError
from sluice.supervise.ranks import end_with_launcher
from sluice.telemetry import configure_logging, start_metrics_server

__all__ = ["serve"]

EXIT_FOR_GOOD = 3
"""Exit code of a service that gave up: a restart would fail the same way."""

EXIT_UNFINISHED = 143
"""Exit code of a service that a signal ended before its work was done; shells report it for SIGTERM."""

log = structlog.get_logger(__name__)


def serve(name: str, argv: list[str]) -> int:
    """Run a service, or under torchrun one rank of it, until SIGTERM or SIGINT. Only the first rank serves metrics.

    Returns:
        0 after a clean stop, 1 after a failure, which is logged, 3 if the service gave up, 143 if a signal came before its work
        was done.

    Raises:
        ConfigError: if the settings are wrong.
    """
    run = load_run(argv, service=name, check=lambda run: run.section(name).check_start(run))
    # Only the trainer has ranks. Other services ignore RANK, which a pod may set for another reason.
    rank = int(os.environ.get("RANK", "0")) if name == "trainer" else 0
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_launcher()
    secrets = frozenset(secret_values(run))
    configure_logging(f"{name}.{rank}" if rank else name, run.log_level, secrets=secrets)
    section = run.section(name)
    server = getattr(section, "server", None)
    try:
        service = load_service(name)
        if isinstance(server, ServerConfig) and server.metrics_port is not None and not rank:
            start_metrics_server(server.metrics_port, server.metrics_host)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_until_stopped(service, run, section))
    except ConfigError as error:
        raise ConfigError(redact_text(str(error), secrets)) from error
    except UnfinishedError as stop:
        log.info("stopped before the end", reason=str(stop))
        return EXIT_UNFINISHED
    except FailedForGoodError as error:
        log.error("gave up", reason=str(error))  # noqa: TRY400 - the message has the reason
        return EXIT_FOR_GOOD
    except SluiceError as error:
        log.error("service failed", code=error.code.name, reason=error.reason, message=error.message)  # noqa: TRY400 - a typed error says all
        return 1
    except Exception:
        log.exception("service failed")
        return 1
    finally:
        # The process ends next. Without this the garbage collector examines all objects of torch and vLLM, for seconds.
        gc.freeze()
    return 0


async def _until_stopped(service: Service, run: RunConfig, section: Section) -> None:
    """Serve. Until the service handles signals itself, which it does once it has loaded, a signal cancels it.

    Raises:
        RuntimeError: if the service was cancelled without a signal.
    """
    serving = asyncio.ensure_future(service.serve(run, section))
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
        log.info("stopped while starting")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return the event loop of uvloop, which vLLM installs; None without it."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory
