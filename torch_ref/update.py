"""One optimiser step: gradients accumulated over micro-batches, then clipping, AdamW, schedule and the control of beta.

`accumulate` leaves the unclipped gradients on the parameters; `apply` uses them. Composes the other modules; knows no
files, prompts or rewards.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from jax_grpo.config.learning import Learning
from jax_grpo.config.objectives import ClipCov, KlCov
from torch_ref import entropy_control
from torch_ref.batch import Batch
from torch_ref.covariance import held_back
from torch_ref.kl_control import beyond_guardrail, next_beta
from torch_ref.model import LanguageModel, score
from torch_ref.objective import TOKEN_WEIGHTS, TokenTerms, Totals, token_terms, top_entropy_mask
from torch_ref.optimiser import build_optimiser, clip_by_global_norm, global_norm, learning_rate


class NonFiniteUpdates(RuntimeError):
    """Too many optimiser steps in a row had a loss or gradient that is not finite."""


@dataclass
class TrainState:
    """What an optimiser step changes."""

    model: LanguageModel
    optimiser: torch.optim.Optimizer
    beta: float
    step: int = 0
    """Optimiser steps taken; skipped ones are not counted."""
    nonfinite_in_a_row: int = 0
    nonfinite_total: int = 0
    empty_total: int = 0
    """Steps that had no token to train on."""
    entropy_coefficient: float = 0.0
    """Moved by `objective.entropy_target`, where there is one."""
    entropy_before: float = entropy_control.NOTHING_SEEN
    """Mean entropy that the last step saw, nats."""


@dataclass(frozen=True)
class Gradients:
    """Result of `accumulate`; the gradients themselves are on the parameters."""

    metrics: dict[str, float]
    logp_BT: Tensor
    """Under the parameters before the step; 0 outside the completion mask."""


def start(model: LanguageModel, learning: Learning, adamw: str = "definition") -> TrainState:
    """State before the first step. adamw: `definition`, `foreach` or `fused`."""
    optimiser, coefficient = build_optimiser(model, learning.update, adamw), learning.objective.entropy_coefficient
    return TrainState(model, optimiser, learning.kl.beta, entropy_coefficient=coefficient)


def optimiser_step(state: TrainState, batch: Batch, learning: Learning) -> dict[str, float]:
    """Changes the state by one optimiser step on the whole batch; returns the step's metrics.

    Those that are means or maxima over tokens are NaN where the batch has no token to train on (see `apply`).
    """
    coefficient = entropy_control.in_force(state.entropy_coefficient, state.entropy_before, learning.objective)
    return apply(state, accumulate(state.model, batch, learning, state.beta, coefficient, state.step), learning)


def accumulate(
    model: LanguageModel, batch: Batch, learning: Learning, beta: float, coefficient: float | None = None, step: int = 0
) -> Gradients:
    """Gradients of the loss of the whole batch, computed `update.micro_batches` slices at a time.

        loss = sum_bt w_bt (policy_bt + beta KL_bt) - coefficient * sum_bt mask_bt entropy_bt / sum_bt mask_bt

    with w of `objective.TOKEN_WEIGHTS`. Every denominator is of the whole batch, so the cut changes only rounding. A
    coefficient of None is `objective.entropy_coefficient`.
    """
    objective = learning.objective
    coefficient = objective.entropy_coefficient if coefficient is None else coefficient
    mask_BT = batch.loss_mask_BT(objective.mask_truncated)
    totals = Totals(mask_BT.shape[0], max(1.0, float(mask_BT.sum())), learning.most_tokens)
    weight_BT = TOKEN_WEIGHTS[objective.aggregation](mask_BT, totals)
    entropy_mask_BT = _entropy_mask(model, batch, mask_BT, learning) if objective.entropy_quantile > 0 else None
    held_back_BT = None
    if isinstance(objective, ClipCov | KlCov):  # chosen by the policy that sampled, as the entropy mask is
        logp_BT = score_batch(model, batch, learning)[0] if batch.old_logp_BT is None else batch.old_logp_BT
        held_back_BT = held_back(logp_BT, batch.advantages_B, mask_BT, objective, learning.seed, step)
    needs_reference = learning.kl.beta > 0

    model.zero_grad(set_to_none=True)
    losses, policies, parts = [], [], []
    for rows in micro_batches(mask_BT.shape[0], learning.update.parts):
        micro = batch.rows(rows)
        with precision(learning.compute_dtype, mask_BT.device.type):
            logp_BT, entropy_BT = score(
                model,
                micro.input_ids_BT,
                micro.attention_mask_BT,
                micro.completion_mask_BT,
                learning.temperature,
                entropy_gradient=coefficient != 0,
            )
        terms = token_terms(
            objective,
            logp_BT=logp_BT,
            mask_BT=mask_BT[rows],
            advantages_B=micro.advantages_B,
            old_logp_BT=micro.old_logp_BT,
            ref_logp_BT=micro.ref_logp_BT if needs_reference else None,
            sampling_logp_BT=micro.sampling_logp_BT,
            entropy_mask_BT=None if entropy_mask_BT is None else entropy_mask_BT[rows],
            held_back_BT=None if held_back_BT is None else held_back_BT[rows],
            kl_estimator=learning.kl.estimator,
            importance_corrected_kl=learning.kl.importance_corrected,
        )
        policy = (weight_BT[rows] * terms.policy_BT).sum()
        loss = policy if terms.kl_BT is None else policy + beta * (weight_BT[rows] * terms.kl_BT).sum()
        if coefficient != 0:
            loss = loss - coefficient * (mask_BT[rows] * entropy_BT).sum() / totals.tokens
        loss.backward()
        losses.append(loss.detach())
        policies.append(policy.detach())
        parts.append((logp_BT.detach(), entropy_BT.detach(), terms))

    logp_BT = torch.cat([logp for logp, _, _ in parts])
    entropy_BT = torch.cat([entropy for _, entropy, _ in parts])
    metrics = {
        "loss": float(sum(losses)),
        "policy_loss": float(sum(policies)),
        "beta": beta,
        "empty": not bool(mask_BT.any()),
        "entropy": _mean(entropy_BT, mask_BT),
        **_term_metrics([terms for _, _, terms in parts], mask_BT),
        **_mismatch_metrics(batch, logp_BT, mask_BT),
    }
    if held_back_BT is not None:
        metrics["held_back"] = _mean(held_back_BT.to(mask_BT.dtype), mask_BT)
    if objective.entropy_target is not None:
        metrics["entropy_bonus/applied"] = coefficient
    return Gradients(metrics, logp_BT)


def apply(state: TrainState, gradients: Gradients, learning: Learning) -> dict[str, float]:
    """Clips, steps AdamW at the schedule's rate and moves beta; a loss or gradient that is not finite changes nothing.

    Nor does a batch without a token to train on, which says nothing about the policy: a mean over no tokens is no
    observation, and AdamW would go on along its moments. It is counted by itself, and ends no row of non-finite steps.

    Raises:
        NonFiniteUpdates: at the `update.max_consecutive_nonfinite`-th such step in a row.
    """
    update = learning.update
    rate = learning_rate(state.step, update, learning.total_steps)
    norm = global_norm(_gradients(state.model))
    empty = bool(gradients.metrics["empty"])
    finite = math.isfinite(gradients.metrics["loss"]) and math.isfinite(norm)
    if finite and not empty:
        clip_by_global_norm(_gradients(state.model), norm, update.max_grad_norm)
        for group in state.optimiser.param_groups:
            group["lr"] = rate
        state.optimiser.step()
        state.step += 1
    if empty:
        state.empty_total += 1
    else:
        state.nonfinite_in_a_row = 0 if finite else state.nonfinite_in_a_row + 1
        state.nonfinite_total += not finite
    if state.nonfinite_in_a_row >= update.max_consecutive_nonfinite:
        raise NonFiniteUpdates(
            f"{state.nonfinite_in_a_row} optimiser steps in a row had a loss or gradient that is not finite "
            f"(loss {gradients.metrics['loss']}, gradient norm {float(norm)}, after {state.step} good steps); parameters "
            "are those of the last good step: lower update.learning_rate, or look at the batch"
        )
    metrics = gradients.metrics | {
        "grad_norm": float(norm),
        "learning_rate": rate,
        "nonfinite": state.nonfinite_total,
        "nonfinite_in_a_row": state.nonfinite_in_a_row,
        "empty_steps": state.empty_total,
    }
    if learning.objective.entropy_target is not None:
        metrics["entropy_bonus/coefficient"] = state.entropy_coefficient
        if finite and not empty:
            state.entropy_before = metrics["entropy"]
            state.entropy_coefficient = entropy_control.behind(
                state.entropy_coefficient, state.entropy_before, learning.objective
            )
    if "kl/mean" in metrics:
        metrics["kl/beyond_guardrail"] = float(beyond_guardrail(metrics["kl/mean"], learning.kl))
        if finite and not empty:
            state.beta = next_beta(state.beta, metrics["kl/mean"], learning.kl)
    return metrics


def micro_batches(sequences: int, parts: int) -> Iterator[slice]:
    """Contiguous slices of nearly equal size; none is empty."""
    edges = [sequences * part // parts for part in range(parts + 1)]
    return (slice(a, b) for a, b in itertools.pairwise(edges) if b > a)


def precision(compute_dtype: str, device: str) -> AbstractContextManager:
    """bfloat16 autocast where the config asks for it. No gradient scaler: bfloat16 has float32's exponent."""
    if compute_dtype == "bfloat16":
        return torch.autocast(device, dtype=torch.bfloat16)
    return nullcontext()


