"""vLLM's scheduler, which holds the tokens of a request back if their reader does not want them at once.

vLLM sends its samples after each step: for each sample an object with its new token and three arrays of log-probabilities. With a
small model, writing and reading these messages takes a fifth of the CPU time of the service, and some of the engine's. A stream that
gives its tokens once per second needs only a message every `HOLD_S`. vLLM imports this module in the process of its engine.

The end of a sample, and any output other than tokens, is sent at once, together with the tokens held back before it. A message names
one version of the weights. vLLM changes the version only while it is paused, and a pause sends everything first.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import LogprobsLists

from rollout_svc.engines.vllm.requests import HOLD_S

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class HeldTokens:
    """The outputs that are held back, by client and request, in the order of their steps."""

    def __init__(self) -> None:
        self._held: defaultdict[int, dict[str, list[EngineCoreOutput]]] = defaultdict(dict)
        self._send_at = 0.0

    def __bool__(self) -> bool:
        return any(self._held.values())

    def sift(
        self, outputs: dict[int, EngineCoreOutputs], interval: Callable[[str], int], *, everything: bool, now: float
    ) -> None:
        """Hold back those outputs of a step that may wait. Join the others with what was held back earlier.

        Args:
            outputs: Outputs of the step by client; changed in place. If tokens are sent to a client without outputs, an entry is added.
            interval: Returns after how many tokens the output of a request is sent. 1: after each.
            everything: Whether to send everything now.
            now: Monotonic time in seconds.
        """
        everything = everything or now >= self._send_at
        for client, message in outputs.items():
            held = self._held[client]
            message.outputs = [sent for each in message.outputs if (sent := _next(each, held, interval)) is not None]
        if everything:
            self._send_at = now + HOLD_S
            for client, held in self._held.items():
                if held:
                    message = outputs.setdefault(client, EngineCoreOutputs())
                    message.outputs = [*message.outputs, *(joined(each) for each in held.values())]
                    held.clear()


def _next(
    output: EngineCoreOutput, held: dict[str, list[EngineCoreOutput]], interval: Callable[[str], int]
) -> EngineCoreOutput | None:
    """Return the output to send for a request now, or None to hold it back."""
    name = output.request_id
    waiting = held.get(name, [])
    waiting.append(output)
    if _may_wait(output) and len(waiting) < interval(name):
        held[name] = waiting
        return None
    held.pop(name, None)
    return joined(waiting)


def _may_wait(output: EngineCoreOutput) -> bool:
    """Return whether an output has only tokens and fields that `joined` preserves."""
    return (
        output.finish_reason is None
        and output.new_prompt_logprobs_tensors is None
        and output.prompt_token_id_logprobs is None
        and output.pooling_output is None
        and output.kv_transfer_params is None
        and output.ec_transfer_params is None
        and output.routed_experts is None
        and output.new_sampling_mask is None
        and output.mm_cache_miss_hashes is None
        and not output.num_nans_in_logits
    )


def joined(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Add the tokens of a request's outputs to the last one, in place, and return it."""
    *before, last = outputs
    if not before:
        return last
    last.new_token_ids = [token for each in outputs for token in each.new_token_ids]
    parts = [each.new_logprobs for each in outputs if each.new_logprobs is not None]
    if parts:
        last.new_logprobs = _joined_logprobs(parts)
    last.events = [event for each in outputs for event in each.events or ()] or None
    last.prefill_stats = next((each.prefill_stats for each in outputs if each.prefill_stats is not None), None)
    return last


def _joined_logprobs(parts: list[LogprobsLists]) -> LogprobsLists:
    # The rows of a step have as many columns as its most demanding request wants. Each request reads the first columns.
    width = min(each.logprobs.shape[1] for each in parts)
    return LogprobsLists(
        np.concatenate([each.logprob_token_ids[:, :width] for each in parts]),
        np.concatenate([each.logprobs[:, :width] for each in parts]),
        np.concatenate([each.sampled_token_ranks for each in parts]),
    )


class HoldingScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not typed for mypy
    """vLLM's scheduler, extended to hold tokens back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's own
        super().__init__(*args, **kwargs)
        self._held = HeldTokens()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Return the outputs to send after a step."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        idle = scheduler_output.total_num_scheduled_tokens == 0
        paused = self.pause_state == PauseState.PAUSED_ALL
        self._held.sift(outputs, self._interval, everything=idle or paused, now=time.monotonic())
        return outputs

    def has_requests(self) -> bool:
        """Return whether another step is needed, even if only to send tokens that were held back."""
        return bool(self._held) or super().has_requests()

    def _interval(self, name: str) -> int:
        request = self.requests.get(name)
        return 1 if request is None else request.sampling_params.stream_interval or 1


class HoldingAsyncScheduler(HoldingScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling."""
