"""Layers to one checked object: pydantic-settings merges them, pydantic validates, and mistakes name their source."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from sluice.config.errors import ConfigError
from sluice.config.layers import Layer
from sluice.config.secrets import REDACTED, is_secret_name

__all__ = ["resolve_layers"]

_Config = TypeVar("_Config", bound=BaseModel)


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


def resolve_layers(model: type[_Config], layers: list[Layer]) -> _Config:
    """Merge the layers, the first over the others, and validate.

    Args:
        model: What results: an instance of a class derived from it.
        layers: Highest precedence first.

    Raises:
        ConfigError: if a value is malformed or out of range; one line per mistake, with the layer it came from.
    """

    def sources(_: type, /, settings_cls: type[BaseSettings], **__: object) -> tuple[PydanticBaseSettingsSource, ...]:
        return tuple(_LayerSource(settings_cls, layer) for layer in layers)

    bases = (model,) if issubclass(model, BaseSettings) else (BaseSettings, model)
    body = {"settings_customise_sources": classmethod(sources), "__module__": __name__}
    resolved: type[BaseModel] = type(model.__name__, bases, body)
    try:
        return cast("_Config", resolved())
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(problem, layers) for problem in error.errors())) from error


def _describe(problem: ErrorDetails, layers: list[Layer]) -> str:
    location = problem["loc"]
    name = ".".join(str(part) for part in location) or "settings"
    sources = [f" (from {layer.label})" for layer in layers if location and layer.contains(location)][:1]
    value = problem.get("input")
    given = f"; got {value!r}" if isinstance(value, str | int | float | bool) else ""
    if any(is_secret_name(str(part)) for part in location):
        given = f"; got {REDACTED}"
    return f"{name}: {problem['msg'].removeprefix('Value error, ')}{given}{''.join(sources)}"
