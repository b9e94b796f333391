"""The sections of a config that describe the model and its adapters. Nothing here touches JAX."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, PlainValidator

from jax_grpo.config.sections import Count, Home, Positive, Section, Text

Dtype = Literal["float32", "bfloat16", "float64"]


def _remat(given: Any) -> Any:
    if not isinstance(given, bool) and given != "keep_matmuls":
        raise ValueError(f"is {given!r}; expected true, false or keep_matmuls")
    return given


class AdapterConfig(Section):
    """Low-rank adapters (LoRA): they are trained, and the weights under them stay as they are; see docs/adapters.md."""

    rank: Count = 16
    """Of each adapter's two matrices (PEFT: r)."""
    alpha: Positive = 32.0
    """An adapter's product is multiplied by alpha / rank (PEFT: lora_alpha)."""
    targets: Literal["all_linear"] | Annotated[list[Text], Field(min_length=1)] = "all_linear"
    """Which linear maps have one: all of every block, or those whose names in Hugging Face's files end so, such as [q_proj, v_proj]
    (PEFT: target_modules)."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead (PEFT: use_rslora)."""
    weights: Annotated[Text, Home] | None = None
    """Begin with these, trained on the same weights: a folder of PEFT's, or a run's; they bring rank, alpha, targets and
    rank_stabilised. null: begin with none of an effect."""
    base_dtype: Literal["parameters", "bfloat16", "int8"] = "parameters"
    """Of the weights that stay as they are: `model.param_dtype`; `bfloat16`, half of float32's memory; or `int8`: the blocks'
    matrices rounded to 8 bits, with a float32 scale for each output column, and all else in bfloat16."""
    merged_rollouts: bool = False
    """Rollouts add the adapters into a copy of the weights first, once an iteration: faster, for that copy's memory, and rounded
    otherwise than the update."""

    def _refusals(self) -> Iterator[str]:
        if self.base_dtype == "int8" and self.merged_rollouts:
            yield (
                "model.adapter.merged_rollouts true with model.adapter.base_dtype int8: the sum of both would be a copy of the "
                "matrices in floats, whose memory int8 is to save; expected false"
            )
        if self.weights is not None:
            for key, value in self.not_default("rank", "alpha", "targets", "rank_stabilised"):
                yield (
                    f"model.adapter.{key} {value} would do nothing beside model.adapter.weights {self.weights!r}, which have their "
                    "own; leave one out"
                )


class ModelConfig(Section):
    """The policy's weights, tokenizer and precision."""

    weights: Annotated[str, Home] | None = None
    """`packaged:rook-small`, a Hugging Face folder (safetensors), a GGUF file, `smollm2-135m-instruct`, one of Hugging
    Face's hub as `hub:Qwen/Qwen3-0.6B`, a run's folder, a checkpoint, or null: random weights of the sizes below."""
    tokenizer: Annotated[str, Home] | None = None
    """`gpt2`, `chess`, a tokenizer.json of any kind, a folder with one or with vocab.json and merges.txt, `packaged:NAME`, or, as
    `weights`, a GGUF; null: the weights' own, and `gpt2` for random weights."""
    vocab_size: Count | None = None
    """With random weights; null: the tokenizer's."""
    architecture: Annotated[Text, Home] | None = None
    """A config.json as Hugging Face writes it: the model that random weights are of, and that `jax_grpo.memory` plans with where
    `weights` are not on this machine; null: GPT-2 with the sizes below."""
    num_layers: Count | None = None
    """L: transformer blocks; this and the three sizes below are for random weights, else config.json has them."""
    num_heads: Count | None = None
    """N: attention heads of a block; divides hidden_size."""
    hidden_size: Count | None = None
    """H: width of the residual stream."""
    max_position_embeddings: Count | None = None
    """Context in tokens, prompt and completion together."""
    compute_dtype: Dtype = "float32"
    """Activations and matmuls; softmax, log-probabilities and reductions use at least float32."""
    param_dtype: Dtype = "float32"
    """Master parameters, gradients and optimiser moments."""
    remat: Annotated[bool | Literal["keep_matmuls"], PlainValidator(_remat)] = False
    """Recompute blocks in the backward pass (TRL: gradient_checkpointing); `keep_matmuls`: all but the results of their products
    with weights."""
    attention: Literal["auto", "full", "blocks", "pallas"] = "auto"
    """Of many queries at once: `full` has every score in one array; `blocks` those of 64 queries at a time, or of a sixteenth of
    them: least memory; `auto`: of 128, or of a quarter, where there are more than 256 queries, else full; `pallas`: none, in
    kernels for NVIDIA cards (a CPU interprets them, for tests)."""
    decode_attention: Literal["einsum", "pallas"] = "einsum"
    """Of a new token a completion: `einsum` anywhere; `pallas` is one kernel for NVIDIA cards (a CPU interprets it, for tests)."""
    adapter: AdapterConfig | None = None
    """Train adapters of `weights`, and not these; null: all parameters are trained."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _tokenizer_of_random_weights(cls, given: Any) -> Any:
        random = isinstance(given, dict) and given.get("weights") is None and given.get("tokenizer") is None
        return given | {"tokenizer": "gpt2"} if random else given

    def _refusals(self) -> Iterator[str]:
        sizes = ("num_layers", "num_heads", "hidden_size", "max_position_embeddings")
        if self.architecture is not None:
            for key, value in self.not_default("vocab_size", *sizes):
                yield f"model.{key} {value} would do nothing beside model.architecture {self.architecture!r}; leave one out"
        elif self.weights is None:
            if missing := [name for name in sizes if getattr(self, name) is None]:
                yield f"model.weights is null, so model.{', model.'.join(missing)} must be given"
            if (self.hidden_size or 0) % (self.num_heads or 1):
                yield f"model.hidden_size {self.hidden_size} must be a multiple of model.num_heads {self.num_heads}"
        if self.adapter is not None and self.weights is None:
            yield "model.adapter leaves the weights under it as they are, and model.weights is null: random ones; give weights"
        if self.adapter is not None and self.adapter.base_dtype == self.param_dtype:
            yield f"model.adapter.base_dtype {self.param_dtype} does nothing beside model.param_dtype of the same; leave it out"

    @property
    def base_dtype(self) -> str:
        """Of the weights that are read: without an adapter, those that are trained. `int8`: of matrices, the others in bfloat16."""
        own = "parameters" if self.adapter is None else self.adapter.base_dtype
        return self.param_dtype if own == "parameters" else own

    @property
    def recomputed(self) -> Literal[False, "all", "dots"]:
        """What the backward pass recomputes of a block: nothing, everything, or all but its products with weights."""
        return "dots" if self.remat == "keep_matmuls" else "all" if self.remat else False
