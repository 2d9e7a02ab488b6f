"""Settings from several sources: flags, then ``@ file.toml`` from right to left, then ``SLUICE_A__B``, then defaults.

How a service takes part, without being imported: its entry point in the group ``sluice.services`` names
``<package>.app:SERVICE``, which may be heavy (torch, vLLM). Its settings live beside it in the light module
``<package>.config``, which exposes ``CONFIG = TrainerConfig``: a `Section` whose every field has a default and a
description. Only that module is imported here, so ``sluice trainer --help`` loads neither torch nor vLLM. Where a
service's package is not installed at all (an image of one role), its table is accepted unread.
"""

from __future__ import annotations

from sluice.config.decide import allocated, allocation_of, check_tables_fit
from sluice.config.load import Options, RunConfig, load_command, load_run, run_config_class, seconds, whole_number
from sluice.config.schema import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_KWARGS,
    RUN_PATTERN,
    CommonConfig,
    PeersConfig,
    Section,
    SecurityConfig,
    ServerConfig,
    TemplateArguments,
    WatchConfig,
)
from sluice.config.services import (
    Command,
    FailedForGoodError,
    MissingPeerError,
    Service,
    TooMuchSetAsideError,
    UnfinishedError,
    command_names,
    find_command,
    load_service,
    service_configs,
    service_names,
)
from sluice.config.text import dump_toml, markdown_reference
from sluice.errors import ConfigError

__all__ = [
    "CHAT_TEMPLATE",
    "CHAT_TEMPLATE_KWARGS",
    "RUN_PATTERN",
    "Command",
    "CommonConfig",
    "ConfigError",
    "FailedForGoodError",
    "MissingPeerError",
    "Options",
    "PeersConfig",
    "RunConfig",
    "Section",
    "SecurityConfig",
    "ServerConfig",
    "Service",
    "TemplateArguments",
    "TooMuchSetAsideError",
    "UnfinishedError",
    "WatchConfig",
    "allocated",
    "allocation_of",
    "check_tables_fit",
    "command_names",
    "dump_toml",
    "find_command",
    "load_command",
    "load_run",
    "load_service",
    "markdown_reference",
    "run_config_class",
    "seconds",
    "service_configs",
    "service_names",
    "whole_number",
]
