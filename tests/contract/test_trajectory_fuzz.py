"""Odd trajectories through gateway, orchestrator, journal and the trainer's real admission: the run ends as if they were not there.

Agents fork their sessions, give odd rewards and stop halfway; the replica answers with odd log-probabilities, with nothing and with too
much. The limits are small here, so that what is beyond them costs little.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from orchestrator_doubles import VOCABULARY, RolloutDouble
from test_external_episodes import EXTERNAL
from test_orchestrator_run import DEADLINE_S, Scene, make_scene

from gateway_svc.app import serve
from gateway_svc.config import GatewayConfig
from orchestrator_svc.commands.audit_compare import audit
from orchestrator_svc.journal.store import read_facts
from orchestrator_svc.run import setting_aside, sifting
from orchestrator_svc.sessions import lending
from sluice.config import CommonConfig, FailedForGoodError, PeersConfig
from sluice.v1 import rollout_pb2
from sluice.versions import Lineage
from trainer_svc.config import TrainerConfig
from trainer_svc.service import batches, servicer

pytestmark = pytest.mark.slow

MOST_TOKENS, MOST_TRAJECTORIES = 60, 40
STEPS = 12
AGENTS = 4
REWARDS = (0.0, 1.0, 0.5, 0.25, 0.75, 0.0, 1.0, 1e6, 1e-300, 5e-324, 2.0, 1.5, 0.0, -1.0)
REFUSED = (1e39, -3.5e38, 1e300, "NaN", "Infinity", 1e7)


@dataclass
class OddReplica(RolloutDouble):
    """Most samples are ordinary; one in eight is not."""

    draw: random.Random = field(default_factory=random.Random)

    async def _sample(self, request):
        answer = await super()._sample(request)
        known = request.continues.messages if request.HasField("continues") else 0
        new = [len(each.content) // 4 + 1 for each in request.conversation.messages[known:]]
        answer.prompt_token_ids[:] = [*request.continues.token_ids, *[1] * sum(new)]
        answer.continued = bool(known)
        for sample in answer.samples:
            sample.ClearField("message")
            self.spoil(sample)
        return answer

    def spoil(self, sample: rollout_pb2.GeneratedSample) -> None:
        count = len(sample.token_ids)
        match self.draw.randrange(48):
            case 0:
                sample.logprobs[count - 1] = float("nan")
            case 1:
                sample.logprobs[0] = 1.0
            case 2:
                sample.token_ids[0] = VOCABULARY + 7
            case 3:
                sample.logprobs[0] = float("-inf")


@dataclass
class Given:
    """What the agents did."""

    refused: int = 0
    submitted: int = 0


async def play(http: httpx.AsyncClient, draw: random.Random, given: Given, session: dict[str, Any]) -> None:
    """One session: a few requests, of which some fork, some odd rewards, and an end."""
    headers = {"authorization": f"Bearer {session['key']}"}
    ids: list[str] = []
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"question {draw.random()}"}]
    for _ in range(draw.choice([1, 1, 2, 3])):
        body = {
            "model": "m",
            "messages": messages,
            "n": 45 if draw.random() < 0.01 else draw.choice([1, 1, 1, 1, 2, 3]),
            "max_tokens": 8,
        }
        answer = await http.post("/v1/chat/completions", json=body, headers=headers)
        if answer.status_code != 200:
            break  # the replica's answer was odd, or it is too late
        ids += [f"{answer.json()['id'].rpartition('/')[0]}/{index}" for index in range(body["n"])]
        said = answer.json()["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": said},
            {"role": "user", "content": "again" * draw.choice([1, 1, 1, 1, 1, 1, 40])},
        ]
    headers = {"authorization": f"Bearer {session['settling_key']}"}
    for _ in range(draw.choice([0, 0, 1, 4])):
        target = draw.choice([{}, {"branch": draw.choice(ids)}, {"generation_id": draw.choice(ids)}]) if ids else {}
        await reward(http, f"/rl/sessions/{session['id']}/reward", headers, draw, given, **target)
    if draw.random() < 0.1:
        await http.post(f"/rl/sessions/{session['id']}/end", headers=headers, json={"abandon": "tired"})
        return
    path = f"/rl/sessions/{session['id']}/end"
    taken = await reward(http, path, headers, draw, given)
    taken = taken or (await http.post(path, headers=headers, json={"reward": draw.choice(REWARDS)})).is_success
    if not taken:  # nothing was sampled in it
        await http.post(path, headers=headers, json={"abandon": "empty"})
    given.submitted += taken


async def reward(
    http: httpx.AsyncClient, path: str, headers: dict[str, str], draw: random.Random, given: Given, **target: str
) -> bool:
    """Give a reward; return whether it was taken. What cannot be trained is refused."""
    value = draw.choice(REFUSED) if draw.random() < 0.2 else draw.choice(REWARDS)
    text = json.dumps({"reward": "VALUE", **target}).replace('"VALUE"', str(value))
    answer = await http.post(path, headers={**headers, "content-type": "application/json"}, content=text)
    assert answer.status_code < 500, answer.text
    if value in REFUSED:
        assert answer.status_code in {400, 409, 410, 429}, f"{answer.status_code}: {answer.text}"
        given.refused += answer.status_code == 400 and isinstance(value, float)  # no JSON has the others
    return answer.status_code == 200


@contextlib.asynccontextmanager
async def gateway(scene: Scene):
    """Serve a gateway; give its address."""
    common = CommonConfig(
        run="test", output_dir=scene.directory, model="double", peers=PeersConfig(orchestrator=scene.target)
    )
    config = GatewayConfig.model_validate({"server": {"port": 0, "http_port": 0}})
    listening: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(common, config, lambda *addresses: listening.set_result(addresses)))
    try:
        await asyncio.wait({serving, listening}, return_when=asyncio.FIRST_COMPLETED)
        yield listening.result()[1]
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def fuzz(directory: Path, seed: int, advantage: str) -> tuple[dict[str, Any], Given]:
    """Play odd sessions until the run has ended; return its report, and what the agents did.

    Raises:
        FailedForGoodError: if the run ends early.
    """
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(directory, stack, [OddReplica(draw=random.Random(seed))])
        scene.trainer.admission = TrainerConfig()
        scene.replicas[0].prompt = lambda request: (
            [1] * sum(len(each.content) // 8 + 1 for each in request.conversation.messages)
        )
        settings = {**EXTERNAL, "max_steps": STEPS, "max_set_aside": 1.0, "advantage": advantage}
        running = scene.start(**settings)
        url = await stack.enter_async_context(gateway(scene))
        given = Given()

        async def agent(number: int) -> None:
            draw = random.Random(seed * 100 + number)
            async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as http:
                while not running.done():
                    with contextlib.suppress(httpx.TransportError):
                        response = await http.post("/rl/sessions", json={"wait_s": 5})
                        if response.status_code == 200:
                            await play(http, draw, given, response.json())
                    await asyncio.sleep(0.01)

        agents = [asyncio.create_task(agent(number)) for number in range(AGENTS)]
        try:
            await asyncio.wait({running, *agents}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in agents:
                each.cancel()
            outcomes = await asyncio.gather(*agents, return_exceptions=True)
            running.cancel()
            await asyncio.wait({running})
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        await running
        assert not audit(read_facts(scene.run_dir), scene.trainer.record, Lineage()).differences
        facts = [fact for _, fact in read_facts(scene.run_dir)]
        counted = Counter[str]()
        for fact in facts:
            counted[fact.trajectories_set_aside.reason] += len(fact.trajectories_set_aside.trajectory_ids)
        report = scene.report()
        assert {reason: each["trajectories"] for reason, each in report["set_aside"].items()} == dict(+counted)
        return report, given


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the limits so small that the agents exceed them."""
    for module in (sifting, batches):
        monkeypatch.setattr(module, "MAX_TRAJECTORY_TOKENS", MOST_TOKENS)
    for module in (setting_aside, servicer):
        monkeypatch.setattr(module, "MAX_TRAJECTORIES", MOST_TRAJECTORIES)


