"""A task may set its own length; what it does not set comes from the run's settings."""

from __future__ import annotations

from orchestrator_svc.envs.base import Task
from orchestrator_svc.workflows.base import EpisodeData, Sampling, sampling_params
from sluice.versions import Version


def params_of(task: Task, sampling: Sampling):
    return sampling_params(EpisodeData(task, "g", 4, sampling, Version(1, 0), "", 0), turn=0)


def test_a_task_sets_its_own_limit_of_tokens() -> None:
    sampling = Sampling(temperature=1.0, max_tokens=256)
    assert params_of(Task("short", max_tokens=9), sampling).max_tokens == 9
    assert params_of(Task("usual"), sampling).max_tokens == 256


def test_a_turn_goes_on_past_its_end_only_when_told_to() -> None:
    assert not params_of(Task("t"), Sampling(temperature=1.0, max_tokens=8)).ignore_eos
    assert params_of(Task("t"), Sampling(temperature=1.0, max_tokens=8, ignore_eos=True)).ignore_eos
