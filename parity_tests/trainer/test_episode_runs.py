"""Runs of episodes: one turn is the run without episodes, cut and continued ones, refusals, and the number game."""

import itertools
import re
from pathlib import Path

import jax
import numpy as np
import pydantic
import pytest
from conftest import config, shapes_given
from played_episodes import Talk, episodes_config, play
from short_runs import cut_and_whole, lines_without_times

import torch_ref.model
import torch_ref.options
import torch_ref.train
from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.config.tasks import task_of
from jax_grpo.memory.programs import LATER_TURNS, run_of
from jax_grpo.prompts.dataset import heldout_rows
from jax_grpo.report.records import read_records, sample_rows
from jax_grpo.rollout.episodes import ObservationTooLong
from jax_grpo.tasks.base import Prompt, RewardError
from jax_grpo.tasks.episodes import EpisodicTask
from jax_grpo.tasks.guess import GuessTask
from jax_grpo.tasks.stop import word_stop
from jax_grpo.tasks.toy import LengthTask
from jax_grpo.train import make_evaluator, train
from jax_grpo.trainer import Trainer


class OneTurn(EpisodicTask):
    """The length task as an episode of one turn."""

    name, reads, stop_rule = "length", "positions", word_stop()

    def __init__(self):
        self._task = LengthTask(task_of(name="length"))
        self.component_weights, self.prompt = self._task.component_weights, self._task.prompt

    def reset(self, prompt):
        class Ends:
            def step(self, completion):
                return "", True  # which nobody reads

        return Ends()

    def score(self, prompts, episodes):
        return self._task.score(prompts, [episode.turns[0].completion for episode in episodes])


