"""verl's dotted keys (as of verl 0.9) and what they become here."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from trainer.aliases import (
    Context,
    Rule,
    function_in,
    is_null,
    is_true,
    loggers,
    mini_batch,
    nothing,
    number,
    only,
    refused,
    resume,
    table,
    to,
    unless_null,
    warmup,
)
from trainer.schema import KEYS

_A, _R, _M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
_KL = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
}  # fmt: skip


def _kl_coef(value: Any, context: Context) -> Mapping[str, Any]:
    used = is_true(context.given.get("algorithm.use_kl_in_reward", "true"))
    return {"algorithm.kl_coef": value if used else 0}


def _kl_in_reward(value: Any, context: Context) -> Mapping[str, Any]:
    coef = context.given.get("algorithm.kl_ctrl.kl_coef", "0.001")
    return {"algorithm.kl_coef": coef if is_true(value) else 0}


def _kl_loss_coef(value: Any, context: Context) -> Mapping[str, Any]:
    used = is_true(context.given.get(_A + "use_kl_loss", "true"))
    return {"actor.kl_loss_coef": value if used else 0}


def _kl_loss(value: Any, context: Context) -> Mapping[str, Any]:
    coef = context.given.get(_A + "kl_loss_coef", "0.001")
    return {"actor.kl_loss_coef": coef if is_true(value) else 0}


def _kl_loss_type(value: Any, context: Context) -> Mapping[str, Any]:
    used = is_true(context.given.get(_A + "use_kl_loss", "false"))
    return table("algorithm.kl_estimator", _KL).apply(value, context) if used else {}


def _margin(value: Any, _: Context) -> Mapping[str, Any]:
    return {"trainer.expires_margin": value} if number(value) else {}


def _save_contents(value: Any, context: Context) -> Mapping[str, Any]:
    """In verl what is saved is also what is loaded, unless that is given too."""
    found = {"storage.save_contents": value}
    if _A + "checkpoint.load_contents" in context.given:
        return found
    return found | {"storage.load_contents": _loadable(value)}


def _loadable(value: Any) -> Any:
    return [v for v in value if v != "hf_model"] if isinstance(value, list) else value


def _reward_model(_: Any, context: Context) -> Mapping[str, Any]:
    for enable, model in (
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        path, enabled = context.given.get(model), is_true(context.given.get(enable))
        if enabled and is_null(path):
            raise ValueError(f"{model} must say which")
        if enabled:
            return {"reward.model": path}
    return {}


def _reward_function(_: Any, context: Context) -> Mapping[str, Any]:
    for prefix in ("reward.custom_reward_function", "custom_reward_function"):
        path = context.given.get(f"{prefix}.path")
        if not is_null(path):
            name = context.given.get(f"{prefix}.name")
            function = "compute_score" if is_null(name) else str(name)
            return {"reward.function": function_in(str(path), function)}
    return {}


_SCHEDULES = {word: word for word in ("constant", "cosine")}
_DTYPES = {
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32",
}  # fmt: skip
_FUNCTION = "the function takes what reward.function's takes"
_ONE_GPU_COUNT = "processes are counted by torchrun, or by ray.workers"
_GLOBAL = "it is divided by the number of GPUs; give ppo_micro_batch_size_per_gpu"


def _optim(prefix: str, role: str) -> dict[str, Rule]:
    """An optimizer's keys, but for those that are ours too."""
    rules = {
        f"{prefix}lr": to(f"{role}.optim.lr"),
        f"{prefix}weight_decay": to(f"{role}.optim.weight_decay"),
        f"{prefix}betas": to(f"{role}.optim.betas"),
        f"{prefix}clip_grad": to(f"{role}.optim.grad_clip"),
        f"{prefix}min_lr_ratio": unless_null(to(f"{role}.optim.min_lr_ratio")),
        f"{prefix}lr_warmup_steps": unless_null(warmup(role, ratio=False, of_steps=True)),
        f"{prefix}lr_warmup_steps_ratio": warmup(role, ratio=True, of_steps=True),
        f"{prefix}lr_scheduler_type": table(f"{role}.optim.schedule", _SCHEDULES),
        f"{prefix}warmup_style": unless_null(table(f"{role}.optim.schedule", _SCHEDULES)),
        f"{prefix}total_training_steps": only("-1", have="has trainer.total_steps for that"),
        f"{prefix}optimizer": only("adamw", have="has AdamW only"),
        f"{prefix}num_cycles": only("0.5", have="has a half cosine only"),
    }
    return {name: rule for name, rule in rules.items() if name not in KEYS}


