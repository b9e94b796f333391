"""One iteration of GRPO in plain JAX, from prompts to an optimiser step, on a toy model: `python docs/one_iteration.py`.

Read it first. `jax_grpo` does the same with real models, several devices and many options; in
`parity_tests/parity/test_one_iteration.py` both take the same step from the same completions, in float64. The task is counting:
after "3" comes "4, 5, 6, 7".

Letters at the end of a name are an array's axes: P prompts, G completions of each (a group), B = P * G completions, C tokens of a
completion, T = 1 + C tokens with the prompt's one, V vocabulary, H width, F inner width.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

V, H, F = 10, 32, 64  # ten digits, and the model's two widths
P, G, C = 8, 8, 4
ITERATIONS, LEARNING_RATE = 100, 5e-3
TEMPERATURE, CLIP, BETA = 1.0, 0.2, 0.01  # of sampling, of the ratio, of the KL penalty
Params = dict[str, jax.Array]


# 1. A policy: token ids to logits. Any causal model would do.


def init_params(key: jax.Array) -> Params:
    shapes = {"embedding_VH": (V, H), "position_TH": (1 + C, H), "in_HF": (H, F), "out_FH": (F, H)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.1 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def hidden_states(params: Params, ids_BT: jax.Array) -> jax.Array:
    """What predicts the token behind each position [B, T, H]: its own embedding and the mean of all so far, through an MLP."""
    x_BTH = params["embedding_VH"][ids_BT] + params["position_TH"][: ids_BT.shape[1]]
    mean_BTH = jnp.cumsum(x_BTH, axis=1) / jnp.arange(1, ids_BT.shape[1] + 1)[:, None]
    return x_BTH + jax.nn.gelu((x_BTH + mean_BTH) @ params["in_HF"]) @ params["out_FH"]


def token_logps(params: Params, ids_BT: jax.Array) -> jax.Array:
    """log pi(token | tokens before it) of each completion token [B, C]: the row before a token predicts it."""
    logits_BTV = hidden_states(params, ids_BT) @ params["embedding_VH"].T / TEMPERATURE
    logp_BCV = jax.nn.log_softmax(logits_BTV[:, :-1])
    return jnp.take_along_axis(logp_BCV, ids_BT[:, 1:, None], axis=-1)[..., 0]


# 2. Rollout: G completions of each prompt from the current policy.


def rollout(params: Params, prompts_P: jax.Array, key: jax.Array) -> jax.Array:
    """Prompt and completion ids [B, T]; the G completions of a prompt stand side by side. (A real one keeps a key-value cache.)"""
    ids_BT = jnp.zeros((P * G, 1 + C), int).at[:, 0].set(jnp.repeat(prompts_P, G))
    for t, step_key in enumerate(jax.random.split(key, C)):
        logits_BV = (hidden_states(params, ids_BT) @ params["embedding_VH"].T / TEMPERATURE)[:, t]
        ids_BT = ids_BT.at[:, t + 1].set(jax.random.categorical(step_key, logits_BV))
    return ids_BT


# 3. Reward: any function of the text. A verifier, not a model.


def rewards_of(ids_BT: jax.Array) -> jax.Array:
    """The share of tokens that are one more than the token before [B]."""
    return jnp.mean(ids_BT[:, 1:] == (ids_BT[:, :-1] + 1) % V, axis=1)


# 4. Advantages: each completion against the others of its own prompt. No value network.


def advantages_of(rewards_B: jax.Array) -> jax.Array:
    """(r - mean) / (std + 1e-4) within each group [B]; 0 where all rewards of a group are equal."""
    rewards_PG = rewards_B.reshape(-1, G)
    centred_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    return (centred_PG / (rewards_PG.std(axis=1, ddof=1, keepdims=True) + 1e-4)).reshape(-1)


# 5. Loss: PPO's clipped ratio and a KL penalty to the frozen start, a mean over all completion tokens.


class Batch(NamedTuple):
    """What an optimiser step trains on; all but the ids are constants."""

    ids_BT: jax.Array
    advantages_B: jax.Array
    old_logp_BC: jax.Array  # under the policy that sampled
    ref_logp_BC: jax.Array  # under the reference
    mask_BC: jax.Array  # 1 on tokens that count: here all; with a stop token, those up to it


def loss_of(params: Params, batch: Batch) -> jax.Array:
    logp_BC = token_logps(params, batch.ids_BT)
    advantages_B1 = batch.advantages_B[:, None]
    ratio_BC = jnp.exp(logp_BC - batch.old_logp_BC)
    clipped_BC = jnp.clip(ratio_BC, 1 - CLIP, 1 + CLIP)
    policy_BC = -jnp.minimum(ratio_BC * advantages_B1, clipped_BC * advantages_B1)
    d_BC = batch.ref_logp_BC - logp_BC
    kl_BC = jnp.exp(d_BC) - 1 - d_BC  # Schulman's k3: unbiased, never negative
    return jnp.sum((policy_BC + BETA * kl_BC) * batch.mask_BC) / jnp.sum(batch.mask_BC)


# 6. Update: clipped gradient, AdamW.

OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, weight_decay=0.0))


@jax.jit
def update(params: Params, opt_state: optax.OptState, batch: Batch) -> tuple[Params, optax.OptState]:
    grads = jax.grad(loss_of)(params, batch)
    updates, opt_state = OPTIMISER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state  # pyright: ignore[reportReturnType]


@functools.partial(jax.jit, static_argnames="epochs")
def iterate(params: Params, reference: Params, opt_state: optax.OptState, key: jax.Array, epochs: int = 2):
    """One iteration; returns the new parameters and optimiser state, and the mean reward of its completions."""
    prompt_key, rollout_key = jax.random.split(key)
    ids_BT = rollout(params, jax.random.randint(prompt_key, (P,), 0, V), rollout_key)
    rewards_B = rewards_of(ids_BT)
    old_logp_BC, ref_logp_BC = token_logps(params, ids_BT), token_logps(reference, ids_BT)
    batch = Batch(ids_BT, advantages_of(rewards_B), old_logp_BC, ref_logp_BC, jnp.ones_like(old_logp_BC))
    for _ in range(epochs):  # with one, the ratio is 1 and nothing is clipped
        params, opt_state = update(params, opt_state, batch)
    return params, opt_state, rewards_B.mean()


def main() -> None:
    params = init_params(jax.random.key(0))
    reference, opt_state = params, OPTIMISER.init(params)
    for iteration in range(ITERATIONS):
        key = jax.random.fold_in(jax.random.key(1), iteration)
        params, opt_state, reward = iterate(params, reference, opt_state, key)
        if iteration % 20 == 0 or iteration == ITERATIONS - 1:
            print(f"iteration {iteration:3d}   mean reward {reward:.2f}   (chance {1 / V:.2f}, best 1.00)")


if __name__ == "__main__":
    main()
