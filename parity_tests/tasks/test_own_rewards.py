"""Reward functions of the user's own: what they are given, what they may answer, and what is told when they fail."""

import asyncio
import json
import re
import textwrap
import threading

import numpy as np
import pytest
from conftest import config as tiny_config
from hypothesis import given
from hypothesis import strategies as st

from jax_grpo.config import ConfigError
from jax_grpo.config.imported import ImportedError, code_hashes, imported
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.prompts.rows import Row
from jax_grpo.report.records import sample_rows
from jax_grpo.run.checkpoints import Origin
from jax_grpo.run.resume import changed_code
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import (
    Prompt,
    RewardError,
    TrainerState,
    applicable,
    held_out_means,
    held_out_values,
    total_reward,
)
from jax_grpo.tasks.checked import about_every_row, checked_score
from jax_grpo.tasks.rewards import RewardsTask
from jax_grpo.tasks.stop import text_stop
from jax_grpo.tasks.toy import LengthTask
from jax_grpo.trainer import Trainer

STATE = TrainerState(3, 10)
PROMPTS = [Prompt("2+2=", 0, columns={"answer": "4"}), Prompt("3+3=", 0, columns={"answer": "6"})]
TEXTS, IDS = ["4", "five"], [[7], [8, 9]]


def scored(*functions, texts=TEXTS, **settings):
    task = RewardsTask(task_of(name="prompts", **settings), functions)
    return checked_score(task, PROMPTS, texts, IDS, STATE), task


def test_a_function_is_given_what_it_takes_and_no_more():
    def everything(prompts, completions, completion_ids, trainer_state, log_metric, log_extra, **columns):
        assert (prompts, completions, completion_ids) == (["2+2=", "3+3="], TEXTS, IDS)
        assert columns == {"answer": ["4", "6"]}
        assert (trainer_state.global_step, trainer_state.max_steps) == (3, 10)
        log_metric("spread", 2)
        log_metric("spread", 4)
        log_extra("read", ["a", float("nan")])
        return [1, 0.5]

    def little(answer, completions):
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]

    class Instance:
        def __call__(self, completions, **_):
            return np.array([len(text) for text in completions])

    actual, task = scored(everything, little, little, Instance(), reward_weights=[1, 2, 0.5, 0])
    assert {name: values.tolist() for name, values in actual.items()} == {
        "everything": [1, 0.5], "little": [1, 0], "little_2": [1, 0], "Instance": [1, 4],
    }  # fmt: skip
    assert total_reward(actual, task.component_weights).tolist() == [3.5, 0.5]
    logged = task.logged()
    assert logged.metrics == {"spread": [2.0, 4.0]}
    config = tiny_config(rollout={"group_size": 2}, prompts={"per_iteration": 1})
    rows = sample_rows(task, PROMPTS, TEXTS, np.zeros(2), actual, config, logged.extras)
    assert rows[0]["extra"] == {"read": "a"}
    nan = sample_rows(task, PROMPTS[1:], TEXTS[1:], np.zeros(1), {}, config, {"read": logged.extras["read"][1:]})
    assert nan[0]["extra"] == {"read": None}, "strict JSON"


def test_none_leaves_a_function_out_of_a_row_and_components_one_by_one_refuse_it():
    def first(completions):
        return [1.0, None]

    def second(completions):
        return [None, 3.0]

    actual, task = scored(first, second, reward_weights=[2.0, 0.5])
    assert total_reward(actual, task.component_weights).tolist() == [2.0, 1.5], "a sum over what is there"
    own = applicable(actual, PROMPTS)
    assert own["first"].tolist() == [1.0] and own["second"].tolist() == [3.0], "means are over the rows it is about"
    with pytest.raises(RewardError, match=r"'first' is None for 1 of 2 completions; advantage.components other than"):
        about_every_row(actual, task.component_weights)
    about_every_row(actual, dict.fromkeys(actual, 0.0))  # diagnostics hinder nothing


def test_a_function_called_reward_leaves_the_total_its_name_in_an_evaluation():
    def reward(completions):
        return [1.0, 3.0]

    def length(completions):
        return [10.0, None]

    alone, task = scored(reward, reward_weights=[0.5])
    assert held_out_means(alone, PROMPTS, task.component_weights) == {"reward": 1.0}
    both, task = scored(reward, length, reward_weights=[1.0, 0.1])
    assert held_out_means(both, PROMPTS, task.component_weights) == {
        "reward": 2.5,
        "reward/reward": 2.0,
        "length": 10.0,
    }
    numbers = {name: own.tolist() for name, (_, own) in held_out_values(both, PROMPTS, task.component_weights).items()}
    assert numbers == {"reward": [0, 1], "reward/reward": [0, 1], "length": [0]}


