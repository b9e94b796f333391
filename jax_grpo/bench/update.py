"""The whole optimiser step (forward, backward, clipping, AdamW) beside `torch_ref` eager and compiled and TRL, on one batch.

    python -m jax_grpo.bench.update --problem 124m --json update_124m.json

Every implementation starts from the same weights and reports the loss of its first step: they must agree.
"""

import tempfile
from typing import Any, Literal

from jax_grpo.bench.harness import Bench, Prepared, main
from jax_grpo.bench.update_problem import (
    ABOUT,
    POSITIONS,
    PROBLEMS,
    Problem,
    arrays,
    config_of,
    flops_of,
    model_of,
    weights,
)

MICRO_BATCHES = 4
Remat = Literal[False, "all", "dots"]


def jax_parts(problem: Problem, remat: Remat = False, **update: Any):
    """(graphdef, parameters, batch) of the problem in this project's layout, and its config."""
    import jax.numpy as jnp

    from jax_grpo.batch import Batch, GroupedTokens

    config = config_of(problem, **update)
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
    name: str, head: dict[str, Any], *, dtype: str | None = None, remat: Remat = False, **update: Any
) -> Prepared:
    """This project's step with an LM head, and where given another compute dtype, recomputation or `update` settings."""
    import jax

    from jax_grpo.config import Config
    from jax_grpo.update import init_state, make_update

    problem = PROBLEMS[name]._replace(dtype=dtype or PROBLEMS[name].dtype)
    graphdef, params, batch, config = jax_parts(problem, remat, **update)
    config = Config.model_validate(config.model_dump() | {"lm_head": head})
    step = make_update(graphdef, config, config.optimizer_steps())
    kept = {"state": init_state(params, config)}
    del params

    def run() -> float:
        kept["state"], metrics = step(kept["state"], batch)
        jax.block_until_ready(kept["state"])
        return float(metrics["loss"])

    return Prepared(run, {"flops": flops_of(problem), "loss": run(), "device": jax.devices()[0].device_kind})


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

    problem, device = PROBLEMS[name], _device()
    model = GPT2(GPT2Config(problem.vocabulary, problem.layers, problem.heads, problem.width, POSITIONS))
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights(problem).items()})
    model.to(device)
    if compiled:
        model.compile()
    config, data = config_of(problem), _torch_batch(problem)
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

    def run() -> float:
        loss = optimiser_step(state, batch, config)["loss"]
        if device == "cuda":
            torch.cuda.synchronize()
        return loss

    return Prepared(run, {"flops": flops_of(problem), "loss": run(), "device": device})


def _trl(name: str) -> Prepared:
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    problem, device, rows = PROBLEMS[name], _device(), PROBLEMS[name].prompts * PROBLEMS[name].group
    sizes = GPT2Config(
        vocab_size=problem.vocabulary, n_layer=problem.layers, n_head=problem.heads, n_embd=problem.width,
        n_positions=POSITIONS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    model = GPT2LMHeadModel(sizes)
    model.load_state_dict({k: torch.from_numpy(x) for k, x in weights(problem).items()}, strict=False)
    model.tie_weights()
    folder = tempfile.mkdtemp()  # TRL reads a model's name or folder, and loads its reference from there
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w1", pad_token="w2", unk_token="w0", padding_side="left"
    )
    trainer = GRPOTrainer(
        model=folder,
        args=GRPOConfig(
            output_dir=folder, use_cpu=device == "cpu", bf16=problem.dtype == "bfloat16",
            per_device_train_batch_size=rows, num_generations=problem.group, max_completion_length=problem.completion,
            temperature=1.0, beta=0.04, loss_type="dapo", steps_per_generation=1, gradient_checkpointing=False,
            report_to=[],
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["w3"] * rows}),
        processing_class=tokenizer,
    )  # fmt: skip
    data = _torch_batch(problem)
    mask = torch.ones_like(data["completion"])
    inputs = {
        "prompt_ids": data["prompt"].long(), "prompt_mask": torch.ones_like(data["prompt"]).long(),
        "completion_ids": data["completion"].long(), "completion_mask": mask.long(), "advantages": data["advantages"],
        "old_per_token_logps": data["old_logp"], "ref_per_token_logps": data["ref_logp"],
        "num_items_in_batch": torch.tensor(int(mask.sum())),
    }  # fmt: skip
    inputs = {key: x.to(device) for key, x in inputs.items()}
    trainer.current_gradient_accumulation_steps = 1
    trained = trainer.model
    assert trained is not None
    trained.train()
    optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def run() -> float:
        with torch.autocast(device, torch.bfloat16, enabled=problem.dtype == "bfloat16"):
            loss = trainer._compute_loss(trained, inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return float(loss.detach())

    return Prepared(run, {"flops": flops_of(problem), "loss": run(), "device": device})


MATERIALISED, CHUNKED = {"implementation": "materialised"}, {"implementation": "chunked"}
BENCH = Bench(
    "jax_grpo.bench.update",
    "The optimiser step beside torch_ref (eager, compiled) and TRL, same weights and batch.",
    {
        "jax_grpo": lambda name: jax_step(name, MATERIALISED),
        "jax_grpo-chunked": lambda name: jax_step(name, CHUNKED),
        "jax_grpo-micro-batches": lambda name: jax_step(name, MATERIALISED, micro_batches=MICRO_BATCHES),
        "torch_ref": lambda name: _torch_ref(name, compiled=False),
        "torch_ref-compiled": lambda name: _torch_ref(name, compiled=True),
        "TRL": _trl,
    },
    ABOUT,
)

if __name__ == "__main__":
    main(BENCH)
