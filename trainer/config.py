"""The configuration: every key, its type, its default and what it means.

Sizes of batches count samples over all ranks; lengths count tokens; times are seconds unless a
key's name says otherwise. ``trainer.settings`` reads files and command lines into these classes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ckptstore.maintenance.policy import OWED_LIMIT

LoraTargets = Literal["all-linear"] | list[str]
Schedule = Literal["constant", "linear", "cosine"]


class Section(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every part of the configuration is made of."""


class LoraConfig(Section):
    """Low-rank adapters.

    Attributes:
        rank: Rank of the adapters; 0 trains all weights.
        alpha: Scale: the adapter's product is multiplied by ``alpha / rank``.
        target_modules: Names of the layers that get one.
    """

    rank: int = 0
    alpha: float = 16.0
    target_modules: LoraTargets = "all-linear"


class ModelConfig(Section):
    """The policy's model; the critic and the reference start from it too.

    Attributes:
        path: A directory with a Hugging Face model, ``tiny`` or ``smollm2`` (made when missing).
        critic_path: Where the critic's backbone starts; by default the policy's.
        reference_path: The frozen reference; by default the policy at step 0.
        dtype: Of the computation; the trained weights stay in float32.
        activation_checkpointing: Recompute activations in the backward pass.
        trust_remote_code: Run model code that comes with the weights.
        lora: Adapters for the policy.
    """

    path: str = "tiny"
    critic_path: str | None = None
    reference_path: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False
    trust_remote_code: bool = False
    lora: LoraConfig = msgspec.field(default_factory=LoraConfig)


class DataConfig(Section):
    """Prompts.

    Attributes:
        train_files: Parquet or JSONL files, or ``digits``, ``chain_sum``, ``gsm`` (made when
            missing).
        val_files: The same for validation.
        prompt_key, answer_key: Columns; GSM8K's own ``question`` and ``answer`` are found too.
        apply_chat_template: Wrap a prompt as a user's turn of the tokenizer's chat template.
        max_prompt_length: Tokens; longer prompts are dropped (and counted).
        batch_size: Prompts a step.
        shuffle: A new order each epoch, a function of the seed and the epoch.
        val_batch_size: Prompts generated at once in validation.
    """

    train_files: list[str] = msgspec.field(default_factory=lambda: ["digits"])
    val_files: list[str] = msgspec.field(default_factory=list)
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    apply_chat_template: bool = False
    max_prompt_length: int = 512
    batch_size: int = 128
    shuffle: bool = True
    val_batch_size: int = 128


class RolloutConfig(Section):
    """Generation.

    Attributes:
        engine: ``hf`` (transformers only) or ``vllm`` (in process).
        n: Responses a prompt.
        max_new_tokens: Tokens a response at most.
        temperature, top_p, top_k: Sampling; ``top_k`` 0 keeps all tokens.
        val_temperature: Sampling in validation; 0 takes the likeliest token.
        micro_batch_size: Sequences that ``hf`` generates at once on a rank; 0 is all of them.
        tensor_parallel_size: Consecutive ranks that share one vLLM engine; it divides their number.
        gpu_memory_utilization, enable_chunked_prefill, max_num_batched_tokens, max_num_seqs,
        enforce_eager: As vLLM's.
        sleep: On GPUs, give vLLM's memory back between rollouts.
    """

    engine: Literal["hf", "vllm"] = "hf"
    n: int = 1
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    val_temperature: float = 0.0
    micro_batch_size: int = 0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    enforce_eager: bool = False
    sleep: bool = True


