"""The optimiser step: micro-batch scan, clipped AdamW, guards, adaptive beta; one jitted, donated program.

Also `make_score`, the same forward without gradients, for old and reference log-probabilities. The loss is a weighted sum
over tokens whose weights are fixed for the whole optimiser batch, so any cut into micro-batches gives the same gradient.
Knows nothing of text, rewards or files.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct

from jax_grpo.batch import Batch, split
from jax_grpo.config import Config
from jax_grpo.lm_head import FUSED_LOSSES, LM_HEADS
from jax_grpo.lm_head.tiles import Tiling
from jax_grpo.loss import TokenTerms, is_empty, metrics, token_terms
from jax_grpo.objective import adaptive_beta
from jax_grpo.optimiser import adamw, apply_adamw, offloaded, schedule
from jax_grpo.system.compilation import training_options


@struct.dataclass
class TrainState:
    """Everything an optimiser step changes."""

    params: Any  # float32 masters (`nnx.State`)
    opt_state: Any  # AdamW's moments
    beta: jax.Array  # KL coefficient, float32 scalar
    optimizer_step: jax.Array  # completed steps, int32; the schedule's argument. A skipped step does not count
    nonfinite_in_a_row: jax.Array  # steps skipped since the last good one because something was not finite
    nonfinite_total: jax.Array  # those in all
    empty_total: jax.Array  # steps skipped because no token was left to train on


# Fields that checkpoints of earlier versions do not have, which begin at 0 for a run that continues from one.
LATER_COUNTERS = ("empty_total",)


def init_state(params: Any, config: Config) -> TrainState:
    """Fresh state around `params` (not copied: the first update donates them)."""
    opt_state = offloaded(config.update, adamw(config.update).init(params))
    beta = jnp.asarray(config.kl.beta, jnp.promote_types(jax.tree.leaves(params)[0].dtype, jnp.float32))
    counters = (jnp.int32(0) for _ in range(4))  # an array for each: a donated one cannot serve twice
    return TrainState(params, opt_state, beta, *counters)


def _head(graphdef, params, tokens, config: Config, heads: dict[str, Callable]) -> Callable:
    """The configured one of `heads`, given its hidden states, embedding, targets and settings."""
    model = nnx.merge(graphdef, params)
    hidden_BSH, targets_BS = tokens.predictions(model)
    settings = config.lm_head
    stored = None if settings.logits_dtype == "float32" else settings.logits_dtype
    return functools.partial(
        heads[settings.implementation],
        hidden_BSH,
        model.wte.embedding[...],
        targets_BS,
        vocab_size=model.vocabulary,
        temperature=config.rollout.temperature,
        tiling=Tiling(settings.chunk_tokens, settings.chunk_vocab, stored),
    )


def make_score(graphdef, config: Config) -> Callable[[Any, Batch], tuple[jax.Array, jax.Array]]:
    """Jitted `score(params, batch) -> (logp_BS, entropy_BS)`, micro-batch by micro-batch."""

    @jax.jit
    def score(params, batch: Batch):
        micro_batches = split(batch.tokens, config.update.minibatches * config.update.parts)
        logp_NBS, entropy_NBS = jax.lax.map(
            lambda tokens: _head(graphdef, params, tokens, config, LM_HEADS)(), micro_batches
        )
        shape = batch.mask_BS.shape
        return logp_NBS.reshape(shape), entropy_NBS.reshape(shape)

    return score


def make_gradient(graphdef, config: Config):
    """`gradient(params, batch, beta) -> (loss, grads, logp_BS, entropy_BS)` over the optimiser batch; not jitted.

    loss = sum_bt w_bt (surrogate_bt + beta KL_bt) - c_entropy mean_bt H_bt, with w from
    `objective.aggregation_weights` over the whole batch, however many micro-batches there are.
    """
    # A fused loss is asked about each token by itself.
    fuses = config.lm_head.implementation in FUSED_LOSSES and config.objective.importance_level == "token"

    def micro_batch_loss(params, tokens, terms: TokenTerms):
        if fuses:
            fused_loss = _head(graphdef, params, tokens, config, FUSED_LOSSES)
            loss, logp_bS, entropy_bS = fused_loss(terms.head_work(), loss_of_rows, terms.tokens_as_rows())
        else:
            logp_bS, entropy_bS = _head(graphdef, params, tokens, config, LM_HEADS)()
            loss = jnp.sum(terms.loss(logp_bS, entropy_bS))
        return loss, (logp_bS, entropy_bS)

    def loss_of_rows(rows: TokenTerms, logp_C, entropy_C):
        return rows.loss(logp_C[:, None], entropy_C[:, None]).reshape(-1)

    def gradient(params, batch: Batch, beta: jax.Array):
        dtype = jnp.promote_types(jax.tree.leaves(params)[0].dtype, jnp.float32)
        terms = token_terms(batch, beta, config, dtype)
        rows = dataclasses.replace(terms, beta=None, bonus=None)  # scalars are alike in every micro-batch
        micro_batches = split((batch.tokens, rows), config.update.parts)

        def add(total, micro_batch):
            tokens, rows = micro_batch
            of_rows = dataclasses.replace(rows, beta=terms.beta, bonus=terms.bonus)
            (loss, aux), grads = jax.value_and_grad(micro_batch_loss, has_aux=True)(params, tokens, of_rows)
            return jax.tree.map(jnp.add, total, (loss, grads)), aux

        nothing = (jnp.zeros((), dtype), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), (logp, entropy) = jax.lax.scan(add, nothing, micro_batches)
        return loss, grads, logp.reshape(batch.mask_BS.shape), entropy.reshape(batch.mask_BS.shape)

    return gradient


def make_step(graphdef, config: Config, total_steps: int):
    """`step(state, batch) -> (state, metrics, logp_BS, grads)`: one optimiser step, not jitted; gradients before clipping.

    A non-finite loss or gradient norm leaves parameters, moments, beta and the step count as they were; the two counters and the
    metric `nonfinite` say so. So does a step without a token to train on (all completions cut at the cap, with
    `objective.mask_truncated`), which `empty_steps` counts: its gradient is 0, but AdamW would still move along its moments and
    decay weights, and a KL of no tokens would lower an adaptive beta.
    """
    gradient = make_gradient(graphdef, config)
    rate = schedule(config.update, total_steps)

    def step(state: TrainState, batch: Batch):
        loss, grads, logp_BS, entropy_BS = gradient(state.params, batch, state.beta)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        empty = is_empty(batch, config)
        taken = finite & ~empty
        scale = jnp.where(norm > config.update.max_grad_norm, config.update.max_grad_norm / norm, 1.0)
        learning_rate = rate(state.optimizer_step)
        scaled = jax.tree.map(lambda g: g * scale, grads)
        params, opt_state = apply_adamw(config.update, state.params, scaled, state.opt_state, learning_rate, taken)
        seen = metrics(batch, logp_BS, entropy_BS, config)
        beta = adaptive_beta(state.beta, seen["kl/mean"], config.kl) if config.kl.adaptive else state.beta
        new_state = TrainState(
            params=params,
            opt_state=opt_state,
            beta=jnp.where(taken, beta, state.beta),
            optimizer_step=state.optimizer_step + taken,
            # An empty step is neither good nor bad: it leaves the row of bad ones as it is.
            nonfinite_in_a_row=jnp.where(
                empty, state.nonfinite_in_a_row, jnp.where(finite, 0, state.nonfinite_in_a_row + 1)
            ),
            nonfinite_total=state.nonfinite_total + (~finite & ~empty),
            empty_total=state.empty_total + empty,
        )
        seen |= {
            "loss": loss,
            "beta": state.beta,
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "nonfinite": new_state.nonfinite_total,
            "empty": empty,
            "empty_steps": new_state.empty_total,
        }
        return new_state, seen, logp_BS, grads

    return step


def make_update(graphdef, config: Config, total_steps: int):
    """Jitted `update(state, batch) -> (state, metrics)`; donates the state."""
    step = make_step(graphdef, config, total_steps)

    def update(state, batch):
        return step(state, batch)[:2]

    return jax.jit(update, donate_argnums=0, compiler_options=training_options())
