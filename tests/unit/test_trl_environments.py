"""Reward functions and environment classes as TRL takes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.environments.base import Score
from sluice.environments.config import EnvironmentProcessesConfig
from sluice.environments.processes import EnvironmentProcesses
from sluice.errors import ConfigError

MINE = '''
import random

def exact(completions, answer, **kwargs):
    return [float(c[0]["content"] == a) for c, a in zip(completions, answer)]

def short(prompts, completions, log_metric):
    assert all(prompt[0]["role"] == "user" for prompt in prompts)
    log_metric("answers", len(completions))
    return [1 / len(c[0]["content"]) for c in completions]

def even_only(completions, answer, **kwargs):
    return [1.0 if int(a) % 2 == 0 else None for a in answer]

async def plain(prompts, completions, **kwargs):
    assert all(isinstance(each, str) for each in (*prompts, *completions))
    return [float(len(c)) for c in completions]

def with_tokens(completion_ids, **kwargs):
    return []

class Counter:
    """Counts up to a goal."""

    def reset(self, start=None, **row):
        self.value = random.randint(1, 9) if start is None else start
        return f" It stands at {self.value}."

    def add(self, amount: int) -> str:
        """Adds to the counter.

        Args:
            amount: How much to add.
        """
        if amount > 5:
            raise ValueError("at most 5")
        self.value += amount
        return f"now {self.value}"

    def get_reward(self) -> float:
        return self.value / 10

    def _hidden(self):
        pass
'''


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": [{"role": "user", "content": f"{n} + 1?"}], "answer": str(n + 1), "start": n} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "plain.jsonl").write_text('{"prompt": "Say something."}\n')
    return f"{tmp_path}/mine.py"


def trl(mine: str, rows: str = "rows", **arguments: object) -> EnvironmentProcesses:
    dataset = str(Path(mine).with_name(f"{rows}.jsonl")) if rows else ""
    given = {"dataset": dataset, **arguments}
    return EnvironmentProcesses("trl", given, EnvironmentProcessesConfig(count=1, score_s=300.0), (300.0, "start_s"))


async def test_rewards_are_weighted_added_and_each_logged(mine: str) -> None:
    async with trl(mine, reward_funcs=[f"{mine}:exact", f"{mine}:short"], reward_weights=[2.0, 1.0]) as questions:
        task = next(each for each in await questions.tasks("train", 0) if each.task_id == "train-2")
        assert [each["content"] for each in await questions.messages(task)] == ["2 + 1?"]
        assert await questions.judge(task, ["3", "four"]) == [
            Score(3.0, {"exact": 1.0, "short": 1.0, "answers": 2.0}),
            Score(0.25, {"exact": 0.0, "short": 0.25, "answers": 2.0}),
        ]


async def test_a_reward_that_does_not_apply_is_left_out_and_a_completion_without_any_has_none(mine: str) -> None:
    async with trl(mine, reward_funcs=f"{mine}:even_only") as questions:
        tasks = {each.task_id: each for each in await questions.tasks("train", 0)}
        assert await questions.score(tasks["train-1"], ["x"]) == [1.0]
        assert await questions.score(tasks["train-2"], ["x"]) == [None]


async def test_prompts_that_are_texts_stay_texts_for_the_reward_function(mine: str) -> None:
    async with trl(mine, rows="plain", reward_funcs=f"{mine}:plain", system="Be brief.") as questions:
        (task,) = await questions.tasks("train", 0)
        assert [each["role"] for each in await questions.messages(task)] == ["system", "user"]
        assert await questions.score(task, ["abc"]) == [3.0]


@pytest.mark.slow
async def test_the_public_methods_of_a_class_are_tools_and_it_gives_the_reward(mine: str) -> None:
    async with trl(mine, environment_factory=f"{mine}:Counter") as counters:
        task = next(each for each in await counters.tasks("train", 0) if each.task_id == "train-3")
        async with counters.episode(task, 0) as episode:
            assert episode.messages[-1]["content"] == "3 + 1? It stands at 3."
            (tool,) = episode.tools
            assert tool["function"]["name"] == "add"
            assert tool["function"]["parameters"]["properties"]["amount"]["type"] == "integer"

            def call(name: str, arguments: str) -> dict[str, object]:
                function = {"name": name, "arguments": arguments}
                return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}

            results = [
                (await episode.step(call(*each))).messages[0]["content"]
                for each in (("add", '{"amount": 4}'), ("add", '{"amount": 9}'), ("take", "{}"), ("add", "nonsense"))
            ]
            assert results[:3] == ["now 7", "error: at most 5", "error: there is no tool take"]
            assert results[3].startswith("error: ")
            end = await episode.step({"role": "assistant", "content": "done"})
            assert (end.done, end.reward, end.metrics) == (True, 0.7, {"Counter": 0.7})
        async with counters.episode(task, 0) as episode:
            cut_off = await episode.step(call("add", '{"amount": 4}'), last=True)
            assert (cut_off.done, cut_off.truncated, cut_off.reward) == (True, True, 0.7)


@pytest.mark.slow
async def test_without_a_data_set_all_attempts_at_a_task_begin_alike(mine: str) -> None:
    async with trl(mine, rows="", environment_factory=f"{mine}:Counter", tasks=6) as counters:
        openings = []
        for task in await counters.tasks("train", 0):
            for attempt in range(2):
                async with counters.episode(task, attempt) as episode:
                    openings.append(episode.messages[-1]["content"])
        assert openings[::2] == openings[1::2]
        assert len(set(openings)) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs reward_funcs"),
        ({"reward_funcs": "with_tokens"}, "asks for completion_ids"),
        ({"reward_funcs": ["exact", "short"], "reward_weights": [1.0]}, "2 reward_funcs and 1 reward_weights"),
        ({"reward_funcs": "nothing"}, "has no 'nothing'"),
    ],
)
async def test_what_cannot_be_trained_is_refused(mine: str, arguments: dict[str, object], message: str) -> None:
    functions = arguments.get("reward_funcs", [])
    located = [f"{mine}:{each}" for each in ([functions] if isinstance(functions, str) else functions)]
    with pytest.raises(ConfigError, match=message):
        async with trl(mine, **{**arguments, **({"reward_funcs": located} if located else {})}):
            pass


async def test_rows_without_a_prompt_are_refused(mine: str, tmp_path: Path) -> None:
    (tmp_path / "other.jsonl").write_text('{"question": "?"}\n')
    async with trl(mine, rows="other", reward_funcs=f"{mine}:exact") as questions:
        with pytest.raises(ConfigError, match=r"line 1 of .*other\.jsonl has no column prompt, but question"):
            await questions.tasks("train", 0)