class OptimConfig(Section):
    """An AdamW optimizer and its schedule.

    Attributes:
        lr: Peak learning rate.
        betas, eps, weight_decay: As AdamW's.
        warmup_steps: Optimizer steps from 0 to ``lr``.
        schedule: After the warm-up, over ``trainer.total_steps``.
        min_lr_ratio: Where the schedule ends, as a share of ``lr``.
        grad_clip: Largest norm of a gradient; 0 does not clip.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: Schedule = "constant"
    min_lr_ratio: float = 0.0
    grad_clip: float = 1.0


class ActorConfig(Section):
    """The policy's update.

    Attributes:
        mini_batch_size: Samples an optimizer step; 0 is the whole batch.
        micro_batch_size: Samples a forward and backward pass on a rank; 0 is all of its share.
        epochs: Passes over a batch.
        clip_ratio: The surrogate's clip range.
        entropy_coef: Weight of the entropy bonus.
        kl_loss_coef: Weight of a KL term in the loss, beside the one in the reward.
        offload_optimizer: On GPUs, keep the optimizer's state in host memory but for its steps.
        optim: The optimizer.
    """

    mini_batch_size: int = 0
    micro_batch_size: int = 0
    epochs: int = 1
    clip_ratio: float = 0.2
    entropy_coef: float = 0.0
    kl_loss_coef: float = 0.0
    offload_optimizer: bool = False
    optim: OptimConfig = msgspec.field(default_factory=OptimConfig)


class CriticConfig(Section):
    """The critic's update; batches as the actor's where they are 0.

    Attributes:
        mini_batch_size, micro_batch_size: As the actor's.
        epochs: Passes over a batch; 0 is as many as the actor's.
        clip_value: How far a value may move from its old one.
        warmup_steps: Steps that train the critic alone.
        optim: The optimizer.
    """

    mini_batch_size: int = 0
    micro_batch_size: int = 0
    epochs: int = 0
    clip_value: float = 0.5
    warmup_steps: int = 0
    optim: OptimConfig = msgspec.field(default_factory=lambda: OptimConfig(lr=1e-5))


class AlgorithmConfig(Section):
    """PPO.

    Attributes:
        gamma, lam: Discount, and GAE's lambda.
        kl_coef: Weight of the KL penalty in the reward (the start, when adaptive).
        kl_controller: ``fixed``, or ``adaptive`` towards ``kl_target`` over ``kl_horizon`` samples.
        kl_estimator: Of KL from two log-probabilities: ``k1``, ``abs``, ``k2`` (mse) or ``k3``.
        whiten_advantages: Mean 0 and variance 1 over all tokens of the batch.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl_coef: float = 0.01
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    kl_target: float = 0.1
    kl_horizon: float = 10000.0
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    whiten_advantages: bool = True


class RewardConfig(Section):
    """The reward.

    Attributes:
        function: ``gsm8k``, ``digits``, ``exact``, or one's own as ``module:function``.
        model: A directory with a sequence-classification model with one output, used instead.
        micro_batch_size: Sequences the reward model scores at once.
    """

    function: str = "gsm8k"
    model: str | None = None
    micro_batch_size: int = 8


Content = Literal["model", "optimizer", "extra", "hf_model"]


class StorageConfig(Section):
    """Where checkpoints live.

    Attributes:
        uri: The store.
        run: The run's name in it.
        store_id: The store must have this id.
        mirrors: Stores kept in step.
        mirror_on_exit: Wait at the end until the mirrors have the newest checkpoint.
        async_save: Train on while a checkpoint is written.
        on_save_error: ``warn`` and train on, or ``fail``.
        threads: Blocks in flight; 0 chooses.
        save_contents, load_contents: What a checkpoint holds, and what of it is loaded.
        keep_last, keep_every, keep_best, max_size: Retention: the newest, every so many steps,
            the best by ``best_metric``, and a limit on bytes. All unset keeps everything.
        owed_limit: At most so many checkpoints are kept only because a mirror lacks them.
        best_metric: ``NAME:max`` or ``NAME:min``.
    """

    uri: str = "checkpoints"
    run: str = "ppo"
    store_id: str | None = None
    mirrors: list[str] = msgspec.field(default_factory=list)
    mirror_on_exit: bool = True
    async_save: bool = True
    on_save_error: Literal["warn", "fail"] = "warn"
    threads: int = 0
    save_contents: list[Content] = msgspec.field(
        default_factory=lambda: ["model", "optimizer", "extra"]
    )
    load_contents: list[Content] = msgspec.field(
        default_factory=lambda: ["model", "optimizer", "extra"]
    )
    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    max_size: str | None = None
    owed_limit: int = OWED_LIMIT
    best_metric: str | None = None


