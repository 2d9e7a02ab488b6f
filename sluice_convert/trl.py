"""TRL's GRPOConfig with the arguments of its script, version 1.16 (Apache-2.0): YAML, JSON, or the flags of a command."""

from __future__ import annotations

from sluice.errors import ConfigError
from sluice_convert import trl_rules as rules
from sluice_convert.table import (
    Given,
    Set,
    Source,
    System,
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
    rule(rules.convert_model, ("model_name_or_path", "model")),
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
        rules.convert_batch,
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
        rules.convert_environment,
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
        rules.convert_length,
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
        rules.convert_schedule,
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
    to("optim", "trainer.optimizer", Given.text, by=rules.convert_optimizer),
    rule(
        rules.convert_objective,
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
    rule(rules.convert_kl, ("beta", "trainer.objective.kl_coef, trainer.reference.model", "k3, in the loss")),
    rule(
        rules.convert_advantage,
        ("scale_rewards", "orchestrator.advantage", "group: grpo, batch: lite_ppo, none: centered"),
    ),
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
        rules.convert_engine,
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
        rules.convert_lora,
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
    rule(rules.convert_precision, (("bf16", "fp16"), "trainer.dtype")),
    to(
        ("dtype", "torch_dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"),
        "trainer.dtype",
        Given.text,
        by=rules.convert_dtype,
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
        rules.convert_saves,
        (("save_strategy", "save_steps"), "orchestrator.checkpoint.every_steps", "in batches"),
        ("save_total_limit", "trainer.checkpoint.keep", "at least 2"),
        unread="checkpoints come by steps: set orchestrator.checkpoint.every_steps",
    ),
    rule(
        rules.convert_evaluation,
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
