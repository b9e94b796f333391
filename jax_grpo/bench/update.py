"""The whole optimiser step (forward, backward, clipping, AdamW) beside `torch_ref` eager and compiled and TRL, on one batch.

    python -m jax_grpo.bench.update --problem 124m --json update_124m.json

Every implementation starts from the same weights; loss and gradient norm of its first step must be those of the first variant,
before anything is timed. `jax_grpo` is a run's own update, with the LM head and the settings of its config; the others are extra.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax_grpo.bench import problems
from jax_grpo.bench.harness import Prepared, main, torch_device, wait_for_torch
from jax_grpo.bench.problems import Problem, batch_of, config_of, flops_of, peer_parts, problem_of

MICRO_BATCHES = 4
CHUNKED = {"implementation": "chunked"}


def _prepared(problem: Problem, step: Callable[[], Mapping[str, Any]], **facts: Any) -> Prepared:
    """A variant whose step returns metrics, `loss` and `grad_norm` among them, and has waited for the weights."""

    def run() -> dict[str, float]:
        metrics = step()
        return {name: float(metrics[name]) for name in ("loss", "grad_norm")}

    return Prepared(run, {"dtype": problem.dtype} | facts, check=dict, after=lambda: {"flops": flops_of(problem)})


def jax_parts(problem: Problem, **sections: Mapping[str, Any]):
    """(graphdef, parameters, batch) of the problem in this project's layout, and its config; keywords: see `config_of`."""
    config = config_of(problem, **sections)
    if config.update.minibatches > 1:
        raise ValueError(
            f"{problem.config}: update.minibatches {config.update.minibatches}; this benchmark is one step on a whole "
            "rollout, of configs with update.minibatches: 1"
        )
    return *problems.model_of(problem, config.model.recomputed), batch_of(problem), config


def jax_step(
    name: str, *, dtype: str | None = None, rounded: str | None = None, **sections: Mapping[str, Any]
) -> Prepared:
    """This project's step; keywords change one thing of the problem's own config.

    Args:
        name: the problem, resolved.
        dtype: computed in.
        rounded: what float32 matmuls are really computed in (`tf32`).
        sections: settings by section.
    """
    import jax

    from jax_grpo.update import init_state, make_update

    problem = problem_of(name)
    problem = problem._replace(dtype=dtype or problem.dtype)
    graphdef, params, batch, config = jax_parts(problem, **sections)
    update = make_update(graphdef, config, config.optimizer_steps())
    held = {"state": init_state(params, config)}
    del params

    def step() -> Mapping[str, Any]:
        held["state"], metrics = update(held["state"], batch)
        jax.block_until_ready(held["state"])
        return metrics

    return _prepared(
        problem, step, dtype=rounded or problem.dtype, device=jax.devices()[0].device_kind,
        lm_head=config.lm_head.model_dump(), micro_batches=config.update.parts,
    )  # fmt: skip


def _torch_ref(name: str, *, compiled: bool) -> Prepared:
    import torch

    from torch_ref.batch import Batch
    from torch_ref.update import optimiser_step, start

    problem, device = problem_of(name), torch_device()
    model = problems.torch_ref_model(problem)
    if compiled:
        model.compile()
    parts = max(peer_parts(problem), config_of(problem).update.parts)
    config = config_of(problem, update={"micro_batches": parts})
    data = {key: torch.from_numpy(x).to(device) for key, x in problems.arrays(problem).items()}
    # Rows of prompt and completion, as every PyTorch trainer lays them out.
    prompt, completion = data["prompt"].repeat_interleave(problem.group, 0), data["completion"].flatten(0, 1)
    ids = torch.cat([prompt, completion], 1)

    def aligned(x: Any) -> Any:
        return torch.nn.functional.pad(x, (problem.prompt, 0))

    old_logp, ref_logp = aligned(data["old_logp"]), aligned(data["ref_logp"])
    mask = aligned(torch.ones_like(data["old_logp"]))
    batch = Batch(ids, torch.ones_like(ids), mask, data["advantages"], old_logp, ref_logp)
    state = start(model, config, "fused")

    def step() -> Mapping[str, Any]:
        metrics = optimiser_step(state, batch, config)
        wait_for_torch()
        return metrics

    return _prepared(problem, step, device=device, micro_batches=parts)


def _trl(name: str, *, fused_head: bool) -> Prepared:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from jax_grpo.bench import trl_peer

    problem, folder = problem_of(name), Path(tempfile.mkdtemp())
    problems.transformers_model(problem, bos_token_id=1, eos_token_id=1).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0", padding_side="left"
    )
    trainer = trl_peer.trainer_of(problem, folder, tokenizer, ["w3"] * problem.rows, fused_head=fused_head)
    micro_batches = trl_peer.inputs_of(problem, off_policy=True)
    model, update = trainer.model, config_of(problem).update
    assert model is not None
    model.train()
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=update.learning_rate, betas=(update.beta1, update.beta2), fused=True,
        weight_decay=update.weight_decay,
    )  # fmt: skip

    def step() -> Mapping[str, Any]:
        metrics = trl_peer.backward(trainer, problem, micro_batches)
        optimiser.step()
        optimiser.zero_grad()
        wait_for_torch()
        return metrics

    return _prepared(problem, step, device=torch_device(), micro_batches=len(micro_batches))


BENCH = problems.bench_of(
    "jax_grpo.bench.update",
    __doc__,
    {
        "jax_grpo": jax_step,
        "jax_grpo-chunked": lambda name: jax_step(name, lm_head=CHUNKED),
        "jax_grpo-micro-batches": lambda name: jax_step(name, update={"micro_batches": MICRO_BATCHES}),
        "torch_ref": lambda name: _torch_ref(name, compiled=False),
        "torch_ref-compiled": lambda name: _torch_ref(name, compiled=True),
        "TRL": lambda name: _trl(name, fused_head=True),
        "TRL-plain-head": lambda name: _trl(name, fused_head=False),
    },
)

if __name__ == "__main__":
    main(BENCH)
