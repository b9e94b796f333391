"""AdamW, its schedule, which parameters decay, and the reference that may follow them. Knows nothing of losses or rollouts."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_grpo.config.learning import KLConfig, UpdateConfig

STORED = {"parameters": None, "bfloat16": jnp.bfloat16}  # None: as the parameters


def schedule(config: UpdateConfig, total_steps: int) -> optax.Schedule:
    """Learning rate at optimiser step t, counted from 0.

    With W warm-up steps, at most N - 1 of them, N total steps and final fraction f:

        t <  W: lr * (t + 1) / W
        t >= W: lr                                               constant
                lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)       cosine, p = min((t - W) / (N - W), 1)

    The first step already learns: a warm-up that starts at 0 wastes the first rollout.
    """
    lr, final = config.learning_rate, config.final_learning_rate_fraction
    warmup = min(config.warmup_steps, total_steps - 1)

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

    Gives the direction -(m_hat / (sqrt(v_hat) + eps) + wd * w); `apply_adamw` multiplies it by the rate. Moments are
    kept in the parameters' dtype (float32 masters), the first one in bfloat16 where `first_moment_dtype` says so: it is added to
    in the parameters' dtype and rounded once a step.
    """
    adam = optax.scale_by_adam(
        b1=config.betas[0], b2=config.betas[1], eps=config.epsilon, mu_dtype=STORED[config.first_moment_dtype]
    )
    return optax.chain(adam, *_after_adam(config))


def _after_adam(config: UpdateConfig) -> tuple[optax.GradientTransformation, ...]:
    return optax.add_decayed_weights(config.weight_decay, mask=decays), optax.scale(-1.0)


def offloaded(config: UpdateConfig, opt_state: Any) -> Any:
    """AdamW's state where it stays between steps: its moments in pinned host memory if `offload_optimizer` says so."""
    return arrays_in(jax.memory.Space.Host, opt_state) if config.offload_optimizer else opt_state


def arrays_in(space: Any, tree: Any) -> Any:
    """The tree with its arrays in that `jax.memory.Space`; scalars, a step count say, stay where they are."""
    return jax.tree.map(lambda x: jax.device_put(x, space) if x.ndim else x, tree)


def apply_adamw(
    config: UpdateConfig, params: Any, grads: Any, opt_state: Any, learning_rate: jax.typing.ArrayLike, taken: jax.Array
) -> tuple[Any, Any]:
    """Parameters and AdamW's state (`offloaded`) after a step along `grads`; as they were where the step is not `taken`."""
    if config.offload_optimizer:
        opt_state = arrays_in(jax.memory.Space.Device, opt_state)
    direction, new_state = adamw(config).update(grads, opt_state, params)
    new_state = jax.tree.map(lambda new, old: jnp.where(taken, new, old), new_state, opt_state)
    if STORED[config.first_moment_dtype] is None:  # else the direction is that of the first moment before it is rounded
        direction, new_state = _direction_of(config, params, new_state)
    params = jax.tree.map(lambda p, u: jnp.where(taken, p + (learning_rate * u).astype(p.dtype), p), params, direction)
    return params, offloaded(config, new_state)


def _direction_of(config: UpdateConfig, params: Any, opt_state: Any) -> tuple[Any, Any]:
    """The direction written out from the moments, and the state, whose moments XLA:CPU must have finished by then.

    It would compute them a second time where their direction is needed, from the old ones, which it then copies first: 8 bytes
    a parameter. On a GPU one kernel does it all, which a barrier would cut in two.
    """
    barrier = jax.lax.optimization_barrier
    adam = jax.lax.platform_dependent(opt_state[0], cpu=barrier, default=lambda adam: adam)
    mu_hat = optax.tree.bias_correction(adam.mu, config.betas[0], adam.count)
    nu_hat = optax.tree.bias_correction(adam.nu, config.betas[1], adam.count)
    scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + config.epsilon), mu_hat, nu_hat)
    after_adam = optax.chain(*_after_adam(config))
    direction, _ = after_adam.update(scaled, after_adam.init(params), params)
    return direction, (adam, *opt_state[1:])


def reference_copy(params: Any, config: KLConfig) -> Any:
    """The reference at the start: a copy of the parameters, since the update donates them, in `kl.reference_dtype`.

    It lies in pinned host memory if `kl.offload_reference` says so.
    """
    stored = STORED[config.reference_dtype]
    copy = jax.tree.map(lambda x: jnp.array(x, stored or x.dtype), params)
    return arrays_in(jax.memory.Space.Host, copy) if config.offload_reference else copy


def moved_reference(config: KLConfig, reference: Any, params: Any, step: jax.Array, taken: jax.Array) -> Any:
    """The reference behind optimiser step number `step`: mixed with its parameters where `reference_every` divides the number.

    reference_mix * policy + (1 - reference_mix) * reference (TR-DPO, Gorbatovski et al. 2024), summed in the policy's
    dtype. A step that is not `taken` has no number of its own, and moves nothing; nor does `reference_every` None.

    >>> config = KLConfig(reference_every=2, reference_mix=0.25)
    >>> old, policy = jnp.array([0.0, 4.0]), jnp.array([4.0, 4.0])
    >>> [moved_reference(config, old, policy, jnp.int32(step), jnp.bool_(True)).tolist() for step in (1, 2)]
    [[0.0, 4.0], [1.0, 4.0]]
    """
    if (every := config.reference_every) is None:
        return reference
    due, share = taken & (step % every == 0), config.reference_mix

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        # Not a sum for a copy: 0 * old would keep what is not finite.
        mixed = new if share == 1 else share * new + (1 - share) * old.astype(new.dtype)
        return jnp.where(due, mixed.astype(old.dtype), old)

    return jax.tree.map(moved, reference, params)