VERL: Mapping[str, Rule] = {
    "algorithm.adv_estimator": only("gae", have="has generalized advantage estimation (gae) only"),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_horizon"),
    "algorithm.kl_ctrl.kl_coef": Rule(_kl_coef),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_target"),
    "algorithm.kl_ctrl.type": to("algorithm.kl_controller"),
    "algorithm.kl_penalty": table("algorithm.kl_estimator", _KL),
    "algorithm.use_kl_in_reward": Rule(_kl_in_reward),
    "algorithm.filter_groups.enable": only("false", have="trains on every group"),
    "algorithm.use_pf_ppo": only("false", have="does not reweight samples"),
    "algorithm.norm_adv_by_std_in_grpo": nothing(),
    "data.train_batch_size": to("data.batch_size"),
    "data.max_response_length": to("rollout.max_new_tokens"),
    "data.val_batch_size": nothing(),
    "data.seed": unless_null(to("trainer.seed")),
    "data.gen_batch_size": only("null", "none", have="generates data.batch_size prompts a step"),
    "data.train_max_samples": only("-1", have="trains on the whole file"),
    "data.val_max_samples": only("-1", have="validates on the whole file"),
    "data.filter_overlong_prompts": nothing("prompts that are too long are always dropped"),
    "data.truncation": nothing("prompts that are too long are always dropped"),
    "data.trust_remote_code": to("model.trust_remote_code"),
    "custom_reward_function.path": Rule(_reward_function, remark=_FUNCTION),
    "custom_reward_function.name": Rule(_reward_function, remark=_FUNCTION),
    "reward.custom_reward_function.path": Rule(_reward_function, remark=_FUNCTION),
    "reward.custom_reward_function.name": Rule(_reward_function, remark=_FUNCTION),
    "reward_model.enable": Rule(_reward_model),
    "reward.reward_model.enable": Rule(_reward_model),
    "reward_model.model.path": Rule(_reward_model),
    "reward.reward_model.model_path": Rule(_reward_model),
    "reward_model.micro_batch_size_per_gpu": unless_null(to("reward.micro_batch_size")),
    _M + "path": to("model.path"),
    _M + "trust_remote_code": to("model.trust_remote_code"),
    _M + "enable_gradient_checkpointing": to("model.activation_checkpointing"),
    _M + "lora_rank": to("model.lora.rank"),
    _M + "lora_alpha": to("model.lora.alpha"),
    _M + "target_modules": to("model.lora.target_modules"),
    "actor_rollout_ref.ref.model.path": to("model.reference_path"),
    **_optim(_A + "optim.", "actor"),
    _A + "grad_clip": to("actor.optim.grad_clip"),
    _A + "ppo_mini_batch_size": mini_batch("actor"),
    _A + "ppo_micro_batch_size": unless_null(refused(_GLOBAL)),
    _A + "ppo_micro_batch_size_per_gpu": unless_null(to("actor.micro_batch_size")),
    _A + "ppo_epochs": to("actor.epochs"),
    _A + "clip_ratio": to("actor.clip_ratio"),
    _A + "clip_ratio_low": to("actor.clip_ratio"),
    _A + "clip_ratio_high": to("actor.clip_ratio"),
    _A + "clip_ratio_c": refused("there is no second clipping here"),
    _A + "entropy_coeff": to("actor.entropy_coef"),
    _A + "use_kl_loss": Rule(_kl_loss),
    _A + "kl_loss_coef": Rule(_kl_loss_coef),
    _A + "kl_loss_type": Rule(_kl_loss_type),
    _A + "loss_agg_mode": only("token-mean", have="takes the mean over tokens (token-mean) only"),
    _A + "policy_loss.loss_mode": only("vanilla", have="has PPO's loss (vanilla) only"),
    _A + "shuffle": only("false", have="takes mini-batches in the order of the batch"),
    _A + "fsdp_config.optimizer_offload": to("actor.offload_optimizer"),
    _A + "fsdp_config.dtype": table("model.dtype", _DTYPES),
    _A + "fsdp_config.model_dtype": only("fp32", "float32", have="keeps its weights in float32"),
    _A + "checkpoint.save_contents": Rule(_save_contents),
    _A + "checkpoint.load_contents": to("storage.load_contents", by=_loadable),
    _A + "checkpoint.async_save": to("storage.async_save"),
    _R + "name": to("rollout.engine"),
    _R + "n": to("rollout.n"),
    _R + "temperature": to("rollout.temperature"),
    _R + "top_p": to("rollout.top_p"),
    _R + "top_k": to("rollout.top_k", by=lambda v: 0 if str(v) == "-1" else v),
    _R + "do_sample": only("true", have="always samples; see rollout.temperature"),
    _R + "tensor_model_parallel_size": to("rollout.tensor_parallel_size"),
    _R + "gpu_memory_utilization": to("rollout.gpu_memory_utilization"),
    _R + "enforce_eager": to("rollout.enforce_eager"),
    _R + "enable_chunked_prefill": to("rollout.enable_chunked_prefill"),
    _R + "free_cache_engine": to("rollout.sleep"),
    _R + "max_num_batched_tokens": to("rollout.max_num_batched_tokens"),
    _R + "max_num_seqs": to("rollout.max_num_seqs"),
    _R + "response_length": to("rollout.max_new_tokens"),
    _R + "prompt_length": to("data.max_prompt_length"),
    _R + "multi_turn.enable": only("false", have="has one turn a prompt"),
    _R + "val_kwargs.temperature": to("rollout.val_temperature"),
    _R + "val_kwargs.n": only("1", have="validates on one response a prompt"),
    **_optim("critic.optim.", "critic"),
    "critic.enable": only("true", "null", have="always has a critic"),
    "critic.model.path": to("model.critic_path"),
    "critic.model.trust_remote_code": to("model.trust_remote_code"),
    "critic.model.enable_gradient_checkpointing": to("model.activation_checkpointing"),
    "critic.model.lora_rank": only("0", have="trains all weights of the critic"),
    "critic.grad_clip": to("critic.optim.grad_clip"),
    "critic.ppo_mini_batch_size": mini_batch("critic"),
    "critic.ppo_micro_batch_size": unless_null(refused(_GLOBAL)),
    "critic.ppo_micro_batch_size_per_gpu": unless_null(to("critic.micro_batch_size")),
    "critic.ppo_epochs": to("critic.epochs"),
    "critic.cliprange_value": to("critic.clip_value"),
    "critic.loss_agg_mode": only("token-mean", have="takes the mean over tokens only"),
    "trainer.critic_warmup": to("critic.warmup_steps"),
    "trainer.logger": to("trainer.loggers", by=loggers, remark="console and JSONL are always on"),
    "trainer.project_name": to("trainer.project"),
    "trainer.experiment_name": to("storage.run"),
    "trainer.total_training_steps": to("trainer.total_steps"),
    "trainer.save_freq_by_step": to("trainer.save_freq"),
    "trainer.default_local_dir": to("storage.uri"),
    "trainer.default_hdfs_dir": unless_null(to("storage.mirrors")),
    "trainer.resume_mode": Rule(resume, stage=1),
    "trainer.resume_from_path": Rule(resume, stage=1),
    "trainer.max_actor_ckpt_to_keep": to("storage.keep_last"),
    "trainer.max_critic_ckpt_to_keep": to("storage.keep_last"),
    "trainer.esi_redundant_time": Rule(_margin, remark="trainer.expires_at names the time"),
    "trainer.del_local_ckpt_after_load": nothing("a checkpoint is never deleted by loading it"),
    "trainer.nnodes": nothing(_ONE_GPU_COUNT),
    "trainer.n_gpus_per_node": nothing(_ONE_GPU_COUNT),
    "trainer.val_only": only("false", have="always trains"),
}

