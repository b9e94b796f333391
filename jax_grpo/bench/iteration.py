"""A whole GRPO iteration beside TRL's: generate, reward, score by the old policy and the reference, one optimiser step.

    python -m jax_grpo.bench.iteration --problem width-128 --json iteration.json

Both start from the same weights, random or a named model's, read the same prompts with the same tokenizer, and generate
completions of full length, or nearly (random weights draw no end of text). Each reward is a function of the text that costs next to
nothing. Before anything is timed, both compute the loss and the gradient of one and the same batch, which must agree. `jax_grpo`
is a run with default settings, its LM head among them; the others are extra.
"""

import dataclasses
import itertools
import multiprocessing
import queue
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from jax_grpo.bench import problems
from jax_grpo.bench.machine import finished
from jax_grpo.bench.problems import Problem, batch_of
from jax_grpo.bench.runner import AGREEMENT, Bench, Prepared, main
from jax_grpo.config import Config
from jax_grpo.config.files import weights_directory

PROMPT_TOKENS = 64  # at most; fewer than 49 would be another width, with programs of its own to compile
CANDIDATES = 1024  # positions; half of them are of the common width, and a run takes a few each step
LONGEST = 80  # of all packaged positions
SMOLLM2 = Problem(30, 9, 576, 49152, 8, 8, PROMPT_TOKENS, 32, positions=8192, model="smollm2-135m-instruct")
PROBLEMS = {
    "width-128": Problem(4, 4, 128, 50257, 8, 8, PROMPT_TOKENS, 32),
    "124m": Problem(12, 12, 768, 50257, 2, 4, PROMPT_TOKENS, 32),
    "124m-8x8x144-bf16": Problem(12, 12, 768, 50257, 8, 8, PROMPT_TOKENS, 144, "bfloat16"),
    "smollm2-135m": SMOLLM2,
    "smollm2-135m-bf16": SMOLLM2._replace(dtype="bfloat16"),
    "tiny": Problem(1, 2, 16, 50257, 2, 2, PROMPT_TOKENS, 4),
}
CHUNKED = {"implementation": "chunked", "chunk_tokens": 256, "chunk_vocab": 8192}


def config_of(problem: Problem, **sections: Mapping[str, Any]) -> Config:
    """A run of the problem; keywords replace settings by section.

    The check comes after a step on completions of each side's own: its learning rate is too small to change a weight.
    """
    return problems.config_of(problem._replace(prompt=LONGEST), update={"learning_rate": 1e-12}, **sections)


def prompts(config: Config) -> list[tuple[Any, str]]:
    """Packaged positions whose prompts are of one padded width, and the texts of those prompts."""
    from jax_grpo.model.tokenizer import Tokenizer, tokenizer_of
    from jax_grpo.rollout.generate import padded_length
    from jax_grpo.tasks import make_task

    packaged = config.prompts.model_copy(update={"source": "packaged", "split": "train"})
    task, width = make_task(config.task), padded_length(PROMPT_TOKENS)
    candidates = [(position, task.prompt(position, 0).text) for position in task.read(packaged, 0, None)[:CANDIDATES]]
    encoded = Tokenizer.load(tokenizer_of(config.model)).encode_batch([text for _, text in candidates])
    return [prompt for prompt, ids in zip(candidates, encoded, strict=True) if padded_length(len(ids)) == width]


def _jax(problem: Problem, **sections: Mapping[str, Any]) -> Prepared:
    import chex

    from jax_grpo.batch import Batch
    from jax_grpo.prompts.dataset import PromptDataset
    from jax_grpo.trainer import Trainer

    config = config_of(problem, **sections)
    trainer = Trainer(config)
    trainer.prompts.dataset = PromptDataset([position for position, _ in prompts(config)], config.seed)
    metrics: dict[str, float] = {}
    iterations = itertools.count()

    def step() -> Batch:
        latest, _, batch = trainer.iterate(next(iterations))
        metrics.update(latest)
        finished(trainer.state)
        return batch

    def check(batch: Batch) -> dict[str, Any]:
        """The loss of the batch that the peers have too, by the update that the first iteration has compiled."""
        assert metrics["completion_length/mean"] > 0.95 * problem.completion, "completions are of (nearly) full length"
        shared = batch_of(problem)
        on_policy = {"old_logp_BS": batch.old_logp_BS, "sampling_logp_BS": batch.sampling_logp_BS}
        shared = dataclasses.replace(shared, mask_BS=shared.mask_BS.astype(batch.mask_BS.dtype), **on_policy)
        # Prompts of one width, for which the update is compiled.
        chex.assert_trees_all_equal_shapes_and_dtypes(shared, batch)
        trainer.state, results = trainer.update(trainer.state, shared)
        return {key: float(results[key]) for key in AGREEMENT}

    def after() -> dict[str, Any]:
        phases = ("rollout", "reward", "score", "update")
        return {"last_iteration": {f"{phase}_ms": 1e3 * metrics[f"time/{phase}"] for phase in phases}}

    return Prepared(step, {"dtype": problem.dtype, "lm_head": config.lm_head.model_dump()}, check, after)


def start(problem: Problem) -> tuple[Path, list[str]]:
    """A folder of the policy that ours starts from, with its tokenizer, and the texts of the positions that it reads."""
    from jax_grpo.model.weights import save_hf
    from jax_grpo.policy.named import load_policy

    config = config_of(problem)
    texts = [text for _, text in prompts(config)]
    if problem.model:
        return weights_directory(problem.model), texts
    folder, policy = Path(tempfile.mkdtemp()), load_policy(config.model, config.seed, 1)
    save_hf(folder, policy.architecture, policy.params, policy.tokenizer)
    return folder, texts


def _trl(problem: Problem, *, head: str) -> Prepared:
    """`GRPOTrainer.train` itself, held after each step by a callback, so that steps can be timed one by one."""
    from transformers import TrainerCallback

    from jax_grpo.bench import trl_peer

    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as another:  # JAX's memory is not TRL's
        folder, texts = another.submit(start, problem).result()
    go: queue.SimpleQueue[None] = queue.SimpleQueue()
    # After each step, and with what ended the training.
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    class OneByOne(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            done.put(None)
            go.get()

    trainer = trl_peer.trainer_of(
        problem, folder, texts, head, callbacks=[OneByOne()], max_steps=1000, save_strategy="no", logging_strategy="no",
        disable_tqdm=True, learning_rate=config_of(problem).update.learning_rate,
    )  # fmt: skip

    def train() -> None:
        go.get()
        try:
            trainer.train()
            done.put(None)
        except BaseException as error:
            done.put(error)

    threading.Thread(target=train, daemon=True).start()

    def step() -> None:
        go.put(None)
        if error := done.get():
            raise error

    def check(_: None) -> dict[str, float]:
        results = trl_peer.backward(trainer, problem, trl_peer.inputs_of(problem, off_policy=False))
        trainer.model.zero_grad()
        return results

    return Prepared(step, {"dtype": problem.dtype}, check)


VARIANTS = {
    "jax_grpo": _jax,
    "jax_grpo-chunked": partial(_jax, lm_head=CHUNKED),
    "jax_grpo-chunked-remat": partial(_jax, lm_head=CHUNKED, model={"remat": True}),
    "TRL": partial(_trl, head="fused"),
    "TRL-plain-head": partial(_trl, head="plain"),
    "TRL-liger": partial(_trl, head="liger"),
}
BENCH = Bench("jax_grpo.bench.iteration", __doc__, VARIANTS, PROBLEMS, of_json=Problem._make)

if __name__ == "__main__":
    main(BENCH)
