"""The optimiser step: micro-batch scan, clipped AdamW, guards, adaptive beta; one jitted, donated program.

Also `make_score`, the same forward without gradients, for old and reference log-probabilities. The loss is a weighted sum
over tokens whose weights are fixed for the whole optimiser batch, so any cut into micro-batches gives the same gradient.
Knows nothing of text, rewards or files.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.flatten_util import ravel_pytree

from jax_grpo import triton
from jax_grpo.batch import Batch, split
from jax_grpo.config import ConfigError
from jax_grpo.config.learning import Learning
from jax_grpo.lm_head import FUSED_LOSSES, LM_HEADS
from jax_grpo.lm_head.tiles import Tiling
from jax_grpo.loss import TokenTerms, is_empty, metrics, token_terms
from jax_grpo.mesh import ONE_DEVICE, Layout, Part
from jax_grpo.model.layers import cast_matrices
from jax_grpo.objective import adaptive_beta, applied_coefficient, next_coefficient
from jax_grpo.objective.masking import masked
from jax_grpo.optimiser import adamw, apply_adamw, arrays_in, moved_reference, offloaded, reference_copy, schedule
from jax_grpo.policy.adapters import joined
from jax_grpo.system.compilation import training_options


@struct.dataclass
class TrainState:
    """Everything an optimiser step changes."""

    params: Any  # what is trained (`nnx.State`): float32 masters of everything, or the adapters alone
    opt_state: Any  # AdamW's moments
    beta: jax.Array  # KL coefficient, float32 scalar
    optimizer_step: jax.Array  # completed steps, int32; the schedule's argument. A skipped step does not count
    nonfinite_in_a_row: jax.Array  # steps skipped since the last good one because something was not finite
    nonfinite_total: jax.Array  # those in all
    empty_total: jax.Array  # steps skipped because no token was left to train on
    entropy_coefficient: Any = None  # float32 scalar; None without `objective.entropy_target`
    entropy_before: Any = None  # what the step before saw, nats; inf before the first, None without a target
    reference: Any = None  # the one that `kl.reference_every` moves; None: it does not change, and is no state


# Fields that checkpoints of earlier versions do not have, which begin at 0 for a run that continues from one.
LATER_COUNTERS = ("empty_total",)


def init_state(params: Any, learning: Learning) -> TrainState:
    """Fresh state around the parameters that are trained (not copied: the first update donates them)."""
    opt_state = offloaded(learning.update, adamw(learning.update).init(params))
    beta = jnp.asarray(learning.kl.beta, jnp.promote_types(jax.tree.leaves(params)[0].dtype, jnp.float32))
    counters = (jnp.int32(0) for _ in range(4))  # an array for each: a donated one cannot serve twice
    more: dict[str, Any] = {}
    if learning.kl.reference_every is not None:
        more["reference"] = reference_copy(params, learning.kl)
    if learning.objective.entropy_target is not None:
        more["entropy_coefficient"] = jnp.asarray(learning.objective.entropy_coefficient, beta.dtype)
        more["entropy_before"] = jnp.asarray(jnp.inf, beta.dtype)  # no bonus before something was seen
    return TrainState(params, opt_state, beta, *counters, **more)


def _token_logprobs(learning: Learning) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The config's LM head. Raises ConfigError: its kernels cannot be called with this JAX."""
    name = learning.lm_head.implementation
    if name == "pallas" and (reason := triton.refusal(or_jax_triton=True)):
        raise ConfigError(
            f"lm_head.implementation pallas {reason}: expected chunked, which does the same without kernels"
        )
    return LM_HEADS[name]


