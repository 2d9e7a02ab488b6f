"""Many samples of one long prompt: built, encoded and digested in threads, and made whole in bounded pieces where they are sent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from orchestrator_doubles import RolloutDouble
from test_external_episodes import EXTERNAL
from test_gateway_run import opened, running_gateway
from test_orchestrator_run import DEADLINE_S, make_scene, trained

from orchestrator_svc.journal import store
from orchestrator_svc.journal.records import SharedRecord
from orchestrator_svc.journal.store import read_facts
from orchestrator_svc.run import external as workflow
from orchestrator_svc.run import training
from sluice.v1 import rollout_pb2, tokens_pb2

pytestmark = pytest.mark.slow

PROMPT, SAMPLES = 20_000, 64
PART_BYTES = 512 << 10
"""Size of a message of a batch, as `sluice.client` makes them."""


class LongPrompt(RolloutDouble):
    """Renders each conversation as the same long prompt, and samples one token."""

    async def _messages(self, request: rollout_pb2.GenerateRequest) -> Any:
        opening = {"prompt_token_ids": [15_000] * PROMPT, "tokenizer_digest": self.digest}
        yield rollout_pb2.GenerateStreamResponse(opening=opening)
        for index in range(request.n or 1):
            sample = rollout_pb2.GeneratedSample(
                index=index,
                token_ids=[index],
                logprobs=[-0.5],
                text="a",
                finish_reason=tokens_pb2.FINISH_REASON_STOP,
                version_spans=[tokens_pb2.VersionSpan(start=0, policy_version=self.version.to_proto())],
            )
            stage = rollout_pb2.REQUEST_STAGE_RUNNING
            chunk = {"deltas": [{"tokens": sample}], "stage": stage, "engine_steps": index + 1}
            yield rollout_pb2.GenerateStreamResponse(chunk=chunk)


class Work:
    """Notes which thread does what, and how many token ids the event loop makes whole between two yields."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: defaultdict[str, set[str]] = defaultdict(set)
        self.whole: Counter[str] = Counter()
        self.most = self._turn = 0
        for module, name in ((workflow, "build"), (store, "encode"), (training, "_digests"), (training, "too_large")):
            monkeypatch.setattr(module, name, self._noted(name, getattr(module, name)))
        whole = SharedRecord.whole

        def counted(record: SharedRecord) -> Any:
            self.whole[threading.current_thread().name] += record.tokens
            with contextlib.suppress(RuntimeError):  # in a thread
                loop = asyncio.get_running_loop()
                if not self._turn:
                    loop.call_soon(self._yielded)
                self._turn += record.tokens
                self.most = max(self.most, self._turn)
            return whole(record)

        monkeypatch.setattr(SharedRecord, "whole", counted)

    def _yielded(self) -> None:
        self._turn = 0

    def _noted(self, name: str, function: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            self.threads[name].add(threading.current_thread().name)
            return function(*arguments)

        return noted


async def test_the_event_loop_makes_one_part_of_a_batch_between_two_yields_and_threads_do_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(monkeypatch)
    async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
        scene = await make_scene(tmp_path, stack, [LongPrompt()])
        running = scene.start(**{**EXTERNAL, "max_steps": 1, "batch_size": 1, "group_size": 2})
        url = await stack.enter_async_context(running_gateway(scene))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=DEADLINE_S))
        for episode, samples in enumerate((SAMPLES, 1)):
            session = await opened(http)
            headers = {"authorization": f"Bearer {session['key']}"}
            body = {"model": "m", "n": samples, "max_tokens": 1, "messages": [{"role": "user", "content": "Say."}]}
            reply = await http.post("/v1/chat/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text[:500]
            headers["authorization"] = f"Bearer {session['settling_key']}"
            ended = await http.post(f"/rl/sessions/{session['id']}/end", json={"reward": episode}, headers=headers)
            assert ended.status_code == 200, ended.text
        await running
    assert len(trained(scene)) == SAMPLES + 1
    sent = {len(each.token_ids) for batch in scene.trainer.history.values() for each in batch}
    assert sent == {PROMPT + 1}
    main = threading.main_thread().name
    assert set(work.threads) == {"build", "encode", "_digests", "too_large"}
    assert work.threads["encode"] == {"encoder"}
    assert all(main not in each for each in work.threads.values()), work.threads
    # Two bytes of each token id; the trajectory that does not fit into a part any more is made before it is sent.
    assert work.most <= PART_BYTES // 2 + 2 * PROMPT < work.whole[main]
    stored = sum(each.stat().st_size for each in (scene.run_dir / "journal").iterdir())
    assert stored < 8 * 2 * PROMPT, "two recordings, and each prompt once"
    ended_facts = [each.episodes_ended for _, each in read_facts(scene.run_dir) if each.HasField("episodes_ended")]
    assert [len(each.beginnings) for each in ended_facts] == [1]
