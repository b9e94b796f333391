"""Text to teach a small model instructions from, the vocabulary of it, and the warm start on both."""

import json

import numpy as np
import pytest
from conftest import config as tiny_config

from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.config.tasks import task_of
from jax_grpo.model.tokenizer import Tokenizer, find_tokenizer
from jax_grpo.policy.named import load_named
from jax_grpo.sft.__main__ import SFTConfig, Stage, train
from jax_grpo.sft.words import main, vocabulary
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import applicable
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.instructions import score
from jax_grpo.tasks.instructions.generate import draw, prompt_text
from jax_grpo.tasks.instructions.lessons import lesson
from jax_grpo.trainer import Trainer


def strict(followed: float, count: int = 400) -> tuple[float, list[str]]:
    """How many lessons follow all of their instructions, and the answers."""
    answers = [lesson(seed, followed).answer for seed in range(count)]
    return float(np.mean(score([draw(f"lesson {seed}") for seed in range(count)], answers)["strict"])), answers


def test_an_answer_follows_as_many_instructions_as_asked_for():
    (everything, _), (some, answers), (little, _) = strict(1.0), strict(0.6), strict(0.0)
    assert everything == 1.0
    assert 0.35 < some < 0.65 and little < some - 0.15, (some, little)
    assert strict(0.6)[1] == answers
    prompt = make_task(task_of(name="instructions")).prompt(read_packaged("heldout")[0], 0)
    assert prompt.text == prompt_text(json.loads(prompt.answer or "")) and lesson(1).prompt.endswith(".\n")


def test_the_vocabulary_is_a_function_of_its_arguments_and_writes_any_text(tmp_path):
    assert vocabulary(400, 200).to_str() == vocabulary(400, 200).to_str()
    main(["--out", str(tmp_path), "--tokens", "500"])
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.vocab_size == 500 and tokenizer.token_bytes()[tokenizer.eos_id] == b""
    for text in [*(lesson(seed).prompt + lesson(seed).answer for seed in range(50)), "Grün\n\n棋 ~ <<x>>", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("Write about a")) == 3
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path), "--tokens", "256"])


def test_a_type_that_no_row_of_a_batch_asks_for_is_no_error():
    task, positions = make_task(task_of(name="instructions")), read_packaged("heldout")
    prompts = [task.prompt(position, 0) for position in positions[:2]]
    scores = checked_score(task, prompts, ["The cat is red.", "A dog, too."])
    requested = {name for prompt in prompts for name in json.loads(prompt.answer or "")["instruction_id_list"]}
    assert set(applicable(scores, prompts)) == requested | {"strict", "loose", "share"}


@pytest.mark.slow
def test_a_warm_start_on_lessons_is_a_model_that_grpo_goes_on_with(tmp_path):
    main(["--out", str(tmp_path / "tokenizer")])
    stage = Stage(mixture={"instructions": 1.0}, rows=8 * 160, learning_rate=1e-2)
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_size": 32, "max_position_embeddings": 96}
    config = SFTConfig(
        out=str(tmp_path / "out"), stages=[stage], tokenizer=str(tmp_path / "tokenizer"), batch_size=8, **sizes
    )
    final = train(config)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "out" / "sft.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.7, losses
    assert json.loads((final / "provenance.json").read_text())["data"].startswith("prompts and answers drawn by")
    assert find_tokenizer(str(final)) == str(final)
    policy = load_named(str(final))
    assert policy.tokenizer.fingerprint() == Tokenizer.load(config.tokenizer).fingerprint()
    run = tiny_config(
        model={"weights": str(final), "tokenizer": str(final), **dict.fromkeys(sizes)},
        task={"name": "instructions"},
        prompts={"max_prompt_tokens": 64},
        rollout={"max_new_tokens": 16},
    )
    metrics, scored, _ = Trainer(run).iterate(0)
    assert np.isfinite(metrics["loss"]) and len(scored.completions) == 16
