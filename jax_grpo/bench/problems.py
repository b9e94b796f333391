"""One problem for every implementation: the same sizes, random weights, tokens, advantages and log-probabilities.

Completions are of full length, so that no implementation gains by skipping padding. A problem that carries the name of a file
in `configs/` has that file's sizes and settings, read from it (`CONFIGS`); the others are clipped GRPO with a KL term. What a
peer's process needs of this module imports no JAX: its memory would be charged for it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_grpo.bench.runner import NotHere, torch_device
from jax_grpo.config import Config, ConfigError, load_config, require_all_trained
from jax_grpo.config.files import read_settings, weights_directory
from jax_grpo.model.architecture import SIZES, Architecture
from jax_grpo.model.families import read_architecture
from jax_grpo.model.flops import Work, completions_work


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
    positions: int = 1024
    config: str = ""  # the file that the sizes are of
    # Of a mixture of tasks, each one's share of the prompts and its completions' cap; empty: all have C.
    parts: tuple[tuple[float, int], ...] = ()
    model: str = ""  # what a config calls weights of these sizes, and their tokenizer; empty: a GPT-2's random weights
    micro_batches: int = 1  # of a step, at least; a config's own where the problem is of one

    @property
    def rows(self) -> int:
        """Completions of the batch."""
        return self.prompts * self.group

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """As every `Architecture` of ours takes them."""
        return self.vocabulary, self.layers, self.heads, self.width, self.positions

    def __str__(self) -> str:
        mixture = "".join(f"; {share:.0%} of the prompts to {cap}" for share, cap in self.parts)
        named = f"{self.model}: " if self.model else ""
        micro_batches = f"; {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return (
            f"{named}L {self.layers}, H {self.width}, V {self.vocabulary}; {self.prompts} prompts x {self.group} completions, "
            f"{self.prompt} + {self.completion} tokens, {self.dtype}{mixture}{micro_batches}"
        )


FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = {"legality": FOLDER / "legality.yaml"}  # problems that are a run's own
PROBLEMS = {
    "124m": Problem(12, 12, 768, 50257, 2, 4, 48, 32),
    "124m-64x192-bf16": Problem(12, 12, 768, 50257, 8, 8, 48, 144, "bfloat16"),
    "124m-long": Problem(12, 12, 768, 50257, 4, 4, 256, 512),
    "tiny": Problem(2, 2, 32, 128, 2, 4, 16, 4),
}
# A block's matrices, in widths in and out.
LINEAR = (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1))
PEER_ROWS = 256  # most completions of a peer's backward pass; 1024 of the legality run's at once would need over 8 GB
ADVANTAGE = 0.1  # their mean: a loss that cancelled to nothing could not be compared relative to itself


def sizes_of(file: str) -> Problem:
    """The sizes of a run's config; time does not depend on the values of weights. Imports JAX.

    Raises ValueError: it is no file of a config; ConfigError: no such file, no config, or one of another family than GPT-2.
    """
    if not file.endswith(".yaml"):
        raise ValueError(f"--problem {file!r}: expected one that --help lists, or a run's config (.yaml)")
    from jax_grpo.memory.programs import architecture
    from jax_grpo.model.tokenizer import Tokenizer, tokenizer_of

    config = load_config(file, [])
    require_all_trained(config, "a benchmark's problem")
    sizes, _ = architecture(config.model, Tokenizer.load(tokenizer_of(config.model)))
    if sizes.rope is not None or sizes.inner_size is not None:
        raise ConfigError(
            f"{file}: the model is a {sizes.family}; the implementations that are compared here are GPT-2s"
        )
    cap, mixture = config.rollout.max_new_tokens, config.task.mixture or {}
    parts = [(part.share, part.max_new_tokens or cap) for part in mixture.values()]
    return Problem(
        sizes.num_layers, sizes.num_heads, sizes.hidden_size, sizes.vocab_size, config.prompts.per_iteration,
        config.rollout.group_size, config.padded_prompt(), cap, config.model.compute_dtype,
        sizes.max_position_embeddings, file, tuple(parts),
    )  # fmt: skip


def config_of(problem: Problem, **sections: Mapping[str, Any]) -> Config:
    """Settings shared by all implementations: a config file's own where the problem is of one; keywords replace some by section."""
    named = {"weights": problem.model, "tokenizer": problem.model}
    model = named if problem.model else dict(zip(SIZES, problem.sizes, strict=True))
    model |= {"compute_dtype": problem.dtype}
    if problem.config:
        own = load_config(problem.config, []).model_dump()
        own["model"] |= model | {"weights": None}
    else:
        own = {
            "iterations": 1000,
            "model": model,
            "prompts": {"per_iteration": problem.prompts, "max_prompt_tokens": problem.prompt},
            "rollout": {"group_size": problem.group, "max_new_tokens": problem.completion},
            "kl": {"beta": 0.04},
            "update": {"learning_rate": 1e-6, "micro_batches": problem.micro_batches},
        }
    changed = {name: own.get(name, {}) | dict(settings) for name, settings in sections.items()}
    return Config.model_validate(own | changed | {"run_dir": "none"})


def peer_parts(config: Config) -> int:
    """Backward passes that a peer's step is accumulated over: the fewest that a run may have of at most `PEER_ROWS` each."""
    rows = config.prompts.per_iteration * config.rollout.group_size
    return next(parts for parts in config.possible_micro_batches() if rows <= parts * PEER_ROWS)


