"""What stands beside configs/arithmetic.yaml in docs/arithmetic.md: scores, answers side by side, and two peers.

    python docs/experiments/arithmetic.py score --weights runs/arithmetic
    python docs/experiments/arithmetic.py answers --before smollm2-135m-instruct --after runs/arithmetic
    python docs/experiments/arithmetic.py peft --weights runs/arithmetic_lora
    python docs/experiments/arithmetic.py supervised --minutes 4 --out runs/arithmetic_sft
    python docs/experiments/arithmetic.py trl --steps 30 --out runs/arithmetic_trl
    python docs/experiments/arithmetic.py ours --steps 30 --out runs/arithmetic_ours
    python docs/experiments/arithmetic.py curve --runs runs/a0 runs/a1 --trl runs/arithmetic_trl --out docs/results/arithmetic

Not part of the package. `supervised` trains on the same questions with their right answers, `trl` on the same rewards with TRL,
both from the same weights; each writes a Hugging Face folder that `score` reads. `ours` takes the config's iterations without its
evaluations, and records what `trl` does of TRL's: rewards, processor seconds an iteration, memory. `score` asks all questions of
heldout.jsonl; `peft` asks them of a run's adapters with PEFT and `transformers`.
`curve` reads finished runs, one a seed, and computes nothing.
"""

import argparse
import json
import random
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

import jax_grpo
from jax_grpo.config import load_config
from jax_grpo.config.files import weights_directory
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.report.pictures import draw_band, saved_figure
from jax_grpo.report.records import read_records
from jax_grpo.rewards import last_number
from jax_grpo.trainer import Trainer

DATA, CONFIG = Path("configs/arithmetic"), "configs/arithmetic.yaml"
BASE, NEW_TOKENS, TEMPERATURE, RATE, SEED = "smollm2-135m-instruct", 16, 0.7, 1e-5, 0
CURVE = "curve.json"  # in TRL's folder
UNTRAINED = (  # kinds that nothing here trains
    ("What is 123 + 456? Answer with the number only.", 579),
    ("Tom has 3 apples and buys 4 more. How many apples has he? Answer with the number only.", 7),
)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def generate(weights: str, questions: list[str], temperature: float) -> list[str]:
    template = ChatTemplate(BASE)
    texts = [template.render([{"role": "user", "content": question}]) for question in questions]
    policy = jax_grpo.load_named(weights)
    return policy.generate(texts, max_new_tokens=NEW_TOKENS, temperature=temperature, seed=SEED)


def share(answers: list[str], wanted: list[int]) -> float:
    return sum(float(one or 0) for one in last_number(answers, wanted)) / len(wanted)


def score(arguments: argparse.Namespace) -> None:
    """Share of right answers on held-out questions, of one digit, of two, of three, and of word problems."""
    rng = random.Random(SEED)
    sets = {
        f"digits {n}": [(r["messages"][0]["content"], r["answer"]) for r in rows("heldout") if r["digits"] == n]
        for n in (1, 2)
    }
    pairs = [(rng.randrange(100, 1000), rng.randrange(100, 1000)) for _ in range(100)]
    sets["digits 3"] = [(f"What is {a} + {b}? Answer with the number only.", a + b) for a, b in pairs]
    small = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    word = "Tom has {} apples and buys {} more. How many apples has he? Answer with the number only."
    sets["word problems"] = [(word.format(a, b), a + b) for a, b in small]
    for name, questions in sets.items():
        texts, wanted = [text for text, _ in questions], [answer for _, answer in questions]
        shares = [share(generate(arguments.weights, texts, temperature), wanted) for temperature in (0.0, TEMPERATURE)]
        print(f"{name}: greedy {shares[0]:.3f}, sampled {shares[1]:.3f} of {len(texts)}", flush=True)


