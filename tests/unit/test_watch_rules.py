"""Each rule finds its fault, and none finds anything in a run that is well."""

from __future__ import annotations

import random
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import WatchConfig
from sluice.v1 import orchestrator_pb2
from sluice.watch.live import LoadReader
from sluice.watch.rules import RULES, EnvironmentLoad, Family, Load, Machine, ReplicaLoad, Row
from sluice.watch.watch import Finding, Watch, verdict

STEP_S = 10.0
FAULT_AT = 31
"""The first step with a fault."""

STEPS = 54
"""Steps of a run. Fewer than 25 of them have the fault, because after 25 steps it counts as usual."""

Change = Callable[[dict[str, float], int], object]


def healthy(seed: int, steps: int = STEPS, change: Change = lambda _values, _step: None) -> list[Row]:
    """Return the steps of a run that learns; `change` is applied to those from `FAULT_AT` on."""
    chance = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        learned = step / steps
        values = {
            "reward/mean": 0.3 + 0.5 * learned + chance.gauss(0, 0.03),
            "reward/max": 1.0,
            "groups/count": 16.0,
            "groups/degenerate": float(chance.randint(2, 9)),
            "groups/all_solved": 2.0,
            "completion/mean_tokens": 200 + 20 * learned + chance.gauss(0, 10),
            "completion/mean_tokens_rewarded": 200 + chance.gauss(0, 10),
            "completion/mean_tokens_unrewarded": 205 + chance.gauss(0, 10),
            "completion/truncated_share": abs(chance.gauss(0.03, 0.02)),
            "completion/repetition": abs(chance.gauss(0.05, 0.02)),
            "trainer/entropy": 1.0 - 0.6 * learned + chance.gauss(0, 0.02),
            "trainer/mismatch_kl": abs(chance.gauss(0.001, 0.0004)),
            "trainer/max_abs_log_difference": abs(chance.gauss(0.05, 0.01)),
            "trainer/effective_sample_size": 0.99,
            "trainer/grad_norm": abs(chance.gauss(1.0, 0.3)),
            "trainer/skipped_steps": 0.0,
            "trainer/precision_differs": 0.0,
            "staleness/max": 1.0,
            "time/step_s": STEP_S + chance.gauss(0, 1),
            "load/trainer_idle": 0.3,
            "load/rollout_idle": 0.1,
            "weights/replica_lag": 1.0,
            "trainer/trajectories": 128.0,
            "environment/failed_calls": float(chance.random() < 0.1),
        }
        if step >= FAULT_AT:
            change(values, step)
        rows.append(Row(step, 1000.0 + STEP_S * step, values))
    return rows


def sets(**values: float) -> Change:
    """Return a change that sets metrics, their names with `__` for a slash."""
    return lambda row, _step: row.update({name.replace("__", "/"): value for name, value in values.items()})


STEP_FAULTS: dict[str, Change] = {
    "mismatch": sets(trainer__mismatch_kl=0.03),
    "precision": sets(staleness__max=0.0, trainer__max_abs_log_difference=0.8),
    "effective-samples": sets(trainer__effective_sample_size=0.4),
    "gradient": sets(trainer__grad_norm=30.0),
    "skipped-steps": sets(trainer__skipped_steps=1.0),
    "entropy": lambda row, _step: row.update({"trainer/entropy": 0.05, "reward/mean": 0.4}),
    "no-signal": sets(groups__degenerate=16.0),
    "length": lambda row, step: row.update(
        {
            "completion/mean_tokens": 200.0 + 24 * (step - FAULT_AT),
            "completion/mean_tokens_rewarded": 1.15 * (200.0 + 24 * (step - FAULT_AT)),
            "completion/mean_tokens_unrewarded": 0.85 * (200.0 + 24 * (step - FAULT_AT)),
        }
    ),
    "truncation": lambda row, _step: row.update({"completion/truncated_share": 0.6, "reward/mean": 0.4}),
    "repetition": sets(completion__repetition=0.8),
    "reward": sets(reward__mean=0.1),
    "slow-step": sets(time__step_s=80.0),
    "trainer-idle": sets(load__trainer_idle=0.95),
    "rollout-idle": sets(load__rollout_idle=0.95),
    "version-lag": sets(weights__replica_lag=7.0),
    "failed-calls": sets(environment__failed_calls=4.0),
}


