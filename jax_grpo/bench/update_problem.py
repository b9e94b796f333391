"""One optimiser batch for every implementation of the update: the same random weights, tokens, advantages and log-probabilities.

Completions are of full length, so that no implementation gains by skipping padding. A problem that carries the name of a file
in `configs/` has that file's sizes and settings, read from it (`CONFIGS`); the others are clipped GRPO with a KL term. What a
peer's process needs of this module imports no JAX: its memory would be charged for it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.config import Config, load_config


class Problem(NamedTuple):
    """Sizes of the model and the batch: P prompts of T tokens, G completions of C.

    Attributes:
        config: the file that the sizes are of, or empty.
        parts: of a mixture of tasks, each one's share of the prompts and its completions' cap; empty: all have C.
    """

    layers: int
    heads: int
    width: int
    vocabulary: int
    prompts: int
    group: int
    prompt: int
    completion: int
    dtype: str = "float32"
    positions: int = 1024
    config: str = ""
    parts: tuple[tuple[float, int], ...] = ()


FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = {"quickstart": FOLDER / "quickstart.yaml"}  # problems that are a run's own
PROBLEMS = {
    "rook-small-long": Problem(4, 6, 192, 585, 4, 8, 80, 80),
    "124m": Problem(12, 12, 768, 50257, 2, 4, 48, 32),
    "124m-64x192-bf16": Problem(12, 12, 768, 50257, 8, 8, 48, 144, "bfloat16"),
    "tiny": Problem(2, 2, 32, 128, 2, 4, 16, 4),
}
PEER_ROWS = 256  # most completions of a peer's backward pass; 1024 of the quickstart's at once would need over 8 GB
ADVANTAGE = 0.1  # their mean: a loss that cancelled to nothing could not be compared relative to itself


def line_of(problem: Problem) -> str:
    """Its sizes, for people."""
    return (
        f"L {problem.layers}, H {problem.width}, V {problem.vocabulary}; {problem.prompts} prompts x {problem.group} "
        f"completions, {problem.prompt} + {problem.completion} tokens, {problem.dtype}"
    )


def about(problems: dict[str, Problem], configs: dict[str, Path]) -> dict[str, str]:
    """A line for each problem by its name; those of config files first, which are not read for it."""
    files = {name: f"the model, the batch and the settings of configs/{file.name}" for name, file in configs.items()}
    return files | {name: line_of(problem) for name, problem in problems.items()}


ABOUT = about(PROBLEMS, CONFIGS)


def sizes_of(file: str) -> Problem:
    """The sizes of a run's config; time does not depend on the values of weights. Imports JAX.

    Raises:
        ConfigError: no such file, or no config.
    """
    from jax_grpo.memory.shapes import architecture
    from jax_grpo.programs import padded_prompt
    from jax_grpo.tokenizer import Tokenizer

    config = load_config(file, [])
    sizes, _ = architecture(config.model, Tokenizer.load(config.model.tokenizer))
    cap, mixture = config.rollout.max_new_tokens, config.task.mixture
    parts = [(part.share, part.max_new_tokens or cap) for part in mixture.parts.values()] if mixture else []
    return Problem(
        sizes.num_layers, sizes.num_heads, sizes.hidden_size, sizes.vocab_size, config.prompts.per_iteration,
        config.rollout.group_size, padded_prompt(config), cap, config.model.compute_dtype,
        sizes.max_position_embeddings, file, tuple(parts),
    )  # fmt: skip


def resolver(problems: dict[str, Problem], configs: dict[str, Path]) -> Callable[[str], str]:
    """What a benchmark makes of its problem's name, or of a config file's, for its variants: see `problem_of`."""

    def resolve(name: str) -> str:
        return json.dumps(problems[name] if name in problems else sizes_of(str(configs.get(name, name))))

    return resolve


def problem_of(resolved: str) -> Problem:
    """The problem that a variant is given: sizes as JSON, so that its process need not import what reads them."""
    return Problem(*json.loads(resolved))


RESOLVE = resolver(PROBLEMS, CONFIGS)


def config_of(problem: Problem, **update: Any) -> Config:
    """Settings shared by all implementations: the config file's own where the problem is of one; keywords are of `update`."""
    model = {
        "vocab_size": problem.vocabulary,
        "num_layers": problem.layers,
        "num_heads": problem.heads,
        "hidden_size": problem.width,
        "max_position_embeddings": problem.positions,
        "compute_dtype": problem.dtype,
    }
    if problem.config:
        own = load_config(problem.config, []).model_dump()
        model = own["model"] | model | {"weights": None}
        return Config.model_validate(own | {"run_dir": "none", "model": model, "update": own["update"] | update})
    return Config.model_validate(
        {
            "iterations": 1000,
            "run_dir": "none",
            "model": model,
            "prompts": {"per_iteration": problem.prompts, "max_prompt_tokens": problem.prompt},
            "rollout": {"group_size": problem.group, "max_new_tokens": problem.completion},
            "kl": {"beta": 0.04},
            "update": {"learning_rate": 1e-6, **update},
        }
    )


