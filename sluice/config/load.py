"""From command line, files, environment and defaults to one checked `RunConfig`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from sluice.config.dump import dump_toml
from sluice.config.errors import ConfigError
from sluice.config.flags import parse_command_line
from sluice.config.layers import Layer, environment_layer
from sluice.config.merge import Value
from sluice.config.reference import help_text
from sluice.config.sections import CommonConfig, Section
from sluice.config.services import service_configs

__all__ = ["RunConfig", "load_run", "run_config_class"]


class RunConfig(BaseSettings, CommonConfig):
    """A whole run: the common keys, and one table per installed service as an attribute of its name."""

    model_config = SettingsConfigDict(extra="forbid", validate_default=True)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Value:
            """One attribute per service, found at run time."""

    def section(self, service: str) -> Section:
        """The table of a service.

        Raises:
            ConfigError: if the service is not installed here.
        """
        value = getattr(self, service, None)
        if not isinstance(value, Section):
            raise ConfigError(f"the package of service {service!r} is not installed here")
        return value


class _LayerSource(PydanticBaseSettingsSource):
    """Hands one of our layers to pydantic-settings, which merges them in order."""

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self._layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The layer's value of a top-level field."""
        del field
        return self._layer.data.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        """The layer's table."""
        return self._layer.data


def run_config_class() -> type[RunConfig]:
    """`RunConfig` with one field per installed service.

    Raises:
        ConfigError: if a service's package breaks the convention of `sluice.config`.
    """
    fields: dict[str, Any] = {}
    for name, config_class in service_configs().items():
        description = f"The table of the service {name}."
        if config_class is None:
            fields[name] = (
                dict[str, Any],
                Field(default_factory=dict, description=f"{description} Not installed here."),
            )
        else:
            fields[name] = (config_class, Field(default_factory=config_class, description=description))
    return create_model("RunConfig", __base__=RunConfig, **fields)


def load_run(argv: Sequence[str], service: str | None = None) -> RunConfig:
    """Resolve the settings of a run: flags > files (later wins) > environment > defaults.

    Args:
        argv: The command line after the program's and the command's name.
        service: The one service this process runs; flags that are not common keys mean its table.

    Raises:
        ConfigError: if anything is unknown, malformed or out of range.
        SystemExit: with code 0 after ``--help`` or ``--dry-run`` printed what it prints.
    """
    model = run_config_class()
    line = parse_command_line(model, argv, service)
    if line.help:
        sys.stdout.write(help_text(model, service))
        raise SystemExit(0)
    layers = [Layer("command line", line.flags), *reversed(line.files), environment_layer(model, os.environ)]
    config = _validate(model, layers)
    if line.dry_run:
        sys.stdout.write(dump_toml(config))
        raise SystemExit(0)
    return config


def _validate(model: type[RunConfig], layers: list[Layer]) -> RunConfig:
    class _Resolved(model):  # type: ignore[misc, valid-type]
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *_: object, **__: object
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return tuple(_LayerSource(settings_cls, layer) for layer in layers)

    try:
        config: RunConfig = _Resolved()
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(problem, layers) for problem in error.errors())) from error
    return config


def _describe(problem: ErrorDetails, layers: list[Layer]) -> str:
    location = problem["loc"]
    name = ".".join(str(part) for part in location) or "settings"
    source = next((layer.label for layer in layers if location and layer.contains(location)), "defaults")
    value = problem.get("input")
    given = f"; got {value!r}" if isinstance(value, str | int | float | bool) else ""
    return f"{name}: {problem['msg']}{given} (from {source})"
