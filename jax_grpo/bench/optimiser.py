"""AdamW alone over a model's parameters: ours with its first moment in bfloat16, with both in host memory, PyTorch's fused one."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_grpo.bench.problems import CONFIGS, PROBLEMS, Problem, config_of, sizes_of, torch_weights, weights
from jax_grpo.bench.runner import Bench, Prepared, main, torch_device
from jax_grpo.optimiser import adamw, apply_adamw, offloaded
from jax_grpo.system.compilation import training_options


def _ours(problem: Problem, **update: Any) -> Prepared:
    config = config_of(problem, update=update).update
    params = jax.tree.map(jnp.asarray, weights(problem))
    grads = jax.tree.map(lambda x: 1e-3 * jnp.ones_like(x), params)

    def updated(params: Any, moments: Any, finite: jax.Array) -> Any:
        return apply_adamw(config, params, grads, moments, jnp.float32(1e-6), finite)

    jitted = jax.jit(updated, donate_argnums=(0, 1), compiler_options=training_options())
    state = params, offloaded(config, adamw(config).init(params))
    del params

    def step() -> Any:
        nonlocal state
        state = jitted(*state, jnp.bool_(True))
        return state

    return Prepared(step, {"parameters": sum(x.size for x in grads.values())})


def _torch(problem: Problem) -> Prepared:
    import torch

    from torch_ref.optimiser import build_optimiser

    module = torch.nn.ParameterList(torch_weights(problem).values()).to(torch_device())
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimiser = build_optimiser(module, config_of(problem).update, "fused")
    return Prepared(optimiser.step, {"parameters": sum(x.numel() for x in module.parameters())})


VARIANTS = {
    "optax": _ours,
    "optax-bfloat16-moment": partial(_ours, first_moment_dtype="bfloat16"),
    "optax-offloaded": partial(_ours, offload_optimizer=True),
    "torch-fused": _torch,
}
BENCH = Bench("jax_grpo.bench.optimiser", __doc__, VARIANTS, CONFIGS | PROBLEMS, sizes_of, Problem._make)

if __name__ == "__main__":
    main(BENCH)