def peer_parts(problem: Problem) -> int:
    """Backward passes that a peer's step is accumulated over: the fewest that a run may have."""
    rows = problem.prompts * problem.group
    return next(parts for parts in config_of(problem).possible_micro_batches() if rows <= parts * PEER_ROWS)


def arrays(problem: Problem) -> dict[str, np.ndarray]:
    """Tokens [P, T] and [P, G, C], advantages [B], old and reference log-probabilities [B, C] near those of random weights."""
    rng = np.random.default_rng(0)
    rows = problem.prompts * problem.group
    near = -np.log(problem.vocabulary)
    return {
        "prompt": rng.integers(0, problem.vocabulary, (problem.prompts, problem.prompt)).astype(np.int32),
        "completion": rng.integers(0, problem.vocabulary, (problem.prompts, problem.group, problem.completion)).astype(
            np.int32
        ),
        "advantages": (ADVANTAGE + rng.normal(size=rows)).astype(np.float32),
        "old_logp": (near + 0.1 * rng.normal(size=(rows, problem.completion))).astype(np.float32),
        "ref_logp": (near + 0.1 * rng.normal(size=(rows, problem.completion))).astype(np.float32),
    }


def weights(problem: Problem) -> dict[str, np.ndarray]:
    """GPT-2 weights by Hugging Face name, N(0, 0.02), norms 1 and biases 0."""
    rng, width, found = np.random.default_rng(1), problem.width, {}

    def normal(*shape: int) -> np.ndarray:
        return (0.02 * rng.standard_normal(shape, np.float32)).astype(np.float32)

    found["transformer.wte.weight"] = normal(problem.vocabulary, width)
    found["transformer.wpe.weight"] = normal(problem.positions, width)
    for layer in range(problem.layers):
        at = f"transformer.h.{layer}."
        for name, size_in, size_out in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            found[f"{at}{name}.weight"] = normal(size_in, size_out)
            found[f"{at}{name}.bias"] = np.zeros(size_out, np.float32)
        for norm in ("ln_1", "ln_2"):
            found[f"{at}{norm}.weight"], found[f"{at}{norm}.bias"] = _norm(width)
    found["transformer.ln_f.weight"], found["transformer.ln_f.bias"] = _norm(width)
    return found


def _norm(width: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones(width, np.float32), np.zeros(width, np.float32)


def flops_of(problem: Problem) -> float:
    """Model FLOPs of the step: each prompt once, real tokens only."""
    from jax_grpo import flops
    from jax_grpo.model import GPT2Config

    sizes = GPT2Config(problem.vocabulary, problem.layers, problem.heads, problem.width, problem.positions)
    prompt = np.ones((problem.prompts, problem.prompt), int)
    completion = np.ones((problem.prompts, problem.group, problem.completion), int)
    return flops.training(sizes, flops.completions_work(prompt, completion))


def model_of(problem: Problem, remat: Any = False) -> tuple[Any, Any]:
    """The problem's weights in this project's model: its graphdef and parameters."""
    import jax.numpy as jnp
    from flax import nnx

    from jax_grpo.model import GPT2, GPT2Config
    from jax_grpo.weights import EMBEDDING, abstract_params, hf_name

    sizes = GPT2Config(problem.vocabulary, problem.layers, problem.heads, problem.width, problem.positions)
    dtype = jnp.dtype(problem.dtype)
    model = nnx.eval_shape(lambda: GPT2(sizes, rngs=nnx.Rngs(0), compute_dtype=dtype, remat=remat))
    found = weights(problem)
    found[EMBEDDING] = np.pad(found[EMBEDDING], ((0, sizes.padded_vocab_size - sizes.vocab_size), (0, 0)))
    flat = nnx.to_flat_state(abstract_params(sizes))
    params = nnx.from_flat_state([(path, leaf.replace(jnp.asarray(found[hf_name(path)]))) for path, leaf in flat])
    return nnx.split(model, nnx.Param)[0], params
