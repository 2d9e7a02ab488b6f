"""From the OpenAI dialect to the contract: one GenerateRequest per prompt, checked where gRPC's are checked."""

from __future__ import annotations

from rollout_svc.openai_schema import ChatMessage, ChatRequest, CompletionRequest, GenerationBody
from sluice.v1 import rollout_pb2, tokens_pb2

__all__ = ["chat_request", "completion_requests"]

COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for `/v1/completions`; `/v1/chat/completions` goes on to the end of the context."""

SAME_NAMES = (
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
)
"""Parameters that the contract calls as this dialect does."""


def chat_request(body: ChatRequest) -> rollout_pb2.GenerateRequest:
    """The request for a conversation."""
    request = _request(body, body.top_logprobs or 0)
    if body.max_completion_tokens is not None:
        request.sampling.max_tokens = body.max_completion_tokens
    request.conversation.messages.extend(_message(each) for each in body.messages)
    for tool in body.tools or [] if body.tool_choice != "none" else []:
        added = request.conversation.tools.add(name=tool.function.name, description=tool.function.description or "")
        added.parameters.update(tool.function.parameters or {})
    request.conversation.template_arguments.update(body.chat_template_kwargs or {})
    return request


def completion_requests(body: CompletionRequest) -> list[rollout_pb2.GenerateRequest]:
    """One request per prompt."""
    requests = []
    for prompt in body.prompts:
        request = _request(body, body.logprobs or 0)
        if body.max_tokens is None:
            request.sampling.max_tokens = COMPLETION_TOKENS
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        requests.append(request)
    return requests


def _request(body: GenerationBody, top_logprobs: int) -> rollout_pb2.GenerateRequest:
    given = {name: getattr(body, name) for name in SAME_NAMES}
    sampling = tokens_pb2.SamplingParams(
        **{name: value for name, value in given.items() if value is not None},
        top_k=max(body.top_k or 0, 0),
        stop=body.stops,
        stop_token_ids=body.stop_token_ids or [],
        logit_bias=body.logit_bias or {},
        top_logprobs=top_logprobs,
    )
    return rollout_pb2.GenerateRequest(sampling=sampling, n=body.n or 1, priority=body.priority or 0, return_text=True)


def _message(message: ChatMessage) -> tokens_pb2.ChatMessage:
    content = message.content or ""
    return tokens_pb2.ChatMessage(
        role=message.role,
        content=content if isinstance(content, str) else "".join(part.text for part in content),
        tool_calls=[
            tokens_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or []
        ],
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=message.reasoning_content or "",
    )