@pytest.mark.slow
def test_an_episode_of_one_turn_is_bit_for_bit_the_run_without_episodes(tmp_path):
    sizes = {"num_layers": 1, "hidden_size": 16, "tokenizer": "chess", "max_position_embeddings": 128}
    shared: dict = {"model": sizes, "prompts": {"max_prompt_tokens": 80}, "kl": {"beta": 0.0}, "run_dir": str(tmp_path)}
    plain = Trainer(config(task={"name": "length"}, **shared))
    episode = Trainer(config(task={"episode": {"turns": 1}}, **shared), OneTurn())
    for iteration in range(3):
        (ours, scored, batch), (theirs, others, other) = episode.iterate(iteration), plain.iterate(iteration)
        timed = re.compile("time/|memory/|compile/|flops_per_second/|tokens_per_second|mfu/")
        ours, theirs = ({k: v for k, v in m.items() if not timed.match(k)} for m in (ours, theirs))
        assert ours == theirs and scored.completions == others.completions
        for mine, same in zip(jax.tree.leaves(batch), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(mine, same)
    for mine, same in zip(jax.tree.leaves(episode.state), jax.tree.leaves(plain.state), strict=True):
        np.testing.assert_array_equal(mine, same)
    assert ours["grad_norm"] > 0 and 0 < ours["truncated_fraction"] < 1


@pytest.fixture(scope="module")
def guessing(tmp_path_factory) -> tuple[Trainer, dict]:
    """A trainer of the number game, and the shapes that its programs were given."""
    folder = str(tmp_path_factory.mktemp("guess"))
    sizes = {"num_layers": 1, "hidden_size": 16}
    trainer = Trainer(episodes_config(turns=3, cap=2, observed=8, model=sizes, run_dir=folder, kl={"beta": 0.1}))
    return trainer, shapes_given(trainer, "generate", "next_turn", "score", "update")


@pytest.mark.slow  # four programs and their shapes
def test_a_run_of_episodes_compiles_each_program_once_and_tells_its_turns(guessing):
    trainer, seen = guessing
    metrics, scored, batch = trainer.iterate(0)
    compiled = {name: metrics[f"compile/{name}"] for name in ("generate", "next_turn", "update")}
    assert compiled == dict.fromkeys(compiled, 1), "one program for all later turns"
    again = trainer.iterate(1)[0]
    assert not any(again[f"compile/{name}"] for name in compiled) and len(seen["next_turn"]) >= 3
    turns = [len(episode.turns) for episode in scored.episodes]
    assert metrics["episode/turns/mean"] == np.mean(turns)
    assert metrics["completion_length/mean"] == np.asarray(batch.mask_BS).sum(-1).mean(), "observations are not written"
    assert metrics["truncated_fraction"] == pytest.approx(1 - np.asarray(scored.rollout.stopped_PG).mean())
    assert metrics["logp_mismatch/max"] < 2e-5
    rows = sample_rows(
        trainer.task,
        scored.prompts,
        scored.completions,
        scored.rewards_B,
        scored.components,
        trainer.config,
        episodes=scored.episodes,
    )
    assert rows[0]["completion"] == "".join("".join(turn) for turn in rows[0]["turns"]) and "truncated" in rows[0]
    planned = {
        program.name: [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(program.arguments)]
        for program in run_of(trainer.config).programs
    }
    assert planned["rollout"] == seen["generate"][0] and planned[LATER_TURNS] == seen["next_turn"][0]
    assert planned["reference"] == seen["score"][0] and planned["update"] == seen["update"][0]


@pytest.mark.slow  # three runs
def test_a_run_of_episodes_that_died_and_was_continued_is_the_run_that_did_not(tmp_path, monkeypatch):
    def settings(name: str) -> Config:
        sections: dict = {"kl": {"beta": 0.1, "adaptive": True}, "checkpoint": {"every": 1}, "iterations": 4}
        sections |= {"logging": {"samples_every": 1, "tensorboard": False}, "run_dir": str(tmp_path / name)}
        return episodes_config(turns=3, cap=2, observed=8, model={"num_layers": 1, "hidden_size": 16}, **sections)

    cut, whole = cut_and_whole(settings, monkeypatch)
    ours, theirs = lines_without_times(cut), lines_without_times(whole)
    assert ours == theirs and len(ours) == 4 and ours[3]["episode/turns/mean"] > 1
    for name in ("samples.jsonl", "weights/model.safetensors"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.slow  # four programs for 64 prompts
def test_held_out_episodes_are_played_to_their_end_greedy_and_sampled(tmp_path):
    sizes = {"num_layers": 1, "hidden_size": 16}
    settings = episodes_config(
        turns=3, cap=2, observed=8, model=sizes, run_dir=str(tmp_path), evaluation={"positions": 3}
    )
    trainer = Trainer(settings)
    evaluator = make_evaluator(trainer, heldout_rows(settings, trainer.positions, trainer.task.read))
    assert evaluator is not None
    actual = evaluator(trainer.state.params)
    for mode in ("greedy", "sampled"):
        assert {f"eval/{mode}/{name}" for name in ("reward", "found", "sooner", "number")} <= set(actual.metrics)
        assert len(actual.completions[mode]) == 3 and all(
            2 <= text.count(":") <= 3 for text in actual.completions[mode]
        )
    assert len(set(actual.completions["greedy"])) == 1 < len(set(actual.completions["sampled"])), (
        "one prompt, and no guess is right"
    )
    names = [program.name for program in run_of(settings).programs]
    assert names[-4:] == [f"evaluation/{mode}{end}" for mode in ("greedy", "sampled") for end in ("", ", later turns")]


def test_the_references_training_refuses_a_task_that_answers(tmp_path):
    with pytest.raises(
        ConfigError, match=r"task\.name is guess, whose completions are answered: torch_ref\.train has one turn"
    ):
        torch_ref.train.Trainer(episodes_config(cap=2, run_dir=str(tmp_path)), torch_ref.options.Options())


class Faulty(Talk):
    """Answers what a test tells it to."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.calls = answer, 0

    def reset(self, prompt):
        task = self

        class Environment:
            def step(self, completion):
                task.calls += 1
                return task.answer(task.calls)

        return Environment()


def bad_move(call: int):
    if call == 3:
        raise ValueError("no such move")
    return " ok", False


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (lambda call: (" far too long", False), ObservationTooLong, r"task 'talk', sample 0: prompt 'a', observation ' far too l"
         r".* has 13 tokens; expected 1 to task.episode.max_observation_tokens = 6"),
        (lambda call: ("", False), ObservationTooLong, r"observation '' has 0 tokens; expected 1 to"),
        (bad_move, RewardError, r"task 'talk', sample 2: prompt 'b c d', completion '.*': step raised ValueError: no such move"),
        (lambda call: " ok", RewardError, r"sample 0: prompt 'a', completion .*: step returned ' ok'; expected \(obs"),
        (lambda call: (3, True), RewardError, r"step returned \(3, True\); expected"),
    ],
    ids=["too long", "empty", "raises", "no pair", "no text"],
)  # fmt: skip
def test_an_answer_that_cannot_be_used_is_one_error_that_names_the_sample(answer, error, message):
    with pytest.raises(error, match=message):
        play(Faulty(answer))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"task": {"name": "guess", "episode": {"turns": 3, "max_observation_tokens": 1}},
          "objective": {"overlong_penalty": {"length": 2, "weight": 1.0}}},
         "objective.overlong_penalty is of one completion, and task.episode.turns is 3"),
        ({"task": {"name": "guess", "episode": {"turns": 3, "max_observation_tokens": 4}}},
         "prompts.max_prompt_tokens + task.episode.turns 3 x rollout.max_new_tokens + 2 x task.episode.max_observation_tokens = 34 "
         "exceeds model.max_position_embeddings 32"),
    ],
)  # fmt: skip
def test_settings_that_cannot_stand_beside_episodes_are_refused(sections, message):
    with pytest.raises(pydantic.ValidationError, match=re.escape(message)):
        config(**sections)


def test_turns_of_a_task_that_answers_nothing_are_refused_before_anything_is_compiled(tmp_path):
    wide = {"tokenizer": "chess", "max_position_embeddings": 256}
    settings = config(
        task={"episode": {"turns": 2}}, model=wide, prompts={"max_prompt_tokens": 80}, run_dir=str(tmp_path)
    )
    with pytest.raises(ConfigError, match=r"task\.episode\.turns is 2, but the task 'length' answers no completion"):
        Trainer(settings, LengthTask(task_of(name="length")))


# The toy ---------------------------------------------------------------------------------------------------------------


def found_share(guesses, numbers: int, turns: int) -> float:
    """Share of the hidden numbers that a way of guessing finds; `guesses(answers so far)` gives the next guess."""
    task = GuessTask(task_of(name="guess", guess_numbers=numbers, episode={"turns": turns}))
    actual = []
    for number in range(1, numbers + 1):
        hidden, answers, done = task.reset(Prompt("", 0, answer=str(number))), [], False
        while not done:
            observation, done = hidden.step(f" {guesses(answers)}")
            answers.append(observation)
        actual.append(hidden.found)
    return float(np.mean(actual))


def halving(answers) -> int:
    low, high = 1, 7
    for answer in answers:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if answer == " higher:" else (low, middle - 1)
    return (low + high) // 2


def test_the_number_is_found_by_its_answers_and_not_without_them():
    assert found_share(halving, 7, 3) == 1
    blind = {found_share(lambda answers: order[len(answers)], 7, 3) for order in itertools.product(range(9), repeat=3)}  # noqa: B023
    assert max(blind) == 3 / 7


def test_the_hidden_numbers_are_of_the_prompt_and_even():
    task = GuessTask(task_of(name="guess", episode={"turns": 3}))
    sampled = [int(task.prompt(None, seed).answer) for seed in range(700)]  # pyright: ignore[reportArgumentType]
    assert sampled == [int(task.prompt(None, seed).answer) for seed in range(700)]
    counts = np.bincount(sampled, minlength=8)[1:]
    assert len(counts) == 7 and abs(counts - 100).max() < 40, "four standard deviations"
    assert len({task.prompt(None, seed).text for seed in range(9)}) == 1, "nothing of it is in the prompt"
    for text, expected in {" 5": " 5", " 12": " 1", "  7 ": "  7", "x": "", " x": " "}.items():
        assert task.stop_rule.truncate(text, 0) == (expected, True)


@pytest.mark.slow  # some hundred iterations
def test_the_number_game_is_learnt_beyond_what_blind_guessing_can(tmp_path):
    """No policy that ignores the answers finds more than three of seven numbers; halving finds all: 20 x 512 episodes."""
    path = str(Path(__file__).parents[2] / "configs" / "guess.yaml")
    run = train(load_config(path, ["--run_dir", str(tmp_path / "run"), "--logging.samples_every", "0"]))
    actual = [record["reward/found/mean"] for record in read_records(run / "metrics.jsonl")]
    print(
        f"found: {np.mean(actual[:5]):.3f} at the start, {np.mean(actual[-20:]):.3f} in the last 20; blindly at most {3 / 7:.3f}"
    )
    # 1 on the machine of docs/episodes.md; a run whose rounding leads it to begin with 3 or 5 can end at 6 of 7
    assert np.mean(actual[:5]) < 3 / 7 and np.mean(actual[-20:]) > 0.8
