"""From what a config or a user calls a model to a tokenizer, a graph definition and parameters on the device.

Names are `packaged:rook-small`, a run's folder, a Hugging Face folder, or a checkpoint. The one place that resolves them, finds the
tokenizer that belongs to weights, and says what a model is.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo.config import ConfigError
from jax_grpo.config.files import RUN_WEIGHTS, TOKENIZER_FILE, read_settings, require_weights, weights_directory
from jax_grpo.config.sections import ModelConfig
from jax_grpo.config.tasks import OWN_SIDE
from jax_grpo.model.gpt2 import GPT2, GPT2Config
from jax_grpo.model.tokenizer import MARKER_FILE, Tokenizer
from jax_grpo.model.weights import WeightsError, abstract_params, load_hf, read_config, require_finite
from jax_grpo.run import checkpoints
from jax_grpo.run.files import STATE, is_checkpoint, read_manifest

GPT2_VOCABULARY = 50257
PROMPT_STYLE = "prompt_style"  # what config.json calls how a model is asked, where that is `OWN_SIDE`


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
    sizes = (config.num_layers, config.num_heads, config.hidden_size, config.max_position_embeddings)
    return GPT2Config(config.vocab_size or tokenizer.vocab_size, *(size or 0 for size in sizes))


def load_policy(config: ModelConfig, seed: int, context: int) -> Policy:
    """The config's tokenizer and its model, whose vocabulary must have room for the tokenizer's.

    Raises as `Tokenizer.load` and `load_model` do.
    """
    tokenizer = Tokenizer.load(config.tokenizer)
    architecture, graphdef, params = load_model(config, seed, context, tokenizer.vocab_size)
    return Policy(architecture, tokenizer, graphdef, params)


def build_model(config: ModelConfig, architecture: GPT2Config, *, seed: int, vocabulary: int | None) -> GPT2:
    """The model as the config's section says, with random weights; see `GPT2`."""
    return GPT2(
        architecture,
        rngs=nnx.Rngs(seed),
        param_dtype=jnp.dtype(config.param_dtype),
        compute_dtype=jnp.dtype(config.compute_dtype),
        remat=config.recomputed,
        vocabulary=vocabulary,
        decode_kernel=config.decode_attention == "pallas",
    )


def load_model(config: ModelConfig, seed: int, context: int, vocabulary: int | None = None) -> Model:
    """Builds the model and loads its weights, or initialises them from `seed` when the config names none.

    Its positions must hold `context` tokens of prompt and completion, and its rows the `vocabulary` that the softmax is over (None:
    as many tokens as there are rows).

    Raises:
        ConfigError: there are no such weights, or the vocabulary or context does not fit them.
        WeightsError: the folder's files are not a GPT-2.
        CheckpointError: the folder is a checkpoint, and damaged.
    """
    if "float64" in (config.param_dtype, config.compute_dtype) and not jax.config.read("jax_enable_x64"):
        where = "model.compute_dtype or model.param_dtype"
        raise ConfigError(f"{where} is float64: set JAX_ENABLE_X64=1, else JAX uses float32")
    if config.weights is None:
        architecture, params = random_architecture(config, Tokenizer.load(config.tokenizer)), None
    else:
        require_weights(config.weights)
        folder = weights_directory(config.weights)
        load = load_checkpoint if is_checkpoint(folder) else load_hf
        architecture, params = load(folder, jnp.dtype(config.param_dtype))
    if vocabulary is not None and architecture.vocab_size < vocabulary:
        raise ConfigError(
            f"model.tokenizer {config.tokenizer!r} has {vocabulary} tokens but the model's vocabulary has "
            f"{architecture.vocab_size}; use the tokenizer the weights were trained with"
        )
    if architecture.max_position_embeddings < context:
        raise ConfigError(
            f"prompts.max_prompt_tokens (rounded up to a bucket) + rollout.max_new_tokens (of an episode: all turns and "
            f"observations) = {context} tokens; the model has {architecture.max_position_embeddings} positions"
        )

    def build() -> GPT2:
        return build_model(config, architecture, seed=seed, vocabulary=vocabulary)

    if params is None:  # one program, which goes with this function; op by op they would stay, 70 MB in all
        params = jax.jit(lambda: nnx.state(build(), nnx.Param))()
    return Model(architecture, nnx.split(nnx.eval_shape(build), nnx.Param)[0], params)


