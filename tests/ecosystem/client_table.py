"""Plays each client through the real gateway, orchestrator and journal, and prints what works: `python tests/ecosystem/client_table.py`.

The replica and the trainer are doubles. Clients live in environments of their own (`make install-ecosystem`); those that are not installed
are left out. One process plays all cases of a row. Every episode is ended, and the branches and samples that it has are counted: a history
that comes back continues the exact tokens, and a request that is repeated is sampled once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "contract")]  # as pytest has them

import httpx  # noqa: E402 - our own modules are found from here on
import structlog  # noqa: E402
from test_external_episodes import EXTERNAL  # noqa: E402
from test_gateway_run import ToolReplica, opened, running_gateway  # noqa: E402
from test_orchestrator_run import make_scene  # noqa: E402

from orchestrator_svc.commands.audit_compare import audit  # noqa: E402
from orchestrator_svc.journal.store import read_facts  # noqa: E402
from sluice.v1 import tokens_pb2  # noqa: E402
from sluice.versions import Lineage  # noqa: E402

CASES = ("plain", "streamed", "tools", "retry", "long wait", "at once")
ALL = frozenset(CASES)

NODE = Path(os.environ.get("SLUICE_ECOSYSTEM_NODE", ROOT / ".node-ecosystem")) / "node_modules"
BUSY = b"HTTP/1.1 503 Busy\r\nretry-after: 0\r\nretry-after-ms: 20\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"
MARKED = re.compile(rb"(?i)\r\nx-stainless-retry-count: *[1-9]")
SAMPLED = re.compile(rb"POST \S*/v1/(chat/completions|completions|responses|messages)(\?\S*)? ")
WAIT_S = 4.0
CASE_S = 90.0

CODEX_PROVIDER = 'model_providers.gateway={name="gateway",base_url="URL/v1",env_key="KEY",wire_api="responses"}'
CLIS = {
    "claude": ["-p", "ASKED", "--model", "any"],
    "codex": ["exec", "--skip-git-repo-check", "-c", 'model_provider="gateway"', "-c", CODEX_PROVIDER, "-m", "any", "ASKED"],
}  # fmt: skip
"""Coding agents of the terminal, and how they are told to ask."""


@dataclass(frozen=True)
class Client:
    """A row: a client and the route that it calls.

    Attributes:
        package: The package that is installed, of Python or of Node.js.
        name: How the table calls it.
        route: The route.
        agent: The function of clients.py or clients.mjs, or the program.
        needs: Further packages of its environment.
        cases: What it can do at all.
        forks: Cases in which it sends its own call back rewritten, so that each turn is a branch.
    """

    package: str
    name: str
    route: str
    agent: str
    needs: tuple[str, ...] = ()
    cases: frozenset[str] = ALL
    forks: frozenset[str] = frozenset()


CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat", "completions", "responses", "messages"
PYTHON_CLIENTS = (
    Client("openai", "openai (Python)", CHAT, "openai_chat"),
    Client("openai", "openai (Python)", RESPONSES, "openai_responses"),
    Client("openai", "openai (Python)", COMPLETIONS, "openai_completions", cases=ALL - {"tools"}),
    Client("anthropic", "anthropic (Python)", MESSAGES, "anthropic_messages"),
    Client("openai-agents", "openai-agents", CHAT, "agents_chat"),
    Client("openai-agents", "openai-agents", RESPONSES, "agents_responses"),
    Client("langgraph", "langgraph, langchain-openai", CHAT, "langgraph_chat", ("langchain-openai",)),
    Client("langgraph", "langgraph, langchain-openai", RESPONSES, "langgraph_responses", ("langchain-openai",)),
    Client("langgraph", "langgraph, langchain-anthropic", MESSAGES, "langgraph_messages", ("langchain-anthropic",)),
    Client("litellm", "litellm", CHAT, "litellm_chat"),
    Client("litellm", "litellm", MESSAGES, "litellm_messages", forks=frozenset({"streamed", "long wait"})),
    Client("smolagents", "smolagents", CHAT, "smolagents_chat", ("openai",), forks=ALL - {"plain"}),
    Client("verifiers", "verifiers", CHAT, "verifiers_chat", cases=ALL - {"streamed"}),
)
NODE_CLIENTS = (
    Client("openai", "openai (Node.js)", CHAT, "openai_chat"),
    Client("openai", "openai (Node.js)", RESPONSES, "openai_responses"),
    Client("@anthropic-ai/sdk", "anthropic (Node.js)", MESSAGES, "anthropic_messages"),
)
CLI_CLIENTS = (
    Client("@anthropic-ai/claude-code", "Anthropic's coding CLI", MESSAGES, "claude", cases=ALL - {"plain"}),
    Client("@openai/codex", "OpenAI's coding CLI", RESPONSES, "codex", cases=ALL - {"plain"}),
)
CLIENTS = (*PYTHON_CLIENTS, *NODE_CLIENTS, *CLI_CLIENTS)


@dataclass
class Clerk(ToolReplica):
    """Says hello if it is asked to; else calls the first tool, and says what it said, by the tool `final_answer` if there is one."""

    async def _sample(self, request):
        if request.WhichOneof("prompt") == "text":
            asked = type(request).FromString(request.SerializeToString())
            asked.conversation.messages.add(role="user", content=request.text)
            request = asked
        return await super()._sample(request)

    def says(self, conversation: tokens_pb2.Conversation) -> tokens_pb2.ChatMessage:
        texts = [each.content + "".join(part.text for part in each.parts) for each in conversation.messages]
        if any("Say hello." in text for text in texts):
            return tokens_pb2.ChatMessage(content="Hello.")
        names = [tool.name for tool in conversation.tools]
        if conversation.messages[-1].role != "tool" and "a cat" not in texts[-1]:
            return tokens_pb2.ChatMessage(
                reasoning="I must look.", tool_calls=[{"name": names[0], "arguments": '{"place": "home"}'}]
            )
        said = "It said a cat."
        if "final_answer" in names:
            call = {"name": "final_answer", "arguments": json.dumps({"answer": said})}
            return tokens_pb2.ChatMessage(tool_calls=[call])
        return tokens_pb2.ChatMessage(content=said)


@dataclass
class Line:
    """A TCP proxy before the gateway, one request to a connection. The first requests for samples meet the faults that are set.

    Attributes:
        upstream: Port of the gateway.
        faults: "busy": answered with 503. "cut": passed on, and the connection is lost before the reply.
        after_cut: Called when a connection was cut.
        reached: Says when the request that is cut has reached the replica.
        marked: Whether a request for samples was marked as a retry.
    """

    upstream: int
    faults: list[str] = field(default_factory=list)
    after_cut: Callable[[], None] = lambda: None
    reached: Callable[[], bool] = lambda: True
    marked: bool = False

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            self.marked |= bool(SAMPLED.match(head) and MARKED.search(head))
            fault = self.faults.pop(0) if self.faults and SAMPLED.match(head) else ""
            if fault == "busy":
                writer.write(BUSY)
                await writer.drain()
                return
            head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head).replace(
                b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"
            )
            replies, requests = await asyncio.open_connection("127.0.0.1", self.upstream)
            with contextlib.closing(requests):
                requests.write(head + body)
                if fault == "cut":
                    while not self.reached():  # noqa: ASYNC110 - the replica has no event for it
                        await asyncio.sleep(0.01)
                    writer.transport.abort()
                    requests.transport.abort()
                    self.after_cut()
                    return
                while part := await replies.read(1 << 16):
                    writer.write(part)
                    await writer.drain()


@functools.cache
def interpreter(packages: tuple[str, ...]) -> tuple[str, str] | None:
    """Return an interpreter that has all of these packages, and the version of the first; None if there is none."""
    given = os.environ.get("SLUICE_ECOSYSTEM_PYTHON")
    found = sorted(ROOT.glob(".venv-ecosystem*/bin/python"))  # some of these libraries do not fit beside each other
    program = "import importlib.metadata as m, sys; print([m.version(name) for name in sys.argv[1:]][0])"
    for each in [given] if given else [*map(str, found), sys.executable]:
        done = subprocess.run([each, "-c", program, *packages], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return each, done.stdout.strip()
    return None


def installed(client: Client) -> str:
    """Return the version of a client; an empty text if it is not installed."""
    if client in PYTHON_CLIENTS:
        found = interpreter((client.package, *client.needs))
        return found[1] if found else ""
    description = NODE / client.package / "package.json"
    if shutil.which("node") is None or not description.exists():
        return ""
    return str(json.loads(description.read_text())["version"])


class Row:
    """The process that plays a client, and the cases it has played.

    Args:
        client: The client.
        directory: An empty directory of its own.
    """

    def __init__(self, client: Client, directory: Path) -> None:
        self.client, self._directory = client, directory
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, url: str, key: str, *, streamed: bool, tools: bool) -> str:
        """Let the client ask; return what it says last, or its error."""
        if self.client in CLI_CLIENTS:
            return await self._run(url, key, "Where is it?" if tools else "Say hello.")
        process = self._process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        question = {"url": url, "key": key, "streamed": streamed, "tools": tools}
        process.stdin.write(json.dumps(question).encode() + b"\n")
        answer = json.loads(await process.stdout.readline() or '{"error": "the client has died"}')
        return str(answer["final"] if "final" in answer else answer["error"])

    async def ask_twice(self, url: str, key: str) -> str:
        """Let the client, in two processes, ask the same at once; return both answers."""
        home = self._directory / "twin"
        home.mkdir()
        twin = Row(self.client, home)
        try:
            both = (each.ask(url, key, streamed=False, tools=False) for each in (self, twin))
            return "; ".join(await asyncio.gather(*both))
        finally:
            await twin.close()

    async def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        if self.client in PYTHON_CLIENTS:
            found = interpreter((self.client.package, *self.client.needs))
            assert found is not None
            command = [found[0], str(HERE / "clients.py")]
        else:
            program = self._directory / "clients.mjs"  # packages are found beside the program
            program.write_text((HERE / "clients.mjs").read_text())
            (self._directory / "node_modules").symlink_to(NODE)
            command = ["node", str(program)]
        pipe = asyncio.subprocess.PIPE
        with (self._directory / "errors.log").open("wb") as errors:
            return await asyncio.create_subprocess_exec(
                *command, self.client.agent, stdin=pipe, stdout=pipe, stderr=errors, limit=1 << 24
            )

    async def _run(self, url: str, key: str, asked: str) -> str:
        """Run a coding agent in an empty home, with nothing but the gateway and its key."""
        (self._directory / ".codex").mkdir(exist_ok=True)
        environment = {"PATH": os.environ["PATH"], "HOME": str(self._directory), "CI": "1", "KEY": key}
        environment |= {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
        words = [word.replace("URL", url).replace("ASKED", asked) for word in CLIS[self.client.agent]]
        self._process = await asyncio.create_subprocess_exec(
            *(str(NODE / ".bin" / self.client.agent), *words),
            env=environment,
            cwd=self._directory,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, errors = await self._process.communicate()
        return out.decode() if self._process.returncode == 0 else (out + errors).decode()[-2000:]


@dataclass(frozen=True)
class Stage:
    """What a case is played on: the replica, the line before the gateway with its URL, and the gateway itself."""

    replica: Clerk
    line: Line
    url: str
    http: httpx.AsyncClient


async def play(row: Row, case: str, stage: Stage) -> str:
    """Play one cell; return "yes", or what went wrong."""
    client, replica, line, http = row.client, stage.replica, stage.line, stage.http
    simple = {"plain", "at once"} | ({"streamed"} if client in CLI_CLIENTS else set())
    tools = case not in simple and "tools" in client.cases
    streamed = case == "streamed" or (case == "long wait" and "streamed" in client.cases)
    session = await opened(http)
    asked_before = len(replica.calls)
    if case in {"retry", "long wait", "at once"}:
        replica.gate.clear()
    if case == "retry":
        line.faults = ["busy", "cut"]
        line.reached = lambda: len(replica.calls) > asked_before
        line.after_cut, line.marked = replica.gate.set, False
    if case == "at once":
        asking = asyncio.create_task(row.ask_twice(stage.url, session["key"]))
    else:
        asking = asyncio.create_task(row.ask(stage.url, session["key"], streamed=streamed, tools=tools))
    final = await _answer(case, asking, replica, asked_before)
    path, headers = f"/rl/sessions/{session['id']}/end", {"authorization": f"Bearer {session['settling_key']}"}
    ended = await http.post(path, json={"reward": 1}, headers=headers)
    if ended.is_error:  # nothing was sampled: the group must not wait for it
        await http.post(path, json={"abandon": "the client failed"}, headers=headers)
    expected, turns = ("It said a cat.", 2) if tools else ("Hello.", 2 if case == "at once" else 1)
    if final.count(expected) < (2 if case == "at once" else 1):
        return f"no: {' '.join(final.split())[-300:]}"
    if line.faults:
        return f"no: the fault {line.faults[0]} was not met"
    samples = len(replica.calls) - asked_before
    branches = len(ended.raise_for_status().json()["trajectory_ids"])
    cell = _counted(samples, turns, branches, forks=case in client.forks or case == "at once")
    if case == "at once":
        return cell.removesuffix(", forks")  # each is a branch
    return f"{cell}, unmarked" if case == "retry" and cell.startswith("yes") and not line.marked else cell


async def _answer(case: str, asking: asyncio.Task[str], replica: Clerk, asked_before: int) -> str:
    """Let the replica go when the case has what it waits for; return what the client says."""
    held = {"at once": 2, "long wait": 1}.get(case, 0)
    try:
        async with asyncio.timeout(CASE_S):
            while len(replica.calls) < asked_before + held and not asking.done():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.02)
            if case == "long wait":
                await asyncio.sleep(WAIT_S)
            if held:
                replica.gate.set()
            return await asking
    except TimeoutError:
        return f"no answer within {CASE_S:g} s"
    finally:
        asking.cancel()
        replica.gate.set()


def _counted(samples: int, turns: int, branches: int, *, forks: bool) -> str:
    """Return what a cell with the right answer says of its samples and branches."""
    if samples != turns:
        return f"no: {turns} turns were sampled {samples} times"
    if branches != (2 if forks else 1):
        return f"no: {branches} branches"
    return "yes, forks" if forks else "yes"


def all_cases(client: Client) -> list[str]:
    """Return the cases that a client can do, in the order of the table."""
    return [case for case in CASES if case in client.cases]


async def table(cases: Mapping[Client, Sequence[str]], directory: Path) -> dict[Client, dict[str, str]]:
    """Play cases of the clients, in a run of its own; raise if the audit of the run finds a difference."""
    cells: dict[Client, dict[str, str]] = {}
    async with contextlib.AsyncExitStack() as stack:
        scene = await make_scene(directory, stack, [Clerk()])
        replica = scene.replicas[0]
        running = scene.start(**{**EXTERNAL, "max_steps": 10_000})
        gateway = await stack.enter_async_context(running_gateway(scene, capture={"deadlines": {"keepalive_s": 0.2}}))
        line = Line(int(gateway.rpartition(":")[2]))
        url = await stack.enter_async_context(line.serving())
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=gateway, timeout=30))
        stage = Stage(replica, line, url, http)
        for number, (client, played) in enumerate(cases.items()):
            home = directory / f"client{number}"
            home.mkdir()
            row = Row(client, home)
            try:
                cells[client] = {case: await play(row, case, stage) for case in played}
            finally:
                await row.close()
            print(client.name, client.route, cells[client], file=sys.stderr, flush=True)
        running.cancel()
        await asyncio.wait({running})
        differences = audit(read_facts(scene.run_dir), scene.trainer.record, Lineage()).differences
        assert not differences, differences
    return cells


def read_table(page: str) -> dict[tuple[str, str], dict[str, str]]:
    """Return the cells of a page's table, by name of the client and route."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    head = next(number for number, row in enumerate(rows) if row[:2] == ["client", "route"])
    return {
        (row[0], row[1]): dict(zip(CASES, row[2:], strict=True)) for row in rows[head + 2 : head + 2 + len(CLIENTS)]
    }


