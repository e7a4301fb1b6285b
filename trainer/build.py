"""Building all that a rank trains with, from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckptstore.hashing import BLOCK_SIZE, block_digest, content_digest, file_digest
from trainer import models
from trainer.batch import Split
from trainer.checkpointing import CRITIC_FILES, MODEL_FILES
from trainer.comm import Comm
from trainer.config import Config
from trainer.data import Dataset, Prompts, Sample, load_samples, tokenize_prompts
from trainer.loader import Loader
from trainer.loop import Roles
from trainer.make_model import ensure_model
from trainer.reward_model import RewardModel
from trainer.rewards import load_reward, score
from trainer.roles import Learner
from trainer.rollout.base import Rollout
from trainer.rollout.hf import HfRollout
from trainer.rollout.shared import SharedRollout, consecutive_ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Data:
    """Prompts, and where they came from.

    Attributes:
        train, val: What is trained and validated on.
        prompts, val_prompts: The same, tokenized; too long ones are dropped.
        loader: The order.
        split: Who computes which sample.
        total_steps: Length of the training.
    """

    train: Dataset
    val: Dataset | None
    prompts: Prompts
    val_prompts: Prompts | None
    loader: Loader
    split: Split
    total_steps: int


def build_data(config: Config, tokenizer: PreTrainedTokenizerBase, comm: Comm) -> Data:
    """Read and tokenize the data.

    Raises:
        NotFoundError: a data file is missing.
        UsageError: one is unusable, or sizes do not fit one another.
    """
    data, seed = config.data, config.trainer.seed
    train = load_samples(data.train_files, data, seed)
    val = load_samples(data.val_files, data, seed) if data.val_files else None
    prompts = tokenize_prompts(train, tokenizer, data)
    loader = Loader(len(prompts.samples), data.batch_size, shuffle=data.shuffle, seed=seed)
    samples = data.batch_size * config.rollout.n
    actor = config.actor.mini_batch_size or samples
    split = Split(samples, actor, config.critic.mini_batch_size or actor, comm.size)
    split.check()
    total = config.trainer.total_steps
    return Data(
        train,
        val,
        prompts,
        tokenize_prompts(val, tokenizer, data) if val is not None else None,
        loader,
        split,
        total if total is not None else config.trainer.total_epochs * loader.steps_per_epoch,
    )


@dataclass(frozen=True)
class ModelPaths:
    """Where the models start from.

    Attributes:
        policy: The policy's directory.
        critic, reference: The others', which are the policy's where nothing else is said.
        weights: Whether the policy's and critic's weights are there to be read; otherwise they come
            from a checkpoint.
    """

    policy: Path
    critic: Path
    reference: Path
    weights: bool


@dataclass(frozen=True)
class StoredModels:
    """A checkpoint's own model files, where a resume has no other: directories that hold them.

    Attributes:
        policy: Configuration and tokenizer.
        critic: Configuration of a critic that is not on the policy's backbone.
    """

    policy: Path | None = None
    critic: Path | None = None


def model_paths(config: Config, stored: StoredModels, *, weights: bool) -> ModelPaths:
    """The directories; models that can be made are made.

    Args:
        config: The configuration.
        stored: What takes the place of a directory that is gone.
        weights: Whether weights are to be read from them.
    """
    model = config.model
    policy = stored.policy or ensure_model(model.path)
    reference = policy
    if needs_reference(config):
        reference = ensure_model(model.reference_path or model.path)
    critic = policy
    if model.critic_path is not None:
        critic = stored.critic or ensure_model(model.critic_path)
    return ModelPaths(policy, critic, reference, weights)


def needs_reference(config: Config) -> bool:
    """Whether anything is computed from a reference's log-probabilities."""
    adaptive = config.algorithm.kl_controller == "adaptive"
    return bool(config.algorithm.kl_coef or config.actor.kl_loss_coef or adaptive)


