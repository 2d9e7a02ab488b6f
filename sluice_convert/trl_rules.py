"""How settings of TRL become ours, where one row of the table is not enough. `trl.py` has the table."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.config.schema import Value
from sluice.errors import ConfigError
from sluice_convert.table import Drop, Given, NotConvertibleError, Outcome, Set, Todo, home

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


def convert_batch(given: Given) -> Iterator[Outcome]:
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


def convert_schedule(given: Given) -> Iterator[Outcome]:
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


def convert_objective(given: Given) -> Iterator[Outcome]:
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


def convert_kl(given: Given) -> Iterator[Outcome]:
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


def convert_advantage(given: Given) -> Iterator[Outcome]:
    scale = given.text("scale_rewards").lower()
    ours = {"group": "grpo", "true": "grpo", "batch": "lite_ppo", "none": "centered", "false": "centered"}.get(scale)
    if ours is None:
        raise ConfigError(f"scale_rewards is {scale!r}: TRL has group, batch and none")
    yield Set("orchestrator.advantage", ours, ("scale_rewards",))


def convert_environment(given: Given) -> Iterator[Outcome]:
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


def convert_model(given: Given) -> Iterator[Outcome]:
    if given.has("model_name_or_path"):
        yield Set("model", home(given.text("model_name_or_path")), ("model_name_or_path",))
    else:
        yield Todo("model", "the model that your script gives GRPOTrainer: a directory or a hub id")


def convert_lora(given: Given) -> Iterator[Outcome]:
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


def convert_saves(given: Given) -> Iterator[Outcome]:
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


def convert_evaluation(given: Given) -> Iterator[Outcome]:
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


def convert_length(given: Given) -> Iterator[Outcome]:
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


def convert_engine(given: Given) -> Iterator[Outcome]:
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


def convert_precision(given: Given) -> Iterator[Outcome]:
    if given.flag("fp16"):
        yield Drop("fp16", "the trainer computes in bfloat16 or float32: set trainer.dtype")
    if given.has("bf16"):
        yield Set("trainer.dtype", "bfloat16" if given.flag("bf16") else "float32", ("bf16",))


def convert_optimizer(value: Value) -> str:
    if not str(value).startswith("adamw"):
        raise NotConvertibleError("there are adamw and muon: set trainer.optimizer")
    return "adamw"


def convert_dtype(value: Value) -> str:
    if value in ("bfloat16", "float32"):
        return str(value)
    if value == "auto":
        return "auto"
    raise NotConvertibleError("the trainer computes in bfloat16 or float32: set trainer.dtype")