_OURS_BUT = {
    "data.val_batch_size": ("null",),
    "trainer.resume_mode": ("disable", "resume_path"),
}
"""Keys of ours of which only these values are verl's."""

_MEANINGLESS = (
    "*.profiler.*",
    "*.use_dynamic_bsz",
    "*.ppo_max_token_len_per_gpu",
    "*.forward_max_token_len_per_gpu",
    "*.forward_micro_batch_size",
    "*.forward_micro_batch_size_per_gpu",
    "*.log_prob_micro_batch_size",
    "*.log_prob_micro_batch_size_per_gpu",
    "*.log_prob_use_dynamic_bsz",
    "*.log_prob_max_token_len_per_gpu",
    "*.ulysses_sequence_parallel_size",
    "*.fsdp_config.*",
    "*.fsdp.*",
    "*.strategy",
    "*.use_torch_compile",
    "*.use_fused_kernels",
    "*.entropy_checkpointing",
    "*.entropy_from_logits_with_chunking",
    "*.use_remove_padding",
    "*.use_rmpad",
    "*.use_liger",
    "*.use_shm",
    "*.external_lib",
    "*.tokenizer_path",
    "*.enable_activation_offload",
    "critic.checkpoint.*",
    "actor_rollout_ref.hybrid_engine",
    "actor_rollout_ref.nccl_timeout",
    _R + "mode",
    _R + "dtype",
    _R + "load_format",
    _R + "max_model_len",
    _R + "disable_log_stats",
    _R + "enable_prefix_caching",
    _R + "data_parallel_size",
    _R + "engine_kwargs.*",
    _R + "calculate_log_probs",
    _R + "agent.num_workers",
    _R + "ignore_eos",
    _R + "layered_summon",
    "data.reward_fn_key",
    "data.dataloader_num_workers",
    "data.filter_overlong_prompts_workers",
    "data.image_key",
    "data.video_key",
    "data.return_*",
    "data.validation_shuffle",
    "global_profiler.*",
    "ray_kwargs.*",
    "reward_model.reward_manager",
    "reward_model.num_workers",
    "reward.num_workers",
    "reward.reward_manager.*",
    "trainer.balance_batch",
    "trainer.device",
    "trainer.log_val_generations",
    "trainer.ray_wait_register_center_timeout",
    "trainer.rollout_data_dir",
    "trainer.use_legacy_worker_impl",
    "trainer.use_v1",
    "trainer.validation_data_dir",
)
"""Names that say how verl itself runs."""


def verl_rule(name: str, value: Any) -> Rule | None:
    """The rule for a key of verl's; ``None`` when there is none, or the value is one of ours."""
    if value not in _OURS_BUT.get(name, (value,)):
        return None
    rule = VERL.get(name)
    if rule is None and any(fnmatchcase(name, pattern) for pattern in _MEANINGLESS):
        return nothing()
    return rule
