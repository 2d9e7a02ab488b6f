"""Asks a model behind an OpenAI-compatible endpoint: another company's, a vLLM server's, or a replica's."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Self

import httpx

from sluice.backoff import Backoff
from sluice.errors import ConfigError

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable that has the API key, unless another one is named."""

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 20.0
_CONNECT_S = 10.0

_WORTH_REPEATING = {
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.CONFLICT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}
_MOST_SHOWN = 300


class EndpointError(Exception):
    """An endpoint refused a request, or did not answer in time. The message has no key."""


class ChatEndpoint:
    """A model behind an endpoint; use it as an async context.

    Args:
        base_url: Up to and with ``/v1``.
        model: Name of the model there.
        key_variable: Environment variable that has the API key; without it no key is sent.
        timeout_s: Seconds for an answer, all attempts together.
        at_a_time: Requests in progress at a time; further ones wait.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key_variable: str = KEY_VARIABLE,
        timeout_s: float = 300.0,
        at_a_time: int = 16,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"an endpoint's URL begins with http:// or https://, such as http://127.0.0.1:8000/v1, not {base_url!r}"
            )
        self._url, self._model, self._timeout_s = f"{base_url.rstrip('/')}/chat/completions", model, timeout_s
        key = os.environ.get(key_variable, "")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(headers=headers, timeout=limits, limits=httpx.Limits(max_connections=at_a_time))
        self._room = asyncio.Semaphore(at_a_time)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **options: object
    ) -> dict[str, Any]:
        """Return the first choice of the answer: `message`, `finish_reason`, and the `usage` of the whole request.

        Args:
            messages: The conversation.
            tools: Functions that the model may call.
            **options: Further fields of the request, such as `temperature`.

        Raises:
            EndpointError: if the endpoint refuses the request, or no attempt succeeded in time.
        """
        body = {"model": self._model, "messages": list(messages), **options}
        if tools:
            body["tools"] = list(tools)
        problem, backoff = "", Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        try:
            async with asyncio.timeout(self._timeout_s), self._room:
                while True:
                    try:
                        response = await self._http.post(self._url, json=body)
                        if response.status_code < HTTPStatus.BAD_REQUEST:
                            return self._choice(response)
                        problem = f"status {response.status_code}: {response.text[:_MOST_SHOWN]}"
                        if response.status_code not in _WORTH_REPEATING:
                            raise EndpointError(f"{self._url} refused a request with {problem}")
                        wait_s = _retry_after_s(response)
                    except httpx.TransportError as error:
                        problem, wait_s = f"{type(error).__name__}: {error}", 0.0
                    await asyncio.sleep(max(wait_s, backoff.fail()))
        except TimeoutError as error:
            raise EndpointError(
                f"{self._url} gave no answer within {self._timeout_s:g} s{f'; the last attempt: {problem}' if problem else ''}"
            ) from error

    def _choice(self, response: httpx.Response) -> dict[str, Any]:
        try:
            whole = response.json()
            choice: dict[str, Any] = {**whole["choices"][0], "usage": whole.get("usage")}
            choice["message"]["content"] = choice["message"].get("content") or ""
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise EndpointError(
                f"{self._url} answered, but not with a chat completion: {response.text[:_MOST_SHOWN]!r}"
            ) from error
        return choice


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("retry-after", "0"))
    except ValueError:  # a date
        return 0.0
