"""Layered settings: flags, then ``@ file.toml`` from right to left, then ``SLUICE_A__B``, then defaults.

How a service takes part, without being imported: its entry point in the group ``sluice.services`` names
``<package>.app:SERVICE``, which may be heavy (torch, vLLM). Its settings live beside it in the light module
``<package>.config``, which exposes ``CONFIG = TrainerConfig``: a `Section` whose every field has a default and a
description. Only that module is imported here, so ``sluice trainer --help`` loads neither torch nor vLLM. Where a
service's package is not installed at all (an image of one role), its table is accepted unread.
"""

from __future__ import annotations

from sluice.config.allocate import allocated, allocation_of
from sluice.config.dump import dump_toml
from sluice.config.errors import ConfigError, reason_of
from sluice.config.load import RunConfig, load_command, load_run, run_config_class
from sluice.config.model import ModelSizes, check_model, sizes_on_disk
from sluice.config.model_files import check_files
from sluice.config.reference import markdown_reference
from sluice.config.sections import CommonConfig, PeersConfig, Section, SecurityConfig, ServerConfig
from sluice.config.services import (
    FailedForGoodError,
    Service,
    UnfinishedError,
    load_service,
    service_configs,
    service_names,
)

__all__ = [
    "CommonConfig",
    "ConfigError",
    "FailedForGoodError",
    "ModelSizes",
    "PeersConfig",
    "RunConfig",
    "Section",
    "SecurityConfig",
    "ServerConfig",
    "Service",
    "UnfinishedError",
    "allocated",
    "allocation_of",
    "check_files",
    "check_model",
    "dump_toml",
    "load_command",
    "load_run",
    "load_service",
    "markdown_reference",
    "reason_of",
    "run_config_class",
    "service_configs",
    "service_names",
    "sizes_on_disk",
]
