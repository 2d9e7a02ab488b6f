"""What a workflow sends: a task may set its own length, and messages arrive whole."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from orchestrator_svc.run.workflows import EpisodeData, GroupRunner, Sampling, sampling_params
from sluice.environments.base import Task
from sluice.environments.wire import chat_messages
from sluice.rpc import SluiceError
from sluice.v1 import orchestrator_pb2, tokens_pb2
from sluice.versions import BASE, Version


def params_of(task: Task, sampling: Sampling):
    return sampling_params(EpisodeData(task, "g", 4, sampling, Version(1, 0), "", 0), turn=0)


def test_a_task_sets_its_own_limit_of_tokens() -> None:
    sampling = Sampling(temperature=1.0, max_tokens=256)
    assert params_of(Task("short", max_tokens=9), sampling).max_tokens == 9
    assert params_of(Task("usual"), sampling).max_tokens == 256


def test_a_turn_goes_on_past_its_end_only_when_told_to() -> None:
    assert not params_of(Task("t"), Sampling(temperature=1.0, max_tokens=8)).ignore_eos
    assert params_of(Task("t"), Sampling(temperature=1.0, max_tokens=8, ignore_eos=True)).ignore_eos


def test_messages_keep_their_tool_calls_ids_names_and_reasoning() -> None:
    called = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1 + 1?", "name": "ada"},
        {"role": "assistant", "content": None, "tool_calls": [called], "reasoning": "a sum"},
        {"role": "tool", "content": "2", "tool_call_id": "call-1"},
        {"role": "assistant", "tool_calls": [{"id": "call-2", "name": "add", "arguments": {"a": 2}}]},
    ]
    user, assistant, tool, flat = chat_messages(messages)
    assert (user.name, user.content) == ("ada", "1 + 1?")
    assert list(assistant.tool_calls) == [tokens_pb2.ToolCall(id="call-1", name="add", arguments='{"a": 1}')]
    assert (assistant.content, assistant.reasoning) == ("", "a sum")
    assert tool.tool_call_id == "call-1"
    assert list(flat.tool_calls) == [tokens_pb2.ToolCall(id="call-2", name="add", arguments='{"a": 2}')]


def test_fields_that_say_nothing_are_absent_and_parts_of_text_are_text() -> None:
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "weight": 1, "train": False}
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    plain, joined = chat_messages([{"role": "user", "content": "hi", **empty}, {"role": "user", "content": parts}])
    assert plain == tokens_pb2.ChatMessage(role="user", content="hi")
    assert joined == tokens_pb2.ChatMessage(role="user", content="one two")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"content": "hidden"}, "role"),
        ({"role": "user", "content": "hidden", "contents": "x"}, "contents"),
        ({"role": "user", "content": 5}, "content"),
        ({"role": "assistant", "tool_calls": [{"id": "call-1", "arguments": "{}"}]}, "tool_calls"),
    ],
)
def test_a_message_that_cannot_be_sent_is_refused_with_the_field_at_fault(message, problem) -> None:
    with pytest.raises(ValueError, match=problem) as refused:
        chat_messages([message])
    assert "hidden" not in str(refused.value)


class Named:
    """Gives its trajectories the names that it was made with."""

    def __init__(self, *names: str) -> None:
        self.names = names

    async def arun_episode(self, engine, data):
        return [
            orchestrator_pb2.TrajectoryRecord(trajectory=tokens_pb2.Trajectory(trajectory_id=name))
            for name in self.names
        ]


@pytest.mark.parametrize("names", [("g1-0", "g1-0"), ("g1-0", "g2-0"), ("first",)])
async def test_a_workflow_that_names_trajectories_as_others_may_be_named_is_refused(names) -> None:
    async def run(*given: str):
        runner = GroupRunner(Named(*given), Mock(), 0, "")
        return await runner.run(Task("t"), "g1", 2, Sampling(temperature=1.0, max_tokens=8), BASE)

    assert len(await run("g1-0", "g1-1-fork")) == 2
    with pytest.raises(SluiceError, match="begins with group_id"):
        await run(*names)