def answers(arguments: argparse.Namespace) -> None:
    """Markdown: ten questions, and the greedy answer of either model."""
    held = {row["messages"][0]["content"]: row for row in rows("heldout")}.values()
    requested = [row for n, count in ((1, 5), (2, 3)) for row in [row for row in held if row["digits"] == n][:count]]
    questions = [row["messages"][0]["content"] for row in requested] + [question for question, _ in UNTRAINED]
    before, after = (generate(weights, questions, 0.0) for weights in (arguments.before, arguments.after))
    print("| question | before | after |\n|---|---|---|")
    for question, *texts in zip(questions, before, after, strict=True):
        print("|", " | ".join([question, *(" ".join(text.split()) for text in texts)]), "|")


def peft(arguments: argparse.Namespace) -> None:
    """How many greedy answers PEFT and `transformers` give as a run of adapters does, of all held-out questions."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, questions = weights_directory(BASE), [*{row["messages"][0]["content"]: None for row in rows("heldout")}]
    tokenizer, base = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    model, same = PeftModel.from_pretrained(base, str(Path(arguments.weights) / "weights")).float(), 0
    for question, ours in zip(questions, generate(arguments.weights, questions, 0.0), strict=True):
        messages = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        out = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)[0, len(ids) :]
        theirs = tokenizer.decode(out, skip_special_tokens=True)
        same += ours == theirs
        if ours != theirs:
            print(f"{question!r}: {ours!r}, PEFT {theirs!r}")
    print(f"{same} of {len(questions)} answers are the same")


def supervised(arguments: argparse.Namespace) -> None:
    """AdamW on the right answers' tokens for so many minutes, batches of 16 questions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = weights_directory(BASE)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    questions, rng, step = rows("train"), random.Random(SEED), 0
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end:
        losses = []
        for row in rng.sample(questions, 16):
            messages = [*row["messages"], {"role": "assistant", "content": str(row["answer"])}]
            prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False)
            ids = tokenizer.apply_chat_template(messages, return_dict=False)
            labels = [-100] * len(prompt) + ids[len(prompt) :]
            losses.append(model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss)
        loss = torch.stack(losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        print(f"step {step}: loss {float(loss):.4f}", flush=True)
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


def trl(arguments: argparse.Namespace) -> None:
    """GRPO with TRL, settings of configs/arithmetic.yaml; prints the mean reward and the seconds of each step."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    times: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **_: Any) -> None:
            times.append(times_now())

    settings, folder = load_config(CONFIG, []), weights_directory(BASE)
    rollout, update = settings.rollout, settings.update
    completions, quarters = settings.prompts.per_iteration * rollout.group_size, 4  # 128 at once took 16 GB here
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = Dataset.from_list(
        [{"prompt": r["messages"], "answer": r["answer"], "digits": r["digits"]} for r in rows("train")]
    )
    config = GRPOConfig(
        output_dir=arguments.out, use_cpu=True, bf16=False, gradient_checkpointing=False, seed=arguments.seed,
        per_device_train_batch_size=completions // quarters, gradient_accumulation_steps=quarters,
        num_generations=rollout.group_size, max_completion_length=rollout.max_new_tokens, temperature=rollout.temperature,
        top_k=0, top_p=1.0, beta=settings.kl.beta, loss_type="dapo", learning_rate=update.learning_rate,
        lr_scheduler_type=update.schedule, warmup_steps=update.warmup_steps,
        adam_beta1=update.betas[0], adam_beta2=update.betas[1], weight_decay=update.weight_decay,
        max_grad_norm=update.max_grad_norm, max_steps=arguments.steps, disable_dropout=True,
        logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(folder), reward_funcs=last_number, args=config, train_dataset=data, processing_class=tokenizer,
        callbacks=[Clock()],
    )  # fmt: skip
    times.append(times_now())
    trainer.train()
    trainer.save_model(arguments.out)
    record_curve(Path(arguments.out), [line["reward"] for line in trainer.state.log_history if "reward" in line], times)


def ours(arguments: argparse.Namespace) -> None:
    """The iterations of configs/arithmetic.yaml; prints the mean reward and the processor seconds of each step."""
    trainer = Trainer(load_config(CONFIG, ["--seed", str(arguments.seed)]))
    rewards, times = [], [times_now()]
    for iteration in range(arguments.steps):
        rewards.append(trainer.iterate(iteration)[0]["reward/right/mean"])
        times.append(times_now())
    record_curve(Path(arguments.out), rewards, times)


def times_now() -> tuple[float, float]:
    """Seconds of this process's processors, and of the clock."""
    return time.process_time(), time.monotonic()


def record_curve(folder: Path, rewards: list[float], times: list[tuple[float, float]]) -> None:
    """Writes and prints what `curve` reads of a run: rewards and both kinds of seconds by iteration, seconds and memory of all."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    processor_seconds, clock_seconds = np.diff(times, axis=0).T.round(1).tolist()
    record = {
        "rewards": [round(reward, 3) for reward in rewards],
        "processor_seconds": processor_seconds,
        "clock_seconds": clock_seconds,
        "seconds": round(times[-1][1] - times[0][1], 1),
        "peak_gb": round(peak, 2),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CURVE).write_text(json.dumps(record) + "\n")
    print(record)


def of_run(folder: Path) -> dict[str, Any]:
    """A run as `ours` records it, or with all its iterations and held-out scores before and after."""
    if (folder / CURVE).exists():
        return json.loads((folder / CURVE).read_text())
    records = read_records(folder / "metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    first, *_, last = [record for record in records if "eval/greedy/reward" in record]
    names = [f"{mode}/{kind}" for kind in ("right", "two_digits") for mode in ("sampled", "greedy")]
    return {
        "rewards": [round(record["reward/right/mean"], 3) for record in steps],
        "seconds": round(sum(record["time/iteration"] for record in steps), 1),
        "heldout": {name: [round(record[f"eval/{name}"], 4) for record in (first, last)] for name in names},
    }


def curve(arguments: argparse.Namespace) -> None:
    """Mean reward by iteration of the runs and of TRL's, and the runs' held-out scores: curves.json and curves.png."""
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    runs = [of_run(Path(run)) for run in arguments.runs]
    peer = json.loads((Path(arguments.trl) / CURVE).read_text()) if arguments.trl else None
    (out / "curves.json").write_text(json.dumps({"jax_grpo": runs, "trl": peer}, indent=1) + "\n")
    least = min(len(run["rewards"]) for run in runs)
    rewards = np.array([run["rewards"][:least] for run in runs])
    with saved_figure(out / "curves.png", 1, 1, (7, 4), dpi=110) as (_, ((axis,),)):
        label = f"jax_grpo, {len(runs)} seeds" if len(runs) > 1 else "jax_grpo, one seed"
        draw_band(axis, range(1, rewards.shape[1] + 1), rewards, color="C0", label=label)
        if peer is not None:
            axis.plot(range(1, len(peer["rewards"]) + 1), peer["rewards"], color="C1", label="TRL, one seed")
        axis.set(xlabel="iteration", ylabel="right answers in training, temperature 0.7", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for command, options in (
        (score, {"--weights": str}),
        (answers, {"--before": str, "--after": str}),
        (peft, {"--weights": str}),
        (supervised, {"--minutes": float, "--out": str}),
        (trl, {"--steps": int, "--out": str, "--seed": int}),
        (ours, {"--steps": int, "--out": str, "--seed": int}),
    ):
        sub = commands.add_parser(command.__name__, help=(command.__doc__ or "").splitlines()[0])
        sub.set_defaults(run=command)
        for option, kind in options.items():
            sub.add_argument(
                option, type=kind, required=option != "--seed", default=SEED if option == "--seed" else None
            )
    sub = commands.add_parser(curve.__name__, help=(curve.__doc__ or "").splitlines()[0])
    sub.set_defaults(run=curve)
    sub.add_argument("--runs", nargs="+", required=True)
    sub.add_argument("--trl")
    sub.add_argument("--out", required=True)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
