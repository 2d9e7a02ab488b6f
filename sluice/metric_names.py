"""Every metric of a run in one table: name, section, unit, and meaning.

TensorBoard's descriptions and layout and docs/metrics.md come from this table. A name may have placeholders in capital
letters, such as ``trainer/seconds/PHASE``, and an optional part in brackets, such as ``eval[/ENVIRONMENT]/reward_mean``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

LEARNING = "Learning"
SIGNAL = "Signal and samples"
OFF_POLICY = "Off-policy and staleness"
SPEED = "Speed and waiting"
SYSTEM = "System"

SECTIONS: Mapping[str, str] = {
    LEARNING: "Does the policy become better, and is the update stable?",
    SIGNAL: "Do the samples say anything to learn from?",
    OFF_POLICY: "How far are the sampled tokens from the policy that learns from them?",
    SPEED: "Where does the time of a step go, and who waits for whom?",
    SYSTEM: "Are the services healthy?",
}
"""The sections in the order in which a user asks, each with its question."""

_PLACEHOLDER = re.compile(r"[A-Z]+")
_NUMBERS = ("K", "N")
"""Placeholders that stand for a whole number. All others stand for any text."""


@dataclass(frozen=True)
class Metric:
    """A metric, or several whose names follow one pattern.

    Attributes:
        name: Its name in ``metrics.jsonl`` and TensorBoard, or the pattern.
        section: One of `SECTIONS`.
        unit: What it counts or is measured in; "share" is a number from 0 to 1.
        text: Its meaning, in one sentence.
        chart: Title of its chart in TensorBoard's layout. Empty: it is only in the list of all metrics.
    """

    name: str
    section: str
    unit: str
    text: str
    chart: str = ""

    @cached_property
    def regex(self) -> str:
        """A regular expression that matches its names; anchor both ends."""
        parts = re.split(r"(\[.*?\])", self.name)
        return "".join(
            f"(?:{_filled(part[1:-1])})?" if part.startswith("[") else _filled(part) for part in parts if part
        )

    @property
    def is_pattern(self) -> bool:
        """Whether its name has a placeholder."""
        return _PLACEHOLDER.search(self.name) is not None


def _filled(text: str) -> str:
    """Return the regular expression of a part of a name."""
    return _PLACEHOLDER.sub(lambda found: r"\d+" if found[0] in _NUMBERS else ".+", text)


HELD_OUT = ("Held-out reward", "Held-out tasks solved")
"""Charts that only a run with evaluations has."""

BY_ENVIRONMENT = "Reward by environment"
"""Chart that only a run with several environments has."""

_REWARD = "Reward of the trained samples"
_PARTS = "Measures of the environment"
_GROUPS = "Groups of a batch"
_LENGTH = "Length of completions"
_SHARES = "Completions that are cut off, duplicates or repetitive"
_STALENESS = "Staleness of trained tokens"
_CLIPPED = "Tokens that are clipped, truncated or masked"
_WAITS = "Who waits: shares of the time"
_TOKENS_PER_S = "Tokens per second"
_PHASES = "Seconds of the trainer's step"
_WEIGHTS = "Seconds to bring new weights to the replicas"

METRICS = (
    # Learning.
    Metric("reward/mean", LEARNING, "reward", "Mean reward of the samples of the batch.", _REWARD),
    Metric("reward/p10", LEARNING, "reward", "A tenth of the samples have at most this reward.", _REWARD),
    Metric("reward/p50", LEARNING, "reward", "Median reward of the samples.", _REWARD),
    Metric("reward/p90", LEARNING, "reward", "A tenth of the samples have at least this reward.", _REWARD),
    Metric("reward/max", LEARNING, "reward", "Greatest reward of the batch."),
    Metric("reward/std", LEARNING, "reward", "Standard deviation of the rewards of the batch.", "Spread of rewards"),
    Metric(
        "eval[/ENVIRONMENT]/reward_mean",
        LEARNING,
        "reward",
        "Mean reward on held-out tasks, sampled at the evaluation's temperature.",
        HELD_OUT[0],
    ),
    Metric(
        "eval[/ENVIRONMENT]/greedy_reward_mean",
        LEARNING,
        "reward",
        "Mean reward on held-out tasks, always taking the likeliest token.",
        HELD_OUT[0],
    ),
    Metric("eval[/ENVIRONMENT]/exact_share", LEARNING, "share", "Held-out samples with full reward.", HELD_OUT[1]),
    Metric(
        "eval[/ENVIRONMENT]/greedy_exact_share",
        LEARNING,
        "share",
        "Held-out samples with full reward, always taking the likeliest token.",
        HELD_OUT[1],
    ),
    Metric(
        "eval[/ENVIRONMENT]/pass_at_K",
        LEARNING,
        "share",
        "Held-out tasks that at least one of K samples solves.",
        HELD_OUT[1],
    ),
    Metric("eval[/ENVIRONMENT]/pass_at_K_low", LEARNING, "share", "Lower end of the 95% interval of pass_at_K."),
    Metric("eval[/ENVIRONMENT]/pass_at_K_high", LEARNING, "share", "Upper end of the 95% interval of pass_at_K."),
    Metric("eval[/ENVIRONMENT]/reward_stderr", LEARNING, "reward", "Standard error of reward_mean, over tasks."),
    Metric(
        "eval[/ENVIRONMENT]/greedy_reward_stderr",
        LEARNING,
        "reward",
        "Standard error of greedy_reward_mean, over tasks.",
    ),
    Metric("eval[/ENVIRONMENT]/truncated_share", LEARNING, "share", "Held-out samples that reached the token limit."),
    Metric("eval[/ENVIRONMENT]/missing_rewards", LEARNING, "samples", "Held-out samples without a reward."),
    Metric("eval[/ENVIRONMENT]/failed_tasks", LEARNING, "tasks", "Held-out tasks that could not be attempted."),
    Metric("eval[/ENVIRONMENT]/failed_episodes", LEARNING, "episodes", "Attempts at held-out tasks that failed."),
    Metric(
        "eval[/ENVIRONMENT]/environment/NAME",
        LEARNING,
        "the environment's",
        "Mean on held-out tasks of a measure that the environment returned beside the reward.",
    ),
    Metric(
        "environments/ENVIRONMENT/reward_mean",
        LEARNING,
        "reward",
        "Mean reward of one environment's samples, in a run with several environments.",
        BY_ENVIRONMENT,
    ),
    Metric("trainer/loss", LEARNING, "loss", "Loss of the update, mean over its applied steps.", "Loss"),
    Metric(
        "trainer/grad_norm",
        LEARNING,
        "norm",
        "Norm of the gradient before clipping; a jump far above its usual value warns of an unstable update.",
        "Norm of the gradient",
    ),
    Metric(
        "trainer/entropy",
        LEARNING,
        "nats",
        "Mean entropy of the policy at the trained tokens; near 0 the policy explores no more.",
        "Entropy of the policy",
    ),
    Metric("trainer/learning_rate", LEARNING, "", "Learning rate of the last optimizer step.", "Learning rate"),
    Metric("trainer/optimizer_steps", LEARNING, "steps", "Optimizer steps of the batch that were applied."),
    Metric(
        "trainer/skipped_steps",
        LEARNING,
        "steps",
        "Optimizer steps of the batch that were skipped because loss or gradient was not finite; should be 0.",
        "Skipped optimizer steps",
    ),
    Metric(
        "trainer/token_budget_halved",
        SPEED,
        "",
        "1 where the batch ran out of memory and was trained with half of `trainer.token_budget`; absent otherwise.",
    ),
    Metric(
        "trainer/kl", LEARNING, "nats", "Mean divergence of the policy from the reference model.", "KL to other models"
    ),
    Metric(
        "trainer/teacher_kl", LEARNING, "nats", "Mean divergence of the policy from the teacher.", "KL to other models"
    ),
    Metric("trainer/critic/value_loss", LEARNING, "loss", "Loss of the critic."),
    Metric("trainer/critic/value_error", LEARNING, "reward", "Root mean square of the critic's error."),
    Metric(
        "trainer/critic/explained_variance",
        LEARNING,
        "share",
        "How much of the returns' variance the critic predicted before the update: 1 is all, 0 or less is nothing.",
    ),
    Metric("trainer/critic/value_clip_fraction", LEARNING, "share", "Tokens whose value loss was clipped."),
    Metric("trainer/critic/value_mean", LEARNING, "reward", "Mean value that the critic predicted."),
    Metric("trainer/critic/return_mean", LEARNING, "reward", "Mean return that the critic should have predicted."),
    Metric("trainer/critic/grad_norm", LEARNING, "norm", "Norm of the critic's gradient before clipping."),
    Metric("trainer/critic/learning_rate", LEARNING, "", "Learning rate of the critic."),
    Metric(
        "trainer/critic/skipped_steps",
        LEARNING,
        "steps",
        "Optimizer steps of the critic that were skipped as not finite.",
    ),
    Metric(
        "trainer/critic/warmup", LEARNING, "0 or 1", "1 while the critic learns alone and the policy stays as it is."
    ),
    # Signal and samples.
    Metric("groups/count", SIGNAL, "groups", "Groups of the batch with a reward.", _GROUPS),
    Metric(
        "groups/degenerate", SIGNAL, "groups", "Groups whose rewards are all equal: they have no gradient.", _GROUPS
    ),
    Metric(
        "groups/all_zero", SIGNAL, "groups", "Groups in which no sample was rewarded: tasks that are too hard.", _GROUPS
    ),
    Metric(
        "groups/all_solved",
        SIGNAL,
        "groups",
        "Groups in which every sample was solved: tasks that are too easy.",
        _GROUPS,
    ),
    Metric("completion/mean_tokens", SIGNAL, "tokens", "Mean length of the completions.", _LENGTH),
    Metric(
        "completion/mean_tokens_rewarded",
        SIGNAL,
        "tokens",
        "Mean length of completions with a reward; far above the unrewarded ones, length may be what pays.",
        _LENGTH,
    ),
    Metric(
        "completion/mean_tokens_unrewarded", SIGNAL, "tokens", "Mean length of completions without a reward.", _LENGTH
    ),
    Metric("completion/max_tokens", SIGNAL, "tokens", "Length of the longest completion of the batch."),
    Metric(
        "completion/truncated_share",
        SIGNAL,
        "share",
        "Completions that reached the token limit before they ended.",
        _SHARES,
    ),
    Metric(
        "completion/duplicate_share",
        SIGNAL,
        "share",
        "Completions equal to another one of their group; a rise says that the policy explores less.",
        _SHARES,
    ),
    Metric(
        "completion/repetition",
        SIGNAL,
        "share",
        "How much of the completions repeats itself; a rise warns of a collapse into loops.",
        _SHARES,
    ),
    Metric("trainer/trajectories", SIGNAL, "trajectories", "Trajectories of the batch as it came to the trainer."),
    Metric("trainer/missing_rewards", SIGNAL, "episodes", "Episodes of the batch without a reward."),
    Metric("trainer/sequences", SIGNAL, "trajectories", "Trajectories of the batch that were trained."),
    Metric(
        "trainer/zero_advantage_sequences",
        SIGNAL,
        "trajectories",
        "Trained trajectories whose advantage is 0: they have no gradient.",
        "Trajectories without a gradient",
    ),
    Metric(
        "trainer/advantage_positive", SIGNAL, "share", "Trained tokens with a positive advantage.", "Sign of advantages"
    ),
    Metric(
        "trainer/advantage_negative", SIGNAL, "share", "Trained tokens with a negative advantage.", "Sign of advantages"
    ),
    Metric("tokens/trained", SIGNAL, "tokens", "Sampled tokens that changed the policy.", "Trained tokens"),
    Metric("trainer/tokens", SIGNAL, "tokens", "All tokens of the trained trajectories, prompts included."),
    Metric(
        "trainer/loss_tokens",
        SIGNAL,
        "tokens",
        "Tokens in the loss; more than tokens/trained where steps were skipped or only the critic learned.",
    ),
    Metric(
        "environment/NAME",
        SIGNAL,
        "the environment's",
        "Mean of a measure that the environment returned beside the reward, such as a part of the reward.",
        _PARTS,
    ),
    Metric(
        "trainer/dropped_trajectories/REASON",
        SIGNAL,
        "trajectories",
        "Trajectories of the batch that were not trained, by reason.",
        "Dropped trajectories",
    ),
    Metric(
        "trainer/dropped_tokens/REASON",
        SIGNAL,
        "tokens",
        "Sampled tokens of the batch that were not trained, by reason.",
    ),
    # Off-policy and staleness.
    Metric(
        "staleness/mean",
        OFF_POLICY,
        "versions",
        "By how many versions the trained tokens are older than the weights that learn from them, in the mean.",
        _STALENESS,
    ),
    Metric("staleness/max", OFF_POLICY, "versions", "Staleness of the oldest trained token.", _STALENESS),
    Metric(
        "staleness/share_ge_1",
        OFF_POLICY,
        "share",
        "Trained tokens that an earlier version sampled.",
        "Tokens of earlier versions",
    ),
    Metric(
        "staleness/tokens_at_N",
        OFF_POLICY,
        "tokens",
        "Trained tokens that are N versions old.",
        "Trained tokens by staleness",
    ),
    Metric(
        "trainer/mismatch_kl",
        OFF_POLICY,
        "nats",
        "Divergence of the trainer's probabilities from the sampler's, before the update; a rise says that they compute differently.",
        "Trainer against sampler: divergence",
    ),
    Metric(
        "trainer/mismatch_kl_last",
        OFF_POLICY,
        "nats",
        "The same in the last of several optimizer steps: how far the update moved the policy.",
        "Trainer against sampler: divergence",
    ),
    Metric(
        "trainer/max_abs_log_difference",
        OFF_POLICY,
        "nats",
        "Greatest difference of a token's log-probability between trainer and sampler.",
        "Trainer against sampler: greatest difference",
    ),
    Metric(
        "trainer/precision_differs",
        OFF_POLICY,
        "",
        "1 if the sampler's weights have another precision than the trainer computes in; absent if replicas do not say theirs.",
    ),
    Metric(
        "trainer/effective_sample_size",
        OFF_POLICY,
        "share",
        "Share of the tokens that count after importance weights; near 1 the samples fit the policy, below 0.5 few decide all.",
        "Effective samples",
    ),
    Metric("trainer/chi_square", OFF_POLICY, "", "Variance of the importance weights between trainer and sampler."),
    Metric(
        "trainer/correction_effective_sample_size",
        OFF_POLICY,
        "share",
        "Effective samples of the correction's weights before truncation.",
        "Effective samples",
    ),
    Metric("trainer/correction_chi_square", OFF_POLICY, "", "Variance of the correction's weights before truncation."),
    Metric("trainer/clip_fraction_low", OFF_POLICY, "share", "Trained tokens clipped at the lower bound.", _CLIPPED),
    Metric("trainer/clip_fraction_high", OFF_POLICY, "share", "Trained tokens clipped at the upper bound.", _CLIPPED),
    Metric(
        "trainer/dual_clip_fraction",
        OFF_POLICY,
        "share",
        "Trained tokens clipped by the second bound of dual clip.",
        _CLIPPED,
    ),
    Metric(
        "trainer/truncate_fraction",
        OFF_POLICY,
        "share",
        "Trained tokens whose importance weight was truncated.",
        _CLIPPED,
    ),
    Metric(
        "trainer/mask_fraction_low", OFF_POLICY, "share", "Tokens left out because they became too unlikely.", _CLIPPED
    ),
    Metric(
        "trainer/mask_fraction_high", OFF_POLICY, "share", "Tokens left out because they became too likely.", _CLIPPED
    ),
    Metric("trainer/deselect_fraction", OFF_POLICY, "share", "Tokens that the selection of m2po left out.", _CLIPPED),
    Metric(
        "trainer/correction_truncate_fraction",
        OFF_POLICY,
        "share",
        "Tokens whose correction weight was truncated.",
        _CLIPPED,
    ),
    Metric(
        "trainer/correction_mask_fraction_low",
        OFF_POLICY,
        "share",
        "Tokens left out because their correction weight was too small.",
        _CLIPPED,
    ),
    Metric(
        "trainer/correction_mask_fraction_high",
        OFF_POLICY,
        "share",
        "Tokens left out because their correction weight was too large.",
        _CLIPPED,
    ),
    Metric(
        "trainer/veto_fraction",
        OFF_POLICY,
        "share",
        "Tokens of sequences that one very unlikely token vetoed.",
        _CLIPPED,
    ),
    Metric(
        "trainer/off_policy_mask_fraction",
        OFF_POLICY,
        "share",
        "Tokens of sequences left out as too far off-policy.",
        _CLIPPED,
    ),
    Metric(
        "trainer/multi_version_trajectories",
        OFF_POLICY,
        "trajectories",
        "Trajectories whose tokens were sampled by several versions.",
    ),
    Metric("requests/spanning", OFF_POLICY, "requests", "Requests during which the sampling version changed."),
    Metric(
        "weights/replica_lag",
        OFF_POLICY,
        "versions",
        "By how many versions the slowest ready replica lags behind the newest one.",
        "Lag of the slowest replica",
    ),
    # Speed and waiting.
    Metric("time/step_s", SPEED, "s", "Seconds from one applied batch to the next.", "Seconds of a step"),
    Metric("load/trainer_idle", SPEED, "share", "Share of the time in which the trainer had no batch.", _WAITS),
    Metric(
        "load/rollout_idle",
        SPEED,
        "share",
        "Share of the time in which no group ran, because none might start.",
        _WAITS,
    ),
    Metric(
        "load/dispatch_blocked",
        SPEED,
        "share",
        "Share of the time in which the staleness bound, the pace or a missing version held further groups back.",
        _WAITS,
    ),
    Metric("tokens/generated_per_s", SPEED, "tokens/s", "Sampled tokens per second.", _TOKENS_PER_S),
    Metric(
        "trainer/tokens_per_s",
        SPEED,
        "tokens/s",
        "Tokens of the batch, prompts included, per second of the trainer's update.",
        _TOKENS_PER_S,
    ),
    Metric(
        "trainer/forward_tokens_per_s",
        SPEED,
        "tokens/s",
        "Tokens that passed through the layers, per second of the update; the difference to tokens_per_s is saved work.",
    ),
    Metric(
        "trainer/seconds/PHASE",
        SPEED,
        "s",
        "Seconds of a phase of the update: packing, forward, backward, optimizer, ...; total is all of it.",
        _PHASES,
    ),
    Metric(
        "trainer/wait_batch_seconds",
        SPEED,
        "s",
        "Seconds that the trainer waited for this batch.",
        "Seconds that the trainer waited",
    ),
    Metric(
        "trainer/wait_push_seconds",
        SPEED,
        "s",
        "Seconds that the trainer waited for the push of an earlier version.",
        "Seconds that the trainer waited",
    ),
    Metric("weights/diff_s", SPEED, "s", "Seconds to compare a version with the one before.", _WEIGHTS),
    Metric("weights/push_s", SPEED, "s", "Seconds to send a version to the weight service.", _WEIGHTS),
    Metric("weights/commit_s", SPEED, "s", "Seconds until the weight service had committed it.", _WEIGHTS),
    Metric("weights/pull_s", SPEED, "s", "Seconds in which the slowest replica fetched a version.", _WEIGHTS),
    Metric("weights/stage_s", SPEED, "s", "Seconds in which the slowest replica prepared it in memory.", _WEIGHTS),
    Metric("weights/pause_s", SPEED, "s", "Seconds in which sampling stood still for it.", _WEIGHTS),
    Metric("weights/apply_s", SPEED, "s", "Seconds to exchange the weights of the engine.", _WEIGHTS),
    Metric("weights/total_s", SPEED, "s", "Seconds of the slowest replica's whole update."),
    Metric(
        "environment/score_seconds_p95",
        SPEED,
        "s",
        "95% of the calls that score an episode take at most this long.",
        "Seconds to score an episode",
    ),
    Metric("tokens/generated", SPEED, "tokens", "Tokens sampled since the last step."),
    Metric(
        "trainer/forward_tokens",
        SPEED,
        "tokens",
        "Tokens that passed through the layers; a prompt that samples share counts once.",
    ),
    Metric("trainer/packing_efficiency", SPEED, "share", "Share of attention's cells that held a token."),
    Metric("trainer/micro_batches", SPEED, "passes", "Forward passes with a gradient."),
    Metric("trainer/flops", SPEED, "operations", "Floating-point operations that the forwarded tokens need."),
    Metric(
        "trainer/mfu", SPEED, "share", "Share of the devices' peak that the update used.", "Use of the devices' peak"
    ),
    # System.
    Metric(
        "trainer/peak_memory_bytes",
        SYSTEM,
        "bytes",
        "On a GPU the most that tensors took in the step, on a CPU the trainer's largest resident memory so far.",
        "Memory of the trainer",
    ),
    Metric(
        "policy/epoch",
        SYSTEM,
        "",
        "Epoch of the policy; it rises when the trainer begins anew from a checkpoint.",
        "Restarts of the trainer",
    ),
    Metric("environment/failed_calls", SYSTEM, "times", "Calls of environments that failed.", "Failures"),
    Metric("rollout/retried", SYSTEM, "times", "Requests that were sent again after a failure.", "Failures"),
    Metric(
        "rollout/evicted",
        SYSTEM,
        "times",
        "Times that a replica was taken out because it did not answer or misbehaved.",
        "Failures",
    ),
    Metric(
        "rollout/continued",
        SYSTEM,
        "times",
        "Samples that another replica continued from the tokens that were there.",
        "Failures",
    ),
    Metric("rollout/tokens_kept", SYSTEM, "tokens", "Tokens of lost replicas that were kept."),
    Metric(
        "rollout/tokens_lost", SYSTEM, "tokens", "Tokens of lost replicas that had to be sampled again.", "Lost tokens"
    ),
    Metric(
        "orchestrator/loop_lag_p99_ms",
        SYSTEM,
        "ms",
        "How late the orchestrator's event loop ran what was due, 99th percentile.",
        "Lag of the orchestrator",
    ),
    Metric("weights/bytes_sent", SYSTEM, "bytes", "Bytes of a version that travelled.", "Bytes of a version"),
    Metric("weights/dense_bytes", SYSTEM, "bytes", "Bytes of a version as whole tensors.", "Bytes of a version"),
    Metric(
        "weights/changed_fraction",
        SYSTEM,
        "share",
        "Values that differ from the version before.",
        "Weights that change",
    ),
    Metric(
        "weights/delta", SYSTEM, "0 or 1", "1 if the difference to the version before travelled, 0 for whole tensors."
    ),
    Metric("requests/count", SYSTEM, "requests", "Requests for samples that ended since the last step."),
)
"""Every metric that this release writes, in the order in which a user wants to see them."""

OWN_LOSS = Metric(
    "trainer/NAME",
    LEARNING,
    "the loss function's",
    "Mean over the trained tokens of what the run's own loss function returned under this name; of max_... the greatest.",
)
"""The entry for all other metrics of the trainer, such as the sums of a user's own loss function."""

_BY_NAME = {each.name: each for each in METRICS if not each.is_pattern}
_PATTERNS = tuple((re.compile(each.regex), each) for each in (*METRICS, OWN_LOSS) if each.is_pattern)


@cache
def find(name: str) -> Metric | None:
    """Return the table's entry for a metric; None for a name that is not in it, such as that of an earlier release."""
    found = _BY_NAME.get(name)
    return found or next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)