def judge(rows: Sequence[Row], limits: WatchConfig | None = None) -> list[Finding]:
    """Return the findings in the steps of a run with at most two versions of staleness."""
    watch = Watch(limits, max_staleness=2)
    for row in rows:
        watch.step(row)
    return watch.findings


def names(found: Sequence[object]) -> list[str]:
    """Return the names of the rules of findings."""
    return [each.rule.name for each in found]


@pytest.mark.slow
@given(st.integers(0, 10_000))
def test_no_rule_finds_anything_in_a_run_that_learns(seed: int) -> None:
    assert names(judge(healthy(seed))) == []


def test_a_sampler_of_another_precision_is_found_at_the_first_step() -> None:
    found = judge(healthy(1, change=sets(trainer__precision_differs=1.0))[: FAULT_AT + 1])
    assert names(found) == ["precision"]


@pytest.mark.parametrize("rule", STEP_FAULTS)
def test_a_fault_in_the_steps_is_found_by_its_rule_and_no_other_family(rule: str) -> None:
    found = judge(healthy(1, change=STEP_FAULTS[rule]))
    family = next(each.family for each in RULES if each.name == rule)
    assert names(found)[0] == rule
    assert {each.rule.family for each in found} == {family}
    assert found[0].since_step >= FAULT_AT
    assert found[0].active
    assert verdict(found) >= 1


@pytest.mark.parametrize("rule", STEP_FAULTS)
def test_a_fault_that_passes_is_remembered_and_no_longer_wrong(rule: str) -> None:
    def passing(row: dict[str, float], step: int) -> None:
        if step < STEPS:
            STEP_FAULTS[rule](row, step)

    found = judge(healthy(1, STEPS + 30, passing))
    assert rule in names(found)
    ended = next(each for each in found if each.rule.name == rule)
    assert not ended.active
    assert ended.until_step is not None
    assert ended.until_step >= STEPS - 1
    assert verdict(found) == 0


def test_one_step_that_stands_out_is_no_finding() -> None:
    def once(row: dict[str, float], step: int) -> None:
        if step == FAULT_AT:
            row |= {
                "trainer/mismatch_kl": 0.02,
                "trainer/grad_norm": 20.0,
                "time/step_s": 200.0,
                "weights/replica_lag": 9.0,
            }

    assert names(judge(healthy(1, change=once))) == []


def test_a_policy_that_solves_its_tasks_may_lose_its_entropy_and_its_signal() -> None:
    def solved(row: dict[str, float], _step: int) -> None:
        row |= {"reward/mean": 0.99, "trainer/entropy": 0.01, "groups/degenerate": 16.0, "groups/all_solved": 15.5}

    assert names(judge(healthy(1, change=solved))) == []


def test_a_run_of_an_earlier_release_is_judged_by_what_it_recorded() -> None:
    new = (
        "groups/all_solved",
        "completion/mean_tokens_rewarded",
        "completion/mean_tokens_unrewarded",
        "completion/repetition",
    )
    rows = [
        Row(each.step, each.time, {name: value for name, value in each.values.items() if name not in new})
        for each in healthy(1)
    ]
    assert names(judge(rows)) == []
    ruined = [
        Row(each.step, each.time, {**each.values, "groups/degenerate": 16.0} if each.step > FAULT_AT else each.values)
        for each in rows
    ]
    assert "no-signal" in names(judge(ruined))


def test_steps_that_a_rollback_undid_do_not_count() -> None:
    rows = healthy(1, 40)
    ruined = [Row(each.step, each.time, {**each.values, "trainer/mismatch_kl": 1.0}) for each in rows[30:]]
    found = judge([*rows[:30], *ruined, *rows[30:]])
    assert names(found) == ["mismatch"]
    assert found[0].broken
    assert not found[0].active


def test_limits_are_settings() -> None:
    rows = healthy(1, change=STEP_FAULTS["mismatch"])
    assert names(judge(rows, WatchConfig(mismatch_kl=0.5))) == []


REPLICAS = (ReplicaLoad("a", "", 100.0), ReplicaLoad("b", "", 110.0), ReplicaLoad("c", "", 90.0))
ENVIRONMENT = EnvironmentLoad("sums", 400, 0, 0)