def hangs(**_):
    threading.Event().wait(30)


async def hangs_async(**_):
    await asyncio.sleep(30)


def raises_on_five(completions, **_):
    return [int(text) for text in completions]


def raises_on_two(completions, **_):
    assert len(completions) == 1, "the batch alone"
    return [0]


async def raises_async(completions, **_):
    await asyncio.sleep(0)
    return [int(text) for text in completions]


def extras_short(log_extra, **_):
    log_extra("column", [1])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda **_: [1.0], r"test_own_rewards.py:\d+: <lambda> returned 1 values; expected one for each of 2"),
        (lambda **_: 1.0, r"returned 1.0; expected a list of 2 numbers"),
        (lambda **_: "ab", r"returned 'ab'; expected a list of 2 numbers"),
        (lambda **_: None, r"returned None; expected a list of 2 numbers"),
        (
            lambda **_: [1.0, float("nan")],
            r"returned nan; expected a finite number or None. Sample 1: prompt '3\+3=', comp",
        ),
        (lambda **_: [1.0, "1"], r"returned '1'; expected a finite number or None. Sample 1"),
        (
            lambda **_: [1.0, 1e39],
            r"rewards.py:\d+: <lambda> returned 1e\+39; expected a finite number or None. Sample 1",
        ),
        (lambda **_: [1.0, None], r"every function returned None; .* from one of <lambda>. Sample 1: prompt '3\+3='"),
        (
            raises_on_five,
            r"rewards.py:\d+: raises_on_five raised ValueError: invalid literal.*'five'. Sample 1: prompt '3",
        ),
        (raises_async, r"rewards.py:\d+: raises_async raised ValueError: invalid literal.*'five'. Sample 1: prompt '3"),
        (raises_on_two, r"raised AssertionError: the batch alone(?s:.*); it does so on the batch of 2, on none of its"),
        (extras_short, r"ValueError: log_extra\('column'\) was given 1 values; expected one for each of 2"),
        (hangs, r"rewards.py:\d+: hangs has not answered within task.timeout_s 0.2 s"),
        (hangs_async, r"rewards.py:\d+: hangs_async has not answered within task.timeout_s 0.2 s"),
    ],
)
def test_a_wrong_answer_is_one_error_with_the_users_file_and_line(function, words):
    with pytest.raises(RewardError, match=words) as raised:
        scored(function, timeout_s=0.2 if "hangs" in function.__name__ else 60.0)
    line = re.search(r"test_own_rewards.py:(\d+)", str(raised.value))
    if function is raises_on_five:
        assert line and int(line[1]) == function.__code__.co_firstlineno + 1, "the line that raises"


def test_coroutines_wait_together_and_keep_one_loop():
    both, loops = [], []

    async def meets(completions):
        loops.append(asyncio.get_running_loop())
        both.append(asyncio.get_running_loop().create_future())
        while len(both) % 2:  # for the other one: one after another, neither would ever return
            await asyncio.sleep(0)
        return [1.0] * len(completions)

    task = RewardsTask(task_of(name="prompts", timeout_s=20.0), [meets, meets])
    for _ in range(2):
        both.clear()
        assert set(checked_score(task, PROMPTS, TEXTS, IDS)) == {"meets", "meets_2"}
    assert len(set(loops)) == 1, "a client of the first iteration can be used in the second"
    task.close()


def file_of(folder, code, name="rewards.py"):
    path = folder / name
    path.write_text(textwrap.dedent(code))
    return path


def prompts_file(folder, text='{"prompt": "2+2=", "answer": "4"}\n'):
    (folder / "data.jsonl").write_text(text)
    return PromptsConfig(source=str(folder / "data.jsonl"), split="all")


