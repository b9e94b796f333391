"""A whole GRPO iteration beside TRL's: generate, reward, score by the old policy and the reference, one optimiser step.

    python -m jax_grpo.bench.iteration --problem width-128 --json iteration.json

Both start from the same random weights, read the same prompts with GPT-2's tokenizer, and generate completions of full length
(random weights draw no end of text). Each reward is a function of the text that costs next to nothing.
"""

import tempfile
import threading
from pathlib import Path
from typing import Any

from jax_grpo.bench import update_problem
from jax_grpo.bench.harness import Bench, Prepared, main
from jax_grpo.bench.update_problem import Problem
from jax_grpo.config import Config
from jax_grpo.prompts import read_packaged
from jax_grpo.resident_memory import give_back_early
from jax_grpo.rollout import padded_length
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Position
from jax_grpo.tokenizer import Tokenizer

PROMPT_TOKENS = 64  # at most; fewer than 49 would be another width, with programs of its own to compile
LOOKED_AT = 1024  # positions; half of them are of the common width, and a run takes a few each step
LONGEST = 80  # of all packaged positions
PROBLEMS = {
    "width-128": Problem(4, 4, 128, 50257, 8, 8, PROMPT_TOKENS, 32),
    "124m": Problem(12, 12, 768, 50257, 2, 4, PROMPT_TOKENS, 32),
    "124m-8x8x144-bf16": Problem(12, 12, 768, 50257, 8, 8, PROMPT_TOKENS, 144, "bfloat16"),
}
CHUNKED = {"implementation": "chunked", "chunk_tokens": 256, "chunk_vocab": 8192}
ABOUT = {
    name: f"L {p.layers}, H {p.width}, V {p.vocabulary}; {p.prompts} prompts x {p.group} completions of {p.completion} "
    f"tokens, beta 0.04, {p.dtype}"
    for name, p in PROBLEMS.items()
}


def config_of(problem: Problem, *, remat: bool = False, **sections: Any) -> Config:
    """A run of the problem; keywords replace sections."""
    shared = update_problem.config_of(problem._replace(prompt=LONGEST)).model_dump()
    return Config.model_validate(shared | {"model": shared["model"] | {"remat": remat}} | sections)


def positions(config: Config) -> list[Position]:
    """Packaged positions whose prompts are of one padded width."""
    tokenizer, task = Tokenizer.load(config.model.tokenizer), make_task(config.task)
    found = read_packaged("train")[:LOOKED_AT]
    lengths = map(len, tokenizer.encode_batch([task.prompt(position, 0).text for position in found]))
    width = padded_length(PROMPT_TOKENS)
    return [position for position, length in zip(found, lengths, strict=True) if padded_length(length) == width]


def _jax(name: str, *, remat: bool = False, **sections: Any) -> Prepared:
    import jax

    from jax_grpo.prompts import PromptDataset
    from jax_grpo.trainer import Trainer

    problem = PROBLEMS[name]
    config = config_of(problem, remat=remat, **sections)
    give_back_early()  # as `jax_grpo.train` does
    trainer = Trainer(config)
    trainer.dataset = PromptDataset(positions(config), config.seed)
    kept: dict[str, Any] = {"iteration": 0}

    def run() -> dict[str, float]:
        kept["metrics"], _, _ = trainer.iterate(kept["iteration"])
        jax.block_until_ready(trainer.state)
        kept["iteration"] += 1
        return kept["metrics"]

    run()  # compiles
    metrics = run()
    assert metrics["completion_length/mean"] > 0.95 * problem.completion, "completions are of (nearly) full length"
    phases = {f"{phase}_ms": 1e3 * metrics[f"time/{phase}"] for phase in ("rollout", "reward", "score", "update")}
    return Prepared(run, {"last_warm_up": phases, "device": str(jax.devices()[0])})


def _trl(name: str) -> Prepared:
    """`GRPOTrainer.train` itself, held after each step by a callback, so that steps can be timed one by one."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from jax_grpo.hf_tokenizer import save_for_transformers
    from jax_grpo.loading import load_policy
    from jax_grpo.weights import save_hf

    problem, config = PROBLEMS[name], config_of(PROBLEMS[name])
    folder = Path(tempfile.mkdtemp())
    policy = load_policy(config.model, config.seed, 1)
    save_hf(folder, policy.architecture, policy.params, policy.tokenizer)
    save_for_transformers(policy.tokenizer, folder, 1024)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    task = make_task(config.task)
    texts = [task.prompt(position, 0).text for position in positions(config)]
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class OneByOne(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            done.release()
            go.acquire()

    trainer = GRPOTrainer(
        model=str(folder),
        args=GRPOConfig(
            output_dir=str(folder), use_cpu=not torch.cuda.is_available(), bf16=problem.dtype == "bfloat16",
            per_device_train_batch_size=problem.prompts * problem.group, num_generations=problem.group,
            max_completion_length=problem.completion, temperature=1.0, beta=0.04, loss_type="dapo", max_steps=1000,
            learning_rate=1e-6, steps_per_generation=1, gradient_checkpointing=False, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True,
        ),
        reward_funcs=lambda completions, **_: [len(set(text)) / 100 for text in completions],
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        callbacks=[OneByOne()],
    )  # fmt: skip
    threading.Thread(target=trainer.train, daemon=True).start()

    def run() -> None:
        go.release()
        done.acquire()

    done.acquire()  # the first step begins by itself
    return Prepared(run, {})


BENCH = Bench(
    "jax_grpo.bench.iteration",
    "A whole GRPO iteration beside TRL's.",
    {
        "jax_grpo": _jax,
        "jax_grpo-chunked": lambda name: _jax(name, lm_head=CHUNKED),
        "jax_grpo-chunked-remat": lambda name: _jax(name, lm_head=CHUNKED, remat=True),
        "TRL": _trl,
    },
    ABOUT,
)

if __name__ == "__main__":
    main(BENCH)