def watch_loads(load: Callable[[float], Load], seconds: int = 200) -> Watch:
    """Return a watch of a live run that was well for 100 seconds, and then had these loads, one every five seconds."""
    watch = Watch(max_staleness=2)
    for row in healthy(1, 10):
        watch.step(Row(row.step, row.step * 10.0, row.values))
    watch.load(Load(100.0, True, REPLICAS, (ENVIRONMENT,)))
    for now in range(105, 105 + seconds, 5):
        watch.step(Row(now, float(now), healthy(1, 10)[-1].values))
        watch.load(load(float(now)))
    return watch


def replace_last(replica: ReplicaLoad) -> tuple[ReplicaLoad, ...]:
    """Return the replicas with another one for the last."""
    return (*REPLICAS[:2], replica)


@pytest.mark.parametrize(
    ("rule", "load", "broken"),
    [
        (
            "replica",
            lambda now: Load(now, True, replace_last(ReplicaLoad("c", "does not answer", 0.0)), (ENVIRONMENT,)),
            False,
        ),
        (
            "replica",
            lambda now: Load(now, True, tuple(ReplicaLoad(each, "gone", 0.0) for each in "abc"), (ENVIRONMENT,)),
            True,
        ),
        ("slow-replica", lambda now: Load(now, True, replace_last(ReplicaLoad("c", "", 10.0)), (ENVIRONMENT,)), False),
        ("waits", lambda now: Load(now, True, REPLICAS, (ENVIRONMENT,), ("agents: none came",)), False),
        ("environment", lambda now: Load(now, True, REPLICAS, (EnvironmentLoad("sums", 500, 5, 0),)), False),
        ("environment", lambda now: Load(now, True, REPLICAS, (EnvironmentLoad("sums", 500, 90, 0),)), True),
        ("quarantine", lambda now: Load(now, True, REPLICAS, (EnvironmentLoad("sums", 500, 0, 2),)), False),
    ],
)
def test_a_fault_of_a_live_run_is_found_by_its_rule_alone(
    rule: str, load: Callable[[float], Load], broken: bool
) -> None:
    found = watch_loads(load).findings
    assert names(found) == [rule]
    assert found[0].active
    assert found[0].broken is broken


@pytest.mark.parametrize(
    "load",
    [
        lambda now: Load(now, True, REPLICAS, (ENVIRONMENT,)),
        lambda now: Load(
            now, True, replace_last(ReplicaLoad("c", "drained" if 120 < now < 150 else "", 90.0)), (ENVIRONMENT,)
        ),
        lambda now: Load(now, True, replace_last(ReplicaLoad("d", "loads the model", None)), (ENVIRONMENT,)),
        lambda now: Load(now, True, REPLICAS, (EnvironmentLoad("sums", 500, 2, 0),)),
    ],
    ids=["well", "away for less than a minute", "new", "two failures"],
)
def test_what_happens_in_a_live_run_that_is_well_is_no_finding(load: Callable[[float], Load]) -> None:
    assert watch_loads(load).findings == []


def rates(counts: Sequence[tuple[int, float]], every_s: float = 11.0) -> list[float | None]:
    """Return the rates of a replica. `counts` has its total tokens and total seconds of sampling at each look."""
    reader = LoadReader()
    found = []
    for number, (tokens, seconds) in enumerate(counts):
        run = orchestrator_pb2.Run(state=orchestrator_pb2.RUN_STATE_RUNNING)
        run.replicas.add(replica="a", address="a:1", eligible=True, generated_tokens=tokens, sample_seconds=seconds)
        found.append(reader.read(run, 1000.0 + every_s * number).replicas[0].tokens_per_s)
    return found


def test_the_rate_of_a_replica_is_that_of_one_sample_however_many_it_has() -> None:
    assert rates([(0, 0.0), (440, 44.0), (440 + 1760, 44.0 + 176.0)]) == [None, None, 10.0]
    assert rates([(100, 20.0), (540, 64.0), (2300, 240.0)]) == [None, 10.0, 10.0]


