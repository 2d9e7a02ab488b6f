"""This rank's share of a batch as micro-batches, in step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from trainer_svc.batch.rows import LossWeight, MicroBatch, Sequence, empty_batch, pack, tokens_to_forward
from trainer_svc.engine.network import Network
from trainer_svc.parallel.ranks import agree

if TYPE_CHECKING:
    from trainer_svc.engine.engine import TrainEngine

__all__ = ["micro_batches"]


def micro_batches(
    engine: TrainEngine,
    sequences: Rows[Sequence],
    loss_weight_fn: LossWeight = lambda _: 0.0,
    contributes: Callable[[Sequence], bool] | None = None,
    *,
    whole_groups: bool = False,
) -> tuple[list[MicroBatch], float]:
    """The micro-batches, as many on every rank, and the weight of the global batch: 1 where it is 0, as nothing is divided then.

    Args:
        engine: What they are for.
        sequences: This rank's share of the batch.
        loss_weight_fn: As of `TrainEngine.train_batch`, like all that follows.
        contributes: Whether a sequence can have a gradient.
        whole_groups: Whether the sequences of a group share a micro-batch.

    Raises:
        ValueError: if a token id is outside of the vocabulary, on any rank.
    """
    engine.mesh.check_same_rows(sequences)

    def packed() -> tuple[list[MicroBatch], float]:
        _check_ids(sequences, engine.network.vocabulary)
        _check_lengths(sequences, engine.network)
        chosen = sequences if contributes is None else [each for each in sequences if contributes(each)]
        fold = engine.config.fold_prompts
        batches = pack(chosen, engine.config.token_budget, fold=fold, whole_groups=whole_groups)
        return batches, loss_weight_fn(sequences)

    batches, weight = agree(engine.ranks, packed)
    totals = engine.ranks.total({"weight": weight, "max_batches": len(batches)})
    batches += [empty_batch(engine.mesh.dims.cp)] * (int(totals["max_batches"]) - len(batches))
    return batches, totals["weight"] or 1.0


def _check_ids(sequences: Rows[Sequence], vocabulary: int) -> None:
    for sequence in sequences:
        low, high = (int(value) for value in sequence.input_ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"sequence {sequence.trajectory_id!r} has a token id outside of the vocabulary [0, {vocabulary}): was it made with another tokenizer?"
            )


def _check_lengths(sequences: Rows[Sequence], network: Network) -> None:
    if network.longest_row is None:
        return
    for sequence in sequences:
        if len(tokens_to_forward(sequence)) > network.longest_row:
            kind = network.model.config.get_text_config().rope_parameters
            raise ValueError(
                f"sequence {sequence.trajectory_id!r} has {len(sequence)} tokens, and this model's RoPE ({kind.get('rope_type', 'per layer')}) has "
                f"other frequencies beyond {network.longest_row}, which would also change the sequences packed beside it: "
                "generate or keep shorter sequences (rollout.max_model_len, max_length), or choose another model"
            )
