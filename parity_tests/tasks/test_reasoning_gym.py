"""Questions of reasoning-gym: scored as the library scores, held-out ones never trained on, every wrong setting one error."""

import collections
import itertools
import json
import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest

from jax_grpo.config import ConfigError, load_config
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.rewards.worker import NoReply
from jax_grpo.tasks import make_task
from jax_grpo.tasks.checked import checked_score, made_prompt
from jax_grpo.tasks.reasoning_gym import ANSWERS
from jax_grpo.trainer import Trainer

reasoning_gym = pytest.importorskip("reasoning_gym", reason="needs the extra `reasoning-gym`")

ASK = "{{ question }}\n"
DATASETS = [
    "aiw", "base_conversion", "basic_arithmetic", "bitwise_arithmetic", "chain_sum", "coin_flip", "count_bits", "count_primes",
    "decimal_arithmetic", "family_relationships", "fraction_simplification", "gcd", "gsm_symbolic", "isomorphic_strings", "lcm",
    "leg_counting", "letter_counting", "number_sorting", "power_function", "prime_factorization", "products",
    "simple_equations", "simple_geometry", "spell_backward", "syllogism", "word_sorting",
]  # fmt: skip
INSTANCES = 500


def task_with(datasets, **settings):
    return make_task(
        task_of(name="reasoning_gym", datasets=datasets, **({"ask": ASK, "instances": INSTANCES} | settings))
    )


# The library as its pages call it, in a process whose hashes are those of the worker: some questions depend on them.
JUDGE = """
import json, reasoning_gym, sys

sets = {}
for line in sys.stdin:
    name, size, number, text = json.loads(line)
    judge = sets.get(name) or sets.setdefault(name, reasoning_gym.create_dataset(name, seed=0, size=size))
    entry = judge[number]
    try:
        score = None if text is None else judge.score_answer(text, entry)
    except (ValueError, TypeError, SyntaxError):  # that scorer reads numbers, and this is none
        score = 0.0
    print(json.dumps([entry["question"], str(entry["answer"]), score]))
"""


def judged(rows):
    """Question, answer and score of each (data set, number of an instance, text or None)."""
    lines = "".join(json.dumps([name, INSTANCES, number, text]) + "\n" for name, number, text in rows)
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    judge = [sys.executable, "-c", JUDGE]
    ended = subprocess.run(judge, input=lines, env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.slow
def test_twenty_datasets_are_scored_as_the_library_scores():
    """On a thousand texts: the answer, another one, the question, numbers and letters, whole and in sentences."""
    rng = random.Random(0)
    task = task_with({name: {"answer": "whole"} for name in DATASETS})
    prompts, completions = [made_prompt(task, row, row) for row in range(1100)], []
    asked = [json.loads(prompt.answer) for prompt in prompts]
    answers, others = (
        [answer for _, answer, _ in judged([(name, number, None) for name, number in each])]
        for each in (asked, [(name, rng.randrange(INSTANCES)) for name, _ in asked])
    )
    for prompt, answer, other in zip(prompts, answers, others, strict=True):
        noise = "".join(rng.choices("abc 0123456789.-/[]'\n", k=rng.randint(1, 20)))
        completions.append(
            rng.choice([answer, f" {answer}\n", other, f"It is {answer}.", noise, prompt.text, answer.upper()])
        )
    scores = checked_score(task, prompts, completions)
    theirs = judged([(*each, text.strip()) for each, text in zip(asked, completions, strict=True)])
    assert [prompt.text for prompt in prompts] == [question + "\n" for question, *_ in theirs]
    expected = np.array([score for *_, score in theirs], np.float32)
    np.testing.assert_array_equal(scores["score"].values_B, expected)
    np.testing.assert_array_equal(scores["right"].values_B, expected == 1)
    for name in DATASETS:
        own = np.array([other == name for other, _ in asked])
        assert own.sum() > 20 and (scores[name].about_B == own).all()
        np.testing.assert_array_equal(scores[name].values_B[own], expected[own])
    right = (expected == 1).sum()
    print(f"{len(DATASETS)} data sets, {len(prompts)} texts, {right} right")
    assert len(DATASETS) >= 20 and right > 200
    task.close()


@pytest.mark.slow
def test_another_process_asks_the_same():
    """Of data sets whose questions depend on the order of a set, which every process has its own of, or on `random`."""
    names = ("isomorphic_strings", "polynomial_multiplication", "ransom_note", "list_functions")
    tasks = [task_with({name: {} for name in names}) for _ in range(2)]
    first, second = ([made_prompt(task, row, row) for row in range(60)] for task in tasks)
    assert first == second
    for task in tasks:
        task.close()


def test_a_held_out_question_is_never_trained_on_and_the_seed_alone_decides():
    task = task_with({"chain_sum": {"settings": {"max_terms": 2, "max_digits": 1}}, "leg_counting": {}})
    trained = {made_prompt(task, None, seed).text for seed in range(1500)}
    requested = {made_prompt(task, None, seed, heldout=True).text for seed in range(300)}
    assert not trained & requested
    share = len(requested) / len(trained | requested)
    print(f"{len(trained)} different questions trained on, {len(requested)} asked")
    assert len(trained) > 100 and len(requested) > 10 and share < 0.5
    again = task_with({"chain_sum": {"settings": {"max_terms": 2, "max_digits": 1}}, "leg_counting": {}})
    assert [made_prompt(again, None, seed) for seed in range(20)] == [
        made_prompt(task, None, seed) for seed in range(20)
    ]


def test_data_sets_ask_by_their_weights_and_are_scored_apart():
    task = task_with({"chain_sum": {"weight": 3, "answer": "last_number"}, "spell_backward": {"answer": "last_word"}})
    prompts = [made_prompt(task, row, row) for row in range(400)]
    names = [json.loads(prompt.answer)[0] for prompt in prompts]
    counts = collections.Counter(names)
    assert 250 < counts["chain_sum"] < 350 and sum(counts.values()) == 400
    judges = {name: reasoning_gym.create_dataset(name, seed=0, size=INSTANCES) for name in counts}
    answers = [judges[name][json.loads(p.answer)[1]]["answer"] for name, p in zip(names, prompts, strict=True)]
    scores = checked_score(task, prompts, [f"1, no, it is {answer}" for answer in answers])
    assert (scores["right"].values_B == 1).all() and (scores["score"].values_B == 1).all()
    for name in counts:
        assert scores[name].about_B.tolist() == [other == name for other in names]
    assert dict(task.component_weights) == {"score": 1.0, "right": 0.0, "chain_sum": 0.0, "spell_backward": 0.0}
    scores = checked_score(task, prompts[:2], ["", "..."])
    assert scores["score"].values_B.tolist() == [0, 0], "no answer"


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("whole", " 7 or 8\n", "7 or 8"),
        ("last_number", "7 or -1,008.50 dollars.", "-1008.50"),
        ("last_number", "seven", None),
        ("last_word", "It is olleh.", "olleh"),
        ("last_word", " \n", None),
        ("tags", "<answer>6</answer><answer> 7 </answer>", "7"),
        ("tags", "7", None),
        ("after_answer", "Answer: 6\nNo. Answer: 7 \nI am sure", "7"),
        ("after_answer", "7", None),
    ],
)
def test_the_answer_in_a_text(rule, text, answer):
    assert ANSWERS[rule](text) == answer