@torch.no_grad()
def score_batch(model: LanguageModel, batch: Batch, learning: Learning) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [B, T] of the completion tokens, micro-batch by micro-batch, without gradients."""
    scored = []
    for rows in micro_batches(batch.input_ids_BT.shape[0], learning.update.parts):
        micro = batch.rows(rows)
        tokens = micro.input_ids_BT, micro.attention_mask_BT, micro.completion_mask_BT
        with precision(learning.compute_dtype, micro.input_ids_BT.device.type):
            scored.append(score(model, *tokens, learning.temperature))
    return torch.cat([logp for logp, _ in scored]), torch.cat([entropy for _, entropy in scored])


def _entropy_mask(model: LanguageModel, batch: Batch, mask_BT: Tensor, learning: Learning) -> Tensor:
    """The tokens at which the policy that sampled was least sure: its entropies, so that later steps keep the same tokens.

    A batch that brings none is one the given model has just sampled. The quantile is the whole batch's, so the entropies of
    all micro-batches are needed before the first one's loss.
    """
    entropy_BT = score_batch(model, batch, learning)[1] if batch.entropy_BT is None else batch.entropy_BT
    return top_entropy_mask(entropy_BT, mask_BT, learning.objective.entropy_quantile)


def _gradients(model: LanguageModel) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _mean(values_BT: Tensor, mask_BT: Tensor) -> float:
    return float((values_BT * mask_BT).sum() / mask_BT.sum())  # 0 / 0 is NaN: no tokens, no mean


def _term_metrics(parts: list[TokenTerms], mask_BT: Tensor) -> dict[str, float]:
    """Means over trained tokens; the KL's 95th percentile interpolates linearly."""
    rho_BT = torch.cat([terms.rho_BT for terms in parts])
    metrics = {
        "ratio/mean": _mean(rho_BT, mask_BT),
        "ratio/deviation": _mean((rho_BT - 1).abs(), mask_BT),
        "clip_fraction/low": _mean(torch.cat([terms.clipped_low_BT for terms in parts]), mask_BT),
        "clip_fraction/high": _mean(torch.cat([terms.clipped_high_BT for terms in parts]), mask_BT),
    }
    observed = [terms.observed_kl_BT for terms in parts if terms.observed_kl_BT is not None]
    if observed:
        kl_K = torch.cat(observed)[mask_BT.bool()]
        p95 = float(kl_K.quantile(0.95)) if kl_K.numel() else math.nan
        metrics |= {"kl/mean": _mean(torch.cat(observed), mask_BT), "kl/p95": p95}
    return metrics


def _mismatch_metrics(batch: Batch, logp_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """|old_logp - sampling_logp| in nats: how far the generator's arithmetic is from the trainer's."""
    there = mask_BT.bool()
    if batch.sampling_logp_BT is None:
        return {}
    old_logp_BT = logp_BT if batch.old_logp_BT is None else batch.old_logp_BT
    gap_K = (old_logp_BT - batch.sampling_logp_BT)[there].abs()
    largest = float(gap_K.max()) if gap_K.numel() else math.nan
    return {"logp_mismatch/mean": float(gap_K.mean()), "logp_mismatch/max": largest}