def _head_inputs(
    graphdef, params, tokens, learning: Learning, layout: Layout
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """What an LM head is called with: hidden states, embedding and targets, and its settings by name."""
    model = nnx.merge(graphdef, layout.gather(params))
    hidden_BSH, targets_BS = tokens.predictions(model)
    settings = learning.lm_head
    stored = None if settings.logits_dtype == "float32" else settings.logits_dtype
    by_name = {
        "vocab_size": model.vocabulary,
        "temperature": learning.temperature,
        "tiling": Tiling(settings.chunk_tokens, settings.chunk_vocab, stored),
    }
    by_name |= {} if layout.tensor is None else {"vocabulary_axis": layout.tensor}
    return (hidden_BSH, model.head_VH, targets_BS), by_name


def make_score(
    graphdef, learning: Learning, layout: Layout = ONE_DEVICE
) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Jitted `score(params, batch) -> (logp_BS, entropy_BS)`, micro-batch by micro-batch; 0 at what is not trained on."""
    token_logprobs = _token_logprobs(learning)

    def of_all(params, micro_batches):
        if layout is not ONE_DEVICE:  # each micro-batch gathers them: in the dtype they are read in
            params = cast_matrices(params, nnx.merge(graphdef, params).compute_dtype)

        def of_micro_batch(micro_batch):
            tokens, mask_bS = micro_batch
            arrays, by_name = _head_inputs(graphdef, params, tokens, learning, layout)
            # What is not trained on would depend on which padding was left out, and so on the number of devices.
            return tuple(masked(score_bS, mask_bS) for score_bS in token_logprobs(*arrays, **by_name))

        return jax.lax.map(of_micro_batch, micro_batches)

    of_all = layout.per_device(of_all, (Part.PARAMETERS, Part.MICRO_BATCHES), Part.MICRO_BATCHES)

    @jax.jit
    def score(params, batch: Batch):
        if learning.kl.offload_reference:
            params = arrays_in(jax.memory.Space.Device, params)
        micro_batches = split((batch.tokens, batch.mask_BS), learning.update.minibatches * learning.update.parts)
        logp_NBS, entropy_NBS = of_all(params, micro_batches)
        return logp_NBS.reshape(batch.mask_BS.shape), entropy_NBS.reshape(batch.mask_BS.shape)

    return score


def make_gradient(graphdef, learning: Learning, layout: Layout = ONE_DEVICE):
    """`gradient(params, batch, beta, coefficient, step, base) -> (loss, grads, logp_BS, entropy_BS)` of the optimiser batch.

    Not jitted. Gradients are of `params`; `base` is what is under adapters, None where everything is trained (`adapters.divided`).

    loss = sum_bt w_bt (surrogate_bt + beta KL_bt) - c_entropy mean_bt H_bt, with w from
    `objective.aggregation_weights` over the whole batch, however many micro-batches there are. The entropy's coefficient is the
    config's where none is given.
    """
    token_logprobs = _token_logprobs(learning)
    # A fused loss is a sum over tokens, each by itself.
    fused_loss = None if learning.objective.of_sequences else FUSED_LOSSES.get(learning.lm_head.implementation)

    def micro_batch_loss(params, base, tokens, terms: TokenTerms):
        arrays, by_name = _head_inputs(graphdef, joined(params, base), tokens, learning, layout)
        if fused_loss is not None:
            work_bS, by_token = terms.head_work(), terms.by_token()
            loss, logp_bS, entropy_bS = fused_loss(*arrays, work_bS, TokenTerms.loss, by_token, **by_name)
        else:
            logp_bS, entropy_bS = token_logprobs(*arrays, **by_name)
            loss = jnp.sum(terms.loss(logp_bS, entropy_bS))
        return loss, (logp_bS, entropy_bS)

    def summed(params, read, base, micro_batches, scalars):
        """Summed over the micro-batches; `read` are the parameters as the model reads them."""
        several, (beta, bonus) = learning.update.parts > 1, scalars
        dtype = jnp.promote_types(jax.tree.leaves(params)[0].dtype, jnp.float32)

        def add(total, micro_batch):
            tokens, rows = micro_batch
            of_rows = dataclasses.replace(rows, beta=beta, bonus=bonus)
            (loss, aux), grads = jax.value_and_grad(micro_batch_loss, has_aux=True)(read, base, tokens, of_rows)
            own = loss, vectors_joined(grads) if several else grads
            return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, own), aux

        zeros = jax.tree.map(jnp.zeros_like, params)
        nothing = (jnp.zeros((), dtype), vectors_joined(zeros) if several else zeros)
        (loss, grads), (logp, entropy) = jax.lax.scan(add, nothing, micro_batches)
        if several:
            vectors, others = grads
            grads = vectors_apart(vectors, others, params)
        return loss, grads, logp, entropy

    given = (Part.PARAMETERS, Part.PARAMETERS, Part.FROZEN, Part.MICRO_BATCHES, Part.WHOLE)
    returned = (Part.WHOLE, Part.PARAMETERS, Part.MICRO_BATCHES, Part.MICRO_BATCHES)
    of_all_prompts = layout.per_device(summed, given, returned)

    def gradient(
        params,
        batch: Batch,
        beta,
        coefficient: jax.Array | None = None,
        step: jax.typing.ArrayLike = 0,
        base: Any = None,
    ):
        # With several micro-batches each would cast every matrix, and its gradient back, in kernels of their own. One alone is
        # left to cast where it needs them: what is cast before takes memory for as long as the step.
        read = params
        if learning.update.parts > 1:
            compute_dtype = nnx.merge(graphdef, joined(params, base)).compute_dtype
            read, base = cast_matrices(params, compute_dtype), base and cast_matrices(base, compute_dtype)
        dtype = jnp.promote_types(jax.tree.leaves(params)[0].dtype, jnp.float32)
        terms = token_terms(batch, beta, learning, dtype, coefficient, step)
        rows = dataclasses.replace(terms, beta=None, bonus=None)  # scalars are alike in every micro-batch
        micro_batches = split((batch.tokens, rows), learning.update.parts)
        loss, grads, logp, entropy = of_all_prompts(params, read, base, micro_batches, (terms.beta, terms.bonus))
        return loss, grads, logp.reshape(batch.mask_BS.shape), entropy.reshape(batch.mask_BS.shape)

    return gradient


def vectors_joined(tree: Any) -> tuple[jax.Array, list[jax.Array]]:
    """All leaves of one axis (biases, norms' scales) end to end, and the others: one sum for the hundred small ones of a model."""
    vectors, others = _by_axes(tree)
    return ravel_pytree(vectors)[0], others


def vectors_apart(joined: jax.Array, others: list[jax.Array], like: Any) -> Any:
    """The inverse of `vectors_joined`; `like` gives the tree and its shapes."""
    leaves, treedef = jax.tree.flatten(like)
    unravel = ravel_pytree(_by_axes(like)[0])[1]
    vectors, rest = iter(unravel(joined)), iter(others)
    return treedef.unflatten([next(vectors) if x.ndim == 1 else next(rest) for x in leaves])


def _by_axes(tree: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if x.ndim == 1], [x for x in leaves if x.ndim != 1]


def make_step(graphdef, learning: Learning, layout: Layout = ONE_DEVICE):
    """`step(state, batch, base) -> (state, metrics, logp_BS, grads)`: one optimiser step, not jitted; gradients before clipping.

    `base` is what the state's adapters are of; None: the state has all parameters.

    A non-finite loss or gradient norm leaves parameters, moments, beta and the step count as they were; the two counters and the
    metric `nonfinite` say so. So does a step without a token to train on (all completions cut at the cap, with
    `objective.mask_truncated`), which `empty_steps` counts: its gradient is 0, but AdamW would still move along its moments and
    decay weights, and a KL of no tokens would lower an adaptive beta.
    """
    gradient = make_gradient(graphdef, learning, layout)
    rate = schedule(learning.update, learning.total_steps)

    def step(state: TrainState, batch: Batch, base: Any = None):
        coefficient = None
        if learning.objective.entropy_target is not None:
            coefficient = applied_coefficient(state.entropy_coefficient, state.entropy_before, learning.objective)
        given = state.params, batch, state.beta, coefficient, state.optimizer_step
        loss, grads, logp_BS, entropy_BS = gradient(*given, base)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        empty = is_empty(batch, learning.objective)
        taken = finite & ~empty
        scale = jnp.where(norm > learning.update.max_grad_norm, learning.update.max_grad_norm / norm, 1.0)
        learning_rate = rate(state.optimizer_step)
        scaled = jax.tree.map(lambda g: g * scale, grads)
        params, opt_state = apply_adamw(learning.update, state.params, scaled, state.opt_state, learning_rate, taken)
        seen = metrics(batch, logp_BS, entropy_BS, learning, state.optimizer_step)
        optimizer_step = state.optimizer_step + taken
        beta = adaptive_beta(state.beta, seen["kl/mean"], learning.kl) if learning.kl.adaptive else state.beta
        more, held = {}, {}
        if coefficient is not None:
            moved = next_coefficient(state.entropy_coefficient, seen["entropy"], learning.objective)
            more = {
                "entropy_coefficient": jnp.where(taken, moved, state.entropy_coefficient),
                "entropy_before": jnp.where(taken, seen["entropy"], state.entropy_before).astype(moved.dtype),
            }
            held = {"entropy_bonus/coefficient": state.entropy_coefficient, "entropy_bonus/applied": coefficient}
        new_state = TrainState(
            params=params,
            opt_state=opt_state,
            beta=jnp.where(taken, beta, state.beta),
            optimizer_step=optimizer_step,
            # An empty step is neither good nor bad: it leaves the row of bad ones as it is.
            nonfinite_in_a_row=jnp.where(
                empty, state.nonfinite_in_a_row, jnp.where(finite, 0, state.nonfinite_in_a_row + 1)
            ),
            nonfinite_total=state.nonfinite_total + (~finite & ~empty),
            empty_total=state.empty_total + empty,
            reference=moved_reference(learning.kl, state.reference, params, optimizer_step, taken),
            **more,
        )
        seen |= held | {
            "loss": loss,
            "beta": state.beta,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "nonfinite": new_state.nonfinite_total,
            "empty": empty,
            "nonfinite_in_a_row": new_state.nonfinite_in_a_row,
            "empty_steps": new_state.empty_total,
        }
        return layout.constrain(new_state), seen, logp_BS, grads

    return step


def make_update(graphdef, learning: Learning, layout: Layout = ONE_DEVICE):
    """Jitted `update(state, batch, base) -> (state, metrics)`, see `make_step`; donates the state, and not the base."""
    step = make_step(graphdef, learning, layout)

    def update(state, batch, base=None):
        return step(state, batch, base)[:2]

    return jax.jit(update, donate_argnums=0, compiler_options=training_options())
