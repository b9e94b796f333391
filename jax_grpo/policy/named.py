"""From what a config or a user calls a model to a tokenizer, a graph definition and parameters on the device.

Names are `packaged:rook-small`, a run's folder, a Hugging Face folder, a folder of adapters, or a checkpoint. The one place that
resolves them, finds the tokenizer that belongs to weights, and says what a model is.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jax_grpo import fused_attention
from jax_grpo.config import ConfigError, earlier
from jax_grpo.config.files import (
    HUB,
    RUN_WEIGHTS,
    adapter_directory,
    base_of,
    is_adapter,
    require_weights,
    weights_directory,
)
from jax_grpo.config.model import AdapterConfig, ModelConfig
from jax_grpo.model import decode_kernel, int8
from jax_grpo.model.architecture import SIZES, Architecture
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer, tokenizer_of
from jax_grpo.model.weights import WeightsError, abstract_params, load_hf, read_config, require_finite
from jax_grpo.policy import int8_base
from jax_grpo.policy.adapters import Adapter, attach, divided, joined, merged
from jax_grpo.policy.peft_files import load_adapters, read_adapter, read_base
from jax_grpo.run import checkpoints
from jax_grpo.run.files import STATE, is_checkpoint

GPT2_SIZES = SIZES[1:]


class Policy(NamedTuple):
    """A model ready to run: `nnx.merge(graphdef, params)` is the `Decoder`."""

    architecture: Architecture
    tokenizer: Tokenizer
    graphdef: Any
    params: Any


class Model(NamedTuple):
    """The same without a tokenizer, for work on token ids."""

    architecture: Architecture
    graphdef: Any
    params: Any


def random_architecture(config: ModelConfig, tokenizer: Tokenizer) -> Architecture:
    """Architecture of random weights: of `model.architecture`, or a GPT-2 of the sizes that the config gives.

    Raises:
        WeightsError: `model.architecture` is no config.json of a model that this decoder can be.
    """
    if config.architecture is not None:
        return read_config(config.architecture)
    sizes: dict[str, Any] = {name: getattr(config, name) or 0 for name in GPT2_SIZES}
    return Architecture(vocab_size=config.vocab_size or tokenizer.vocab_size, **sizes)


def load_policy(config: ModelConfig, seed: int, context: int) -> Policy:
    """The config's tokenizer and its model, whose vocabulary must have room for the tokenizer's.

    Raises as `Tokenizer.load` and `load_model` do.
    """
    tokenizer = Tokenizer.load(tokenizer_of(config))
    architecture, graphdef, params = load_model(config, seed, context, tokenizer.vocab_size)
    return Policy(architecture, tokenizer, graphdef, params)


def build_model(config: ModelConfig, architecture: Architecture, *, seed: int, vocabulary: int | None) -> Decoder:
    """The model as the config's section says, with random weights, and adapters of no effect; see `Decoder`.

    Raises:
        ConfigError: kernels are asked for that cannot do the model's attention; or an adapter's target is not there.
    """
    if config.attention == "pallas" and (reason := fused_attention.refusal(architecture.head_dim)):
        raise ConfigError(f"model.attention pallas {reason}: leave it at auto")
    if config.decode_attention == "pallas" and (reason := decode_kernel.refusal(architecture.head_dim)):
        raise ConfigError(f"model.decode_attention pallas {reason}: leave it at einsum")
    model = int8.decoder(
        architecture,
        jnp.dtype(config.base_dtype),
        rngs=nnx.Rngs(seed),
        compute_dtype=jnp.dtype(config.compute_dtype),
        remat=config.recomputed,
        vocabulary=vocabulary,
        attention=config.attention,
        decode_kernel=config.decode_attention == "pallas",
    )
    adapter = adapter_of(config.adapter)
    if config.adapter is None or adapter is None:
        return model
    model.merges_adapters = config.adapter.merged_rollouts
    return attach(model, adapter, seed=seed, param_dtype=jnp.dtype(config.param_dtype))


def adapter_of(config: AdapterConfig | None) -> Adapter | None:
    """Sizes and places of the adapters that the config asks for; its own, or those of the weights that it names."""
    if config is None:
        return None
    if config.weights is not None:
        return read_adapter(adapter_directory(config.weights))
    targets = None if config.targets == "all_linear" else tuple(config.targets)
    return Adapter(config.rank, config.alpha, targets, config.rank_stabilised)


def load_model(config: ModelConfig, seed: int, context: int, vocabulary: int | None = None) -> Model:
    """Builds the model and loads its weights, or initialises them from `seed` when the config names none.

    Its positions must hold `context` tokens of prompt and completion, and its rows the `vocabulary` that the softmax is over (None:
    as many tokens as there are rows).

    Raises:
        ConfigError: there are no such weights, or the vocabulary or context does not fit them.
        WeightsError: the folder's files are no model that this decoder can be.
        CheckpointError: the folder is a checkpoint, and damaged.
    """
    if "float64" in (config.param_dtype, config.compute_dtype) and not jax.config.read("jax_enable_x64"):
        where = "model.compute_dtype or model.param_dtype"
        raise ConfigError(f"{where} is float64: set JAX_ENABLE_X64=1, else JAX uses float32")
    if config.weights is None:
        architecture, params = random_architecture(config, Tokenizer.load(tokenizer_of(config))), None
    else:
        require_weights(config.weights)
        architecture, params = load_weights(config.weights, jnp.dtype(config.base_dtype))
        if config.architecture is not None and read_config(config.architecture) != architecture:
            raise ConfigError(
                f"model.architecture {config.architecture!r} is not what model.weights {config.weights!r} are of"
            )
    if vocabulary is not None and architecture.vocab_size < vocabulary:
        raise ConfigError(
            f"model.tokenizer {tokenizer_of(config)!r} has {vocabulary} tokens but the model's vocabulary has "
            f"{architecture.vocab_size}; use the tokenizer the weights were trained with"
        )
    if architecture.max_position_embeddings < context:
        raise ConfigError(
            f"prompts.max_prompt_tokens (rounded up to a bucket) + rollout.max_new_tokens (of an episode: all turns and "
            f"observations) = {context} tokens; the model has {architecture.max_position_embeddings} positions"
        )

    def build() -> Decoder:
        return build_model(config, architecture, seed=seed, vocabulary=vocabulary)

    if params is None:  # one program, which goes with this function; op by op they would stay, 70 MB in all
        params = jax.jit(lambda: nnx.state(build(), nnx.Param))()
    if config.adapter is not None:
        params = joined(_adapters(config.adapter, architecture, build, params), params)
    return Model(architecture, nnx.split(nnx.eval_shape(build), nnx.Param)[0], params)


def _adapters(config: AdapterConfig, architecture: Architecture, build: Callable[[], Decoder], base: Any) -> nnx.State:
    """Those that a run of these weights begins with."""
    if config.weights is None:
        return jax.jit(lambda: divided(nnx.state(build(), nnx.Param))[0])()
    folder = adapter_directory(config.weights)
    _require_own_base(folder, base)
    return load_adapters(folder, architecture, divided(nnx.state(nnx.eval_shape(build), nnx.Param))[0])


def base_hash(base: Any, dtype: Any = jnp.float32) -> str:
    """What adapters know their base by: a hash of its values in a dtype, in whatever it is held now. Of int8, of what it makes of
    them, scales included.
    """
    if dtype == int8.INT8:
        return checkpoints.content_hash(base if int8_base.is_held(base) else int8_base.held(base), jnp.float32)
    return checkpoints.content_hash(base, dtype, jnp.float32)


def _require_own_base(folder: Path, base: Any) -> None:
    """Refuses, with a WeightsError, adapters that were trained on other weights, where their folder says on which."""
    before, dtype = read_base(folder)
    if before is not None and (now := base_hash(base, jnp.dtype(dtype or "float32"))) != before:
        raise WeightsError(
            f"{folder} has adapters that were trained on other weights: their hash was {before[:12]}..., and here it is "
            f"{now[:12]}...; an adapter is of its base alone, as it was held then (in {dtype or 'float32'})"
        )


def load_weights(name: str, dtype: Any) -> tuple[Architecture, nnx.State]:
    """Architecture and parameters of a user's name; those of adapters are their base's with the adapters added in.

    Raises as `load_model` does.
    """
    folder = weights_directory(name, tensors=True)
    if dtype == int8.INT8 and (is_checkpoint(folder) or is_adapter(folder)):
        architecture, params = load_weights(name, jnp.float32)
        return architecture, int8_base.held(params)
    if is_checkpoint(folder):
        return load_checkpoint(folder, dtype)
    if not is_adapter(folder):
        return load_hf(folder, dtype)
    # The base's hash is of the values in its files; and the sum is rounded once.
    wide = jnp.promote_types(dtype, jnp.float32)
    architecture, base = load_weights(base_of(folder), wide)
    _require_own_base(folder, base)
    graphdef, like = _with_adapters(architecture, read_adapter(folder), wide)
    base = _as_trained_on(base, read_base(folder)[1])
    whole = merged(graphdef, joined(load_adapters(folder, architecture, like), base))
    return architecture, jax.tree.map(lambda x: x.astype(dtype), whole)


def _as_trained_on(base: nnx.State, dtype: str | None) -> nnx.State:
    """The base as it was rounded where its adapters were trained."""
    if dtype == "int8":
        return int8_base.rounded(base)
    if dtype != "bfloat16":
        return base
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), base)


def _with_adapters(architecture: Architecture, adapter: Adapter, dtype: Any) -> tuple[Any, nnx.State]:
    """Graph of a decoder with adapters, and their shapes."""
    made = nnx.eval_shape(
        lambda: attach(Decoder(architecture, rngs=nnx.Rngs(0), param_dtype=dtype), adapter, seed=0, param_dtype=dtype)
    )
    graphdef, params = nnx.split(made, nnx.Param)
    return graphdef, divided(params)[0]


def load_named(name: str, *, tokenizer: str | None = None, context: int = 1) -> Policy:
    """The policy of a user's name, computing in float32; its tokenizer is the weights' own unless given.

    Raises as `load_policy` does.
    """
    require_weights(name)
    config = ModelConfig(weights=name, tokenizer=tokenizer)
    return load_policy(config, seed=0, context=context)


def describe_model(name: str, policy: Policy) -> dict[str, Any]:
    """Name (without folders, and without the trailing `weights` of a run), sizes and a hash of the parameters' values."""
    folder, sizes = weights_directory(name), policy.architecture
    own = folder.parent if folder.name == RUN_WEIGHTS else folder
    padding = (sizes.padded_vocab_size - sizes.vocab_size) * sizes.hidden_size
    return {
        "name": name.removeprefix(HUB) if name.startswith(HUB) else own.name,
        "architecture": sizes.as_json(),
        "tokenizer": policy.tokenizer.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.params)) - padding,
        "sha256": checkpoints.content_hash(policy.params),
    }


