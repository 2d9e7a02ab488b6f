"""Commands between the ranks of a trainer, as they travel."""

from __future__ import annotations

import json

import pytest

from sluice.versions import Version
from trainer_svc.service.rank_group import (
    Command,
    Encode,
    Load,
    Position,
    Publish,
    Restore,
    Save,
    Stop,
    Train,
    decode_command,
    encode_command,
)

POSITION = Position(Version(2, 7), Version(1, 7), "b7")
COMMANDS: tuple[Command, ...] = (
    Load(),
    Restore(POSITION, epoch=3, checkpoints=["step_7", "step_5"]),
    Train("b8", halved=True, changed_lr=1e-5),
    Train("b9", halved=False, changed_lr=None),
    Encode(POSITION, deadline_s=600.0),
    Save(POSITION, journal_position=12),
    Publish(Version(2, 8), deadline_s=1.5),
    Stop(exit_code=3),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_arrives_as_it_was_given(command: Command) -> None:
    arrived = decode_command(encode_command(command))
    assert arrived == command
    assert type(arrived) is type(command)


@pytest.mark.parametrize(
    "given", [["Dance", {}], ["Stop", {}], ["Stop", {"exit_code": "soon"}], [["Stop"], {}], ["Stop"]]
)
def test_a_command_of_another_release_is_refused(given: object) -> None:
    with pytest.raises(RuntimeError, match="run the same release on every rank"):
        decode_command(json.dumps(given))
