"""Structured logs on stderr: for eyes on a terminal, JSON lines elsewhere; the standard library's loggers included."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from sluice.config.secrets import hide

__all__ = ["LEVELS", "LEVEL_VARIABLE", "configure_logging"]

LEVEL_VARIABLE = "SLUICE_LOG_LEVEL"
"""Where the level comes from when no config was read."""

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

_CHATTY = ("asyncio", "filelock", "fsspec", "grpc", "httpcore", "httpx", "matplotlib", "urllib3", "uvicorn.access")
"""Libraries whose info lines tell about themselves rather than about the run."""


def configure_logging(
    service: str, level: str | None = None, stream: TextIO | None = None, *, secrets: Collection[str] = ()
) -> None:
    """Route structlog and the standard library's logging to one stream, in one format.

    Args:
        service: Name that every JSON line carries.
        level: Least severe level written; None takes ``SLUICE_LOG_LEVEL``, else ``info``.
        stream: Where to write; None is stderr.
        secrets: Texts that are replaced in every line, tracebacks included.

    Raises:
        ValueError: if the level has no such name.
    """
    name = (level or os.environ.get(LEVEL_VARIABLE) or "info").lower()
    if name not in LEVELS:
        raise ValueError(f"log level {name!r} is unknown; choose one of {', '.join(LEVELS)}")
    threshold = LEVELS[name]
    output = stream or sys.stderr
    shared = _shared_processors(service, terminal=output.isatty())
    renderer = _renderer(terminal=output.isatty(), secrets=secrets)
    structlog.configure(
        processors=[*shared, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=threshold, force=True)
    logging.captureWarnings(True)
    for chatty in _CHATTY:
        logging.getLogger(chatty).setLevel(max(threshold, logging.WARNING) if threshold > logging.DEBUG else threshold)


def _shared_processors(service: str, *, terminal: bool) -> list[Processor]:
    def name_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    clock = structlog.processors.TimeStamper(fmt="%H:%M:%S" if terminal else "iso", utc=not terminal)
    return [structlog.contextvars.merge_contextvars, structlog.processors.add_log_level, clock, name_service]


def _renderer(*, terminal: bool, secrets: Collection[str]) -> list[Processor]:
    """Tracebacks are plain: local variables may hold prompts and tokens."""

    def without_secrets(_logger: WrappedLogger, _method: str, line: Any) -> str:  # noqa: ANN401 - the rendered text
        return hide(line, secrets)

    last: list[Processor] = [without_secrets] if secrets else []
    if terminal:
        return [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback), *last]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str), *last]
