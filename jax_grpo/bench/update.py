"""The whole optimiser step (forward, backward, clipping, AdamW) beside `torch_ref` eager and compiled and TRL, on one batch.

    python -m jax_grpo.bench.update --problem 124m --json update_124m.json

Every implementation starts from the same weights; loss and gradient norm of its first step must be those of the first variant,
before anything is timed. `jax_grpo` is a run's own update, with the LM head and the settings of its config; the others are extra.
"""

import tempfile
from pathlib import Path
from typing import Any, Literal

from jax_grpo.bench.harness import Bench, Prepared, main
from jax_grpo.bench.update_problem import (
    ABOUT,
    RESOLVE,
    Problem,
    arrays,
    config_of,
    flops_of,
    model_of,
    peer_parts,
    problem_of,
    weights,
)

MICRO_BATCHES = 4
Remat = Literal[False, "all", "dots"]


def jax_parts(problem: Problem, remat: Remat = False, **update: Any):
    """(graphdef, parameters, batch) of the problem in this project's layout, and its config."""
    import jax.numpy as jnp

    from jax_grpo.batch import Batch, GroupedTokens

    config = config_of(problem, **update)
    if config.update.minibatches > 1:
        raise ValueError(
            f"{problem.config}: update.minibatches {config.update.minibatches}; this benchmark is one step on a whole "
            "rollout, of configs with update.minibatches: 1"
        )
    graphdef, params = model_of(problem, remat)
    data = {name: jnp.asarray(x) for name, x in arrays(problem).items()}
    rows = (problem.prompts * problem.group, problem.completion)
    batch = Batch(
        GroupedTokens(
            data["prompt"], jnp.ones_like(data["prompt"]), data["completion"], jnp.ones_like(data["completion"])
        ),
        jnp.ones(rows, jnp.int32),
        data["advantages"],
        jnp.ones(rows[0], bool),
        data["old_logp"],
        data["ref_logp"],
    )
    return graphdef, params, batch, config


def jax_step(
    name: str,
    head: dict[str, Any] | None = None,
    *,
    dtype: str | None = None,
    remat: Remat | None = None,
    rounded: str | None = None,
    **update: Any,
) -> Prepared:
    """This project's step; keywords change one thing of the problem's own config.

    Args:
        name: the problem, resolved.
        head: settings of `lm_head`.
        dtype: computed in.
        remat: what is recomputed.
        rounded: what float32 matmuls are really computed in (`tf32`).
        update: settings of `update`.
    """
    import jax

    from jax_grpo.config import Config
    from jax_grpo.update import init_state, make_update

    problem = problem_of(name)
    problem = problem._replace(dtype=dtype or problem.dtype)
    remat = config_of(problem).model.recomputed if remat is None else remat
    graphdef, params, batch, config = jax_parts(problem, remat, **update)
    config = Config.model_validate(config.model_dump() | ({} if head is None else {"lm_head": head}))
    step = make_update(graphdef, config, config.optimizer_steps())
    kept = {"state": init_state(params, config)}
    del params

    def run() -> dict[str, float]:
        kept["state"], metrics = step(kept["state"], batch)
        jax.block_until_ready(kept["state"])
        return {name: float(metrics[name]) for name in ("loss", "grad_norm")}

    facts = {"dtype": rounded or problem.dtype, "device": jax.devices()[0].device_kind}
    facts |= {"lm_head": config.lm_head.model_dump(), "micro_batches": config.update.parts}
    return Prepared(run, facts, check=dict, after=lambda: {"flops": flops_of(problem)})