@pytest.mark.parametrize(
    ("takes", "words"),
    [
        (
            "completions, anwser",
            r"rewards.py:1: reward needs the column 'anwser'; .*data.jsonl has answer. Did you mean answer\?",
        ),
        ("completions, *, answer, level", r"needs the column 'level'"),
        ("completions, answer, log_metric, level=3, **columns", None),
    ],
)
def test_a_column_that_the_data_lack_is_refused_as_they_are_read(takes, words, tmp_path):
    path = file_of(tmp_path, f"def reward({takes}):\n    return [0.0]\n")
    task = make_task(task_of(name="prompts", rewards_from=[f"{path}:reward"]))
    if words is None:
        assert task.read(prompts_file(tmp_path), 0, None)[0] == Row("2+2=", {"answer": "4"})
        return
    with pytest.raises(ConfigError, match=words):
        task.read(prompts_file(tmp_path), 0, None)


def test_a_column_called_as_an_argument_is_refused(tmp_path):
    task = RewardsTask(task_of(name="prompts"), [raises_on_five])
    with pytest.raises(ConfigError, match="the column 'completions' has the name of an argument of rewards; rename it"):
        task.read(prompts_file(tmp_path, '{"prompt": "p", "completions": 1}\n'), 0, None)


def test_a_column_that_is_missing_is_told_before_anything_is_loaded_or_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_grpo.trainer.load_policy", lambda *_: pytest.fail("a model was made"))
    monkeypatch.setattr("jax_grpo.train.choose_micro_batches", lambda *_, **__: pytest.fail("programs were compiled"))
    path = file_of(tmp_path, "def reward(completions, level):\n    return [0.0]\n")
    prompts = prompts_file(tmp_path).model_dump() | {"per_iteration": 4, "max_prompt_tokens": 8}
    sections = {
        "task": {"name": "prompts", "rewards_from": [f"{path}:reward"]},
        "prompts": prompts,
        "run_dir": str(tmp_path / "r"),
    }
    with pytest.raises(ConfigError, match="needs the column 'level'"):
        Trainer(tiny_config(**sections))
    from jax_grpo.train import train

    with pytest.raises(ConfigError, match="needs the column 'level'"):
        train(tiny_config(**sections, update={"micro_batches": "auto"}))


@pytest.mark.parametrize(
    ("code", "spec", "words"),
    [
        ("def reward(:", "{}:reward", r"SyntaxError|rewards.py:1"),
        ("import nothing_like_it", "{}:reward", r"rewards.py:1: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("x = 1\ny = 1 / 0", "{}:reward", r"rewards.py:2: ZeroDivisionError"),
        ("def rewards(): pass", "{}:reward", r"has no 'reward'; it has rewards"),
        ("", "nowhere.py:reward", r"there is no file .*nowhere.py"),
        ("", "nowhere_at_all:reward", r"no module 'nowhere_at_all' on the path; a file is given as nowhere_at_all.py:reward"),
        ("", "rewards", r"'rewards'; expected my_module:name, or path/to/file.py:name"),
    ],
)  # fmt: skip
def test_code_that_cannot_be_imported_is_one_error(code, spec, words, tmp_path):
    with pytest.raises(ImportedError, match=words):
        imported(spec.format(file_of(tmp_path, code)), "task.rewards_from")


def test_the_hash_is_of_the_users_files_alone(tmp_path):
    path = file_of(tmp_path, "def reward(completions):\n    return [0.0]\n")
    task = make_task(task_of(name="prompts", rewards_from=[f"{path}:reward"]))
    before = code_hashes(task.code())
    assert list(before) == ["rewards.py"]
    assert not code_hashes(make_task(task_of()).code()) and not code_hashes([len])
    path.write_text(path.read_text().replace("0.0", "1.0"))
    assert code_hashes(task.code()) != before


def test_a_changed_file_is_imported_again_and_told_as_a_run_continues(tmp_path):
    path = file_of(tmp_path, "def reward():\n    return 1\n")
    identities = []
    for code in ("return 1", "return 2"):
        path.write_text(f"def reward():\n    {code}\n")
        function = imported(f"{path}:reward", "task.rewards_from")
        assert f"return {function()}" == code, "a notebook trains again with what it has written"
        identities.append({"code": code_hashes([function])})
    saved = Origin(tmp_path, {"identity": identities[0]}, {})
    assert changed_code(saved, identities[1]) == ["the code of rewards.py"] and not changed_code(saved, identities[0])
    assert not changed_code(Origin(tmp_path, {"identity": {}}, {}), {"code": {}}), (
        "an earlier version, the package's own tasks"
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "task.name prompts needs task.rewards_from"),
        ({"rewards_from": ["math:pi"]}, "task.rewards_from: 3.14.* is of type float; expected a function"),
        (
            {"rewards_from": ["math:sqrt"], "reward_weights": [1, 2]},
            "reward_weights has 2 numbers; expected one for each of sqrt",
        ),
    ],
)
def test_settings_that_do_not_fit_the_functions_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_task(task_of(name="prompts", **settings))


