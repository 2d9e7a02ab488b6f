"""Plays the episodes of a run over HTTP: opens a session, lets an agent play it, and ends it with its reward.

It needs httpx2 alone, which the SDKs of OpenAI and Anthropic bring.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from httpx2 import AsyncClient, TransportError

WAIT_S = 30
"""Seconds that the gateway holds a request for a session until a task is on offer."""

PATIENCE_S = 30.0
"""Seconds without a gateway after which an agent ends."""

PAUSE_S = 0.5
"""Seconds between two attempts to reach a gateway."""

OVER = frozenset({"RUN_ENDED", "GATEWAY_GONE"})
"""Reasons to open no further session."""

REPORT_EVERY = 256
"""Episodes."""


@dataclass(frozen=True)
class Session:
    """An episode, and where the policy answers for it.

    Attributes:
        id: Its name.
        key: API key for the SDKs of OpenAI and Anthropic.
        openai_base_url: For OpenAI's.
        anthropic_base_url: For Anthropic's.
        question: What the user asks.
        prices: Price of each item.
    """

    id: str
    key: str
    openai_base_url: str
    anthropic_base_url: str
    question: str
    prices: dict[str, int]

    def reward(self, answer: str) -> float:
        """Return 1 for the lower price, else 0."""
        return float(answer.strip() == str(min(self.prices.values())))


@dataclass(frozen=True)
class Played:
    """What came of an episode: the last text of the agent, and how often it called the tool."""

    answer: str
    calls: int


class RefusedError(Exception):
    """The gateway refused a request, or there is none; `reason` says why."""

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason, self.retry_after_s = reason, retry_after_s


async def play_all(
    http: AsyncClient, gateway: str, play: Callable[[Session], Awaitable[Played]], at_a_time: int
) -> None:
    """Play episodes until the run has ended. What is under way then is left.

    Args:
        http: The client of the SDK, or one of its own.
        gateway: URL of the gateway.
        play: Plays one episode. If it raises, another attempt is offered.
        at_a_time: Episodes under way.

    Raises:
        RefusedError: the gateway gives no session, for another reason than those of `OVER`.
    """
    began, rewards, called = time.monotonic(), [], []

    async def work() -> str:
        while True:
            try:
                session, settling_key = await open_session(http, gateway)
            except RefusedError as error:
                if error.reason in OVER:
                    return str(error)
                raise
            try:
                played = await play(session)
                end: dict[str, Any] = {"reward": session.reward(played.answer)}
            except Exception as error:  # noqa: BLE001 - an agent may raise anything
                end = {"abandon": repr(error)[:128], "requeue": True}
            try:
                await post(http, f"{gateway}/rl/sessions/{session.id}/end", end, settling_key)
            except RefusedError as error:
                print(f"{session.id} was not ended with {end}: {error}", flush=True)
                continue
            if "reward" in end:
                rewards.append(end["reward"])
                called.append(played.calls > 0)
                if len(rewards) % REPORT_EVERY == 0:
                    print(f"{summary(rewards, called)}, {time.monotonic() - began:.0f} s", flush=True)

    workers = [asyncio.create_task(work()) for _ in range(at_a_time)]
    try:
        ended, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
        print(f"{ended.pop().result()}\n{summary(rewards, called)}")
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def summary(rewards: list[float], called: list[bool]) -> str:
    """Say how many episodes were submitted, and how the last of them went."""
    last = slice(-REPORT_EVERY, None)
    count = max(1, len(rewards[last]))
    return (
        f"{len(rewards)} episodes, reward {sum(rewards[last]) / count:.3f}, with a call {sum(called[last]) / count:.0%}"
    )


async def open_session(http: AsyncClient, gateway: str) -> tuple[Session, str]:
    """Wait for a task, and open a session for it. Return it, and the key that ends it, which the agent does not get.

    Raises:
        RefusedError: as `post`.
    """
    while True:
        try:
            opened = await post(http, f"{gateway}/rl/sessions", {"request_id": uuid.uuid4().hex, "wait_s": WAIT_S})
        except RefusedError as error:
            if error.retry_after_s is None:
                raise
            await asyncio.sleep(error.retry_after_s)  # nothing is on offer
            continue
        names = ("id", "key", "openai_base_url", "anthropic_base_url")
        prices = {item: int(price) for item, price in opened["task"]["data"]["prices"].items()}
        session = Session(*(opened[name] for name in names), opened["opening"]["messages"][0]["content"], prices)
        return session, opened["settling_key"]


async def post(http: AsyncClient, url: str, body: dict[str, Any], key: str = "") -> dict[str, Any]:
    """Return the answer to a request; repeat it while there is no gateway.

    Raises:
        RefusedError: the gateway refused it, or there was none for too long.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            response = await http.post(url, json=body, headers=headers, timeout=2 * WAIT_S)
            if response.status_code < 400:
                return dict(response.json())
            problem = f"status {response.status_code}"
            if response.status_code < 500:
                fault, wait = response.json()["error"], response.headers.get("retry-after")
                raise RefusedError(fault["code"], fault["message"], None if wait is None else float(wait))
        except TransportError as error:
            problem = repr(error)
        if time.monotonic() > until:
            raise RefusedError("GATEWAY_GONE", f"no gateway at {url} for {PATIENCE_S:.0f} s: {problem}")
        await asyncio.sleep(PAUSE_S)