def _torch_batch(problem: Problem) -> dict[str, Any]:
    """Rows of prompt and completion, as every PyTorch trainer lays them out."""
    import torch

    data = {name: torch.from_numpy(x) for name, x in arrays(problem).items()}
    prompt = data["prompt"].repeat_interleave(problem.group, 0)
    completion = data["completion"].reshape(-1, problem.completion)
    return data | {"prompt": prompt, "completion": completion}


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _torch_ref(name: str, *, compiled: bool, adamw: str = "fused") -> Prepared:
    import torch

    from torch_ref.batch import Batch
    from torch_ref.model import GPT2, GPT2Config
    from torch_ref.update import optimiser_step, start

    problem, device = problem_of(name), _device()
    model = GPT2(GPT2Config(problem.vocabulary, problem.layers, problem.heads, problem.width, problem.positions))
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights(problem).items()})
    model.to(device)
    if compiled:
        model.compile()
    parts = max(peer_parts(problem), config_of(problem).update.parts)
    config, data = config_of(problem, micro_batches=parts), _torch_batch(problem)
    ids = torch.cat([data["prompt"], data["completion"]], 1)

    def aligned(x: Any) -> Any:
        return torch.nn.functional.pad(x, (problem.prompt, 0)).to(device)

    batch = Batch(
        ids.to(device),
        torch.ones_like(ids).to(device),
        aligned(torch.ones(data["completion"].shape)),
        data["advantages"].to(device),
        aligned(data["old_logp"]),
        aligned(data["ref_logp"]),
    )
    state = start(model, config, adamw)

    def run() -> dict[str, float]:
        metrics = optimiser_step(state, batch, config)
        if device == "cuda":
            torch.cuda.synchronize()
        return {name: float(metrics[name]) for name in ("loss", "grad_norm")}

    facts = {"dtype": problem.dtype, "device": device, "micro_batches": parts}
    return Prepared(run, facts, check=dict, after=lambda: {"flops": flops_of(problem)})


def _trl(name: str, *, fused_head: bool) -> Prepared:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl.trainer.grpo_trainer import GRPOTrainer

    from jax_grpo.bench import trl_peer

    problem = problem_of(name)
    folder, rows = Path(tempfile.mkdtemp()), problem.prompts * problem.group
    trl_peer.saved(problem, folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0", padding_side="left"
    )
    trainer = GRPOTrainer(
        model=str(folder),
        args=trl_peer.arguments_of(problem, folder, rows),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["w3"] * rows}),
        processing_class=tokenizer,
    )
    if not fused_head:
        trl_peer.use_plain_head(trainer)
    micro_batches = trl_peer.inputs_of(problem, off_policy=True)
    trained = trainer.model
    assert trained is not None
    trained.train()
    update = config_of(problem).update
    optimiser = torch.optim.AdamW(
        trained.parameters(), lr=update.learning_rate, betas=(update.beta1, update.beta2), fused=True,
        weight_decay=update.weight_decay,
    )  # fmt: skip

    def run() -> dict[str, float]:
        found = trl_peer.backward(trainer, problem, micro_batches)
        optimiser.step()
        optimiser.zero_grad()
        return found

    facts = {"dtype": problem.dtype, "device": trl_peer.device_of(), "micro_batches": len(micro_batches)}
    return Prepared(run, facts, check=dict, after=lambda: {"flops": flops_of(problem)})


MATERIALISED, CHUNKED = {"implementation": "materialised"}, {"implementation": "chunked"}
BENCH = Bench(
    "jax_grpo.bench.update",
    "The optimiser step beside torch_ref (eager, compiled) and TRL, same weights and batch.",
    {
        "jax_grpo": jax_step,
        "jax_grpo-chunked": lambda name: jax_step(name, CHUNKED),
        "jax_grpo-micro-batches": lambda name: jax_step(name, micro_batches=MICRO_BATCHES),
        "torch_ref": lambda name: _torch_ref(name, compiled=False),
        "torch_ref-compiled": lambda name: _torch_ref(name, compiled=True),
        "TRL": lambda name: _trl(name, fused_head=True),
        "TRL-plain-head": lambda name: _trl(name, fused_head=False),
    },
    ABOUT,
    reads_configs=True,
    resolve=RESOLVE,
)

if __name__ == "__main__":
    main(BENCH)
