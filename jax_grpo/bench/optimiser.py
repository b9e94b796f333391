"""AdamW alone over a model's parameters: ours with its first moment in bfloat16, with both in host memory, PyTorch's three."""

from typing import Any

import jax
import jax.numpy as jnp

from jax_grpo.bench.harness import Prepared, main, torch_device, wait_for_torch
from jax_grpo.bench.problems import bench_of, config_of, problem_of, weights


def _ours(name: str, **update: Any) -> Prepared:
    from jax_grpo.optimiser import adamw, apply_adamw, offloaded
    from jax_grpo.system.compilation import training_options

    config = config_of(problem_of(name), update=update).update
    params = {key: jnp.asarray(x) for key, x in weights(problem_of(name)).items()}
    grads = jax.tree.map(lambda x: 1e-3 * jnp.ones_like(x), params)

    def step(params: Any, moments: Any, finite: jax.Array) -> Any:
        return apply_adamw(config, params, grads, moments, jnp.float32(1e-6), finite)

    jitted = jax.jit(step, donate_argnums=(0, 1), compiler_options=training_options())
    held = {"state": (params, offloaded(config, adamw(config).init(params)))}
    del params

    def run() -> None:
        held["state"] = jax.block_until_ready(jitted(*held["state"], jnp.bool_(True)))

    return Prepared(run, {"parameters": sum(x.size for x in grads.values())})


def _torch(name: str, implementation: str) -> Prepared:
    import torch

    from torch_ref.optimiser import build_optimiser

    module = torch.nn.ParameterList([torch.from_numpy(x) for x in weights(problem_of(name)).values()])
    module.to(torch_device())
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimiser = build_optimiser(module, config_of(problem_of(name)).update, implementation)

    def run() -> None:
        optimiser.step()
        wait_for_torch()

    return Prepared(run, {"parameters": sum(x.numel() for x in module.parameters())})


BENCH = bench_of(
    "jax_grpo.bench.optimiser",
    __doc__,
    {
        "optax": _ours,
        "optax-bfloat16-moment": lambda name: _ours(name, first_moment_dtype="bfloat16"),
        "optax-offloaded": lambda name: _ours(name, offload_optimizer=True),
        "torch-foreach": lambda name: _torch(name, "foreach"),
        "torch-fused": lambda name: _torch(name, "fused"),
        "torch-definition": lambda name: _torch(name, "definition"),
    },
)

if __name__ == "__main__":
    main(BENCH)