def markdown(cells: dict[Client, dict[str, str]]) -> str:
    """Return the table."""
    lines = [f"| client | route | {' | '.join(CASES)} |", "|---" * (len(CASES) + 2) + "|"]
    for client, row in cells.items():
        shown = [row.get(case, "").partition(":")[0] for case in CASES]
        lines.append(f"| {client.name} | {client.route} | {' | '.join(shown)} |")
    return "\n".join(lines).replace("|  |", "| |").replace("|  |", "| |") + "\n"


def main() -> int:
    """Print the table; exit with 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="clients whose function or program has this in its name")
    only = parser.parse_args().only
    clients = [each for each in CLIENTS if only in each.agent and installed(each)]
    for each in CLIENTS:
        if only in each.agent and each not in clients:
            print(f"{each.name}: not installed; `make install-ecosystem` installs it", file=sys.stderr)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as directory:
        cells = asyncio.run(table({each: all_cases(each) for each in clients}, Path(directory)))
    print(markdown(cells))
    print("\n".join(failures(cells)), file=sys.stderr)
    return bool(failures(cells))


def failures(cells: dict[Client, dict[str, str]]) -> list[str]:
    """Return the cells that are not "yes"."""
    return [
        f"{each.name} {each.route} {case}: {cell}"
        for each, row in cells.items()
        for case, cell in row.items()
        if not cell.startswith("yes")
    ]


if __name__ == "__main__":
    sys.exit(main())
