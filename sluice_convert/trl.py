"""TRL's GRPOConfig with the arguments of its script, version 1.16 (Apache-2.0): YAML, JSON, or the flags of a command."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.schema import Value
from sluice.errors import ConfigError
from sluice_convert.table import (
    Drop,
    Given,
    NotConvertibleError,
    Outcome,
    Set,
    Source,
    System,
    Todo,
    home,
    missing,
    rule,
    run_name,
    same,
    template_arguments,
    template_file,
    to,
)

DEFAULTS = {
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "max_completion_length": 512,
    "temperature": 1.0,
    "loss_type": "dapo",
    "epsilon": 0.2,
    "scale_rewards": "group",
    "beta": 0.0,
    "num_iterations": 1,
    "importance_sampling_level": "token",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "seed": 42,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "save_strategy": "steps",
    "save_steps": 500,
}

OWN_REWARDS = {
    name: f"trl.rewards:{name}" for name in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
}
"""Reward functions that come with TRL, by their names in its script."""


def processes(given: Given) -> int:
    """Return the processes that train."""
    return given.options.get("processes") or given.count("launcher.num_processes")


def optimizer_steps(given: Given) -> tuple[int, int]:
    """Return the completions that are generated at a time, and the optimizer steps that a pass over them makes.

    Raises:
        ConfigError: if the numbers do not divide.
    """
    one = given.count("per_device_train_batch_size") * processes(given)
    accumulated = given.count("gradient_accumulation_steps")
    if given.has("generation_batch_size"):
        completions = given.whole("generation_batch_size")
        parts = completions // one
    else:
        parts = given.count("steps_per_generation", accumulated)
        completions = one * parts
    return completions, max(1, parts // accumulated)


def _batch(given: Given) -> Iterator[Outcome]:
    completions, minibatches = optimizer_steps(given)
    size, iterations = given.count("num_generations"), given.count("num_iterations")
    how = "per_device_train_batch_size", "gradient_accumulation_steps", "launcher.num_processes"
    named = (*how, "generation_batch_size", "steps_per_generation", "num_generations")
    if size < 1 or completions % size or completions < size:
        raise ConfigError(
            f"{completions} completions at a time are no whole groups of num_generations = {size}: give the number of processes that"
            " trained with --processes, or correct per_device_train_batch_size and gradient_accumulation_steps"
        )
    yield Set(
        "orchestrator.batch_size",
        completions // size,
        (*given.present(*named),),
        f"{completions} completions at a time / num_generations",
    )
    yield Set("orchestrator.group_size", size, ("num_generations",))
    if minibatches > 1:
        yield Set(
            "trainer.minibatches",
            minibatches,
            ("steps_per_generation", "gradient_accumulation_steps"),
            "optimizer steps for each generation",
        )
    if iterations > 1:
        yield Set("trainer.epochs", iterations, ("num_iterations",))
    if "processes" not in given.options and not given.has("launcher.num_processes"):
        yield Todo(
            "orchestrator.batch_size",
            "it is for one process that trained; convert again with --processes N if there were more",
        )
    if given.has("launcher.config_file"):
        yield Drop(
            "launcher.config_file",
            "a configuration of accelerate: give its num_processes with --processes, and set trainer.parallel or allocation_mode",
        )
    steps = given.whole("max_steps", -1)
    per_batch = minibatches * iterations
    if steps > 0:
        yield Set(
            "orchestrator.max_steps",
            -(-steps // per_batch),
            ("max_steps",),
            f"{steps} optimizer steps, {per_batch} for each batch" if per_batch > 1 else "",
        )
    elif "steps" in given.options:
        yield Set("orchestrator.max_steps", given.options["steps"], ("num_train_epochs",), "--steps")
    else:
        epochs = given.number("num_train_epochs", 3.0)
        yield Todo(
            "orchestrator.max_steps",
            f"num_train_epochs = {epochs:g} passes over the data: rows x {epochs:g} / {completions // size}; convert again with --steps N; 100 until then",
        )
        yield Drop("num_train_epochs", "Sluice counts batches: set orchestrator.max_steps, or give --steps")


def _schedule(given: Given) -> Iterator[Outcome]:
    kind = given.text("lr_scheduler_type").removeprefix("SchedulerType.").lower()
    ours = {
        "linear": "linear",
        "cosine": "cosine",
        "cosine_with_min_lr": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
    }.get(kind)
    _, minibatches = optimizer_steps(given)
    per_batch = minibatches * given.count("num_iterations")
    steps = given.whole("max_steps", -1)
    if steps <= 0:
        steps = given.options.get("steps", 0) * per_batch
    warmup = given.whole("warmup_steps") if given.number("warmup_steps") >= 1 else 0
    share = given.number("warmup_ratio") or (given.number("warmup_steps") if not warmup else 0.0)
    named = given.present("warmup_steps", "warmup_ratio")
    if not warmup and share and steps:
        warmup = -(-int(share * steps * 1000) // 1000)
    if warmup:
        yield Set("trainer.warmup_steps", warmup, named)
    elif share:
        yield Todo(
            "trainer.warmup_steps",
            f"{named[0]} = {share:g} of the steps: convert again with --steps N, or set the number of optimizer steps",
        )
        yield Drop(named[0], "the number of steps is not known: convert again with --steps N")
    if ours is None:
        yield Drop(
            "lr_scheduler_type",
            f"there is no schedule {kind}: set trainer.schedule to constant, linear, cosine or wsd (constant, then a decay)",
        )
    elif ours == "constant":
        yield Set("trainer.schedule", "constant", ("lr_scheduler_type",))
    elif not steps:
        yield Todo(
            "trainer.schedule",
            f"the schedule {kind} needs the number of steps: convert again with --steps N; it is constant until then",
        )
        if given.has("lr_scheduler_type"):
            yield Drop("lr_scheduler_type", "the number of steps is not known: convert again with --steps N")
    else:
        yield Set("trainer.schedule", ours, ("lr_scheduler_type",))
        yield Set("trainer.max_steps", steps, ("max_steps",), "optimizer steps until the end of the decay")
        floor = given.number("lr_scheduler_kwargs.min_lr_rate") or (
            given.number("lr_scheduler_kwargs.min_lr") / (given.number("learning_rate") or 1.0)
        )
        if floor:
            yield Set("trainer.min_lr_ratio", floor, given.present(*given.below("lr_scheduler_kwargs")))


def _objective(given: Given) -> Iterator[Outcome]:
    kind, sequence = given.text("loss_type"), given.text("importance_sampling_level") == "sequence"
    low = given.number("epsilon")
    high = given.number("epsilon_high", low)
    preset = {
        "grpo": "grpo",
        "bnpo": "grpo",
        "dapo": "dapo",
        "dr_grpo": "dr_grpo",
        "cispo": "cispo",
        "sapo": "sapo",
    }.get(kind)
    if preset is None:
        yield Drop(
            "loss_type",
            f"there is no loss {kind} here; dapo stands in its place: choose a preset of docs/objectives.md, or write the loss (trainer.objective.preset = module:function)",
        )
        preset = "dapo"
    if sequence:
        if preset not in ("grpo", "dapo", "dr_grpo"):
            yield Drop(
                "importance_sampling_level", f"{kind} has ratios per token here: set trainer.objective.preset to gspo"
            )
            sequence = False
        else:
            preset = "gspo"
    yield Set("trainer.objective.preset", preset, ("loss_type", *(("importance_sampling_level",) if sequence else ())))
    if preset == "sapo":
        yield Set("trainer.objective.tau_pos", given.number("sapo_temperature_pos"), ("sapo_temperature_pos",))
        yield Set("trainer.objective.tau_neg", given.number("sapo_temperature_neg"), ("sapo_temperature_neg",))
    elif preset == "cispo":
        yield Set(
            "trainer.objective.eps_high",
            max(0.0, high - 1.0),
            ("epsilon_high", "epsilon"),
            "TRL's bound is the ratio itself",
        )
    else:
        yield Set("trainer.objective.eps_low", low, ("epsilon",))
        yield Set("trainer.objective.eps_high", high, ("epsilon_high",) if given.has("epsilon_high") else ("epsilon",))
        if given.number("delta"):
            if preset == "gspo":
                yield Drop("delta", "gspo has no second clip here")
            else:
                yield Set("trainer.objective.dual_clip", given.number("delta"), ("delta",), "two-sided clip")
    aggregation = {"grpo": "sequence", "sapo": "sequence", "dr_grpo": "constant"}.get(kind, "token")
    yield Set(
        "trainer.objective.aggregation",
        aggregation,
        ("loss_type",),
        "of the whole batch; TRL: of each process" if kind == "bnpo" else "",
    )
    if aggregation == "constant":
        yield Set("trainer.objective.max_tokens", given.whole("max_completion_length"), ("max_completion_length",))
    yield from _correction(given)


def _correction(given: Given) -> Iterator[Outcome]:
    """The weight between what sampled and what trains: TRL recomputes the log-probabilities, if vLLM sampled."""
    if not given.flag("use_vllm"):
        yield Set(
            "trainer.objective.proximal",
            "bypass",
            ("use_vllm",),
            "the engine's log-probabilities are those of the sampler",
        )
        return
    yield Set(
        "trainer.objective.proximal",
        "recompute",
        ("use_vllm",),
        "one forward pass per batch, as in TRL; bypass saves it",
    )
    kinds = {
        "token_truncate": "token_tis",
        "token_mask": "token_mask",
        "sequence_truncate": "sequence_tis",
        "sequence_mask": "sequence_mask",
    }
    kind = (
        kinds.get(given.text("vllm_importance_sampling_mode"))
        if given.flag("vllm_importance_sampling_correction")
        else "none"
    )
    if kind is None:
        yield Drop(
            "vllm_importance_sampling_mode", "there is no such correction: set trainer.objective.correction.kind"
        )
        kind = "none"
    sources = "vllm_importance_sampling_correction", "vllm_importance_sampling_mode"
    yield Set(
        "trainer.objective.correction.kind",
        kind,
        sources,
        "sequences inside the bounds weigh 1 here, and their ratio in TRL" if kind == "sequence_mask" else "",
    )
    name = (
        "vllm_importance_sampling_cap"
        if given.has("vllm_importance_sampling_cap")
        else "vllm_importance_sampling_clip_max"
    )
    most, least = given.number(name), given.number("vllm_importance_sampling_clip_min")
    if kind in ("token_tis", "sequence_tis"):
        yield Set("trainer.objective.correction.cap", most, (name,))
        yield Drop("vllm_importance_sampling_clip_min", "a truncated weight has no lower bound here")
    elif kind in ("token_mask", "sequence_mask"):
        yield Set("trainer.objective.correction.high", most, (name,))
        yield Set(
            "trainer.objective.correction.low",
            least or 1e-9,
            ("vllm_importance_sampling_clip_min",),
            "" if least else "no lower bound",
        )


def _kl(given: Given) -> Iterator[Outcome]:
    beta = given.number("beta")
    yield Set("trainer.objective.kl_coef", beta, ("beta",))
    if beta:
        biased = given.value("use_bias_correction_kl") is not None and not given.flag("use_bias_correction_kl")
        yield Set(
            "trainer.objective.kl_kind",
            "k3",
            ("beta",),
            "" if biased else "TRL weighs it by the ratio as well, this does not",
        )
        yield Set("trainer.reference.model", "base", ("beta",))


def _advantage(given: Given) -> Iterator[Outcome]:
    scale = given.text("scale_rewards").lower()
    ours = {"group": "grpo", "true": "grpo", "batch": "lite_ppo", "none": "centered", "false": "centered"}.get(scale)
    if ours is None:
        raise ConfigError(f"scale_rewards is {scale!r}: TRL has group, batch and none")
    yield Set("orchestrator.advantage", ours, ("scale_rewards",))


def _environment(given: Given) -> Iterator[Outcome]:
    arguments: dict[str, Value] = {}
    dataset = given.text("dataset_name")
    arguments["dataset"] = dataset or "FILL-IN"
    functions = [OWN_REWARDS.get(name) or _dotted(name) for name in given.texts("reward_funcs")]
    arguments["reward_funcs"] = functions or ["rewards.py:reward"]
    if given.has("reward_weights"):
        arguments["reward_weights"] = given.numbers("reward_weights")
    if given.text("system_prompt"):
        arguments["system"] = given.text("system_prompt")
    yield Set("orchestrator.environment", "trl", ("reward_funcs",), "docs/environments.md")
    yield Set(
        "orchestrator.environment_args",
        arguments,
        given.present("dataset_name", "reward_funcs", "reward_weights", "system_prompt"),
    )
    if not dataset:
        yield Todo(
            "orchestrator.environment_args", "dataset: rows with a column `prompt`, a file, a directory or a hub id"
        )
    if given.text("dataset_prompt_column") not in ("", "prompt"):
        yield Drop("dataset_prompt_column", "the column must be called prompt: rename it in the data")
    if not functions:
        yield Todo(
            "orchestrator.environment_args",
            "reward_funcs: the functions that your script gives GRPOTrainer, as path.py:function or module:function",
        )
    elif any(":" not in each for each in functions):
        yield Todo(
            "orchestrator.environment_args",
            "reward_funcs: names of your script, to be given as path.py:function or module:function",
        )
    if any(each in OWN_REWARDS.values() for each in functions):
        yield Todo(
            "orchestrator.environment_processes.python",
            "an interpreter with TRL, for its reward functions; unset: Sluice's own must have it",
        )


def _dotted(name: str) -> str:
    module, dot, function = name.rpartition(".")
    return f"{module}:{function}" if dot else name


def _model(given: Given) -> Iterator[Outcome]:
    if given.has("model_name_or_path"):
        yield Set("model", home(given.text("model_name_or_path")), ("model_name_or_path",))
    else:
        yield Todo("model", "the model that your script gives GRPOTrainer: a directory or a hub id")


def _lora(given: Given) -> Iterator[Outcome]:
    if not given.flag("use_peft"):
        return
    rank = given.whole("lora_r")
    yield Set("trainer.lora.rank", rank, ("use_peft", "lora_r"))
    yield Set("trainer.lora.alpha", given.number("lora_alpha"), ("lora_alpha",))
    yield Set("trainer.lora.dropout", given.number("lora_dropout"), ("lora_dropout",))
    modules = given.texts("lora_target_modules")
    if modules and modules != ["all-linear"]:
        yield Set("trainer.lora.target_modules", modules, ("lora_target_modules",))
    elif modules:
        yield Set("trainer.lora.target_modules", [], ("lora_target_modules",), "empty: all linear layers")
    yield Set("rollout.lora.enabled", True, ("use_peft",))
    yield Set("rollout.lora.max_rank", rank, ("lora_r",))


def _saves(given: Given) -> Iterator[Outcome]:
    kind, every = given.text("save_strategy"), given.number("save_steps")
    _, minibatches = optimizer_steps(given)
    per_batch = minibatches * given.count("num_iterations")
    if kind == "steps" and every >= 1:
        yield Set(
            "orchestrator.checkpoint.every_steps", max(1, round(every / per_batch)), ("save_steps", "save_strategy")
        )
    elif kind == "no":
        yield Set("orchestrator.checkpoint.every_steps", 0, ("save_strategy",))
    else:
        yield Drop("save_strategy", "checkpoints come by steps: set orchestrator.checkpoint.every_steps")
    if given.whole("save_total_limit"):
        yield Set(
            "trainer.checkpoint.keep", max(2, given.whole("save_total_limit")), ("save_total_limit",), "at least 2"
        )


def _evaluation(given: Given) -> Iterator[Outcome]:
    kind = given.text("eval_strategy") or given.text("evaluation_strategy")
    name = "eval_strategy" if given.has("eval_strategy") else "evaluation_strategy"
    _, minibatches = optimizer_steps(given)
    if kind == "steps":
        every = given.number("eval_steps", given.number("logging_steps", 500))
        yield Set(
            "orchestrator.evaluation.every_steps",
            max(1, round(every / (minibatches * given.count("num_iterations")))),
            (name, "eval_steps"),
        )
    elif kind == "epoch":
        yield Drop(name, "evaluations come by steps: set orchestrator.evaluation.every_steps")
    elif kind == "no":
        yield Set("orchestrator.evaluation.every_steps", 0, (name,))
    if given.has("dataset_test_split"):
        yield Set("orchestrator.evaluation.split", given.text("dataset_test_split"), ("dataset_test_split",))
    if given.whole("num_generations_eval"):
        yield Set("orchestrator.evaluation.samples", given.whole("num_generations_eval"), ("num_generations_eval",))


def _length(given: Given) -> Iterator[Outcome]:
    completion = given.whole("max_completion_length")
    yield Set("orchestrator.sampling.max_tokens", completion, ("max_completion_length",))
    if given.whole("vllm_max_model_length"):
        yield Set("rollout.max_model_len", given.whole("vllm_max_model_length"), ("vllm_max_model_length",))
        yield Drop("max_prompt_length", "prompts are not cut: rollout.max_model_len bounds prompt and answer")
    elif given.whole("max_prompt_length"):
        yield Set(
            "rollout.max_model_len",
            given.whole("max_prompt_length") + completion,
            ("max_prompt_length", "max_completion_length"),
            "prompts are not cut, a longer one is refused",
        )


def _engine(given: Given) -> Iterator[Outcome]:
    if given.flag("use_vllm"):
        yield Set("rollout.engine", "vllm", ("use_vllm",))
        if given.has("vllm_gpu_memory_utilization"):
            yield Set(
                "rollout.engine_args.gpu_memory_utilization",
                given.number("vllm_gpu_memory_utilization"),
                ("vllm_gpu_memory_utilization",),
                "TRL shares the device with the trainer; engines here have their own: 0.9 is usual"
                if given.text("vllm_mode") != "server"
                else "",
            )
        if given.whole("vllm_tensor_parallel_size", 1) > 1:
            yield Set(
                "rollout.engine_args.tensor_parallel_size",
                given.whole("vllm_tensor_parallel_size"),
                ("vllm_tensor_parallel_size",),
            )
    else:
        yield Todo(
            "rollout.engine",
            "TRL samples with transformers here; vllm is the default of Sluice, `transformers` its engine without vLLM",
        )


def _precision(given: Given) -> Iterator[Outcome]:
    if given.flag("fp16"):
        yield Drop("fp16", "the trainer computes in bfloat16 or float32: set trainer.dtype")
    if given.has("bf16"):
        yield Set("trainer.dtype", "bfloat16" if given.flag("bf16") else "float32", ("bf16",))


def _optimizer(value: Value) -> str:
    if not str(value).startswith("adamw"):
        raise NotConvertibleError("there are adamw and muon: set trainer.optimizer")
    return "adamw"


def _dtype(value: Value) -> str:
    if value in ("bfloat16", "float32"):
        return str(value)
    if value == "auto":
        return "auto"
    raise NotConvertibleError("the trainer computes in bfloat16 or float32: set trainer.dtype")


def _check(source: Source) -> None:
    if any(
        name.partition(".")[0] in ("trainer", "orchestrator", "actor", "actor_rollout_ref") for name in source.leaves
    ):
        raise ConfigError(
            f"{source.path} is not a configuration of TRL, whose settings have no tables: choose another system with --from"
        )
    if not any(row.names(name) for name in source.leaves for row in ROWS):
        raise ConfigError(
            f"{source.path} has no setting of TRL's GRPOConfig: give its YAML or JSON file, or the script that starts it with --flags"
        )


ROWS = (
    missing("env.**", "set variables where you start `sluice`: children inherit the environment"),
    rule(_model, ("model_name_or_path", "model")),
    to(("run_name", "output_dir"), "run", Given.text, by=lambda text: run_name(text.rstrip("/").rpartition("/")[2])),
    to("seed", "seed", Given.whole),
    rule(
        lambda _: [
            Set(
                "max_staleness",
                0,
                (),
                "TRL trains on what the present policy sampled; 1 or 2 overlaps sampling and training",
            )
        ]
    ),
    rule(
        _batch,
        (
            (
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "generation_batch_size",
                "steps_per_generation",
                "launcher.num_processes",
            ),
            "orchestrator.batch_size, trainer.minibatches",
            "completions of a generation / num_generations; optimizer steps of a generation",
        ),
        ("num_generations", "orchestrator.group_size"),
        ("num_iterations", "trainer.epochs"),
        (
            ("max_steps", "num_train_epochs"),
            "orchestrator.max_steps",
            "TRL counts optimizer steps, Sluice batches; epochs need --steps",
        ),
        ("launcher.config_file", "", "give accelerate's num_processes with --processes"),
        unread="the others of these settings say it already",
    ),
    rule(
        _environment,
        ("dataset_name", "orchestrator.environment, .environment_args", "environment trl, dataset"),
        ("reward_funcs", "orchestrator.environment_args", "reward_funcs, as path.py:function or module:function"),
        ("reward_weights", "orchestrator.environment_args", "reward_weights"),
        ("system_prompt", "orchestrator.environment_args", "system"),
        ("dataset_prompt_column", "", "the column must be called prompt"),
        unread="it is the default",
    ),
    to("dataset_train_split", "orchestrator.split", Given.text),
    missing(
        ("dataset_config", "dataset_streaming", "dataset_mixture", "dataset_mixture.**", "datasets", "datasets.**"),
        "save the rows that you want as JSONL or Parquet, and name the file in environment_args",
    ),
    missing(("reward_model_name_or_path",), "serve the reward model, and call it in a reward function"),
    rule(
        _length,
        ("max_completion_length", "orchestrator.sampling.max_tokens"),
        ("max_prompt_length", "rollout.max_model_len", "prompt + completion; a longer prompt is refused, not cut"),
        ("vllm_max_model_length", "rollout.max_model_len"),
    ),
    to("temperature", "orchestrator.sampling.temperature", Given.number),
    missing(
        ("top_p", "top_k", "min_p", "repetition_penalty"),
        "training samples from the whole distribution, so that its log-probabilities are those of the policy",
        off=(1.0, 0, -1, False, ""),
    ),
    missing(
        ("generation_kwargs", "generation_kwargs.**"),
        "orchestrator.sampling has temperature, max_tokens, stop and ignore_eos",
    ),
    template_arguments("chat_template_kwargs"),
    template_file("chat_template_path"),
    rule(
        lambda given: [Set("trainer.lr", given.number("learning_rate"), ("learning_rate",))],
        ("learning_rate", "trainer.lr"),
    ),
    rule(
        _schedule,
        (
            "lr_scheduler_type",
            "trainer.schedule, .max_steps",
            "linear, cosine, constant; a decay needs the number of steps: max_steps, or --steps",
        ),
        (("warmup_steps", "warmup_ratio"), "trainer.warmup_steps", "a share of the steps needs their number"),
        (("lr_scheduler_kwargs", "lr_scheduler_kwargs.**"), "trainer.min_lr_ratio", "min_lr and min_lr_rate"),
        lost="trainer.schedule has warmup_steps, decay_steps and min_lr_ratio",
    ),
    rule(
        lambda given: [
            Set("trainer.betas", [given.number("adam_beta1"), given.number("adam_beta2")], ("adam_beta1", "adam_beta2"))
        ],
        (("adam_beta1", "adam_beta2"), "trainer.betas"),
    ),
    to("adam_epsilon", "trainer.eps", Given.number),
    to("weight_decay", "trainer.weight_decay", Given.number),
    to("max_grad_norm", "trainer.grad_clip", Given.number),
    to("optim", "trainer.optimizer", Given.text, by=_optimizer),
    rule(
        _objective,
        (
            "loss_type",
            "trainer.objective.preset, .aggregation",
            "grpo, bnpo, dapo, dr_grpo, cispo and sapo; bnpo over the whole batch",
        ),
        ("importance_sampling_level", "trainer.objective.preset", "sequence: gspo"),
        ("epsilon", "trainer.objective.eps_low, .eps_high"),
        ("epsilon_high", "trainer.objective.eps_high", "for cispo it is the ratio itself: eps_high = epsilon_high - 1"),
        ("delta", "trainer.objective.dual_clip"),
        (("sapo_temperature_pos", "sapo_temperature_neg"), "trainer.objective.tau_pos, .tau_neg"),
        (
            ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode"),
            "trainer.objective.proximal, trainer.objective.correction.kind",
            "token_tis, token_mask, sequence_tis, sequence_mask; without vLLM there is none",
        ),
        (
            ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_min"),
            "trainer.objective.correction.cap, .high, .low",
        ),
        unread="it does not apply to this loss",
    ),
    rule(_kl, ("beta", "trainer.objective.kl_coef, trainer.reference.model", "k3, in the loss")),
    rule(_advantage, ("scale_rewards", "orchestrator.advantage", "group: grpo, batch: lite_ppo, none: centered")),
    missing(
        "multi_objective_aggregation",
        "rewards are added with their weights, then normalised",
        off=("sum_then_normalize",),
    ),
    to(
        "mask_truncated_completions",
        "orchestrator.overlong.policy",
        Given.flag,
        by=lambda masks: "mask" if masks else "none",
    ),
    to("entropy_coef", "trainer.objective.entropy_coef", Given.number),
    missing(
        ("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
        "the weight of the entropy is constant: trainer.objective.entropy_coef",
    ),
    missing("top_entropy_quantile", "all loss tokens are trained; a loss of your own can select them", off=(1.0,)),
    to("off_policy_mask_threshold", "trainer.objective.correction.off_policy_sequence_mask", Given.number),
    missing("use_bias_correction_kl", "the KL term is not weighed by the ratio", off=(False,)),
    missing(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"), "the reference policy is frozen"),
    rule(
        _engine,
        (("use_vllm", "vllm_mode"), "rollout.engine", "engines are services of their own"),
        ("vllm_gpu_memory_utilization", "rollout.engine_args", "gpu_memory_utilization"),
        ("vllm_tensor_parallel_size", "rollout.engine_args", "tensor_parallel_size"),
        unread="engines and trainer have their own devices, or share all: allocation_mode",
    ),
    same(
        ("vllm_server_*", "vllm_group_port", "vllm_enable_sleep_mode", "vllm_model_impl", "ds3_gather_for_generation"),
        "`sluice rl` starts the engine, and weights travel through the weight service",
    ),
    missing("vllm_structured_outputs_regex", "sampling has no grammar"),
    missing("vllm_guided_decoding_regex", "sampling has no grammar"),
    same(
        ("use_transformers_*", "transformers_continuous_batching_config", "cache_implementation", "use_cache"),
        "the engines batch continuously",
    ),
    rule(
        _lora,
        (("use_peft", "lora_r"), "trainer.lora.rank, rollout.lora.enabled, rollout.lora.max_rank"),
        ("lora_alpha", "trainer.lora.alpha"),
        ("lora_dropout", "trainer.lora.dropout"),
        ("lora_target_modules", "trainer.lora.target_modules", "all-linear is the default"),
        unread="without use_peft it has no effect",
    ),
    missing(
        (
            "lora_target_parameters",
            "lora_modules_to_save",
            "use_rslora",
            "use_dora",
            "load_in_8bit",
            "load_in_4bit",
            "use_bnb_nested_quant",
        ),
        "adapters are plain LoRA on linear layers (docs/lora.md)",
    ),
    same(("lora_task_type", "bnb_4bit_*"), "it is of causal language models without quantization"),
    rule(_precision, (("bf16", "fp16"), "trainer.dtype")),
    to(
        ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"),
        "trainer.dtype",
        Given.text,
        by=_dtype,
    ),
    to("gradient_checkpointing", "trainer.gradient_checkpointing", Given.flag),
    same("gradient_checkpointing_kwargs.**", "trainer.gradient_checkpointing is all there is"),
    to("torch_compile", "trainer.compile", Given.flag),
    same(
        ("attn_implementation", "model_init_kwargs.attn_implementation"),
        "trainer.attention = auto takes the fastest kernel that works",
    ),
    same(("use_liger_kernel", "use_liger_loss"), "logits are computed in parts anyway (trainer.logit_cells)"),
    missing(("model_revision",), "fetch the revision into a directory, and name that", off=("main", "")),
    missing(
        ("trust_remote_code", "model_init_kwargs.trust_remote_code"), "models with code of their own are not trained"
    ),
    missing(("model_init_kwargs", "model_init_kwargs.**"), "the model is loaded as its files say"),
    same(("cast_lm_head_to_fp32", "disable_dropout"), "logits are computed in float32, without dropout"),
    rule(
        _saves,
        (("save_strategy", "save_steps"), "orchestrator.checkpoint.every_steps", "in batches"),
        ("save_total_limit", "trainer.checkpoint.keep", "at least 2"),
        unread="checkpoints come by steps: set orchestrator.checkpoint.every_steps",
    ),
    rule(
        _evaluation,
        (("eval_strategy", "evaluation_strategy", "eval_steps"), "orchestrator.evaluation.every_steps", "in batches"),
        ("dataset_test_split", "orchestrator.evaluation.split"),
        ("num_generations_eval", "orchestrator.evaluation.samples"),
        unread="only with eval_strategy = steps",
    ),
    same(
        ("do_eval", "do_train", "eval_on_start", "per_device_eval_batch_size", "eval_accumulation_steps"),
        "`orchestrator.evaluation` says what is evaluated",
    ),
    missing("resume_from_checkpoint", "`sluice rl @ rl.toml --resume`"),
    missing(("push_to_hub", "hub_*"), "`sluice export RUN DIRECTORY --push owner/name` after the run"),
    missing(
        ("report_to", "wandb_*", "run_group", "project", "trackio_*", "hub_model_id"),
        "metrics go to metrics.jsonl and TensorBoard in the run's directory",
        off=("none", "tensorboard", ["tensorboard"], ["none"]),
    ),
    same(
        ("logging_*", "log_*", "disable_tqdm", "num_completions_to_print"),
        "every step is logged, and trajectories are kept in the run's directory",
    ),
    same(("overwrite_output_dir", "output_dir"), "a run has a directory of its own, which no other run overwrites"),
    same(
        (
            "remove_unused_columns",
            "dataloader_*",
            "dataset_num_proc",
            "pad_to_multiple_of",
            "ddp_*",
            "group_by_length",
            "torch_empty_cache_steps",
            "average_tokens_across_devices",
            "packing",
            "use_reentrant",
        ),
        "it changes how TRL works inside, not what is trained",
    ),
    missing(
        (
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "fsdp_config.**",
            "launcher.**",
            "parallelism_config",
            "accelerator_config.**",
        ),
        "set trainer.parallel or allocation_mode (docs/parallelism.md)",
    ),
    missing("shuffle_dataset", "tasks come in an order that the seed decides", off=(True,)),
    to(
        "max_tool_calling_iterations",
        "orchestrator.max_turns",
        Given.whole,
        by=lambda calls: calls + 1,
        remark="answers, the last one without a call",
    ),
    missing(("router_aux_loss_coef",), "there is no such term of the loss"),
    missing(("vespo_*",), "there is no loss vespo here"),
)

SYSTEM = System("trl", "TRL", ROWS, DEFAULTS, _check)
