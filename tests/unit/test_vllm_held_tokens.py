"""Tokens that the process of vLLM's engine keeps back: none is lost, none comes late, and the order stays."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.engines.vllm.requests import HOLD_S

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    from rollout_svc.engines.vllm.scheduler import HeldTokens

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

INTERVAL = 5
REQUESTS = ("a", "b", "c")


def output(name: str, *tokens: int, width: int = 1, finish: FinishReason | None = None, **fields: object):
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    ids = np.repeat(np.array(tokens, dtype=np.int32).reshape(-1, 1), width, axis=1)
    logprobs = LogprobsLists(ids, -ids.astype(np.float32), ids[:, 0])
    return EngineCoreOutput(name, list(tokens), new_logprobs=logprobs, finish_reason=finish, **fields)


def step(held: HeldTokens, *outputs: EngineCoreOutput, now: float, interval: int = INTERVAL, everything: bool = False):
    """Return the outputs that are sent after a step, by request."""
    from vllm.v1.engine import EngineCoreOutputs

    messages = {0: EngineCoreOutputs(outputs=list(outputs))}
    held.sift(messages, lambda _: interval, everything=everything, now=now)
    return {each.request_id: each for each in messages[0].outputs}


def nothing_held() -> HeldTokens:
    from rollout_svc.engines.vllm.scheduler import HeldTokens

    return HeldTokens()


def begun() -> HeldTokens:
    """Return one that has just sent everything."""
    held = nothing_held()
    step(held, now=0.0)
    return held


def test_tokens_wait_for_others():
    held = begun()
    for token in range(INTERVAL - 1):
        assert not step(held, output("a", token), now=0.0)
        assert held
    sent = step(held, output("a", INTERVAL - 1), now=0.0)["a"]
    assert sent.new_token_ids == list(range(INTERVAL))
    assert sent.new_logprobs.logprobs.ravel().tolist() == [-float(token) for token in range(INTERVAL)]
    assert not held


def test_tokens_of_one_who_wants_them_at_once_do_not_wait():
    assert step(begun(), output("a", 1), now=0.0, interval=1)["a"].new_token_ids == [1]


def test_an_end_is_sent_at_once_with_what_waited():
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import PrefillStats

    for reason in FinishReason:
        held = begun()
        step(held, output("a", 1, prefill_stats=PrefillStats()), output("b", 9), now=0.0)
        sent = step(held, output("a", 2, finish=reason, stop_reason=7), now=0.0)
        assert sent.keys() == {"a"}
        assert sent["a"].new_token_ids == [1, 2]
        assert sent["a"].finish_reason == reason
        assert sent["a"].stop_reason == 7
        assert sent["a"].prefill_stats is not None
        assert held, "b waits"


def test_what_is_no_token_is_sent_at_once():
    held = begun()
    step(held, output("a", 1), now=0.0)
    assert step(held, output("a", 2, num_nans_in_logits=1), now=0.0)["a"].new_token_ids == [1, 2]


def test_no_token_waits_longer_than_the_time():
    held = begun()
    assert not step(held, output("a", 1), now=0.9 * HOLD_S)
    sent = step(held, output("b", 2), now=HOLD_S)
    assert {name: each.new_token_ids for name, each in sent.items()} == {"a": [1], "b": [2]}


def test_a_pause_sends_everything_although_no_request_has_a_token():
    held = begun()
    step(held, output("a", 1), now=0.0)
    messages: dict[int, EngineCoreOutputs] = {}
    held.sift(messages, lambda _: INTERVAL, everything=True, now=0.0)
    assert [each.new_token_ids for each in messages[0].outputs] == [[1]]
    assert not held


def test_rows_of_log_probabilities_may_differ_in_width():
    from vllm.v1.engine import FinishReason

    held = begun()
    step(held, output("a", 1, width=3), now=0.0)
    sent = step(held, output("a", 2, width=6, finish=FinishReason.LENGTH), now=0.0)["a"]
    assert sent.new_logprobs.logprobs.shape == sent.new_logprobs.logprob_token_ids.shape == (2, 3)
    assert sent.new_logprobs.sampled_token_ranks.tolist() == [1, 2]


@given(
    st.lists(
        st.tuples(st.sets(st.sampled_from(REQUESTS)), st.floats(0, HOLD_S), st.booleans(), st.sampled_from((1, 2, 5))),
        max_size=30,
    )
)
def test_each_request_gets_its_tokens_in_order(steps):
    held, now, count = nothing_held(), 0.0, 0
    sampled: dict[str, list[int]] = {name: [] for name in REQUESTS}
    given: dict[str, list[int]] = {name: [] for name in REQUESTS}
    for names, seconds, everything, interval in steps:
        now += seconds
        outputs = []
        for name in sorted(names):
            count += 1
            sampled[name].append(count)
            outputs.append(output(name, count))
        for name, sent in step(held, *outputs, now=now, interval=interval, everything=everything).items():
            assert sent.new_logprobs.sampled_token_ranks.tolist() == sent.new_token_ids
            given[name] += sent.new_token_ids
        for name in REQUESTS:
            assert sampled[name][: len(given[name])] == given[name]
            assert len(sampled[name]) - len(given[name]) < INTERVAL
        assert bool(held) == (sampled != given)
    step_sends_all = step(held, now=now, everything=True)
    for name, sent in step_sends_all.items():
        given[name] += sent.new_token_ids
    assert sampled == given