def find_tokenizer(weights: str) -> str:
    """The tokenizer that weights which are there were trained with: `chess`, `gpt2`, or their own folder, by what it holds.

    Raises:
        WeightsError: nothing in the folder says which.
    """
    folder = weights_directory(weights)
    if is_checkpoint(folder):
        return read_manifest(folder)["config"]["model"]["tokenizer"]
    if any((folder / file).is_file() for file in (MARKER_FILE, "vocab.json", TOKENIZER_FILE)):
        return str(folder)
    if (vocabulary := read_config(folder).vocab_size) == GPT2_VOCABULARY:
        return "gpt2"
    raise WeightsError(
        f"{folder} has no tokenizer (vocab.json and merges.txt, {TOKENIZER_FILE}, or {MARKER_FILE}) and its vocabulary of "
        f"{vocabulary} is not GPT-2's {GPT2_VOCABULARY}; put the tokenizer's files beside the weights"
    )


def find_style(weights: str) -> str:
    """How weights that are there were taught to be asked for one move, by a checkpoint's config or config.json: `own_side`
    where they say so, else `best_move`.
    """
    folder = weights_directory(weights)
    if is_checkpoint(folder):
        said = read_manifest(folder).get("config", {}).get("task", {}).get(PROMPT_STYLE)
    else:
        said = read_settings(folder / "config.json").get(PROMPT_STYLE)
    return OWN_SIDE if said == OWN_SIDE else "best_move"


def said_of_style(style: str) -> dict[str, str]:
    """What config.json says of a model that was taught a prompt style; nothing of those that are asked as ever."""
    return {PROMPT_STYLE: style} if style == OWN_SIDE else {}


def load_named(name: str, *, tokenizer: str | None = None, context: int = 1) -> Policy:
    """The policy of a user's name, computing in float32; its tokenizer is the weights' own (`find_tokenizer`) unless given.

    Raises as `find_tokenizer` and `load_policy` do.
    """
    require_weights(name)
    config = ModelConfig(weights=name, tokenizer=tokenizer or find_tokenizer(name))
    return load_policy(config, seed=0, context=context)


def describe_model(name: str, policy: Policy) -> dict[str, Any]:
    """Name (without folders, and without the trailing `weights` of a run), sizes and a hash of the parameters' values."""
    folder, sizes = weights_directory(name), policy.architecture
    padding = (sizes.padded_vocab_size - sizes.vocab_size) * sizes.hidden_size
    return {
        "name": folder.parent.name if folder.name == RUN_WEIGHTS else folder.name,
        "architecture": dataclasses.asdict(sizes),
        "tokenizer": policy.tokenizer.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.params)) - padding,
        "sha256": checkpoints.content_hash(policy.params),
    }


def load_checkpoint(path: Path, dtype: Any) -> tuple[GPT2Config, nnx.State]:
    """Architecture and parameters alone of a checkpoint, on the default device: weights to start another run from.

    Raises:
        CheckpointError: damaged, or not a GPT-2 of the architecture it states.
        WeightsError: a value is not finite.
    """
    _, content, arrays = checkpoints.load(path, checkpoints.PARAMS)
    architecture = GPT2Config(**content["architecture"])
    tree = abstract_params(architecture)
    like = {checkpoints.PARAMS + name: leaf for name, leaf in checkpoints.named(tree).items()}
    saved = {name: content["arrays"][name] for name in arrays}
    stated = {name: [list(x.shape), saved.get(name, [None, None])[1]] for name, x in like.items()}
    checkpoints.require_same(path, saved, stated)
    for name, array in arrays.items():
        require_finite(array, path / STATE / name, name)
    leaves = [jnp.asarray(arrays[name], dtype) for name in like]
    return architecture, jax.tree.unflatten(jax.tree.structure(tree), leaves)
