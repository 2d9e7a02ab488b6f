"""The settings of a run that may change while it lives, and the checks of new values.

Settings objects always hold the current values: read them at use, do not copy. A change is a fact of the journal. A start takes the
changed values from there; they override the settings file.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import grpc
import structlog
import tomli_w
from pydantic import Field, ValidationError

from orchestrator_svc.config import OrchestratorConfig
from sluice.config import CommonConfig, Section
from sluice.rpc import SluiceError

Value: TypeAlias = Any
"""A value as TOML has it; the field of the setting decides whether it is valid."""

LEARNING_RATE = "trainer.lr"
"""The trainer gets it in the header of each batch that is made after the change."""

_NOT_DETERMINISTIC = ("max_staleness", "orchestrator.concurrency.most_samples", "orchestrator.pacing.reserve")
"""Settings that must not change in a deterministic run."""

_MOST_CHARACTERS = 1000

_MOST_LR = 1000
"""Optimizers that scale by the gradient's size take rates near 1, SGD on prompts takes some hundred. With a greater rate weights soon
overflow float32."""

_MOST_STALENESS = 1000
"""Most versions that a token may lag behind, and so most steps that a batch may be early: older tokens teach the present policy nothing."""

_MOST_AT_A_TIME = 1_000_000
"""Groups or samples at a time: more than the orchestrator can hold in memory."""

_MOST_RATIO = 1_000_000
"""Weight of an environment in the mix, as in a settings file."""

_MOST_STEPS = 1_000_000
"""Most steps of an interval, or evaluations of a patience: longer than a run. To switch it off, set 0."""

_MOST_S = 31_536_000
"""Most seconds of an interval: a year. To switch it off, set 0."""

log = structlog.get_logger(__name__)


class _Trainer(Section):
    """The known settings of the trainer if its package is not installed."""

    lr: float | None = Field(None, ge=0, description="Peak learning rate.")


class _Place(NamedTuple):
    """Where a setting is held, and the largest value that a live run may be given."""

    owner: Section
    name: str
    most: float


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that gets another value. Both values are TOML; the old one is empty if it is not known."""

    key: str
    old: str
    new: str