def build_roles(
    config: Config,
    paths: ModelPaths,
    tokenizer: PreTrainedTokenizerBase,
    data: Data,
    comm: Comm,
) -> Roles:
    """The models, sharded, with their optimizers, and the engine that generates."""
    model, dtype = config.model, config.model.dtype
    split, samples = data.split, data.split.samples
    actor_steps = data.total_steps * (samples // split.actor) * config.actor.epochs
    critic_epochs = config.critic.epochs or config.actor.epochs
    critic_steps = data.total_steps * (samples // split.critic) * critic_epochs
    rollout = build_rollout(config, paths.policy, tokenizer, comm)
    policy = models.load_policy(paths.policy, model, weights=paths.weights or model.lora.rank > 0)
    if model.lora.rank:
        models.add_adapters(policy, model.lora, config.trainer.seed)
    actor = models.shard(policy, comm.mesh, dtype)
    critic = models.shard(
        models.load_critic(paths.critic, model, weights=paths.weights), comm.mesh, dtype
    )
    reference = None
    if needs_reference(config):
        frozen = models.load_policy(paths.reference, model).requires_grad_(False)
        reference = models.shard(frozen, comm.mesh, dtype)

    judge: Callable[[Sequence[Sample], Sequence[str]], list[float]]
    if config.reward.model is not None:
        judge = RewardModel(config.reward, model, comm.device)
    else:
        judge = partial(score, load_reward(config.reward.function))

    def decode(tokens: Sequence[int]) -> str:
        text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert isinstance(text, str)
        return text

    return Roles(
        actor=Learner(
            actor,
            config.actor.optim,
            actor_steps,
            comm,
            # On a CPU it is in host memory already.
            offload=config.actor.offload_optimizer and comm.device.type != "cpu",
        ),
        critic=Learner(critic, config.critic.optim, critic_steps, comm),
        reference=reference,
        rollout=rollout,
        judge=judge,
        decode=decode,
        pad=tokenizer.pad_token_id,
    )


def build_rollout(
    config: Config, path: Path, tokenizer: PreTrainedTokenizerBase, comm: Comm
) -> Rollout:
    """The engine that generates; its weights are still to be pushed. A collective."""
    rollout = config.rollout
    if rollout.engine == "vllm":
        from trainer.rollout.vllm import VllmRollout

        engine = VllmRollout(
            path,
            config.model,
            rollout,
            comm.device,
            eos=tokenizer.eos_token_id,
            max_length=config.data.max_prompt_length + rollout.max_new_tokens,
            seed=config.trainer.seed,
            ranks=comm.size,
        )
        shards = rollout.tensor_parallel_size
        if shards == 1:
            return engine
        return SharedRollout(engine, consecutive_ranks(shards, config.trainer.nccl_timeout))
    return HfRollout(
        models.load_policy(path, config.model, weights=False),
        comm.device,
        config.model.dtype,
        eos=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        micro_batch_size=rollout.micro_batch_size,
    )


def model_files(
    path: Path,
    config: Config,
    scratch: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> dict[str, bytes]:
    """A model's configuration and perhaps a tokenizer, as files to be stored."""
    models.load_config(path, config.model).save_pretrained(scratch)
    if tokenizer is not None:
        tokenizer.save_pretrained(scratch)
    generation = path / "generation_config.json"
    if generation.is_file():
        (scratch / generation.name).write_bytes(generation.read_bytes())
    return {
        str(file.relative_to(scratch)): file.read_bytes()
        for file in sorted(scratch.rglob("*"))
        if file.is_file()
    }


@dataclass(frozen=True)
class ModelFacts:
    """What every checkpoint of a run tells about its models; empty on all ranks but the first.

    Attributes:
        identities: Path and digest of what a checkpoint does not hold, by role.
        files: The policy's configuration and tokenizer, and a critic's own configuration, by path
            in the checkpoint.
    """

    identities: dict[str, dict[str, str]]
    files: dict[str, bytes]


def model_facts(
    config: Config,
    paths: ModelPaths,
    tokenizer: PreTrainedTokenizerBase,
    comm: Comm,
    scratch: Path,
) -> ModelFacts:
    """Look at the models' directories.

    Args:
        config: The configuration.
        paths: The directories.
        tokenizer: The policy's.
        comm: The ranks.
        scratch: A directory to write into.
    """
    if not comm.is_first:
        return ModelFacts({}, {})
    identities: dict[str, dict[str, str]] = {}
    if needs_reference(config):
        identities["reference"] = directory_identity(paths.reference)
    if config.model.lora.rank:
        same = paths.policy == paths.reference and "reference" in identities
        known = identities["reference"] if same else None
        identities["base"] = known or directory_identity(paths.policy)
    if config.reward.model is not None:
        identities["reward"] = directory_identity(Path(config.reward.model))
    policy = model_files(paths.policy, config, scratch / "policy", tokenizer)
    files = {f"{MODEL_FILES}/{name}": data for name, data in policy.items()}
    if config.model.critic_path is not None:
        critic = model_files(paths.critic, config, scratch / "critic")
        files |= {f"{CRITIC_FILES}/{name}": data for name, data in critic.items()}
    return ModelFacts(identities, files)


def directory_identity(path: Path) -> dict[str, str]:
    """Path and content digest of a model's directory, so that another one can be told."""
    files = []
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        blocks = []
        with file.open("rb") as opened:
            while block := opened.read(BLOCK_SIZE):
                blocks.append(block_digest(block))
        size = file.stat().st_size
        files.append((str(file.relative_to(path)), size, file_digest(size, blocks), False))
    return {"path": str(path), "digest": content_digest(files, ())}