@pytest.mark.parametrize(
    ("datasets", "settings", "sentence"),
    [
        ({"chain_sums": {}}, {}, r"task\.datasets has 'chain_sums'; expected one of reasoning-gym's \d+\..*chain_sum"),
        ({"chain_sum": {"settings": {"terms": 3}}}, {}, r"task\.datasets\.chain_sum\.settings \{'terms': 3\}: .*'terms'"),
        ({"chain_sum": {"settings": {"min_terms": 9}}}, {}, r"chain_sum\.settings .*max_terms must be >= min_terms"),
        ({"chain_sum": {"settings": {"seed": 3}}}, {}, r"chain_sum\.settings has 'seed'; expected seed and task\.instances"),
        ({"chain_sum": {}}, {"ask": "{{ question"}, r"task\.ask: '\{\{ question', line 1"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(datasets, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        task_with(datasets, **settings)


@pytest.mark.parametrize(
    ("prompts", "sentence"),
    [
        (
            {"source": "a.jsonl"},
            r"prompts\.source is 'a\.jsonl', which does nothing: task reasoning_gym makes its prompts",
        ),
        ({"template": "a"}, r"prompts\.template is 'a', which does nothing.*expected task\.ask"),
        (
            {"chat_template_kwargs": {"a": 1}},
            r"prompts\.chat_template_kwargs \{'a': 1\} do nothing: task\.ask makes texts",
        ),
    ],
)
def test_settings_of_files_are_refused(prompts, sentence):
    with pytest.raises(ConfigError, match=sentence):
        task_with({"chain_sum": {}}).read(PromptsConfig(**prompts), 0, None)


def test_too_few_questions_for_a_split_are_one_error():
    task = task_with({"chain_sum": {}}, instances=1)
    with pytest.raises(
        ConfigError, match=r"task\.datasets\.chain_sum .* so few different questions that none of 1000 is"
    ):
        task.prompt(0, 0), task.heldout_prompt(0, 0)


def test_a_missing_library_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'jax_grpo[reasoning-gym]'")):
        task_with({"chain_sum": {}})


def test_questions_are_messages_where_nothing_else_is_said(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ mood }}"
    )
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    task = task_with({"chain_sum": {}}, ask=None)
    with pytest.raises(
        ConfigError, match=r"task\.ask: messages need a chat template.*for a model without one give a text"
    ):
        task.prompt(0, 0)
    task.chat = ChatTemplate(str(tmp_path))
    task.read(PromptsConfig(chat_template_kwargs={"mood": "!"}), 0, None)
    prompt = task.prompt(0, 0)
    (message,) = prompt.messages
    assert message["role"] == "user" and prompt.text == f"<user>{message['content']}!"
    parts = {"gym": {"task": "reasoning_gym", "datasets": {"chain_sum": {}}}, "length": {}}
    mixed = make_task(task_of(name="mixed", mixture=parts), None, str(tmp_path))
    table = mixed.read(PromptsConfig(chat_template_kwargs={"mood": "!"}), 0, None)
    texts = [mixed.prompt(row, seed).text for seed, row in enumerate(table[:4])]
    assert [text.endswith("!") for text in texts] == [False, True] * 2, "the questions of a mixture"
    assert "gym, 0.5: reasoning-gym" in table.identity, "a run knows again what makes them"
    ask = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ question }}"}]
    system = task_with({"chain_sum": {}}, ask=ask)
    system.chat = ChatTemplate(str(tmp_path))
    assert system.prompt(0, 0).text == f"<system>Be brief.<user>{message['content']}"