def test_functions_from_python_are_refused_where_nothing_asks_for_them():
    with pytest.raises(ConfigError, match=r"functions reward the prompts of task.name prompts; here it is policy"):
        make_task(task_of(), [raises_on_five])


def test_functions_of_the_config_are_refused_beside_functions_from_python():
    config = task_of(name="prompts", rewards_from=["absent.py:reward"])
    with pytest.raises(
        ConfigError, match=r"^task.rewards_from is \['absent.py:reward'\], which does nothing beside rewards that Py"
    ):
        make_task(config, [raises_on_five])


def test_a_weighted_sum_beyond_float32_is_refused():
    with pytest.raises(
        RewardError, match=r"^task 'prompts': the reward, 1e\+39 <lambda>, is inf in float32; expected .* Sample 0"
    ):
        scored(lambda **_: [1.0, 1.0], reward_weights=[1e39])


def test_components_one_by_one_need_one_with_a_weight():
    config = tiny_config(
        task={"name": "prompts", "rewards_from": ["math:sqrt"], "reward_weights": [0.0]},
        advantage={"components": "normalise_each"},
        prompts={"source": "absent.jsonl"},
    )
    with pytest.raises(
        ConfigError, match=r"^advantage.components is 'normalise_each', and the weights of sqrt are 0; expected"
    ):
        Trainer(config)


def test_a_function_alone_is_refused_as_a_list_of_functions():
    for alone in (raises_on_five, "mine.py:reward"):
        with pytest.raises(
            ConfigError, match=r"^rewards is .*(raises_on_five|mine.py).*; expected a list of functions, such"
        ):
            make_task(task_of(name="prompts"), alone)


STRINGS = st.lists(st.text("ab\n", min_size=1, max_size=3), min_size=1, max_size=3)


@given(STRINGS, st.text("ab\n", max_size=12))
def test_a_text_ends_before_the_stop_that_is_complete_first(strings, text):
    ends = [(at + len(stop), at) for stop in strings if (at := text.find(stop)) >= 0]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert text_stop(*strings).truncate(text, 0) == expected


def test_stops_are_of_bytes_and_none_ends_nothing():
    assert text_stop("ü\n").truncate("grün ü\nnach", 0) == ("grün ", True)
    assert text_stop().truncate("any\n\ntext", 0) == ("any\n\ntext", False)


def test_functions_beside_a_task_that_is_given_are_refused_since_they_would_do_nothing():
    with pytest.raises(ConfigError, match="rewards: a task that is given scores by itself"):
        Trainer(tiny_config(), LengthTask(task_of(name="length")), rewards=[lambda completions: [0.0]])


class Pops:
    """A verifier that uses up what it is given: tests of a column, the messages, texts and ids."""

    def __init__(self):
        self.seen: list = []

    def __call__(self, prompts, completions, completion_ids, tests, log_extra):
        self.seen.append(repr((prompts, completions, completion_ids, tests)))
        counts = [len(own) + len(own[0]["args"]) for own in tests]
        for own in tests:
            own.pop()["args"].pop()
        for messages in prompts:
            messages.pop()["content"] = "spoilt"
        log_extra("tests", tests)
        tests.clear()
        completions[:] = [None]
        completion_ids[0].clear()
        return counts


async def pops_async(completions, tests, **_):
    return Pops()([[{}]], completions, [[]], tests, lambda *_: None)


class PopsByItself(LengthTask):
    """A task of the user's own whose score uses up its prompts and completions."""

    component_weights = {"left": 1.0}  # noqa: RUF012

    def __init__(self):
        pass

    def score(self, prompts, completions):
        counts = [len(prompt.columns["tests"]) + len(prompt.messages) for prompt in prompts]
        for prompt in prompts:
            prompt.columns["tests"].pop()
            prompt.messages.pop()
        completions.clear()
        return {"left": np.array(counts, np.float32)}


