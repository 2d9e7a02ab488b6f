"""Which sampling of a captured request is done: a captured endpoint serves clients that nobody can change.

What cannot change the tokens is ignored, what the engine does not enforce is not enforced, and what would make the log-probabilities those
of another distribution follows `capture.on_unsupported`. Each of these is a notice of the request. Notices are counted, and none is an
error unless the settings say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from sluice.limits import MAX_TEMPERATURE, MIN_TEMPERATURE, may_train_at
from sluice.openai.fields import ClientRequest, fault

Unsupported: TypeAlias = Literal["override", "reject", "not_trained", "allow"]
"""What happens to sampling that may not be trained. `allow` is for sessions of an evaluation: nothing of them is trained."""

NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
}
"""Sampling with which the log-probabilities of the engine are those of the policy, for each field that a trained request may not set."""


def settle_sampling(request: ClientRequest, unsupported: Unsupported) -> None:
    """Remove the sampling that may not be trained, refuse it, or mark the request as not trained; see `capture.on_unsupported`.

    A priority below 0, with which it would go before other sessions and the run's own episodes, becomes 0.

    Raises:
        SluiceError: INVALID_ARGUMENT if the settings say `reject`.
    """
    if request.generate.priority < 0:
        request.note("overridden", "priority")
        request.generate.priority = 0
    sampling = request.generate.sampling
    for name, neutral in NEUTRAL.items():
        if getattr(sampling, name) == neutral:
            sampling.ClearField(name)  # type: ignore[arg-type]  # a name of a field
    present = {each.name for each, _ in sampling.ListFields()}
    changing = [name for name in (*NEUTRAL, "logit_bias") if name in present]
    if (
        "temperature" in present
        and 0 <= sampling.temperature < MAX_TEMPERATURE
        and not may_train_at(sampling.temperature)
    ):
        changing.append("temperature")
    if unsupported == "allow":
        return
    for name in changing:
        if unsupported == "reject":
            why = "changes the distribution that tokens are sampled from, so that they could not be trained"
            if name == "temperature":
                why = f"is {sampling.temperature:g}, and trained tokens need at least {MIN_TEMPERATURE:g}"
            raise fault(name, f"{why}: leave it out, or let capture.on_unsupported be override or not_trained")
        if unsupported == "override":
            request.note("overridden", name)
            sampling.ClearField(name)  # type: ignore[arg-type]
        else:
            request.note("not_trained", name)
            request.not_trained = request.not_trained or name.upper()
