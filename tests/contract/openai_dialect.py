"""How tests of the OpenAI dialect ask, and what they ask for."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterable
from typing import Any

import httpx
import openai
from rollout_stack import Replica
from small_models import EOS, VOCABULARY, text_of

USER = [{"role": "user", "content": text_of([20, 30, 40])}]
CHAT_PROMPT = [10, 20, 30, 40, 9]
PROMPT = [5, 9, 17, 33, 64]
TOKENS = 12
IDS = {"return_token_ids": True}
PAST_THE_END = {"ignore_eos": True}
VOCABULARY_TEXTS = ["<pad>", "<end>", *(chr(256 + id_) for id_ in range(2, VOCABULARY))]

ROUNDING = 1e-5
"""Log-probabilities differ in their last bits with what else is in the batch."""


def http_client() -> httpx.AsyncClient:
    """A client for ports without TLS: it does not read the list of authorities, which takes longer than a request."""
    return httpx.AsyncClient(verify=False)


def client_of(replica: Replica, key: str = "none", timeout: float = 30.0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{replica.url}/v1", api_key=key, max_retries=0, timeout=timeout, http_client=http_client()
    )


def chat(client: openai.AsyncOpenAI, **more: Any) -> Any:
    given = {"model": "small", "messages": USER, "max_tokens": TOKENS, "temperature": 0.0}
    return client.chat.completions.create(**(given | more))


def complete(client: openai.AsyncOpenAI, **more: Any) -> Any:
    given = {"model": "small", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
    return client.completions.create(**(given | more))


def visible(ids: list[int]) -> str:
    return text_of([id_ for id_ in ids if id_ > EOS])


def accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            return True
    except OSError:
        return False


async def refusal(replica: Replica, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error that a request is answered with."""
    async with http_client() as http:
        response = await http.post(replica.url + path, json=body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    """One list of several."""
    return list(itertools.chain.from_iterable(parts))


def stop_in(ids: list[int]) -> tuple[str, list[int], list[int]]:
    """A stop string of two tokens in a continuation, the tokens up to its end, and those before it."""
    at = next(i for i in range(3, len(ids) - 1) if min(ids[i : i + 2]) > EOS and ids[i : i + 2] != ids[i - 1 : i + 1])
    stop = text_of(ids[at : at + 2])
    at = visible(ids).index(stop)
    return stop, ids[: at + 2], ids[:at]