class Saved(NamedTuple):
    """What a checkpoint has of a model: all of its parameters, or adapters."""

    architecture: Architecture
    params: nnx.State
    adapter: Adapter | None  # what the parameters are; None: all there are
    graphdef: Any  # of the model with the adapters
    content: dict[str, Any]  # of the manifest


def read_checkpoint(path: Path, dtype: Any) -> Saved:
    """The parameters that a checkpoint has, on the default device.

    Raises:
        CheckpointError: damaged, or not of the architecture it states.
        WeightsError: a value is not finite.
    """
    _, content, arrays = checkpoints.load(path, checkpoints.PARAMS)
    architecture = Architecture.from_json(content["architecture"])
    own = content.get("config", {}).get("model", {}).get("adapter")
    adapter = None if own is None else adapter_of(AdapterConfig.model_validate(own))
    graphdef, tree = None, abstract_params(architecture)
    if adapter is not None:
        graphdef, tree = _with_adapters(architecture, adapter, dtype)
    like = {checkpoints.PARAMS + name: leaf for name, leaf in checkpoints.named(tree).items()}
    saved = {name: content["arrays"][name] for name in arrays}
    stated = {name: [list(x.shape), saved.get(name, [None, None])[1]] for name, x in like.items()}
    checkpoints.require_same(path, saved, stated)
    for name, array in arrays.items():
        require_finite(array, path / STATE / name, name)
    leaves = [jnp.asarray(arrays[name], dtype) for name in like]
    return Saved(architecture, jax.tree.unflatten(jax.tree.structure(tree), leaves), adapter, graphdef, content)


def load_checkpoint(path: Path, dtype: Any) -> tuple[Architecture, nnx.State]:
    """Architecture and parameters alone of a checkpoint, on the default device: weights to start another run from.

    Of a run of adapters they are its base's with the adapters added in. Raises as `read_checkpoint` does; a WeightsError also where
    a run's base is not what it was.
    """
    saved = read_checkpoint(path, dtype)
    if saved.adapter is None:
        return saved.architecture, saved.params
    base = _base_of_run(path, saved.content, dtype)
    return saved.architecture, merged(saved.graphdef, joined(saved.params, base))


def _base_of_run(path: Path, content: Mapping[str, Any], dtype: Any) -> nnx.State:
    """The weights under a run's adapters."""
    model = ModelConfig.model_validate(earlier.current(content["config"])["model"])
    require_weights(model.weights)
    _, base = load_weights(str(model.weights), dtype)
    before = content["identity"]["base"]
    if (now := base_hash(base, jnp.dtype(model.base_dtype))) != before:
        raise WeightsError(
            f"{path} has adapters of model.weights {model.weights!r}, which hold something else now: their hash is {now[:12]}..., "
            f"it was {before[:12]}...; put the old files back"
        )
    return _as_trained_on(base, model.base_dtype)
