"""From what a user calls a model (`packaged:rook-small`, a run's folder, a Hugging Face folder, a checkpoint) to a policy to ask.

Finds the tokenizer that belongs to the weights, and says what a model is. Loading itself is `loading`'s.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jax_grpo.checkpoint import content_hash
from jax_grpo.checkpoint_files import is_checkpoint, read_manifest
from jax_grpo.config_files import PACKAGED, RUN_WEIGHTS, require_weights, weights_directory
from jax_grpo.config_sections import ModelConfig
from jax_grpo.loading import Policy, load_policy
from jax_grpo.weights import WeightsError, read_config

GPT2_VOCABULARY = 50257


def find_weights(name: str) -> str:
    """What `model.weights` would be: a run's folder becomes its exported weights, all else stays.

    Raises:
        ConfigError: there is no such packaged model or folder, or it is a run's without exported weights.
    """
    require_weights(name)
    return name if name.startswith(PACKAGED) else str(weights_directory(name))


def find_tokenizer(weights: str) -> str:
    """The tokenizer that weights of `find_weights` were trained with: `chess`, `gpt2` or their own folder.

    Raises:
        WeightsError: nothing in the folder says which.
    """
    folder = weights_directory(weights)
    if is_checkpoint(folder):
        return read_manifest(folder)["config"]["model"]["tokenizer"]
    if any((folder / file).is_file() for file in ("jax_grpo_tokenizer.json", "vocab.json")):
        return str(folder)
    if (vocabulary := read_config(folder).vocab_size) == GPT2_VOCABULARY:
        return "gpt2"
    raise WeightsError(
        f"{folder} has no tokenizer (vocab.json and merges.txt, or jax_grpo_tokenizer.json) and its vocabulary of "
        f"{vocabulary} is not GPT-2's {GPT2_VOCABULARY}; put the tokenizer's files beside the weights"
    )


def load_named(name: str, compute_dtype: str = "float32", *, tokenizer: str | None = None, context: int = 1) -> Policy:
    """The policy of a name, ready to run.

    Args:
        name: what a user calls a model.
        compute_dtype: of activations.
        tokenizer: `chess`, `gpt2` or a folder; None: the weights' own, see `find_tokenizer`.
        context: tokens a sequence may have.

    Raises:
        ConfigError, WeightsError, TokenizerError, CheckpointError: see `find_weights`, `find_tokenizer` and `load_policy`.
    """
    weights = find_weights(name)
    config = ModelConfig.model_validate(
        {"weights": weights, "tokenizer": tokenizer or find_tokenizer(weights), "compute_dtype": compute_dtype}
    )
    return load_policy(config, seed=0, context=context)


def display_name(name: str) -> str:
    """A short name for titles and PGN headers: without folders and without the trailing `weights` of a run."""
    folder = Path(find_weights(name))
    named = folder.parent if folder.name == RUN_WEIGHTS else folder
    return named.name.removeprefix("packaged:")


def describe_model(weights: str, policy: Policy) -> dict[str, Any]:
    """Name, sizes and a hash of the parameters' values."""
    return {
        "name": display_name(weights),
        "architecture": dataclasses.asdict(policy.architecture),
        "tokenizer": policy.tokenizer.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(policy.params)) - _padding(policy),
        "sha256": content_hash(policy.params),
    }


def _padding(policy: Policy) -> int:
    config = policy.architecture
    return (config.padded_vocab_size - config.vocab_size) * config.hidden_size
