"""The whole optimiser step (forward, backward, clipping, AdamW) beside `torch_ref` eager and compiled and TRL, on one batch.

    python -m jax_grpo.bench.update --problem 124m --json update_124m.json

Every implementation starts from the same weights; loss and gradient norm of its first step must be those of the first variant,
before anything is timed. `torch_ref-flash` is compiled with TF32 and flash attention; `TRL-liger` has Liger's fused loss and layer
norms. `jax_grpo` is a run's own update, with the LM head and the settings of its config; the others are extra: what recomputing
blocks costs (`remat-*`: matmuls' results or blocks' inputs alone are stored), attention with all scores in one array, and the step
in float32, in TF32 where the device has it, and in bfloat16.
"""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jax_grpo.bench import problems
from jax_grpo.bench.machine import finished
from jax_grpo.bench.problems import CONFIGS, PROBLEMS, Problem, config_of, peer_parts, sizes_of
from jax_grpo.bench.runner import AGREEMENT, Bench, NotHere, Prepared, main, torch_device
from jax_grpo.config.files import weights_directory
from jax_grpo.model.flops import BACKWARD, forward

CHUNKED = {"implementation": "chunked"}
SMOLLM2 = Problem(30, 9, 576, 49152, 4, 4, 256, 512, positions=8192, model="smollm2-135m-instruct", micro_batches=4)
NAMED_MODELS = {"smollm2-135m-long": SMOLLM2}
# The dtype of the step, and the precision of matmuls that JAX is asked for.
PRECISIONS = {"float32": ("float32", "highest"), "tf32": ("float32", "default"), "bfloat16": ("bfloat16", "default")}


def _prepared(problem: Problem, step: Callable[[], Mapping[str, Any]], **facts: Any) -> Prepared:
    """A variant whose step updates the weights and returns metrics, `loss` and `grad_norm` among them."""
    work = (1 + BACKWARD) * forward(problems.architecture_of(problem), problems.work_of(problem))
    facts = {"dtype": problem.dtype, "flops": work} | facts
    return Prepared(step, facts, lambda metrics: {name: float(metrics[name]) for name in AGREEMENT})


def jax_parts(problem: Problem, **sections: Mapping[str, Any]):
    """(graphdef, parameters, batch) of the problem in this project's layout, and its config; keywords: see `config_of`."""
    config = config_of(problem, **sections)
    if config.update.minibatches > 1:
        raise ValueError(
            f"{problem.config}: update.minibatches {config.update.minibatches}; this benchmark is one step on a whole "
            "rollout, of configs with update.minibatches: 1"
        )
    return *problems.model_of(problem, config), problems.batch_of(problem), config


def _jax(problem: Problem, *, matmuls: str | None = None, **sections: Mapping[str, Any]) -> Prepared:
    """This project's step, computed as one of `PRECISIONS` if asked, with some of the problem's settings replaced by section."""
    import jax

    from jax_grpo.update import init_state, make_update

    if matmuls:
        dtype, precision = PRECISIONS[matmuls]
        problem = problem._replace(dtype=dtype)
        jax.config.update("jax_default_matmul_precision", precision)
    graphdef, params, batch, config = jax_parts(problem, **sections)
    update = make_update(graphdef, config.learning())
    state = init_state(params, config.learning())
    del params

    def step() -> Mapping[str, Any]:
        nonlocal state
        state, metrics = update(state, batch)
        finished(state)
        return metrics

    head, parts = config.lm_head.model_dump(), config.update.parts
    return _prepared(problem, step, dtype=matmuls or problem.dtype, lm_head=head, micro_batches=parts)


def _torch_ref(problem: Problem, *, compiled: bool, flash: bool = False) -> Prepared:
    """With `flash`, float32 matmuls are in TF32 and attention is the flash kernel alone, which no padding is in the way of here.

    Raises NotHere: a GPU's flash kernels take no float32.
    """
    import torch

    from torch_ref.batch import Batch
    from torch_ref.options import Options, computing
    from torch_ref.update import optimiser_step, start

    if flash and torch_device() != "cpu" and problem.dtype == "float32":
        raise NotHere("a GPU's flash attention takes no float32; the problem is in no other")
    how = Options(tf32=flash, sdpa="flash" if flash else "auto")
    model = problems.torch_ref_model(problem)
    model.unpadded = flash
    if compiled:
        model.compile()
    config, data = config_of(problem), problems.torch_arrays(problem)
    parts = max(peer_parts(config), config.update.parts)
    ids_BT = torch.cat([data["prompt"], data["completion"]], 1)
    of_completions = (torch.ones_like(data["old_logp"]), data["old_logp"], data["ref_logp"])
    mask_BT, *logps_BT = (torch.nn.functional.pad(x_BC, (problem.prompt, 0)) for x_BC in of_completions)
    batch = Batch(ids_BT, torch.ones_like(ids_BT), mask_BT, data["advantages"], *logps_BT)
    learning = config.with_micro_batches(parts).learning()
    state = start(model, learning, "fused")

    def step() -> Mapping[str, Any]:
        with computing(how):
            return optimiser_step(state, batch, learning)

    return _prepared(problem, step, micro_batches=parts, tf32=how.tf32, sdpa=how.sdpa)


def _trl(problem: Problem, *, head: str) -> Prepared:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from jax_grpo.bench import trl_peer
    from torch_ref.optimiser import build_optimiser

    if problem.model:
        folder = weights_directory(problem.model)
    else:
        folder, words = Path(tempfile.mkdtemp()), Tokenizer(models.WordLevel({"word": 0, "end": 1}, unk_token="word"))
        problems.transformers_model(problem, bos_token_id=1, eos_token_id=1).save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end").save_pretrained(folder)
    trainer = trl_peer.trainer_of(problem, folder, ["word"] * problem.rows, head)
    micro_batches = trl_peer.inputs_of(problem, off_policy=True)
    trainer.model.train()
    optimiser = build_optimiser(trainer.model, config_of(problem).update, "fused")

    def step() -> Mapping[str, Any]:
        metrics = trl_peer.backward(trainer, problem, micro_batches)
        optimiser.step()
        optimiser.zero_grad()
        return metrics

    return _prepared(problem, step, micro_batches=len(micro_batches))


VARIANTS = {
    "jax_grpo": _jax,
    "jax_grpo-chunked": partial(_jax, lm_head=CHUNKED),
    "jax_grpo-micro-batches": partial(_jax, update={"micro_batches": 4}),
    "torch_ref": partial(_torch_ref, compiled=False),
    "torch_ref-compiled": partial(_torch_ref, compiled=True),
    "torch_ref-flash": partial(_torch_ref, compiled=True, flash=True),
    "TRL": partial(_trl, head="fused"),
    "TRL-plain-head": partial(_trl, head="plain"),
    "TRL-liger": partial(_trl, head="liger"),
    "attention-full": partial(_jax, model={"attention": "full"}),
    "remat-none": partial(_jax, model={"remat": False}),
    "remat-matmuls": partial(_jax, model={"remat": "keep_matmuls"}),
    "remat-full": partial(_jax, model={"remat": True}),
    "remat-full-chunked-head": partial(_jax, model={"remat": True}, lm_head=CHUNKED),
} | {name: partial(_jax, matmuls=name) for name in PRECISIONS}
BENCH = Bench("jax_grpo.bench.update", __doc__, VARIANTS, CONFIGS | PROBLEMS | NAMED_MODELS, sizes_of, Problem._make)

if __name__ == "__main__":
    main(BENCH)
