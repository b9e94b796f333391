"""Episodes beside the user's own code: a task of several turns that the config names, and what cannot be one."""

import json

import pytest
from conftest import config as tiny_config

from jax_grpo import train as training
from jax_grpo.config import ConfigError
from jax_grpo.config.imported import ImportedError
from jax_grpo.config.tasks import task_of
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.report.records import read_records
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Prompt, RewardError, TrainerState
from jax_grpo.tasks.checked import checked_score, made_prompt
from jax_grpo.tasks.episodes import Episode, checked_reset, checked_steps
from jax_grpo.trainer import Trainer

TALK = """
import json

import jax_grpo
import numpy as np


class Listener:
    def __init__(self, kind):
        self.kind, self.said = kind, []

    def step(self, completion):
        self.said.append(completion)
        return " more:", False


class Talk(jax_grpo.EpisodicTask):
    name, reads, component_weights, stop_rule = "talk", "prompts", {"share": 1.0}, jax_grpo.text_stop()

    def prompt(self, row, seed):
        return jax_grpo.Prompt(row.prompt, 0, columns=row.columns)

    def reset(self, prompt):
        return Listener(prompt.columns["kind"])

    def begin(self, state, completion_ids):
        self.given = state, completion_ids

    def score(self, prompts, episodes):
        (step, _), ids = self.given
        said = [[turn.completion for turn in episode.turns] for episode in episodes]
        with open("given.jsonl", "a") as file:
            print(json.dumps([step, ids, said]), file=file)
        shares = [np.mean([getattr(c, e.environment.kind)() for c in "".join(e.environment.said)] or [0]) for e in episodes]
        return {"share": np.array(shares, np.float32)}
"""
CONFIG = """
iterations: 2
run_dir: run
model: {tokenizer: chess, num_layers: 1, num_heads: 2, hidden_size: 16, max_position_embeddings: 48}
task: {name: "talk.py:Talk", episode: {turns: 2, max_observation_tokens: 8}}
prompts: {source: kinds.jsonl, per_iteration: 2, max_prompt_tokens: 16}
rollout: {group_size: 2, max_new_tokens: 3}
evaluation: {positions: 2}
logging: {samples_every: 1, tensorboard: false}
checkpoint: {every: 1}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "config.yaml").write_text(CONFIG)
    rows = [{"prompt": f"{n} of {kind}: ", "kind": kind} for n in range(30) for kind in ("isdigit", "isalpha")]
    (tmp_path / "kinds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.slow  # two turns in two modes and an update, twice
def test_a_task_of_several_turns_is_named_by_the_config_trains_and_goes_on(folder, capfd):
    training.main(["--config", "config.yaml"])
    given = [json.loads(line) for line in (folder / "given.jsonl").read_text().splitlines()]
    # before the first iteration, two iterations, after the last: held-out episodes are scored greedy and sampled
    assert [step for step, _, _ in given] == [0, 0, 0, 1, 2, 2]
    chess = Tokenizer.load("chess")
    for _, ids, output in given:
        assert len(ids) == len(output) and all(len(turns) == 2 for turns in output)
        written = [chess.decode(i).replace("<|endoftext|>", "") for i in ids]
        assert written == ["".join(turns) for turns in output], "what the model wrote, and no observation"
        assert max(map(len, ids)) > 3, "of both turns"
    lines = (folder / "run" / "samples.jsonl").read_text().splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    assert samples and all([answer for _, answer in sample["turns"]] == [" more:"] * 2 for sample in samples)
    records = read_records(folder / "run" / "metrics.jsonl")
    assert [r["episode/turns/mean"] for r in records if "reward/share/mean" in r] == [2, 2]
    assert sum("eval/greedy/share" in r for r in records) == 2

    (folder / "talk.py").write_text(TALK + "# another\n")
    training.main(["--config", "config.yaml", "--resume", "auto", "--iterations", "3"])
    output = "".join(capfd.readouterr().out.split("\n")).replace("  ", " ")
    assert "continuing after iteration 2 from" in output and "the code of talk.py" in output


def test_a_score_that_fails_on_an_episode_names_it(folder):
    task = make_task(task_of(name="talk.py:Talk"))
    row = task.read(tiny_config(prompts={"source": "kinds.jsonl"}).prompts, 0, None)[0]
    prompts = [task.prompt(row, 0)] * 2
    good, bad = (Episode(task.reset(prompt)) for prompt in prompts)  # pyright: ignore[reportAttributeAccessIssue]
    bad.environment.kind = "no_such_test"  # pyright: ignore[reportAttributeAccessIssue]
    bad.environment.step("x")
    where = r"talk.py:\d+: task 'talk' raised AttributeError: 'str' object has no attribute 'no_such_test'"
    with pytest.raises(RewardError, match=rf"{where}. Sample 1: prompt '\d+ of is"):
        checked_score(task, prompts, [good, bad], [[1], [2]], TrainerState(0, 2))


def test_an_episode_that_uses_up_its_prompt_leaves_it_whole_for_the_others(folder):
    popped = TALK.replace('prompt.columns["kind"]', 'prompt.columns["kinds"].pop()')
    (folder / "talk.py").write_text(popped)
    task = make_task(task_of(name="talk.py:Talk"))
    prompts = [Prompt("a", 0, columns={"kinds": ["isdigit"]})] * 3
    for _ in range(2):  # an evaluation plays the same prompts again
        episodes = checked_reset(task, prompts)  # pyright: ignore[reportArgumentType]
        assert [episode.environment.kind for episode in episodes] == ["isdigit"] * 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ('row.columns["kinds"]', r"talk.py:\d+: task 'talk': prompt raised KeyError: 'kinds'. It was asked about Row"),
        ("exit()", r"talk.py:\d+: task 'talk': prompt raised SystemExit: None. It was asked about Row"),
        ('"text"', r"task 'talk': prompt returned 'text'; expected a jax_grpo.Prompt. It was asked about Row"),
    ],
)
def test_a_prompt_that_cannot_be_made_is_told_with_its_line(prompt, words, folder):
    (folder / "talk.py").write_text(TALK.replace("jax_grpo.Prompt(row.prompt, 0, columns=row.columns)", prompt))
    task = make_task(task_of(name="talk.py:Talk"))
    row = task.read(tiny_config(prompts={"source": "kinds.jsonl"}).prompts, 0, None)[0]
    for heldout in (False, True):
        with pytest.raises(RewardError, match=words.replace(": prompt", ": (heldout_)?prompt")):
            made_prompt(task, row, 0, heldout=heldout)


def test_a_step_that_fails_is_told_with_its_line(folder):
    (folder / "talk.py").write_text(TALK.replace("self.said.append(completion)", "self.said.append(int(completion))"))
    task = make_task(task_of(name="talk.py:Talk"))
    prompts = [Prompt("a", 0, columns={"kind": "isdigit"}), Prompt("b", 0, columns={})]
    with pytest.raises(
        RewardError, match=r"talk.py:24: task 'talk', sample 1: prompt 'b': reset raised KeyError: 'kind'"
    ):
        checked_reset(task, prompts)  # pyright: ignore[reportArgumentType]
    episodes = dict(enumerate(checked_reset(task, prompts[:1] * 2)))  # pyright: ignore[reportArgumentType]
    line = r"talk.py:13: task 'talk', sample 1: prompt 'a', completion 'x': step raised ValueError: invalid literal"
    with pytest.raises(RewardError, match=line):
        checked_steps(task, prompts[:1] * 2, episodes, ["1", "x"])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("method", ["reset", "score", "prompt"])
def test_a_task_of_several_turns_says_what_it_lacks(method, folder):
    (folder / "talk.py").write_text(TALK.replace(f"def {method}(self", f"def other_{method}(self"))
    with pytest.raises(ImportedError, match=rf"task.name is 'talk.py:Talk': Talk has no {method}$"):
        make_task(task_of(name="talk.py:Talk"))


def test_a_mixture_of_it_is_refused(folder):
    mixture = {"policy": {}, "own": {"task": "talk.py:Talk", "source": "kinds.jsonl"}}
    for episode in (None, {"turns": 2}):
        with pytest.raises(
            ConfigError, match=r"^task.mixture.own: Talk answers completions \(EpisodicTask\), and a mixture"
        ):
            make_task(task_of(**{"name": "mixed", "mixture": mixture, "episode": episode}))


def test_turns_of_rewarded_prompts_are_refused(folder):
    (folder / "rewards.py").write_text("def right(completions):\n    return [0.0] * len(completions)\n")
    task = {"name": "prompts", "rewards_from": ["rewards.py:right"], "episode": {"turns": 2}}
    long = {"tokenizer": "chess", "max_position_embeddings": 96}
    requested = {"source": "kinds.jsonl", "per_iteration": 2, "max_prompt_tokens": 16}
    with pytest.raises(ConfigError, match=r"^task.episode.turns is 2, but the task 'prompts' answers no completion"):
        Trainer(tiny_config(task=task, prompts=requested, model=long, run_dir=str(folder / "run")))
