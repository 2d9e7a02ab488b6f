"""The judge of `sluice bench capture` finds each kind of difference: it would pass no run whose tokens are wrong."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.capture import judge, witness
from benchmarks.capture.agents import Completions, Tokens, Turn, parsed_calls
from benchmarks.capture.clients import Played
from benchmarks.capture.command import draw_kills
from benchmarks.capture.records import TRAINED, Generation, Run, Trajectory
from benchmarks.capture.warm_up import conversation
from sluice.v1 import tokens_pb2
from sluice.versions import Version

SESSION = "g1-0-0"


def ids(*values: int) -> Any:
    return np.array(values, np.uint32)


def generation(name: str, parent: str, prompt: Any, made: Any, *, not_trained: str = "") -> Generation:
    logprobs = np.full(len(made), -0.5, np.float32)
    return Generation(name, parent, "openai.chat", prompt, made, logprobs, tokens_pb2.ChatMessage(), not_trained)


FIRST, SECOND = (generation("a/0", "", ids(1, 2), ids(3, 4)), generation("b/0", "a/0", ids(1, 2, 3, 4, 5), ids(6)))


def trajectory(stretches: list[tuple[int, int]], name: str = "g1-0") -> Trajectory:
    tokens = sum(length for _, length in stretches)
    spans = [(0, Version(1, 0))]
    whole = ids(1, 2, 3, 4, 5, 6)
    return Trajectory(name, "g1-0", whole, stretches, np.zeros(tokens, np.float32), spans, 1.0, 1.0, TRAINED, 1)


def recorded(*generations: Generation, branches: list[Trajectory]) -> Run:
    run = Run(submitted={SESSION}, trajectories={each.name: each for each in branches})
    run.sessions[SESSION] += generations
    return run


def problems(check: Any, *arguments: Any) -> list[str]:
    findings = judge.Findings()
    check(*arguments, findings)
    return findings.failures


def test_each_token_is_trained_once() -> None:
    whole = [trajectory([(2, 2), (5, 1)])]
    assert not problems(judge.trained_once, recorded(FIRST, SECOND, branches=whole))


@pytest.mark.parametrize(
    ("branches", "said"),
    [
        ([trajectory([(2, 2)])], "b/0 .* trained in no branch"),
        ([trajectory([(2, 2), (5, 1)]), trajectory([(5, 1)], "g1-0.1")], "1 stretches"),
        ([trajectory([(1, 3), (5, 1)])], "a/0 .* trained in no branch"),
    ],
)
def test_a_token_that_is_trained_twice_or_never_or_elsewhere_is_found(branches: list[Trajectory], said: str) -> None:
    found = problems(judge.trained_once, recorded(FIRST, SECOND, branches=branches))
    assert any(re.search(said, each) for each in found), found


def test_a_trajectory_that_is_trained_in_two_batches_is_found() -> None:
    twice = trajectory([(2, 2), (5, 1)])
    twice.times = 2
    assert "g1-0 was trained 2 times" in problems(judge.trained_once, recorded(FIRST, SECOND, branches=[twice]))


def test_what_may_not_be_trained_has_its_reason() -> None:
    context = generation("b/0", "a/0", ids(1, 2, 3, 4, 5), ids(6), not_trained="TOP_P")
    findings = judge.Findings()
    judge.trained_once(recorded(FIRST, context, branches=[trajectory([(2, 2)])]), findings)
    assert not findings.failures
    assert findings.figures["tokens"] == {TRAINED: 2, "not trained: TOP_P": 1}


def test_of_two_samples_with_the_same_tokens_one_may_have_been_given_to_nobody() -> None:
    unread = generation("lost/0", "a/0", ids(1, 2, 3, 4, 5), ids(6), not_trained="UNDELIVERED")
    assert not problems(judge.trained_once, recorded(FIRST, unread, SECOND, branches=[trajectory([(2, 2), (5, 1)])]))


def test_a_history_that_forks_though_its_agent_only_appends_is_found() -> None:
    played = Played(SESSION, "chat", appends=True, path=["a/0", "b/0"])
    assert not problems(judge.histories_continue, recorded(FIRST, SECOND, branches=[]), [played])
    fork = generation("b/0", "", ids(1, 2, 9, 5), ids(6))
    assert problems(judge.histories_continue, recorded(FIRST, fork, branches=[]), [played])
    encoded_again = generation("b/0", "a/0", ids(1, 2, 9, 4, 5), ids(6))
    assert problems(judge.histories_continue, recorded(FIRST, encoded_again, branches=[]), [played])


def test_a_reply_that_was_given_otherwise_than_recorded_is_found() -> None:
    run = recorded(FIRST, branches=[])
    assert not problems(judge.given_are_captured, run, [Played(SESSION, "chat", True, [Turn("a/0", "", (), (3, 4))])])
    for turn in (Turn("a/0", "", (), (3, 5)), Turn("x/0", ""), Turn("a/0", "", (), (3, 4), (1, 3))):
        assert problems(judge.given_are_captured, run, [Played(SESSION, "chat", True, [turn])])


def test_the_witness_knows_tokens_by_all_that_came_before_them_and_their_logprobs(tmp_path: Path) -> None:
    writer = witness.Writer(tmp_path, "rollout-0")
    row: Any = SimpleNamespace(prompt_ids=[1, 2], token_ids=[])
    for token in (3, 4):
        writer.drawn([row], SimpleNamespace(token_ids=[token], logprobs=[-0.5]))  # type: ignore[arg-type]
        row.token_ids.append(token)
    later: Any = SimpleNamespace(prompt_ids=[1, 2, 3, 4, 5], token_ids=[])
    writer.drawn([later], SimpleNamespace(token_ids=[6], logprobs=[-0.5]))  # type: ignore[arg-type]
    seen = witness.Witness(witness.read(tmp_path))
    assert seen.tokens == 3
    assert not problems(judge.captured_are_sampled, recorded(FIRST, SECOND, branches=[]), seen)
    for wrong in (generation("a/0", "", ids(1, 2), ids(3, 5)), generation("a/0", "", ids(1, 9), ids(3, 4))):
        assert problems(judge.captured_are_sampled, recorded(wrong, branches=[]), seen)
    FIRST.logprobs[1] = -0.25
    try:
        assert problems(judge.captured_are_sampled, recorded(FIRST, branches=[]), seen)
    finally:
        FIRST.logprobs[1] = -0.5


def test_a_file_of_the_witness_that_a_kill_cut_off_is_read_up_to_there(tmp_path: Path) -> None:
    writer = witness.Writer(tmp_path, "rollout-0")
    row: Any = SimpleNamespace(prompt_ids=[1], token_ids=[])
    for token in (3, 4):
        writer.drawn([row], SimpleNamespace(token_ids=[token], logprobs=[-0.5]))  # type: ignore[arg-type]
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    assert [each.tokens for each in witness.read(tmp_path)] == [[3]]


def test_agents_without_a_parser_read_calls_as_the_model_writes_them() -> None:
    call = '<tool_call>{"name":"price","arguments":{"item":"cup"}}</tool_call>'
    assert [each.item for each in parsed_calls(f"{call}{call}")] == ["cup", "cup"]
    assert not parsed_calls('<tool_call>{"name":')
    assert not parsed_calls("<tool_call>[1]</tool_call>")


def test_agents_that_render_themselves_continue_what_was_sampled() -> None:
    class Characters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            del add_special_tokens
            return [*text.encode()]

        def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
            del skip_special_tokens
            return bytes(token_ids).decode()

    agent = Tokens("ask", Characters())
    agent.keep({"choices": [{"token_ids": [*b"cup 2<|end|>"]}]})
    agent.answer([("0", "3")])
    assert bytes(agent.ids) == b"askcup 2<|end|><|tool|>3<|end|><|assistant|>"
    text = Completions("ask")
    text.keep({"choices": [{"text": "cup 2"}]})
    text.say("and?")
    assert text.prompt == "askcup 2<|end|><|user|>and?<|end|><|assistant|>"


def test_the_model_is_warmed_up_on_what_agents_and_tool_say() -> None:
    dice = random.Random(0)
    for _ in range(50):
        told: dict[str, str] = {}
        for message in conversation(dice)["messages"]:
            if message["role"] == "user":
                told = {}
            elif message["role"] == "tool":
                told[message["tool_call_id"]] = message["content"]
            elif not message.get("tool_calls"):
                item, price = message["content"].split()
                assert len(told) == 2
                assert told[item] == price == min(told.values())


def test_every_victim_is_killed_between_turns_and_inside_of_turns() -> None:
    kills = draw_kills(2, random.Random(0))
    assert Counter((each.child, each.between) for each in kills) == {
        (child, between): 2
        for child in ("gateway-0", "gateway-1", "rollout-0", "rollout-1", "orchestrator")
        for between in (False, True)
    }
