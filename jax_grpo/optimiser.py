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


def adamw(config: UpdateConfig) -> optax.GradientTransformationExtraArgs:
    """AdamW (Loshchilov & Hutter 2019, decoupled decay) with the learning rate left to the caller.

    Gives the direction -(m_hat / (sqrt(v_hat) + eps) + wd * w); `update` multiplies it by the scheduled rate. With
    `finite=False` the state stays as it was. Moments are kept in the parameters' dtype (float32 masters), the first one in
    bfloat16 where `first_moment_dtype` says so: it is added to in the parameters' dtype and rounded once a step.
    """
    return optax.chain(
        _scale_by_adam(config),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.scale(-1.0),
    )


def _scale_by_adam(config: UpdateConfig) -> optax.GradientTransformationExtraArgs:
    """`optax.scale_by_adam`, with moments that are kept where a step is not finite."""
    stored = STORED[config.first_moment_dtype]
    adam = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon, mu_dtype=stored)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        finite = extra.get("finite", jnp.bool_(True))
        direction, new = adam.update(updates, state, params)
        new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, state)
        if stored is not None:  # the direction is that of the first moment before it is rounded
            return direction, new

        def from_moments() -> Any:
            mu_hat = optax.tree.bias_correction(new.mu, config.beta1, new.count)
            nu_hat = optax.tree.bias_correction(new.nu, config.beta2, new.count)
            return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + config.epsilon), mu_hat, nu_hat)

        # XLA:CPU computes the moments a second time where their direction is needed, from the old ones: it then copies those first,
        # 8 bytes a parameter. It computes nothing twice across a loop's edge, so this loop of one turn, in the gradients' place,
        # reads the new ones. On a GPU one kernel does it all, which the loop would cut in two.
        placed = jax.lax.platform_dependent(
            updates,
            cpu=lambda updates: jax.lax.fori_loop(0, finite.astype(jnp.int32), lambda *_: from_moments(), updates),
            default=lambda _: direction,
        )
        return placed, new

    return optax.GradientTransformationExtraArgs(adam.init, update)
