"""Saved states of trainings: whole, checked, and the old one where a write is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_svc.tuner.adapters import AdapterState, StateError, load_state, save_state


class Killed(BaseException):
    """The process was killed."""


def state(value: float) -> AdapterState:
    moments = {"a.lora_A": {"step": torch.tensor(2.0), "exp_avg": torch.full((2, 3), value / 2)}}
    return AdapterState({"a.lora_A": torch.full((2, 3), value)}, moments, optimizer_steps=2)


def test_a_state_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    digest = save_state(state(1.0), tmp_path / "one.safetensors")
    loaded, found = load_state(tmp_path / "one.safetensors", state(9.0))
    assert (found, loaded.digest(), loaded.optimizer_steps) == (digest, digest, 2)
    assert torch.equal(loaded.moments["a.lora_A"]["exp_avg"], torch.full((2, 3), 0.5))


@pytest.mark.parametrize("step", ["replace", "open"])
def test_a_state_whose_write_is_killed_is_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "one.safetensors"
    digest = save_state(state(1.0), path)

    def dies(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, step, dies)
        with pytest.raises(Killed):
            save_state(state(2.0), path)
    assert load_state(path, state(9.0))[1] == digest
    assert save_state(state(3.0), path) == load_state(path, state(9.0))[1]


def test_a_state_of_another_rank_is_refused(tmp_path: Path) -> None:
    save_state(state(1.0), tmp_path / "one.safetensors")
    other = AdapterState({"a.lora_A": torch.zeros(4, 3)})
    with pytest.raises(StateError, match="another base model or rank"):
        load_state(tmp_path / "one.safetensors", other)
