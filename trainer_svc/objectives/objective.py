"""Objectives: the loss of a micro-batch, its divisor, which tokens are trained, its metrics, and warnings about these.

    loss of a token = surrogate(t, o, b, A) x f(rho) x masks + kl_tau (log t/b)^2 + kl_coef x KL(t, ref) - entropy_coef x entropy

f(rho) and the masks multiply the surrogate only. Divisors count every loss token, masked or not.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from sluice.versions import Version
from trainer_svc.batch.attention_plan import to_device
from trainer_svc.batch.rows import OPTIONAL_COLUMNS, LossFn, LossWeight, MicroBatch, Outputs, TrainingRow
from trainer_svc.batch.shapes import MaskPerToken, PerSequenceToken, PerToken, Scalar
from trainer_svc.objectives.advantages import at_loss_tokens, carried_back, check_rewards, proximal_of, with_column
from trainer_svc.objectives.config import ObjectiveConfig, ResolvedObjective
from trainer_svc.objectives.presets import (
    CORRECTIONS,
    Surrogate,
    TokenTerms,
    TokenWeights,
    divisor,
    kl_loss,
    log_difference,
    off_policy_sequence_mask,
    pull_to_behaviour,
    token_factors,
    veto,
)
from trainer_svc.parallel.mesh import ALONE, Ranks

if TYPE_CHECKING:  # the module imports transformers, which takes seconds and is not needed for a loss
    from trainer_svc.engine.logprob import Entropy


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a policy on samples or demonstrations.

    Attributes:
        resolved: The settings.
        surrogate: The loss per token.
    """

    resolved: ResolvedObjective
    surrogate: Surrogate

    @classmethod
    def of(cls, config: ObjectiveConfig) -> Self:
        """Return the objective of these settings.

        Raises:
            ValueError: if a user's own loss cannot be imported, or cannot be called with its `params`.
        """
        resolved = config.resolved
        return cls(resolved, resolved.preset.surrogate or _own_surrogate(resolved.name, resolved.parameters))

    @property
    def entropy(self) -> Entropy:
        """Whether the entropy must be computed with a gradient, or only for the report."""
        return "train" if self.resolved.entropy_coef > 0 else "measure"

    def contributes(self, sequence: TrainingRow) -> bool:
        """Return whether a sequence can have a gradient."""
        advantages, mask = sequence.advantages.numpy(), sequence.loss_mask.numpy()
        return not self.resolved.vanishes_without_advantage or bool(advantages[mask].any())

    def weight(self, sequences: Sequence[TrainingRow]) -> float:
        """Return these sequences' share of the divisor; a `LossWeight`."""
        return divisor(self.resolved.aggregation, sequences, self.resolved.max_tokens)

    def loss(self, outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        """Return the summed loss of a micro-batch, and sums for the step's report; a `LossFn`.

        Raises:
            ValueError: if the batch lacks a column that the objective reads.
        """
        settings, terms = self.resolved, self._terms(outputs, batch)
        loss, counts = self._per_token(terms)
        sums = {**counts, "tokens": torch.full((), float(len(loss)), dtype=torch.float64, device=loss.device)}
        for weights, counts in self._token_weights(terms):
            loss = loss * weights
            sums |= counts
        if settings.kl_tau > 0:
            loss = loss + settings.kl_tau * pull_to_behaviour(terms)
        if settings.loss_kl_coef > 0:
            if terms.reference is None:
                raise ValueError(
                    "kl_coef is above 0 but the batch has no reference log-probabilities: send them, name a reference model, "
                    "or set kl_coef to 0"
                )
            kl = kl_loss(settings.kl_kind, terms.current, terms.reference)
            loss = loss + settings.loss_kl_coef * kl
            sums["kl"] = kl.detach().sum()
        if terms.entropy is not None:
            sums["entropy"] = terms.entropy.detach().sum()
        if settings.entropy_coef > 0:
            if terms.entropy is None:
                raise ValueError("entropy_coef is above 0 but the entropy was not computed")
            loss = loss - settings.entropy_coef * terms.entropy
        if settings.needs_behaviour:
            sums |= _policy_gap(terms)
        if settings.decoupled:
            sums |= _correction_spread(terms)
        return (loss * terms.factors).sum(), sums

    def _terms(self, outputs: Outputs, batch: MicroBatch) -> TokenTerms:
        if outputs.logprobs is None:
            raise ValueError("the objective needs log-probabilities: give it a network with a language head")
        return TokenTerms(
            current=outputs.logprobs,
            behaviour=batch.behaviour_logprobs,
            proximal=self._proximal(outputs.logprobs.detach(), batch),
            advantages=batch.advantages,
            owners=batch.owners,
            sequences=len(batch.sequences),
            factors=token_factors(self.resolved.aggregation, batch, outputs.logprobs.dtype),
            reference=batch.reference_logprobs,
            teacher=batch.teacher_logprobs,
            entropy=outputs.entropy,
            kept=batch.kept,
        )

    def _proximal(self, current: PerToken, batch: MicroBatch) -> PerToken:
        """Return log o: log b, the result of an earlier forward pass, or a value between log b and log t."""
        match self.resolved.proximal:
            case "bypass":
                return batch.behaviour_logprobs
            case "recompute":
                if batch.proximal_logprobs is None:
                    raise ValueError(
                        "the decoupled form needs proximal_logprobs: compute them before the first step, or set proximal to bypass"
                    )
                return batch.proximal_logprobs
            case "loglinear":
                if batch.proximal_share is None:
                    raise ValueError(
                        "proximal = loglinear needs proximal_share: derive it from the tokens' versions before the first step"
                    )
                return batch.behaviour_logprobs + batch.proximal_share * (current - batch.behaviour_logprobs)

    def _per_token(self, terms: TokenTerms) -> tuple[PerToken, dict[str, Scalar]]:
        """Return the surrogate's loss of each token, and its sums.

        Raises:
            ValueError: if the surrogate returns anything else.
        """
        answer = self.surrogate(terms, **self.resolved.parameters)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise ValueError(
                f"objective {self.resolved.name} returned a {type(answer).__name__}: return one loss per token and a dict of sums"
                " to report, such as `return loss, {}`"
            )
        loss, counts = answer
        if loss.shape != terms.current.shape:
            raise ValueError(
                f"objective {self.resolved.name} returned shape {tuple(loss.shape)} for {len(terms.current)} tokens: "
                "return one loss per token and leave the aggregation to the config"
            )
        return loss, counts

    def _token_weights(self, terms: TokenTerms) -> list[TokenWeights]:
        """Return the constants that multiply the surrogate of each token."""
        settings = self.resolved
        weights: list[TokenWeights] = []
        if settings.decoupled:
            weights.append(CORRECTIONS[settings.correction].weights(terms, **settings.bounds))
        if settings.veto is not None:
            weights.append(veto(terms, settings.veto))
        if settings.off_policy_mask is not None:
            weights.append(off_policy_sequence_mask(terms, settings.off_policy_mask))
        if terms.kept is not None:
            weights.append((terms.kept.to(terms.current.dtype), {"deselected": (~terms.kept).sum()}))
        return weights


def _own_surrogate(name: str, parameters: Mapping[str, object]) -> Surrogate:
    """Import the user's own loss, and check that it takes these parameters. So a mistake shows at the start, not in the first step.

    Raises:
        ValueError: if it cannot be imported, or cannot be called with these parameters.
    """
    module_name, function_name = name.split(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"objective {name!r}: there is no module {error.name!r}: install it, or put its directory on PYTHONPATH"
        ) from error
    surrogate: Surrogate | None = getattr(module, function_name, None)
    if not callable(surrogate):
        raise ValueError(  # noqa: TRY004 - the name is wrong, not a type
            f"objective {name!r}: {module.__file__} has no function {function_name!r}: correct the name"
        )
    try:
        inspect.signature(surrogate).bind(None, **parameters)
    except TypeError as error:
        raise ValueError(
            f"objective {name!r} is called with the terms of a micro-batch and params ({', '.join(parameters) or 'none'}): "
            f"{error}; correct params or the function"
        ) from error
    return surrogate


# Which tokens are trained, and which facts about the whole batch a token's loss needs.


CAUSES = ("behaviour_not_finite", "advantage_not_finite", "reference_not_finite", "teacher_not_finite")
"""Causes for which a token leaves the loss. A token is counted under its first cause."""


def check_columns(sequences: Sequence[TrainingRow], objective: ResolvedObjective) -> None:
    """Refuse rows that a later step would refuse, before ranks wait for each other.

    Raises:
        ValueError: if a row lacks a column that the objective reads: its reward, the share of the log-linear form, or the
            log-probabilities of the reference or of the teacher.
    """
    for sequence in sequences:
        if objective.runs_estimator:
            check_rewards(sequence, objective)
        name = f"sequence {sequence.trajectory_id!r}"
        if objective.proximal == "loglinear" and sequence.proximal_share is None:
            raise ValueError(
                f"proximal = loglinear needs proximal_share, and {name} has none: derive it from the tokens' versions"
            )
        if objective.needs_reference and sequence.reference_logprobs is None:
            raise ValueError(
                f"kl_coef is above 0 but {name} has no reference log-probabilities: send them, name a reference model, or set "
                "kl_coef to 0"
            )
        if objective.needs_teacher and sequence.teacher_logprobs is None:
            raise ValueError(
                f"{objective.name} follows a teacher but {name} has no teacher log-probabilities: send them, or name a teacher model"
            )


def keep_trainable(
    sequences: Sequence[TrainingRow], objective: ResolvedObjective
) -> tuple[list[TrainingRow], dict[str, int]]:
    """Take the tokens that cannot be trained out of the loss and out of its divisor.

    If earlier tokens are credited with later rewards, a dropped token's reward moves to the last kept token before it.

    Returns:
        The rows with narrowed masks, and the number of dropped tokens by cause.
    """
    kept: list[TrainingRow] = []
    dropped: Counter[str] = Counter()
    for sequence in sequences:
        mask = sequence.loss_mask
        for cause, values in _loss_inputs(sequence, objective).items():
            gaps = mask.numpy() & ~np.isfinite(
                values.numpy()
            )  # numpy takes a third of the time for rows as short as these
            if missing := int(np.count_nonzero(gaps)):
                dropped[cause] += missing
                mask = mask & ~torch.from_numpy(gaps)
        if mask is sequence.loss_mask:
            kept.append(sequence)
            continue
        rewards = sequence.token_rewards
        if rewards is not None and objective.credits_earlier_tokens:
            rewards = carried_back(rewards, sequence.loss_mask, mask)
        kept.append(replace(sequence, loss_mask=mask, token_rewards=rewards))
    return kept, dict(dropped)


def with_batch_facts(
    sequences: Sequence[TrainingRow], objective: ResolvedObjective, staleness: Callable[[Version], int]
) -> list[TrainingRow]:
    """Return the rows with the columns that have to be computed from the whole batch, before it is distributed over ranks.

    These are the number of loss tokens of the row's group and, for `proximal = loglinear`, `proximal_share`.

    Args:
        sequences: The whole batch, as `keep_trainable` returns it.
        objective: The objective that will be minimised.
        staleness: Returns the number of versions between a version that sampled and the version that is trained.
    """
    rows = with_group_tokens(sequences)
    if objective.proximal != "loglinear":
        return rows
    return with_proximal_share(rows, [_ages(each, staleness) for each in rows])


def with_group_tokens(sequences: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Return the rows with the number of loss tokens of their group, if it is not set. Rows without a group stay as they are."""
    counts: Counter[str] = Counter()
    for sequence in sequences:
        counts[sequence.group_id] += sequence.loss_tokens
    return [
        sequence
        if sequence.group_loss_tokens or not sequence.group_id
        else replace(sequence, group_loss_tokens=counts[sequence.group_id])
        for sequence in sequences
    ]


def loglinear_share(ages: torch.Tensor) -> torch.Tensor:
    """Return a in log o = log b + a (log t - log b): (age - 1) / age, and 0 for tokens of the current version.

    Args:
        ages: v - v_b per loss token: the trainer's version minus the version that sampled the token.
    """
    aged = ages.double()
    return ((aged - 1) / aged.clamp(min=1)).clamp(0, 1)


def with_proximal_share(sequences: Sequence[TrainingRow], ages: Sequence[torch.Tensor]) -> list[TrainingRow]:
    """Return the rows with `proximal_share`, from the age of each loss token."""
    return with_column(sequences, "proximal_share", [loglinear_share(each) for each in ages])


def _ages(sequence: TrainingRow, staleness: Callable[[Version], int]) -> torch.Tensor:
    """Return the staleness of each loss token, in versions; 0 before the first version span."""
    ages = torch.zeros(len(sequence), dtype=torch.int64)
    for span in sequence.versions:
        ages[span.start :] = staleness(span.version)
    return ages[sequence.loss_mask]


def _loss_inputs(sequence: TrainingRow, objective: ResolvedObjective) -> dict[str, PerSequenceToken]:
    """Return the columns that the objective reads and the row has, by the cause under which their missing numbers are counted."""
    inputs: dict[str, PerSequenceToken] = {}
    if objective.needs_behaviour:
        inputs = {"behaviour_not_finite": sequence.behaviour_logprobs, "advantage_not_finite": sequence.advantages}
    if objective.needs_reference and sequence.reference_logprobs is not None:
        inputs["reference_not_finite"] = sequence.reference_logprobs
    if objective.needs_teacher and sequence.teacher_logprobs is not None:
        inputs["teacher_not_finite"] = sequence.teacher_logprobs
    return inputs


# M2PO's selection of tokens.


def with_selection(
    sequences: Sequence[TrainingRow], objective: ResolvedObjective, ranks: Ranks = ALONE
) -> list[TrainingRow]:
    """Return the rows with `kept` set for the tokens that m2po keeps.

    Raises:
        ValueError: if a row has no proximal log-probabilities.
    """
    tau = objective.other_parameters["tau"] or 0.0
    behaviour = [at_loss_tokens(each, each.behaviour_logprobs) for each in sequences]
    proximal = [at_loss_tokens(each, proximal_of(each, objective)) for each in sequences]
    masks = keep_small_moments(behaviour, proximal, tau=tau, ranks=ranks)
    rows = []
    for sequence, mask in zip(sequences, masks, strict=True):
        kept = torch.ones_like(sequence.loss_mask)
        kept[sequence.loss_mask] = mask
        rows.append(replace(sequence, kept=kept))
    return rows


def keep_small_moments(
    behaviour: Sequence[PerToken], proximal: Sequence[PerToken], *, tau: float, ranks: Ranks = ALONE
) -> list[MaskPerToken]:
    """Drop the tokens with the largest (log b - log o)^2 until the mean of the rest is below tau (M2PO, arXiv 2510.01161).

    The mean is exact over the global batch: every rank sees the values of all ranks. Tokens whose value equals the first dropped
    value are dropped, too, so that the result does not depend on order or ranks. Tokens with the smallest value are always kept,
    even if it is tau or more: a step without tokens would train nothing.

    Args:
        behaviour: log b of the loss tokens of each of this rank's sequences.
        proximal: log o of the same tokens.
        tau: Nats squared.
        ranks: All ranks that have a share of the batch.

    Returns:
        For each sequence, whether each token is kept.
    """
    moments = [log_difference(b.double(), o.double()).square() for b, o in zip(behaviour, proximal, strict=True)]
    own = torch.cat(moments) if moments else torch.zeros(0, dtype=torch.float64)
    ordered = ranks.gather(own).sort().values
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, dtype=torch.float64)
    kept = int((means < tau).sum())
    if kept == len(ordered):
        return [torch.ones_like(each, dtype=torch.bool) for each in moments]
    smallest, first_dropped = ordered[0], ordered[kept]
    return [(each < first_dropped) | (each == smallest) for each in moments]


# Metrics and warnings.


_FRACTIONS = {
    "clipped_low": "clip_fraction_low",
    "clipped_high": "clip_fraction_high",
    "dual_clipped": "dual_clip_fraction",
    "truncated": "truncate_fraction",
    "masked_low": "mask_fraction_low",
    "masked_high": "mask_fraction_high",
    "correction_truncated": "correction_truncate_fraction",
    "correction_masked_low": "correction_mask_fraction_low",
    "correction_masked_high": "correction_mask_fraction_high",
    "vetoed": "veto_fraction",
    "off_policy_masked": "off_policy_mask_fraction",
    "deselected": "deselect_fraction",
}
_MEANS = {"entropy": "entropy", "kl": "kl", "teacher_kl": "teacher_kl"}
_GAP = ("gap_tokens", "weight", "weight_squared", "k3", "max_abs_log_difference", "rho", "rho_squared")


def _policy_gap(terms: TokenTerms) -> dict[str, Scalar]:
    """Return the distance of the trainer's policy from the policy that sampled, as sums over tokens; `max_...` are maxima."""
    gap = log_difference(terms.current.detach(), terms.behaviour).double()
    weight = gap.exp()
    return {
        "gap_tokens": torch.full((), float(len(gap)), dtype=torch.float64, device=gap.device),
        "weight": weight.sum(),
        "weight_squared": weight.square().sum(),
        "k3": (weight - gap - 1).sum(),
        "max_abs_log_difference": torch.cat([gap.abs(), gap.new_zeros(1)]).max(),
    }


def _correction_spread(terms: TokenTerms) -> dict[str, Scalar]:
    """Return how uneven rho = o / b is before any truncation, as sums over tokens."""
    rho = log_difference(terms.proximal, terms.behaviour).double().exp()
    return {"rho": rho.sum(), "rho_squared": rho.square().sum()}


def finish(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step, from the sums that `Objective.loss` gave.

    Returns:
        Only metrics that were measured: `mismatch_kl` and `max_abs_log_difference` (nats, trainer against engine);
        `effective_sample_size` (share of the tokens) and `chi_square` of the weights t / b, and of o / b with the prefix
        `correction_`; `entropy`, `kl`, `teacher_kl` (mean, in nats); as shares of the loss tokens `clip_fraction_low` and `_high`,
        `dual_clip_fraction`, `truncate_fraction`, `mask_fraction_low` and `_high`, the same for the correction (`correction_...`),
        `veto_fraction`, `off_policy_mask_fraction`, `deselect_fraction`; and the mean of each sum that the user's own loss
        returned, under its name.
    """
    done: dict[str, float] = {}
    tokens = sums.get("gap_tokens", 0.0)
    if tokens:
        done["mismatch_kl"] = sums["k3"] / tokens
        done["max_abs_log_difference"] = sums["max_abs_log_difference"]
        done["effective_sample_size"] = sums["weight"] ** 2 / (tokens * sums["weight_squared"])
        done["chi_square"] = sums["weight_squared"] / tokens - 1.0
        if "rho" in sums:
            done["correction_effective_sample_size"] = sums["rho"] ** 2 / (tokens * sums["rho_squared"])
            done["correction_chi_square"] = sums["rho_squared"] / tokens - 1.0
    measured = sums.get("tokens", 0.0)
    if measured:
        own = {name: name for name in sums if name not in (*_GAP, *_FRACTIONS, *_MEANS, "tokens")}
        for total, name in (_FRACTIONS | _MEANS | own).items():
            if total in sums:
                done[name] = sums[total] if total.startswith("max_") else sums[total] / measured
    return done


SAME_ESTIMATOR = {"centered": "dr_grpo"}
"""Estimators that have a second name."""

MISMATCH_BOUNDS = {"float32": 1e-5, "bfloat16": 4e-3}
"""Largest `mismatch_kl` at staleness 0, in nats per token, that rounding can explain, by the precision of the forward pass.

Measured with vLLM on a CPU: float32 1e-12; bfloat16 1e-4 for the small model of the quickstart, 1e-3 for SmolLM2-135M.
"""


def mismatch_warning(measured: Mapping[str, float], *, staleness: int, sampled: str, computed: str) -> str | None:
    """Return a warning if trainer and engine disagree about tokens that the current weights sampled.

    Args:
        measured: Metrics of a step, with its `mismatch_kl`.
        staleness: The largest age of a trained token, in versions. Above 0 the policies differ on purpose.
        sampled: Precision of the engine's weights; empty if unknown.
        computed: Precision of the trainer's forward pass.
    """
    mismatch = measured.get("mismatch_kl", 0.0)
    if staleness > 0 or mismatch <= MISMATCH_BOUNDS.get(computed, MISMATCH_BOUNDS["bfloat16"]):
        return None
    finding = f"mismatch_kl is {mismatch:.4f} at staleness 0"
    if sampled and sampled != computed:
        return (
            f"{finding}: the engine samples with {sampled} weights and the trainer computes in {computed}, so the engine misses small"
            f" updates; set rollout.dtype to {computed} or auto"
        )
    precision = f"both use {computed}" if sampled else "the precision of the engine's weights is not known"
    return (
        f"{finding}: the engine does not sample from the policy that is trained ({precision}); check that both load the same model,"
        f" that rollout.dtype is {computed} or auto, and that rollout.engine_args quantises neither weights nor the KV cache"
    )


def bypass_warning(
    objective: ResolvedObjective, measured: Mapping[str, float], *, bf16: bool, staleness: int
) -> str | None:
    """Return a warning if the ratio is clipped to bounds as narrow as rounding, in the bypass form.

    Args:
        objective: The objective that is minimised.
        measured: Metrics of a step.
        bf16: Whether engine or trainer computes in bfloat16.
        staleness: The largest age of a trained token, in versions.
    """
    if objective.decoupled or not objective.has_narrow_bounds or not (bf16 or staleness > 0):
        return None
    clipped = measured.get("clip_fraction_low", 0.0) + measured.get("clip_fraction_high", 0.0)
    cause = "bfloat16" if bf16 else f"staleness {staleness}"
    return (
        f"objective {objective.name} in the bypass form clips {clipped:.1%} of the tokens: its bounds are as narrow as the "
        f"differences that {cause} makes between engine and trainer; set proximal to recompute"
    )


def estimator_warning(objective: ResolvedObjective, estimator: str) -> str | None:
    """Return a warning if a batch names another estimator than the one that the preset was published with.

    If `estimator` is empty, the batch names none.
    """
    published = objective.preset.advantage
    if not estimator or not published or objective.is_own or objective.runs_estimator:
        return None
    if SAME_ESTIMATOR.get(estimator, estimator) == SAME_ESTIMATOR.get(published, published):
        return None
    return (
        f"objective {objective.name} was published with {published} advantages, but the batches bring {estimator} advantages: "
        f"set orchestrator.advantage to {published}, unless this is what you want"
    )


# Several objectives in one batch: each trajectory is trained with the objective that it names.
#
#     loss = sum over objectives of (sum of the losses of its trajectories' tokens / its own divisor over the whole batch)
#
# So the gradient is the sum of the gradients that each objective would have with only its own trajectories. An objective's part does
# not depend on packing, on the number of ranks, or on the other objectives of the batch.

_PER_TOKEN = ("behaviour_logprobs", "advantages", "sequence_tokens", "group_tokens", *OPTIONAL_COLUMNS)
"""Columns of a micro-batch that a loss reads."""


def among(
    rows: Sequence[TrainingRow], names: Collection[str], work: Callable[[list[TrainingRow]], list[TrainingRow]]
) -> list[TrainingRow]:
    """Replace the rows of some objectives by the result of `work` on them. `work` is called on every rank, even without rows."""
    places = [place for place, row in enumerate(rows) if row.objective in names]
    changed = list(rows)
    for place, row in zip(places, work([rows[place] for place in places]), strict=True):
        changed[place] = row
    return changed


def with_common_columns(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """Give all rows the optional columns that any row has, so that they can share micro-batches.

    A column is only filled in for rows whose objective does not read it.
    """
    missing = {name for name in OPTIONAL_COLUMNS if len({getattr(each, name) is None for each in rows}) > 1}
    return [
        replace(row, **{name: _unread(row, name) for name in missing if getattr(row, name) is None}) for row in rows
    ]


def _unread(row: TrainingRow, name: str) -> torch.Tensor:
    return torch.ones_like(row.loss_mask) if name == "kept" else torch.full_like(row.behaviour_logprobs, torch.nan)


def mixed(
    objectives: Mapping[str, Objective], part: Sequence[TrainingRow], ranks: Ranks = ALONE
) -> tuple[LossFn, LossWeight]:
    """Return the loss of a minibatch under several objectives, with the divisor that the engine applies.

    Args:
        objectives: By the name that rows have; "" is the trainer's own.
        part: This rank's rows of the minibatch.
        ranks: All ranks that train on it.
    """
    own = {name: each.weight([row for row in part if row.objective == name]) for name, each in objectives.items()}
    divisors = ranks.total({f"objective/{name}": weight for name, weight in own.items()})

    def loss(outputs: Outputs, batch: MicroBatch) -> tuple[Scalar, dict[str, Scalar]]:
        present = [name for name in objectives if any(each.objective == name for each in batch.sequences)]
        total, merged = outputs.main.sum() * 0.0, dict[str, Scalar]()
        for name in present:
            inner, rows = (outputs, batch) if len(present) == 1 else _of(name, outputs, batch)
            value, sums = objectives[name].loss(inner, rows)
            total = total + value / (divisors[f"objective/{name}"] or 1.0)
            for key, each in sums.items():
                before = merged.get(key)
                merged[key] = (
                    each if before is None else torch.maximum(before, each) if key.startswith("max_") else before + each
                )
        return total, merged

    # The divisors are applied above. The weights of all ranks add up to 1, so the engine divides by 1.
    return loss, lambda _: 1.0 / ranks.size


def _of(name: str, outputs: Outputs, batch: MicroBatch) -> tuple[Outputs, MicroBatch]:
    """Return outputs and micro-batch with only the loss tokens of one objective's sequences."""
    counts = np.array([each.loss_tokens for each in batch.sequences])
    members = np.array([each.objective == name for each in batch.sequences])
    device = outputs.main.device
    places = to_device(torch.from_numpy(np.flatnonzero(np.repeat(members, counts))), device)
    owners = to_device(torch.from_numpy(np.repeat(np.arange(int(members.sum())), counts[members])), device)
    columns: dict[str, Any] = {each: getattr(batch, each) for each in _PER_TOKEN}
    columns = {each: None if column is None else column[places] for each, column in columns.items()}
    chosen = replace(
        batch,
        sequences=tuple(each for each, member in zip(batch.sequences, members, strict=True) if member),
        owners=owners,
        **columns,
    )
    return (
        replace(
            outputs,
            logprobs=None if outputs.logprobs is None else outputs.logprobs[places],
            entropy=None if outputs.entropy is None else outputs.entropy[places],
        ),
        chosen,
    )
