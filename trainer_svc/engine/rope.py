"""RoPE whose frequencies depend on the longest sequence of a forward pass.

transformers computes `dynamic` and `longrope` frequencies from the largest position in the whole forward pass: one long
sequence would change the log-probabilities of all sequences that are packed beside it. Up to the length that the model was
first trained for the frequencies do not change, so that sequences up to this length can be packed; longer ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

__all__ = ["fix_frequencies"]


def fix_frequencies(model: PreTrainedModel) -> int | None:
    """Keep a model's RoPE at the frequencies of short sequences.

    transformers then no longer looks at the positions of each forward pass, which would wait for the device.

    Returns:
        Most tokens of a sequence for which these frequencies are right; None means any number.
    """
    limits: list[int] = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if not kinds or not hasattr(module, "original_max_seq_len"):
            continue
        by_layer = kinds if isinstance(kinds, Mapping) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if kind == "longrope":
                limits.append(int(_parameters(module.config, layer_type)["original_max_position_embeddings"]))
            elif "dynamic" in kind:
                limits.append(int(module.original_max_seq_len))
        module.rope_type = dict.fromkeys(kinds, "fixed") if isinstance(kinds, Mapping) else "fixed"
    return min(limits, default=None)


def _parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:  # noqa: ANN401  transformers' configurations
    parameters: Mapping[str, Any] = config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]
