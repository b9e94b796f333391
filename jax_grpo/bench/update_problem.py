"""One optimiser batch for every implementation of the update: the same random weights, tokens, advantages and log-probabilities.

Clipped GRPO with a KL term; completions of full length, so that no implementation gains by skipping padding.
"""

from typing import Any, NamedTuple

import numpy as np

from jax_grpo.config import Config


class Problem(NamedTuple):
    """Sizes of the model and the batch: P prompts of T tokens, G completions of C."""

    layers: int
    heads: int
    width: int
    vocabulary: int
    prompts: int
    group: int
    prompt: int
    completion: int
    dtype: str = "float32"


PROBLEMS = {
    "quickstart": Problem(4, 6, 192, 164, 16, 16, 80, 4),
    "quickstart-long": Problem(4, 6, 192, 164, 4, 8, 80, 80),
    "124m": Problem(12, 12, 768, 50257, 2, 4, 48, 32),
    "124m-64x192-bf16": Problem(12, 12, 768, 50257, 8, 8, 48, 144, "bfloat16"),
}
ABOUT = {
    name: f"L {p.layers}, H {p.width}, V {p.vocabulary}; {p.prompts} prompts x {p.group} completions, {p.prompt} + "
    f"{p.completion} tokens, {p.dtype}"
    for name, p in PROBLEMS.items()
}
POSITIONS = 1024


def config_of(problem: Problem, **update: Any) -> Config:
    """Settings shared by all implementations; keywords are of `update`."""
    return Config.model_validate(
        {
            "iterations": 1000,
            "run_dir": "none",
            "model": {
                "vocab_size": problem.vocabulary,
                "num_layers": problem.layers,
                "num_heads": problem.heads,
                "hidden_size": problem.width,
                "max_position_embeddings": POSITIONS,
                "compute_dtype": problem.dtype,
            },
            "prompts": {"per_iteration": problem.prompts, "max_prompt_tokens": problem.prompt},
            "rollout": {"group_size": problem.group, "max_new_tokens": problem.completion},
            "kl": {"beta": 0.04},
            "update": {"learning_rate": 1e-6, **update},
        }
    )


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
        "advantages": rng.normal(size=rows).astype(np.float32),
        "old_logp": (near + 0.1 * rng.normal(size=(rows, problem.completion))).astype(np.float32),
        "ref_logp": (near + 0.1 * rng.normal(size=(rows, problem.completion))).astype(np.float32),
    }


def weights(problem: Problem) -> dict[str, np.ndarray]:
    """GPT-2 weights by Hugging Face name, N(0, 0.02), norms 1 and biases 0."""
    rng, width, found = np.random.default_rng(1), problem.width, {}

    def normal(*shape: int) -> np.ndarray:
        return (0.02 * rng.standard_normal(shape, np.float32)).astype(np.float32)

    found["transformer.wte.weight"] = normal(problem.vocabulary, width)
    found["transformer.wpe.weight"] = normal(POSITIONS, width)
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

    sizes = GPT2Config(problem.vocabulary, problem.layers, problem.heads, problem.width, POSITIONS)
    prompt = np.ones((problem.prompts, problem.prompt), int)
    completion = np.ones((problem.prompts, problem.group, problem.completion), int)
    return flops.training(sizes, flops.completions_work(prompt, completion))


def model_of(problem: Problem, remat: Any = False) -> tuple[Any, Any]:
    """The problem's weights in this project's model: its graphdef and parameters."""
    import jax.numpy as jnp
    from flax import nnx

    from jax_grpo.model import GPT2, GPT2Config
    from jax_grpo.weights import EMBEDDING, abstract_params, hf_name

    sizes = GPT2Config(problem.vocabulary, problem.layers, problem.heads, problem.width, POSITIONS)
    dtype = jnp.dtype(problem.dtype)
    model = nnx.eval_shape(lambda: GPT2(sizes, rngs=nnx.Rngs(0), compute_dtype=dtype, remat=remat))
    found = weights(problem)
    found[EMBEDDING] = np.pad(found[EMBEDDING], ((0, sizes.padded_vocab_size - sizes.vocab_size), (0, 0)))
    flat = nnx.to_flat_state(abstract_params(sizes))
    params = nnx.from_flat_state([(path, leaf.replace(jnp.asarray(found[hf_name(path)]))) for path, leaf in flat])
    return nnx.split(model, nnx.Param)[0], params
