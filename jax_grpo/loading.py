"""From a config to a tokenizer, a graph definition and parameters on the device. The one place that resolves weight names."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo.checkpoint import load_params as load_checkpoint
from jax_grpo.checkpoint_files import is_checkpoint
from jax_grpo.config import ConfigError
from jax_grpo.config_files import require_weights, weights_directory
from jax_grpo.config_sections import ModelConfig
from jax_grpo.model import GPT2, GPT2Config
from jax_grpo.tokenizer import Tokenizer
from jax_grpo.weights import load_hf


class Policy(NamedTuple):
    """A model ready to run: `nnx.merge(graphdef, params)` is the `GPT2`."""

    architecture: GPT2Config
    tokenizer: Tokenizer
    graphdef: Any
    params: Any


class Model(NamedTuple):
    """The same without a tokenizer, for work on token ids."""

    architecture: GPT2Config
    graphdef: Any
    params: Any


def random_architecture(config: ModelConfig, tokenizer: Tokenizer) -> GPT2Config:
    """Architecture of random weights: the sizes that the config gives, all of them by its own check."""
    return GPT2Config(
        vocab_size=config.vocab_size or tokenizer.vocab_size,
        num_layers=config.num_layers or 0,
        num_heads=config.num_heads or 0,
        hidden_size=config.hidden_size or 0,
        max_position_embeddings=config.max_position_embeddings or 0,
    )


def load_policy(config: ModelConfig, seed: int, context: int) -> Policy:
    """The config's tokenizer and its model (`load_model`), whose vocabulary must have room for the tokenizer's.

    Raises:
        ConfigError: vocabulary or context do not fit the tokenizer or the rollout.
        TokenizerError: no such tokenizer.
        WeightsError, CheckpointError: see `load_model`.
    """
    tokenizer = Tokenizer.load(config.tokenizer)

    def require_room(architecture: GPT2Config) -> None:
        if architecture.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"model.tokenizer {config.tokenizer!r} has {tokenizer.vocab_size} tokens but the model's vocabulary has "
                f"{architecture.vocab_size}; use the tokenizer the weights were trained with"
            )

    model = load_model(config, seed, context, require_room, vocabulary=tokenizer.vocab_size)
    return Policy(model.architecture, tokenizer, model.graphdef, model.params)


def load_model(
    config: ModelConfig,
    seed: int,
    context: int,
    require: Callable[[GPT2Config], None] = lambda architecture: None,
    vocabulary: int | None = None,
) -> Model:
    """Builds the model and loads its weights, or initialises them from `seed` when the config names none.

    Args:
        config: the config's `model` section.
        seed: of the initialisation.
        context: tokens a sequence may have (prompt and completion); must fit the model's positions.
        require: raises where the architecture will not do.
        vocabulary: tokens the softmax is over, where the weights have rows for more; None: for all of them.

    Raises:
        ConfigError: there are no such weights, or the context does not fit them.
        WeightsError: the folder's files are not a GPT-2.
        CheckpointError: the folder is a checkpoint, and damaged.
    """
    dtypes = {"param_dtype": jnp.dtype(config.param_dtype), "compute_dtype": jnp.dtype(config.compute_dtype)}
    if "float64" in (config.param_dtype, config.compute_dtype) and not jax.config.read("jax_enable_x64"):
        raise ConfigError(
            "model.compute_dtype or model.param_dtype is float64: set JAX_ENABLE_X64=1, else JAX uses float32"
        )
    if config.weights is None:
        architecture = random_architecture(config, Tokenizer.load(config.tokenizer))
        params = None
    else:
        require_weights(config.weights)
        folder = weights_directory(config.weights)
        load = load_checkpoint if is_checkpoint(folder) else load_hf
        architecture, params = load(folder, dtypes["param_dtype"])
    require(architecture)
    if architecture.max_position_embeddings < context:
        raise ConfigError(
            f"prompts.max_prompt_tokens (rounded up to a bucket) + rollout.max_new_tokens = {context} tokens; the model "
            f"has {architecture.max_position_embeddings} positions"
        )

    def build() -> GPT2:
        return GPT2(architecture, rngs=nnx.Rngs(seed), remat=config.recomputed, vocabulary=vocabulary, **dtypes)

    if params is None:  # one program, which goes with this function; op by op they would stay, 70 MB in all
        params = jax.jit(lambda: nnx.state(build(), nnx.Param))()
    return Model(architecture, nnx.split(nnx.eval_shape(build), nnx.Param)[0], params)