def test_rows_are_known_again_by_what_makes_their_questions():
    def identity(**settings):
        return task_with({"chain_sum": {}}, **settings).read(PromptsConfig(), 0, None).identity

    assert identity() == identity() != identity(instances=7)
    assert len(task_with({"chain_sum": {}}).read(PromptsConfig(), 0, None)) == INSTANCES


@pytest.mark.slow
def test_a_run_trains_on_questions_alone_and_beside_another_task(tmp_path):
    tiny = {
        "iterations": 2, "run_dir": str(tmp_path / "run"), "kl": {"beta": 0.0},
        "model": {"num_layers": 1, "num_heads": 2, "hidden_size": 16, "max_position_embeddings": 256},
        "prompts": {"per_iteration": 4}, "rollout": {"group_size": 2, "max_new_tokens": 4},
        "evaluation": {"positions": 3},
    }  # fmt: skip
    own = {"name": "reasoning_gym", "datasets": {"chain_sum": {"answer": "last_number"}}, "ask": ASK}
    metrics, samples, _ = Trainer(load_config(tiny | {"task": own})).iterate(0)
    assert {"reward/right/mean", "reward/chain_sum/mean", "right_fraction"} <= metrics.keys()
    assert all(prompt.text.startswith("State the final answer") for prompt in samples.prompts)
    part = {key: value for key, value in own.items() if key != "name"} | {"share": 3}
    mixed = {"name": "mixed", "mixture": {"reasoning_gym": part, "length": {}}}
    metrics, samples, _ = Trainer(load_config(tiny | {"task": mixed})).iterate(0)
    requested = collections.Counter(prompt.task for prompt in samples.prompts)
    assert requested["reasoning_gym"] and "reward/reasoning_gym/right/mean" in metrics


def test_a_text_that_its_scorer_evaluates_as_python_harms_no_run():
    """Some of the library's scorers call `eval`: in the run's own process, `exit()` would end it without a word."""
    settings = {"n": 4, "min_remove": 1, "max_remove": 1}
    task = task_with({"n_queens": {"answer": "whole", "settings": settings}})
    prompts = [made_prompt(task, row, row) for row in range(3)]
    judge = reasoning_gym.create_dataset("n_queens", seed=0, size=INSTANCES, **settings)
    entry = judge[json.loads(prompts[-1].answer)[1]]
    texts = ["exit()", "__import__('os')._exit(0)", entry["metadata"]["valid_answers"][0]]
    assert checked_score(task, prompts, texts)["score"].values_B.tolist() == [0, 0, 1]
    task.close()


def test_an_instance_that_the_library_never_finishes_is_left_out(monkeypatch):
    monkeypatch.setattr("jax_grpo.tasks.reasoning_gym.LIMIT_S", 1.0)
    task, endless = task_with({"number_sequence": {}}, instances=164), 163  # of reasoning-gym 0.1.25

    def first_number(seed: int) -> int:
        rng = random.Random(f"reasoning_gym/{seed}")
        rng.choices(["number_sequence"], [1.0])
        return rng.randrange(164)

    task.prompt(0, 0)  # the process has begun
    seed = next(seed for seed in itertools.count() if first_number(seed) == endless)
    assert json.loads(task.prompt(0, seed).answer)[1] != endless

    def never(*request, seconds):
        raise NoReply

    monkeypatch.setattr(task._library, "ask", never)
    with pytest.raises(
        ConfigError, match=r"task\.datasets\.number_sequence with .*did not finish 3 instances in 1 s each"
    ):
        task.prompt(0, 0)
    task.close()
