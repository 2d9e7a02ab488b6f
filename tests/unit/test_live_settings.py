"""Settings of a live run: which may change, what is a good value, and that a restart takes them back."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from orchestrator_svc.config import OrchestratorConfig
from orchestrator_svc.run.live_settings import LiveSettings, as_toml
from sluice.config import CommonConfig, load_run
from sluice.rpc import SluiceError

KEYS = (
    "trainer.lr",
    "max_staleness",
    "orchestrator.max_concurrent",
    "orchestrator.max_running",
    "orchestrator.pacing.reserve",
    "orchestrator.concurrency.most_samples",
    "orchestrator.checkpoint.every_steps",
    "orchestrator.evaluation.every_steps",
    "orchestrator.environments.easy.ratio",
    "orchestrator.environments.v1.hard.ratio",
)


def settings(**orchestrator: object) -> tuple[LiveSettings, SimpleNamespace]:
    """The settings of a run with two environments, and the objects that hold them."""
    common = CommonConfig(max_staleness=2)
    table = {"batch_size": 4, "max_concurrent": 16, "max_running": 8, "evaluation": {"every_steps": 5}}
    mix = [{"environment": "a:A", "name": "easy"}, {"environment": "b:B", "name": "v1.hard", "ratio": 3}]
    config = OrchestratorConfig(**{**table, "environments": mix, **orchestrator})
    return LiveSettings(common, config), SimpleNamespace(common=common, config=config)


def change(live: LiveSettings, **values: str) -> list[tuple[str, str, str]]:
    changes = live.plan({key.replace("__", "."): text for key, text in values.items()})
    for each in changes:
        live.apply_change(each)
    return [(each.key, each.old, each.new) for each in changes]


def faults(live: LiveSettings, values: dict[str, str]) -> dict[str, str]:
    with pytest.raises(SluiceError) as caught:
        live.plan(values)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    return {key.removeprefix("values[").removesuffix("]"): text for key, text in caught.value.violations.items()}


def test_a_change_is_seen_by_whoever_reads_the_settings():
    live, held = settings()
    values = {
        "max_staleness": "0",
        "orchestrator.max_concurrent": "32",
        "orchestrator.checkpoint.every_steps": "0",
        "orchestrator.environments.v1.hard.ratio": "1",
    }
    for each in live.plan(values):
        live.apply_change(each)
    assert held.common.max_staleness == 0
    assert (held.config.max_concurrent, held.config.checkpoint.every_steps) == (32, 0)
    assert [each.ratio for each in held.config.mix] == [1.0, 1.0]


def test_the_same_again_changes_nothing():
    live, _ = settings()
    assert change(live, max_staleness="3", orchestrator__max_running="8") == [("max_staleness", "2", "3")]
    assert change(live, max_staleness="3", orchestrator__max_running="8") == []


def test_all_or_none():
    live, held = settings()
    found = faults(live, {"max_staleness": "1", "orchestrator.max_running": "0", "orchestrator.batch_size": "2"})
    assert found.keys() == {"orchestrator.max_running", "orchestrator.batch_size"}
    assert held.common.max_staleness == 2


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("max_staleness", "-1", "greater than or equal to 0"),
        ("max_staleness", "1.5", "integer"),
        ("max_staleness", "true", "must be a number"),
        ("max_staleness", "", "must be a value of TOML"),
        ("max_staleness", "1\nmax_staleness = 2", "must be a value of TOML"),
        ("max_staleness", "1" * 2000, "more than 1000 characters"),
        ("orchestrator.max_concurrent", "3", "could never fill a batch"),
        ("orchestrator.environments.easy.ratio", "0", "greater than 0"),
        ("orchestrator.environments.easy.ratio", "inf", "finite"),
        ("trainer.lr", "nan", "finite"),
        ("trainer.lr", "'x'", "valid number"),
        ("max_runnin", "1", "did you mean orchestrator.max_running?"),
        ("every_steps", "1", "did you mean orchestrator.checkpoint.every_steps?"),
        ("seed", "1", "cannot be changed while the run lives"),
    ],
)
def test_a_bad_value_is_refused_with_the_reason_of_its_field(key, text, reason):
    live, _ = settings()
    assert reason in faults(live, {key: text})[key]


@pytest.mark.parametrize("text", ["1e30", "1" + "0" * 30, "1" + "0" * 400])
def test_every_setting_has_an_upper_bound_that_its_refusal_names(text):
    live, _ = settings()
    assert set(KEYS) <= set(live.keys)
    for key in live.keys:
        assert re.search(r"must be at most \d+ while .*\(got ", faults(live, {key: text})[key]), key


@pytest.mark.parametrize(
    ("key", "most", "more"),
    [
        ("trainer.lr", "1e3", "1001.0"),
        ("max_staleness", "1000", "1001"),
        ("orchestrator.max_running", "1000000", "1000001"),
        ("orchestrator.pacing.reserve", "1000", "1000.5"),
        ("orchestrator.checkpoint.every_s", "31536000", "31536001"),
    ],
)
def test_the_bound_is_let_in_and_what_is_beyond_it_is_refused_with_value_and_bound(key, most, more):
    live, _ = settings()
    assert live.plan({key: most})
    with pytest.raises(SluiceError) as caught:
        live.plan({key: more})
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert f"{key} must be at most {as_toml(int(float(most)))}" in caught.value.message
    assert f"(got {more})" in caught.value.message


def test_a_value_of_the_settings_file_beyond_the_bound_may_be_set_again():
    live, held = settings(max_running=2_000_000)
    assert live.plan({"orchestrator.max_running": "2000000"}) == []
    assert held.config.max_running == 2_000_000


def test_an_error_lists_what_can_be_changed():
    live, _ = settings()
    with pytest.raises(SluiceError) as caught:
        live.plan({"seed": "1"})
    assert all(key in caught.value.message for key in KEYS)
    assert "nothing was changed: seed cannot be changed while the run lives" in caught.value.message
    with pytest.raises(SluiceError, match="give at least one of"):
        live.plan({})


def test_what_the_run_does_not_have_cannot_be_changed():
    live, _ = settings(environments=[], environment="a:A", evaluation={"every_steps": 0})
    for key in ("orchestrator.evaluation.every_steps", "orchestrator.environments.A.ratio"):
        assert "cannot be changed" in faults(live, {key: "1"})[key]


def test_the_learning_rate_is_the_trainers_setting_where_its_package_is_installed():
    live, _ = settings()
    assert change(live, trainer__lr="0.1") == [("trainer.lr", "", "0.1")]
    run = load_run(["--trainer.lr", "1e-5"])
    live = LiveSettings(run, run.section("orchestrator"))
    assert change(live, trainer__lr="3e-6") == [("trainer.lr", "1e-05", "3e-06")]
    assert run.section("trainer").lr == 3e-6
    assert "greater than or equal to 0" in faults(live, {"trainer.lr": "-1.0"})["trainer.lr"]


def test_a_start_takes_changed_values_back_and_says_so():
    live, held = settings()
    with capture_logs() as told:
        live.restore(
            {"max_staleness": "5", "orchestrator.max_running": "8", "orchestrator.environments.gone.ratio": "2"}
        )
    assert held.common.max_staleness == 5
    assert [(line["log_level"], line["key"]) for line in told] == [
        ("info", "max_staleness"),
        ("warning", "orchestrator.environments.gone.ratio"),
    ]
    assert told[0]["of_the_file"] == "2"


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=20), st.text(max_size=20), max_size=4))
def test_any_text_is_refused_or_changes_all_of_it(values):
    live, _ = settings()
    with contextlib.suppress(SluiceError):
        for each in live.plan(values):
            live.apply_change(each)
        assert live.plan(values) == []


@given(st.sampled_from(KEYS), st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_is_refused_or_kept_to_the_bit(key, number):
    live, _ = settings()
    with contextlib.suppress(SluiceError):
        changes = live.plan({key: as_toml(number)})
        for each in changes:
            live.apply_change(each)
        again, held = settings()
        again.restore({each.key: each.new for each in changes})
        assert again.plan({key: as_toml(number)}) == []
        assert held.config.max_concurrent >= held.config.batch_size