def group_of(count: int) -> list[Prompt]:
    """A prompt as often as it is completed: one object, as a run has it."""
    tests = [{"args": [1, 2]}, {"args": [3, 4]}]
    messages = [{"role": "user", "content": "2+2="}]
    return [Prompt("2+2=", 0, columns={"tests": tests}, messages=messages)] * count


def test_a_reward_that_changes_what_it_is_given_changes_nothing_for_others_or_later():
    first, second, texts, ids = Pops(), Pops(), ["4", "4", "4"], [[7], [7], [7]]
    prompts, functions = group_of(3), [first, pops_async, second]
    task = RewardsTask(task_of(name="prompts"), functions)
    for _ in range(2):  # an evaluation asks the same prompts again
        scores = checked_score(task, prompts, texts, ids)
        assert [values.tolist() for values in scores.values()] == [[4, 4, 4]] * 3
    assert len({*first.seen, *second.seen}) == 1
    assert (prompts, texts, ids) == (group_of(3), ["4"] * 3, [[7]] * 3)
    assert task.logged().extras["tests"] == ["[{'args': [1, 2]}]"] * 3, "as it was when it was logged"
    for _ in range(2):
        assert checked_score(PopsByItself(), prompts, texts)["left"].tolist() == [3, 3, 3]
    assert (prompts, texts) == (group_of(3), ["4"] * 3)


def test_functions_that_answer_with_one_array_keep_their_own_numbers():
    array = np.zeros(2)

    def fills(value):
        def fill(**_):
            array[:] = value
            return array

        return fill

    scores, _ = scored(fills(1), fills(2))
    assert [values.tolist() for values in scores.values()] == [[1, 1], [2, 2]]


@pytest.mark.parametrize("value", [np.array([0.5]), np.array([[0.5]]), np.float16(0.5)])
def test_an_array_of_one_number_is_that_number(value):
    scores, _ = scored(lambda **_: [value, 0.5])
    assert scores["<lambda>"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize("value", [np.array([1.0, 2.0]), np.str_("1"), 10**400, np.complex64(1), np.array([])])
def test_what_is_not_one_number_is_refused(value):
    with pytest.raises(RewardError, match=r"test_own_rewards.py:\d+: <lambda> returned .*; expected a finite number"):
        scored(lambda **_: [0.5, value])


def test_extras_of_any_kind_are_shown_as_json():
    torch = pytest.importorskip("torch")
    values = [np.array([1.0, 2.0]), torch.ones(2, requires_grad=True), np.int64(3), float("nan"), {1, 2}, 10**400]

    def logs(completions, log_extra):
        log_extra("any", values[: len(completions)])
        return [0.0] * len(completions)

    task, prompts = RewardsTask(task_of(name="prompts"), [logs]), PROMPTS * 3
    scores = checked_score(task, prompts, TEXTS * 3, IDS * 3)
    rows = sample_rows(
        task,
        prompts,
        TEXTS * 3,
        scores["logs"].values_B,
        scores,
        tiny_config(rollout={"group_size": 2}),
        task.logged().extras,
    )
    text = json.dumps(rows, allow_nan=False)
    assert "[1. 2.]" in text and len(rows) == 3
    shown = task.logged().extras["any"]
    assert shown[2:4] == [3.0, None] and shown[4] == "{1, 2}" and isinstance(shown[1], str)


async def exits_async(**_):
    raise SystemExit(3)


def exits(**_):
    raise SystemExit(3)


class Exits(LengthTask):
    def __init__(self, config=None):
        super().__init__(task_of(name="length"))

    def score(self, prompts, completions):
        raise SystemExit(3)


@pytest.mark.parametrize("function", [exits, exits_async])
def test_a_reward_that_exits_is_named_at_once(function):
    with pytest.raises(RewardError, match=rf"rewards.py:\d+: {function.__name__} raised SystemExit: 3. Sample 0"):
        scored(function, timeout_s=60.0)


def test_a_task_that_exits_is_named(tmp_path):
    with pytest.raises(RewardError, match=r"rewards.py:\d+: task 'length' raised SystemExit: 3. Sample 0"):
        checked_score(Exits(), PROMPTS, TEXTS)
    path = file_of(tmp_path, "import sys\nsys.exit('usage: rewards.py FILE')\n")
    with pytest.raises(ImportedError, match=r"rewards.py:2: SystemExit: usage"):
        imported(f"{path}:reward", "task.rewards_from")
