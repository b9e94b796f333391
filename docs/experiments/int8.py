"""What rounding a base to int8 does to a model's logits and loss: the table of docs/adapters.md.

    python docs/experiments/int8.py --weights smollm2-135m-instruct --out docs/results/int8

Not part of the package. The texts are the model's own: chat prompts with what float32 samples for them at temperature 1. Every
other way of holding the same weights is then scored on the same tokens. `qwix` and `bitsandbytes`, each of `pip install --no-deps`,
are left out where they are missing; of both the matrices are rounded by their own function, by column, and multiplied in float32.
"""

import argparse
import functools
import json
import platform
from importlib import metadata, util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jax_grpo
from jax_grpo.config.model import AdapterConfig, ModelConfig
from jax_grpo.model import int8
from jax_grpo.policy.named import load_model
from jax_grpo.prompts.chat import ChatTemplate

QUESTIONS = (
    "What is 7 + 3? Answer with the number only.", "Write two sentences about the sea.", "Name three colours.",
    "How do bees make honey?", "Translate 'good morning' into French.", "What is the capital of Japan?",
    "Write a Python function that adds two numbers.", "Why is the sky blue?",
)  # fmt: skip
SAMPLES, NEW_TOKENS, SEED = 2, 48, 0


def texts_of(weights: str, policy) -> list[tuple[str, str]]:
    """Prompts and what the policy says to them."""
    template = ChatTemplate(weights)
    prompts = [template.render([{"role": "user", "content": question}]) for question in QUESTIONS] * SAMPLES
    return list(
        zip(prompts, policy.generate(prompts, max_new_tokens=NEW_TOKENS, temperature=1.0, seed=SEED), strict=True)
    )


def batch_of(pairs: list[tuple[str, str]], tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and mask [B, T], padded on the right, and which tokens are the policy's own."""
    rows = [(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in pairs]
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids, mask, own = (np.zeros((len(rows), width), np.int32) for _ in range(3))
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = [*prompt, *answer]
        mask[row, : len(prompt) + len(answer)] = 1
        own[row, len(prompt) : len(prompt) + len(answer)] = 1
    return ids, mask, own


def by_matrix(params: nnx.State, rounded) -> nnx.State:
    """The parameters with each matrix of the blocks as `rounded` leaves it."""

    def of(path, leaf):
        return leaf.replace(jnp.asarray(rounded(leaf.get_value()))) if path[-1] == int8.KERNEL else leaf

    return nnx.from_flat_state([(path, of(path, leaf)) for path, leaf in nnx.to_flat_state(params)])


def of_qwix(matrix):
    import qwix

    return qwix.dequantize(qwix.quantize(matrix, jnp.int8, channelwise_axes=[1]))


def of_bitsandbytes(matrix):
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    q, largest, _ = int8_vectorwise_quant(torch.from_numpy(np.asarray(matrix).T.astype(np.float16)))
    return (q.float() * largest[:, None] / 127).numpy().T


def ours(matrix):
    q, scale = int8.quantised(np.asarray(matrix))
    return q * scale


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graphdef, params, ids, mask):
    model = nnx.merge(graphdef, params)
    hidden = model(ids, mask)
    return jnp.einsum("bth,vh->btv", hidden, model.head_VH.astype(hidden.dtype), preferred_element_type=jnp.float32)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", default="smollm2-135m-instruct")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    policy = jax_grpo.load_named(arguments.weights)
    pairs = texts_of(arguments.weights, policy)
    ids, mask, own = batch_of(pairs, policy.tokenizer)
    predicted = own[:, 1:] == 1
    narrow = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}
    held = {
        "bfloat16": ModelConfig(weights=arguments.weights, **narrow),
        "int8, float32 products": ModelConfig(weights=arguments.weights, adapter=AdapterConfig(rank=1, base_dtype="int8")),
        "int8, bfloat16 products": ModelConfig(
            weights=arguments.weights, compute_dtype="bfloat16", adapter=AdapterConfig(rank=1, base_dtype="int8")
        ),
    }  # fmt: skip
    ways = {"float32": lambda: (policy.graphdef, policy.params)}
    for name, config in held.items():
        ways[name] = lambda config=config: load_model(config, 0, 1)[1:]
    packages = ("jax", "numpy", "qwix", "bitsandbytes")
    record = {
        "command": f"python docs/experiments/int8.py --weights {arguments.weights} --out {arguments.out}",
        "versions": {name: metadata.version(name) for name in packages if util.find_spec(name)},
        "machine": f"{platform.system()} {platform.machine()}", "tokens": int(predicted.sum()), "texts": pairs,
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, package, rounded in (
        ("int8, matrices alone", None, ours),
        ("qwix", "qwix", of_qwix),
        ("bitsandbytes", "bitsandbytes", of_bitsandbytes),
    ):
        if package is None or util.find_spec(package):
            ways[name] = lambda rounded=rounded: (policy.graphdef, by_matrix(policy.params, rounded))
    rows, reference, exact = {}, None, None
    for name, made in ways.items():
        logits = logits_of(*made(), ids, mask)[:, :-1][predicted].astype(jnp.float32)
        logp_V = jax.nn.log_softmax(logits)
        logp = np.asarray(jnp.take_along_axis(logp_V, ids[:, 1:][predicted][:, None], axis=-1))[:, 0]
        if reference is None:
            reference, exact = logits, logp
        gap, apart = np.asarray(logits - reference, np.float64), np.abs(logp - exact)
        rows[name] = {
            "logits_rms": float(np.sqrt(np.mean(gap**2))), "logits_max": float(np.abs(gap).max()),
            "logp_mean": float(apart.mean()), "logp_max": float(apart.max()),
            "loss": float(-logp.mean()), "loss_gap": float(exact.mean() - logp.mean()),
            "likeliest_differ": float(np.mean(np.asarray(jnp.argmax(logits, -1) != jnp.argmax(reference, -1)))),
        }  # fmt: skip
        print(name, rows[name], flush=True)
        more = {"logits_deviation": float(jnp.std(reference)), "ways": rows}
        file = arguments.out / f"{Path(arguments.weights).name}.json"
        file.write_text(
            json.dumps(record | more, indent=1) + "\n"
        )  # after each: what was interrupted keeps what it saw


if __name__ == "__main__":
    main()