class TrainerConfig(Section):
    """The course of training.

    Attributes:
        total_steps: Steps in all; ``None`` follows from ``total_epochs``.
        total_epochs: Passes over the data.
        stop_at_step: End this process there with a save; the schedule stays as it is.
        save_freq: Steps between saves; -1 saves by step never. The last step is always saved.
        save_every_epochs, save_every_minutes: Saves by epoch and by time.
        save_on_signal: On SIGTERM and SIGUSR1, save and end.
        grace_seconds: How long after the signal the process may live.
        expires_at: A time (ISO 8601 or seconds since the epoch), or the name of an environment
            variable that holds one: save and end before it.
        expires_margin: Seconds before ``expires_at``.
        resume_mode: ``auto``, ``latest``, ``none``, a step, a REF or a URI with one.
        resume_from: What to start from while the run has no checkpoint of its own.
        resume_strict: What a changed configuration means at a resume.
        test_freq: Steps between validations; -1 validates never.
        val_before_train: Validate before the first step.
        log_dir: Where metrics and logs go; ``{run}`` is the run's name.
        loggers: Beside the console and JSONL, which are always on.
        project: Name of the project in Weights & Biases.
        log_digest: Log a digest over the whole training state each step.
        seed: Of everything random.
        deterministic: Use deterministic kernels only.
        nccl_timeout: Seconds after which a silent rank is an error.
        alert_mirror_lag: Checkpoints a mirror may be behind.
    """

    total_steps: int | None = None
    total_epochs: int = 1
    stop_at_step: int | None = None
    save_freq: int = 10
    save_every_epochs: int = -1
    save_every_minutes: float = -1.0
    save_on_signal: bool = True
    grace_seconds: float = 60.0
    expires_at: str | None = None
    expires_margin: float = 120.0
    resume_mode: str = "auto"
    resume_from: str | None = None
    resume_strict: Literal["warn", "error", "ignore"] = "warn"
    test_freq: int = -1
    val_before_train: bool = False
    log_dir: str = "logs/{run}"
    loggers: list[Literal["tensorboard", "wandb"]] = msgspec.field(default_factory=list)
    project: str = "ckptstore"
    log_digest: bool = False
    seed: int = 0
    deterministic: bool = True
    nccl_timeout: float = 1800.0
    alert_mirror_lag: int = 3


class RayConfig(Section):
    """The Ray runtime.

    Attributes:
        address: Of a running cluster; ``None`` starts one here (or takes ``RAY_ADDRESS``).
        workers: Actors, one a GPU (or a CPU share).
        cpus_per_worker, gpus_per_worker: What each is given.
        placement: How actors are placed on nodes.
        init_timeout: Seconds until the workers must have started.
        init: More options of ``ray.init``.
    """

    address: str | None = None
    workers: int = 1
    cpus_per_worker: float = 1.0
    gpus_per_worker: float = 0.0
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    init_timeout: float = 300.0
    init: dict[str, object] = msgspec.field(default_factory=dict)


class Config(Section):
    """All of it.

    Attributes:
        runtime: ``local`` (one process, or the ranks that torchrun started) or ``ray``.
    """

    runtime: Literal["local", "ray"] = "local"
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    data: DataConfig = msgspec.field(default_factory=DataConfig)
    rollout: RolloutConfig = msgspec.field(default_factory=RolloutConfig)
    actor: ActorConfig = msgspec.field(default_factory=ActorConfig)
    critic: CriticConfig = msgspec.field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = msgspec.field(default_factory=AlgorithmConfig)
    reward: RewardConfig = msgspec.field(default_factory=RewardConfig)
    storage: StorageConfig = msgspec.field(default_factory=StorageConfig)
    trainer: TrainerConfig = msgspec.field(default_factory=TrainerConfig)
    ray: RayConfig = msgspec.field(default_factory=RayConfig)
