"""AdamW, its schedule and which parameters decay. Knows nothing of losses or rollouts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_grpo.config_sections import UpdateConfig

STORED = {"parameters": None, "bfloat16": jnp.bfloat16}  # None: as the parameters


def schedule(config: UpdateConfig, total_steps: int) -> optax.Schedule:
    """Learning rate at optimiser step t, counted from 0.

    With W warm-up steps, N total steps and final fraction f:

        t <  W: lr * (t + 1) / W
        t >= W: lr                                               constant
                lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)       cosine, p = min((t - W) / (N - W), 1)

    The first step already learns: a warm-up that starts at 0 wastes the first rollout.
    """
    lr, warmup, final = config.learning_rate, config.warmup_steps, config.final_learning_rate_fraction

    def cosine(t):
        progress = jnp.clip((t - warmup) / max(total_steps - warmup, 1), 0.0, 1.0)
        return lr * (final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))

    after = {"constant": lambda t: jnp.asarray(lr), "cosine": cosine}[config.schedule]

    def at(t):
        t = jnp.asarray(t, jnp.result_type(float))  # an integer step would give a float32 rate even in float64 runs
        return jnp.where(t < warmup, lr * (t + 1) / max(warmup, 1), after(t))

    return at


def decays(params: Any) -> Any:
    """True for matrices (weights and embeddings), False for biases and norms, in the structure of `params`."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def adamw(config: UpdateConfig) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, decoupled decay) with the learning rate left to the caller.

    Returns the direction -(m_hat / (sqrt(v_hat) + eps) + wd * w); `update` multiplies it by the scheduled rate. Moments are
    kept in the parameters' dtype (float32 masters), the first one in bfloat16 where `first_moment_dtype` says so: it is
    added to in the parameters' dtype and rounded once a step.
    """
    return optax.chain(
        optax.scale_by_adam(
            b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=STORED[config.first_moment_dtype]
        ),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.scale(-1.0),
    )