class LiveSettings:
    """Reads, checks and changes the settings that may change.

    Args:
        common: The run's settings; with a table `trainer` if that package is installed. Changes are written into it.
        config: The orchestrator's, likewise.

    Attributes:
        common: The run's settings as they are now.
        config: The orchestrator's.
    """

    def __init__(self, common: CommonConfig, config: OrchestratorConfig) -> None:
        self.common, self.config = common, config
        trainer = getattr(common, "trainer", None)
        peak = trainer if isinstance(trainer, Section) and hasattr(trainer, "lr") else _Trainer()
        self._places: dict[str, _Place] = {
            LEARNING_RATE: _Place(peak, "lr", _MOST_LR),
            "max_staleness": _Place(common, "max_staleness", _MOST_STALENESS),
            "orchestrator.max_concurrent": _Place(config, "max_concurrent", _MOST_AT_A_TIME),
            "orchestrator.max_running": _Place(config, "max_running", _MOST_AT_A_TIME),
            "orchestrator.pacing.reserve": _Place(config.pacing, "reserve", _MOST_STALENESS),
            "orchestrator.concurrency.most_samples": _Place(config.concurrency, "most_samples", _MOST_AT_A_TIME),
            "orchestrator.checkpoint.every_steps": _Place(config.checkpoint, "every_steps", _MOST_STEPS),
            "orchestrator.checkpoint.every_s": _Place(config.checkpoint, "every_s", _MOST_S),
        }
        if common.deterministic:
            for name in _NOT_DETERMINISTIC:
                del self._places[name]
        if config.evaluation.wanted:  # otherwise the run has not loaded the tasks to evaluate
            for name, most in (("every_steps", _MOST_STEPS), ("every_s", _MOST_S), ("patience", _MOST_STEPS)):
                self._places[f"orchestrator.evaluation.{name}"] = _Place(config.evaluation, name, most)
        if len(config.mix) > 1:
            for each in config.mix:
                self._places[ratio_key(each.name)] = _Place(each, "ratio", _MOST_RATIO)

    @property
    def keys(self) -> tuple[str, ...]:
        """The settings that may change in this run."""
        return tuple(self._places)

    def plan(self, values: Mapping[str, str]) -> list[Change]:
        """Return what would change, without settings that have this value already. Nothing changes yet.

        Args:
            values: New values by setting, as TOML.

        Raises:
            SluiceError: INVALID_ARGUMENT with every key that cannot be changed and every invalid value.
        """
        if not values:
            raise SluiceError.invalid_argument("values", f"give at least one of {', '.join(self._places)}")
        changes: list[Change] = []
        faults: dict[str, str] = {}
        for key, text in sorted(values.items()):
            try:
                new = self._checked(key, _parsed(text))
            except ValueError as error:
                faults[f"values[{key[:_MOST_CHARACTERS]}]"] = str(error)
                continue
            place = self._places[key]
            old = getattr(place.owner, place.name)
            if new != old:
                changes.append(Change(key, "" if old is None else as_toml(old), as_toml(new)))
        if faults:
            listed = "; ".join(
                f"{field.removeprefix('values[').removesuffix(']')} {fault}" for field, fault in faults.items()
            )
            raise SluiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "BAD_SETTING",
                f"nothing was changed: {listed}. Settings of a live run: {', '.join(self._places)}",
                violations=faults,
            )
        return changes

    def apply_change(self, change: Change) -> None:
        """Write a planned change into the settings."""
        place = self._places[change.key]
        setattr(place.owner, place.name, _parsed(change.new))

    def restore(self, changed: Mapping[str, str]) -> None:
        """Restore the values that were changed before this start. They override the settings file.

        Args:
            changed: Values by setting, as TOML. A setting that this process does not use is left out with a warning.
        """
        for key, text in changed.items():
            try:
                changes = self.plan({key: text})
            except SluiceError as error:
                log.warning("a setting that was changed while the run lived is left out", key=key, error=error.message)
                continue
            for change in changes:
                self.apply_change(change)
                log.info(
                    "a setting has the value that it was given while the run lived, not that of the settings file",
                    key=key,
                    value=change.new,
                    of_the_file=change.old,
                )

    def _checked(self, key: str, value: Value) -> Value:
        """Validate a value like one of the settings file, and against the bound of a live run.

        The current value is valid whatever the bound: the settings file may have set it.

        Raises:
            ValueError: if the key cannot be changed, or the value is invalid.
        """
        if key not in self._places:
            near = difflib.get_close_matches(key, self._places, n=1, cutoff=0.5)
            same = [each for each in self._places if each.rpartition(".")[2] == key]
            guess = (same or near)[:1]
            hint = f"; did you mean {guess[0]}?" if guess else ""
            raise ValueError(f"cannot be changed while the run lives{hint}")
        owner, name, most = self._places[key]
        if isinstance(value, bool):
            raise ValueError("must be a number")  # noqa: TRY004 - an error of the caller, like the others
        if isinstance(value, int | float) and most < value < math.inf and value != getattr(owner, name):
            raise ValueError(f"must be at most {most:.15g} while the run lives (got {as_toml(value)})")
        # The rest of a run's settings is not validated again.
        others = {} if isinstance(owner, CommonConfig) else owner.model_dump(exclude_unset=True)
        kind = CommonConfig if isinstance(owner, CommonConfig) else type(owner)
        try:
            return getattr(kind.model_validate(others | {name: value}), name)
        except ValidationError as error:
            reasons = (
                each["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
                for each in error.errors()
            )
            raise ValueError(f"{'; '.join(reasons)} (got {as_toml(value)})") from None


def ratio_key(environment: str) -> str:
    """Return the name of the setting for the weight of an environment in the mix."""
    return f"orchestrator.environments.{environment}.ratio"


def as_toml(value: Value) -> str:
    """Return a value as TOML writes it."""
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()


def _parsed(text: str) -> Value:
    """Parse one TOML value.

    Raises:
        ValueError: if the text is not a value of TOML.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"has more than {_MOST_CHARACTERS} characters")
    try:
        table = tomllib.loads(f"value = {text}\n")
    except (tomllib.TOMLDecodeError, RecursionError):
        table = {}
    if table.keys() != {"value"} or "\n" in text:
        raise ValueError(f"must be a value of TOML, such as 3 or 1e-5, not {text[:100]!r}")
    return table["value"]
