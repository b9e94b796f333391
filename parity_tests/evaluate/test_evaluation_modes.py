"""What `eval/greedy` and `eval/sampled` are of: the policy at its temperature, and each prompt within its own cap."""

import dataclasses

from conftest import config

from jax_grpo.chess.positions.sources import read_packaged
from jax_grpo.config import Config
from jax_grpo.evaluate.during_training import Evaluator
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.policy.named import load_policy
from jax_grpo.rollout.texts import TextProgram
from jax_grpo.tasks import make_task
from torch_ref.evaluate import evaluate
from torch_ref.options import Options
from torch_ref.rollout import Texts
from torch_ref.train import Trainer as TorchTrainer

CHESS = Tokenizer.load("chess")
SEED = 2  # of weights that do not answer all greedily with nothing
SETTINGS = {"top_k": 1, "repetition_penalty": 3.0, "min_p": 0.9}  # sampled would be greedy, and greedy another


def settings(temperature: float, **rollout) -> Config:
    return config(
        model={"tokenizer": "chess", "num_layers": 1, "hidden_size": 16, "max_position_embeddings": 96},
        task={"name": "length"},
        prompts={"source": "selfplay:1", "max_prompt_tokens": 80},
        rollout={"temperature": temperature} | rollout,
        evaluation={"positions": 8},
    )


def prompts(made: Config, own: int | None = None) -> list:
    task = make_task(made.task)
    requested = [task.prompt(position, seed) for seed, position in enumerate(read_packaged("heldout")[:8])]
    return [dataclasses.replace(prompt, max_new_tokens=own) for prompt in requested]


def by_jax(made: Config, own: int | None = None) -> dict[str, list[str]]:
    policy = load_policy(made.model, SEED, made.context())
    return Evaluator(policy, make_task(made.task), prompts(made, own), made)(policy.params).completions


def test_sampled_is_at_the_rollouts_temperature_and_a_prompts_own_cap_holds():
    cold, hot, capped = by_jax(settings(1e-4)), by_jax(settings(3.0)), by_jax(settings(3.0), own=1)
    assert cold["greedy"] == cold["sampled"] == hot["greedy"] != hot["sampled"] and any(cold["greedy"])
    whole, first = ([CHESS.encode(text) for text in texts["sampled"]] for texts in (hot, capped))
    assert max(map(len, whole)) > 3 and max(map(len, first)) == 1, "of the same samples the first token"


def test_equal_prompts_are_answered_once_greedily_and_each_when_sampled(monkeypatch):
    made = settings(3.0)
    policy, alone = load_policy(made.model, SEED, made.context()), by_jax(made)
    six = prompts(made)[:6]
    repeated = [*six, *six[::-1], dataclasses.replace(six[0], max_new_tokens=1)]
    evaluator, counts = Evaluator(policy, make_task(made.task), repeated, made), []
    complete = TextProgram.complete
    monkeypatch.setattr(TextProgram, "complete", lambda *given: counts.append(len(given[2])) or complete(*given))
    actual = evaluator(policy.params).completions
    assert counts == [7, 13], "the prompt with a cap of its own is another"
    greedy, sampled = actual["greedy"], actual["sampled"]
    assert greedy[:6] == alone["greedy"][:6] == greedy[6:12][::-1] and len(CHESS.encode(greedy[12])) == 1
    assert sampled[:6] == alone["sampled"][:6] != sampled[6:12][::-1]


def test_a_reward_gets_the_tokens_that_were_sampled_and_not_those_of_the_text_encoded_again(monkeypatch):
    made = settings(3.0)
    policy, trainer, task = (
        load_policy(made.model, SEED, made.context()),
        TorchTrainer(made, Options()),
        make_task(made.task),
    )
    passed: list[list[list[int]]] = []
    monkeypatch.setattr(type(task), "begin", lambda self, state, completion_ids: passed.append(completion_ids))
    completions = Evaluator(policy, task, prompts(made), made)(policy.params).completions
    evaluate(Texts(trainer.texts.model, trainer.tokenizer, trainer.task, made), prompts(made))
    assert len(passed) == 4, "two modes of each implementation"
    for ids, mode in zip(passed, completions, strict=False):
        texts = [
            task.stop_rule.text(row, prompt.start_state, CHESS) for row, prompt in zip(ids, prompts(made), strict=True)
        ]
        assert texts == completions[mode] and ids != CHESS.encode_batch(texts)
    cap = made.rollout.max_new_tokens
    assert all(0 < len(row) <= cap for ids in passed for row in ids)


def test_the_reference_evaluates_without_what_draws_from_another_distribution():
    trainer = TorchTrainer(settings(3.0), Options())
    actual = []
    for made in (settings(3.0), settings(3.0, **SETTINGS)):
        texts = Texts(trainer.texts.model, trainer.tokenizer, trainer.task, made)
        actual.append(evaluate(texts, prompts(made)))
    assert actual[0] == actual[1] and actual[0]["eval/greedy/length"] != actual[0]["eval/sampled/length"]