def test_a_replica_without_work_keeps_its_rate_and_one_that_started_again_too() -> None:
    assert rates([(100, 20.0), (540, 64.0), (540, 64.0), (545, 65.0)]) == [None, 10.0, 10.0, 10.0]
    assert rates([(100, 20.0), (540, 64.0), (30, 80.0), (350, 112.0)]) == [None, 10.0, 10.0, 10.0]
    assert rates([(100, 20.0), (540, 64.0), (900, 12.0), (1000, 22.0)]) == [None, 10.0, 10.0, 10.0], "the orchestrator"


def test_a_live_run_without_steps_is_found_and_a_paused_or_ended_one_is_not() -> None:
    watch = watch_loads(lambda now: Load(now, True, REPLICAS, (ENVIRONMENT,)))
    assert watch.load(Load(360.0, True, REPLICAS, (ENVIRONMENT,))) == []
    begun = watch.load(Load(500.0, True, REPLICAS, (ENVIRONMENT,)))
    assert names(begun) == ["no-step"]
    assert not begun[0].broken
    watch.load(Load(5000.0, True, REPLICAS, (ENVIRONMENT,)))
    assert verdict(watch.findings) == 2
    watch.load(Load(5001.0, False, REPLICAS, (ENVIRONMENT,)))
    assert verdict(watch.findings) == 0
    watch.load(Load(5002.0, True, REPLICAS, (ENVIRONMENT,)))
    assert verdict(watch.findings) == 0, "it has the time of a step again"
    watch.load(Load(9000.0, True, REPLICAS, (ENVIRONMENT,)))
    watch.end(9001.0)
    assert verdict(watch.findings) == 0


@pytest.mark.parametrize("rule", ["waits", "replica"])
def test_what_a_run_that_does_not_run_lacks_is_found_as_well(rule: str) -> None:
    """The run is starting, or paused because something is missing."""
    watch = Watch()
    replicas = REPLICAS if rule == "waits" else (ReplicaLoad("a", "does not answer", None),)
    waits = ("trainer: does not serve",) if rule == "waits" else ()
    began = [watch.load(Load(1000.0 + 5 * each, False, replicas, (), waits)) for each in range(200)]
    assert names([each for found in began for each in found]) == [rule]


def test_a_run_has_ten_minutes_for_its_first_step() -> None:
    watch = Watch()
    watch.load(Load(1000.0, True))
    assert watch.load(Load(1590.0, True)) == []
    assert names(watch.load(Load(1610.0, True))) == ["no-step"]


def test_a_disk_and_a_memory_that_are_nearly_full_are_found() -> None:
    watch = Watch()
    assert watch.machine(Machine(10**12, 0.5), 1000.0) == []
    assert names(watch.machine(Machine(3 * 10**9, 0.5), 1010.0)) == ["disk"]
    assert watch.machine(Machine(10**12, 0.02), 1020.0) == []
    assert names(watch.machine(Machine(10**12, 0.02), 1060.0)) == ["memory"]
    assert [(each.rule.name, each.active) for each in watch.findings] == [("memory", True), ("disk", False)]


def test_every_rule_has_a_test_here_and_says_why_and_what_to_do() -> None:
    tested = {
        *STEP_FAULTS,
        "replica",
        "slow-replica",
        "waits",
        "environment",
        "quarantine",
        "no-step",
        "disk",
        "memory",
    }
    assert {each.name for each in RULES} == tested
    assert all(each.why.endswith(".") and each.remedy.endswith(".") for each in RULES)
    assert {each.family for each in RULES} == set(Family)


def test_the_settings_and_pages_that_remedies_name_exist() -> None:
    root = Path(__file__).parents[2]
    known = (root / "docs" / "configuration.md").read_text()
    for rule in RULES:
        for page in re.findall(r"docs/[\w-]+\.md", rule.remedy):
            assert (root / page).is_file(), page
        for name in re.findall(r"\b(?:trainer|orchestrator|rollout|weightsync|watch)\.[\w.]*\w", rule.remedy):
            assert f"`{name}" in known, name


def test_each_rule_has_an_alert_in_the_file_for_prometheus() -> None:
    root = Path(__file__).parents[2]
    written = runpy.run_path(str(root / "deploy/observability/findings.py"))
    assert written["FILE"].read_text() == written["text"](), "run python deploy/observability/findings.py"
