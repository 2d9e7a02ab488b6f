"""A harness for verifiers that plays in this process: asks the model and calls the tools of the task, until there are no more calls.

The library's own harnesses start a program for each episode, and `uv` fetches its packages. That takes seconds, and fails without a
network.
"""

from __future__ import annotations

import json
import ssl
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf  # type: ignore[import-not-found]  # runs where verifiers is installed

__all__ = ["ChatHarness"]

_CONNECT_S = 10.0

_CONTEXT = ssl.create_default_context()
"""Shared by all episodes: loading certificates would take 30 ms per episode, and the endpoint is the library's own, on this machine."""


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]  # of a library that is not here
    """Chat Completions with the tools of the task's MCP servers."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917 - the library's
        self,
        ctx: Any,  # noqa: ANN401 - of the library, as those that follow
        trace: Any,  # noqa: ANN401
        runtime: Any,  # noqa: ANN401
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,  # noqa: ANN401
        tool_interception_url: str | None = None,
    ) -> Any:  # noqa: ANN401
        """Play one segment. The library's interception relays each request, and ends the episode at its limits."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [each.model_dump(mode="json", exclude_none=True) for each in prompt or ()]
        headers, timeout = {"authorization": f"Bearer {secret}"}, httpx.Timeout(None, connect=_CONNECT_S)
        async with AsyncExitStack() as stack:
            tools: list[dict[str, Any]] = []
            dispatch: Any = {}
            servers: Any = {}
            if mcp_urls:
                from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp  # type: ignore[import-not-found]  # noqa: PLC0415 - of 0.4

                config = {
                    "mcpServers": {
                        name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
                    }
                }
                tools, dispatch, servers = await connect_mcp(config, stack)
            http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=timeout, verify=_CONTEXT))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                response = await http.post(f"{endpoint.rstrip('/')}/chat/completions", json=body)
                if response.is_error:
                    return vf.ProgramResult(1, "", f"status {response.status_code}: {response.text[:500]}")
                said = response.json()["choices"][0]["message"]
                messages.append({name: value for name, value in said.items() if value is not None})
                if not said.get("tool_calls"):
                    return vf.ProgramResult(0, said.get("content") or "", "")
                for call in said["tool_calls"]:
                    function = call["function"]
                    try:
                        found = await call_mcp(servers, dispatch, function["name"], json.loads(function["arguments"]))
                    except (KeyError, ValueError) as error:
                        found = f"no such call: {error!r}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": found})