def arrays(problem: Problem) -> dict[str, np.ndarray]:
    """Tokens [P, T] and [P, G, C], advantages [B], old and reference log-probabilities [B, C] near those of random weights.

    A trained model's of such tokens are about twice as low; a reference far above them would make the KL term a huge number.
    """
    rng, near = np.random.default_rng(0), -np.log(problem.vocabulary) * (2 if problem.model else 1)

    def ids(*shape: int) -> np.ndarray:
        return rng.integers(0, problem.vocabulary, shape).astype(np.int32)

    def logp() -> np.ndarray:
        return (near + 0.1 * rng.normal(size=(problem.rows, problem.completion))).astype(np.float32)

    return {
        "prompt": ids(problem.prompts, problem.prompt),
        "completion": ids(problem.prompts, problem.group, problem.completion),
        "advantages": (ADVANTAGE + rng.normal(size=problem.rows)).astype(np.float32),
        "old_logp": logp(),
        "ref_logp": logp(),
    }


def torch_arrays(problem: Problem) -> dict[str, Any]:
    """`arrays` on PyTorch's device; tokens are rows [B, T] and [B, C], as every PyTorch trainer lays them out."""
    import torch

    data = {name: torch.from_numpy(x).to(torch_device()) for name, x in arrays(problem).items()}
    prompt_BT, completion_BC = data["prompt"].repeat_interleave(problem.group, 0), data["completion"].flatten(0, 1)
    return data | {"prompt": prompt_BT.long(), "completion": completion_BC.long()}


def weights(problem: Problem) -> dict[str, np.ndarray]:
    """GPT-2 weights by Hugging Face name, N(0, 0.02), norms 1 and biases 0."""
    rng, width = np.random.default_rng(1), problem.width
    blocks = [f"h.{layer}" for layer in range(problem.layers)]
    linear = {f"{block}.{name}": (ins * width, outs * width) for block in blocks for name, ins, outs in LINEAR}
    norms = ["ln_f", *(f"{block}.{name}" for block in blocks for name in ("ln_1", "ln_2"))]
    matrices = {"wte": (problem.vocabulary, width), "wpe": (problem.positions, width)} | linear
    values = {
        f"{name}.weight": np.float32(0.02) * rng.standard_normal(shape, np.float32) for name, shape in matrices.items()
    }
    values |= {f"{name}.bias": np.zeros(outs, np.float32) for name, (_, outs) in linear.items()}
    values |= {f"{name}.weight": np.ones(width, np.float32) for name in norms}
    values |= {f"{name}.bias": np.zeros(width, np.float32) for name in norms}
    return {f"transformer.{name}": value for name, value in values.items()}


def torch_weights(problem: Problem) -> dict[str, Any]:
    """`weights` as PyTorch's tensors."""
    import torch

    return {name: torch.from_numpy(x) for name, x in weights(problem).items()}


def work_of(problem: Problem) -> Work:
    """What a forward pass of the batch has to do: each prompt once, real tokens only."""
    completions = (problem.prompts, problem.group, problem.completion)
    return completions_work(np.ones((problem.prompts, problem.prompt)), np.ones(completions))


def batch_of(problem: Problem) -> Any:
    """The batch in this project's layout."""
    import jax.numpy as jnp

    from jax_grpo.batch import Batch, GroupedTokens

    prompt, completion, advantages, old_logp, ref_logp = map(jnp.asarray, arrays(problem).values())
    return Batch(
        GroupedTokens(prompt, jnp.ones_like(prompt), completion, jnp.ones_like(completion)),
        jnp.ones_like(old_logp, jnp.int32), advantages, jnp.ones(problem.rows, bool), old_logp, ref_logp,
    )  # fmt: skip


def architecture_of(problem: Problem) -> Architecture:
    """Sizes of the problem's model."""
    if problem.model:
        return read_architecture(read_settings(weights_directory(problem.model) / "config.json"))
    return Architecture(*problem.sizes)


def model_of(problem: Problem, config: Config) -> tuple[Any, Any]:
    """The weights in this project's model, which is built as the config says: its graphdef and parameters."""
    from flax import nnx

    from jax_grpo.model.weights import from_hf, load_hf
    from jax_grpo.policy.named import build_model

    if problem.model:
        sizes, params = load_hf(weights_directory(problem.model))
    else:
        sizes = architecture_of(problem)
        params = from_hf(weights(problem).__getitem__, sizes)
    model = nnx.eval_shape(lambda: build_model(config.model, sizes, seed=0, vocabulary=None))
    return nnx.split(model, nnx.Param)[0], params


def torch_ref_model(problem: Problem) -> Any:
    """The weights in `torch_ref`'s GPT-2, on PyTorch's device. Raises NotHere: the problem is of a named model."""
    if problem.model:
        raise NotHere(f"{problem.model} is no GPT-2 of random weights")
    from torch_ref.model import GPT2, GPT2Config

    model = GPT2(GPT2Config(*problem.sizes))
    model.load_state_dict(torch_weights(problem))
    return model.to(torch_device())


def transformers_model(problem: Problem, **special_ids: Any) -> Any:
    """The weights in `transformers`' model, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(
        vocab_size=problem.vocabulary, n_layer=problem.layers, n_head=problem.heads, n_embd=problem.width,
        n_positions=problem.positions, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **special_ids,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(sizes)
    model.load_state_dict(torch_weights(problem), strict=False)
    model.tie_weights()
    return model