@pytest.mark.parametrize(("seed", "advantage"), [pytest.param(1, "centered", marks=pytest.mark.soak), (2, "maxrl")])
async def test_odd_trajectories_end_no_run_and_most_are_trained(tmp_path, limits, seed, advantage) -> None:
    report, given = await fuzz(tmp_path, seed, advantage)
    assert (report["state"], report["steps"]) == ("succeeded", STEPS)
    assert report["trajectories_trained"] >= report["trajectories_accepted"] / 2
    assert sum(each["count"] for each in report["refused"]) == given.refused > 0
    dropped = report["trajectories_dropped"]
    assert {"TRAINER_REFUSES", "TOO_LONG"} <= dropped.keys()
    assert {"REWARDS_UNFIT"} <= dropped.keys() or advantage != "maxrl"


@pytest.mark.parametrize(
    ("module", "name"),
    [(sifting, "MAX_TRAJECTORY_TOKENS"), (setting_aside, "MAX_TRAJECTORIES")],
    ids=["length", "size"],
)
async def test_what_a_limit_that_is_missing_lets_through_comes_to_the_trainer(
    tmp_path, limits, monkeypatch, module, name
):
    monkeypatch.setattr(module, name, 1 << 30)
    report, _ = await fuzz(tmp_path, 1, "centered")
    refused = report["set_aside"]["TRAINER_REFUSES"]["trajectories"]
    expected = {"MAX_TRAJECTORY_TOKENS": "TOO_LONG", "MAX_TRAJECTORIES": "BATCH_TOO_LARGE"}[name]
    assert refused > 0
    assert expected not in report["trajectories_dropped"]


async def test_without_the_door_of_rewards_the_fuzz_says_so(tmp_path, limits, monkeypatch) -> None:
    monkeypatch.setattr(lending, "within", lambda reward, most: True)
    with pytest.raises(AssertionError, match="200"):
        await fuzz(tmp_path, 1, "centered")


async def test_without_setting_aside_the_fuzz_ends_the_run(tmp_path, limits, monkeypatch) -> None:
    monkeypatch.setattr(setting_aside.BatchRefusedError, "of", classmethod(lambda cls, error: None))
    with pytest.raises(FailedForGoodError, match="faults in the batch"):
        await fuzz(tmp_path, 1, "centered")
