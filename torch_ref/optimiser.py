"""AdamW, global-norm clipping and the learning-rate schedule.

AdamW is written out once, as the definition; torch's `foreach` and `fused` ones are the same update, faster. Knows
parameters and gradients, not what they are gradients of.
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from jax_grpo.config.learning import UpdateConfig


def learning_rate(step: int, config: UpdateConfig, total_steps: int) -> float:
    """Learning rate of optimiser step t = 0, 1, ... . THE definition, N = total_steps, W = min(warmup_steps, N - 1):

        t < W:                lr (t + 1) / W              (the first step already learns; step W - 1 has the full lr)
        t >= W, constant:     lr
        t >= W, cosine:       lr (f + (1 - f) (1 + cos(pi p)) / 2),   p = min(1, (t - W) / (N - W)),
                              f = final_learning_rate_fraction

    Skipped (non-finite) steps do not advance t.
    """
    warmup = min(config.warmup_steps, total_steps - 1)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return config.learning_rate * SCHEDULES[config.schedule](progress, config.final_learning_rate_fraction)


SCHEDULES = {
    "constant": lambda progress, final: 1.0,
    "cosine": lambda progress, final: final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2,
}


def global_norm(gradients: Iterable[Tensor]) -> Tensor:
    """L2 norm over all tensors together, a float64 scalar.

    In float32 the sum of squares of GPT-2's 38 million embedding gradients loses its last digits on a CPU: 6e-5 of the norm.
    """
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]))


def clip_by_global_norm(gradients: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scales the gradients by max_norm / norm where norm > max_norm, else leaves them alone; in place.

    This is optax's rule; torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6.
    """
    if norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / norm)


class AdamW(torch.optim.Optimizer):
    """Decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), moments in the parameters' dtype:

    m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
    p <- p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay p),  t = 1, 2, ...
    """

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if not state:
                    state |= {"step": 0, "m": torch.zeros_like(parameter), "v": torch.zeros_like(parameter)}
                state["step"] += 1
                state["m"].mul_(beta1).add_(gradient, alpha=1 - beta1)
                state["v"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                m_hat = state["m"] / (1 - beta1 ** state["step"])
                v_hat = state["v"] / (1 - beta2 ** state["step"])
                change = m_hat / (v_hat.sqrt() + group["eps"]) + group["weight_decay"] * parameter
                parameter.sub_(change, alpha=group["lr"])


ADAMW = {
    "definition": AdamW,
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
}


def build_optimiser(
    model: nn.Module, config: UpdateConfig, implementation: str = "definition"
) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained; weight decay on matrices and embeddings, not on biases and norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return ADAMW[implementation](
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
    )
