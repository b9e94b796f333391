"""Prompts of the user's own files: every format alike, every bad row one error, splits, and mixtures with the built-in tasks."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import config as tiny_config
from hypothesis import given
from hypothesis import strategies as st

import jax_grpo
from jax_grpo.config import Config, ConfigError, check_files
from jax_grpo.config.imported import ImportedError
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.prompts.dataset import describe_rows, heldout_rows
from jax_grpo.prompts.rows import PromptFileError, Row, load_prompts
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import RewardError, Task, TrainerState, applicable, total_reward
from jax_grpo.tasks.checked import checked_score
from jax_grpo.tasks.interleaved import Interleaved

ROWS = [Row(f"{a}+{b}=", {"answer": a + b, "level": "easy"}) for a in range(10) for b in range(6)]


def load(path, **settings):
    return load_prompts(PromptsConfig(source=str(path), **({"split": "all"} | settings)))


def jsonl(folder, rows=ROWS, name="data.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": row.prompt, **row.columns}) + "\n" for row in rows))
    return path


def test_every_format_gives_the_same_rows(tmp_path):
    assert list(load(jsonl(tmp_path))) == ROWS
    csv = tmp_path / "data.csv"
    csv.write_text(
        "\ufefflevel,prompt,answer\n" + "".join(f'easy,"{r.prompt}",{r.columns["answer"]}\n\n' for r in ROWS)
    )
    texts = [Row(row.prompt, {"level": "easy", "answer": str(row.columns["answer"])}) for row in ROWS]
    assert list(load(csv)) == texts, "values of a CSV file are texts"
    table = pa.table({"prompt": [r.prompt for r in ROWS]} | {k: [r.columns[k] for r in ROWS] for k in ROWS[0].columns})
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=7)
    assert list(load(tmp_path / "data.parquet")) == ROWS and load(tmp_path / "data.parquet")[-1] == ROWS[-1]


@pytest.mark.slow  # `datasets` takes seconds to import
def test_a_folder_that_datasets_saved_gives_the_same_rows(tmp_path):
    from datasets import Dataset, DatasetDict

    made = Dataset.from_list([{"prompt": row.prompt, **row.columns} for row in ROWS])
    shuffled = made.select(range(59, -1, -1))
    shuffled.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    assert list(load(tmp_path / "saved")) == ROWS[::-1]
    DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(PromptFileError, match=r"holds several data sets; give one: .*both/test, .*both/train"):
        load(tmp_path / "both")
    next((tmp_path / "saved").glob("*.arrow")).write_bytes(b"not arrow")
    with pytest.raises(PromptFileError, match=r"saved: not a folder that `datasets` saved \(Arrow"):
        load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("d.jsonl", b"", r"d.jsonl: no prompts in it"),
        ("d.jsonl", b'{"prompt": "a"}\n{"prompt": \n', r"d.jsonl:2: '{\"prompt\":' is not JSON"),
        ("d.jsonl", b'\n["a"]\n', r"d.jsonl:2: '\[\"a\"\]'; expected an object"),
        ("d.jsonl", b'{"question": "a"}\n', r"d.jsonl:1: it has question; expected a text that is not empty as 'prompt'"),
        ("d.jsonl", b'{"prompt": 3}\n', r"d.jsonl:1: prompt is 3; expected a text"),
        ("d.jsonl", b'{"prompt": ""}\n', r"d.jsonl:1: prompt is ''; expected a text"),
        ("d.jsonl", b'{"prompt": "\\ud800"}\n', r"d.jsonl:1: prompt .* holds half a surrogate pair"),
        ("d.jsonl", b'{"prompt": "a"}\n{"prompt": "b\xff"}\n', r"d.jsonl:2: byte 14 is 0xff, which is not UTF-8"),
        ("d.jsonl", b'{"prompt": "a", "x": 1, "x": 2}\n', r"d.jsonl:1: the column 'x' is there twice"),
        ("d.jsonl", b'{"prompt": ' + b"[" * 100_000, r"d.jsonl:1: .* is not JSON"),
        ("d.csv", b"question,answer\na,b\n", r"d.csv:1: columns question, answer; expected one called 'prompt'"),
        ("d.csv", b"prompt,x,x\na,b,c\n", r"d.csv:1: the column 'x' is there twice"),
        ("d.csv", b'prompt,x\n"a\nb",1\nc\n', r"d.csv:4: 1 values; expected 2, as in line 1"),
        ("d.csv", b"prompt,x\n,1\n", r"d.csv:2: prompt is ''; expected a text"),
        ("d.csv", b"prompt\na\rb\n", r"d.csv:2: not CSV"),
        ("d.csv", b"", r"d.csv: no prompts in it"),
        ("d.parquet", b"PAR1", r"d.parquet: not a Parquet file"),
        ("d.pgn", b"*", r"d.pgn: prompts are read from .jsonl, .csv, .parquet; not from '.pgn'"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_one_error(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptFileError, match=words):
        load(tmp_path / name)


def test_a_csv_field_may_have_any_length(tmp_path):
    (tmp_path / "d.csv").write_text(f"prompt,tests\n{'x' * 200_000},{'y' * 200_000}\n")
    limit = csv.field_size_limit()
    assert load(tmp_path / "d.csv")[0] == Row("x" * 200_000, {"tests": "y" * 200_000})
    assert csv.field_size_limit() == limit  # it is the whole process's: readers of other files keep theirs


def test_a_parquet_row_without_a_text_is_named(tmp_path):
    pq.write_table(pa.table({"prompt": ["a", None]}), tmp_path / "d.parquet")
    with pytest.raises(PromptFileError, match=r"d.parquet: row 1: it has nothing; expected a text"):
        load(tmp_path / "d.parquet")
    pq.write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / "d.parquet")
    assert load(tmp_path / "d.parquet")[1] == Row("b", {}), "no other column"


def test_a_tenth_is_held_out_by_the_prompts_text(tmp_path):
    path = jsonl(tmp_path, [*ROWS, *ROWS])
    train, heldout, both = (load(path, split=split) for split in ("train", "heldout", "all"))
    assert {r.prompt for r in train}.isdisjoint(r.prompt for r in heldout), (
        "a text that is there twice is in one of them"
    )
    assert sorted([*train, *heldout], key=str) == sorted(both, key=str) and 2 <= len(heldout) <= 30
    assert train.apart == len(heldout) and len({train.identity, heldout.identity, both.identity}) == 3
    other = load(jsonl(tmp_path, ROWS[::-1], "other.jsonl"), split="heldout")
    assert {r.prompt for r in other} == {r.prompt for r in heldout}, "whatever file it stands in"
    with pytest.raises(PromptFileError, match=r"has no held-out prompts: a hash of a prompt .*, and none of its 1"):
        load(jsonl(tmp_path, [train[0]], "one.jsonl"), split="heldout")


def rewarded(folder, **task):
    (folder / "rewards.py").write_text(
        "def right(completions, answer):\n    return [float(str(a) == c) for a, c in zip(answer, completions)]\n"
    )
    return {"name": "prompts", "rewards_from": [f"{folder / 'rewards.py'}:right"], **task}


def test_an_evaluation_asks_what_the_run_does_not_train_on(tmp_path):
    source = str(jsonl(tmp_path))
    config = tiny_config(task=rewarded(tmp_path), prompts={"source": source}, evaluation={"positions": 3})
    task = make_task(config.task)
    training = task.read(config.prompts, 0, None)
    held = heldout_rows(config, training, task.read)
    assert held is not None and held.rows == load(source, split="heldout")[:3]
    assert describe_rows(training, held).startswith(
        f"{len(training)} prompts to train on, {training.apart} held out, of which 3 are"
    )
    own = jsonl(tmp_path, [training[0], Row("x", {"answer": 1})], "asked.jsonl")
    config = tiny_config(
        task=rewarded(tmp_path), prompts={"source": source}, evaluation={"positions": 3, "source": str(own)}
    )
    held = heldout_rows(config, training, task.read)
    assert held is not None and (held.rows, held.left_out) == ([Row("x", {"answer": 1, "level": None})], 1)
    own.write_text('{"prompt": "x"}\n')
    with pytest.raises(ConfigError, match=r"right needs the column 'answer'; .*asked.jsonl has no other than prompt"):
        heldout_rows(config, training, task.read)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": {"name": "prompts"}}, r"prompts.source is packaged, which has chess positions; a prompts task needs"),
        (
            {"task": {"name": "prompts"}, "prompts": {"source": "endings:KRK"}},
            r"prompts.source is endings:KRK, which has chess positions; a prompts task needs",
        ),
        (
            {"task": {"name": "mixed", "mixture": {"policy": {}, "prompts": {"source": "packaged:tables"}}}},
            r"task.mixture.prompts.source is packaged:tables, which has chess positions",
        ),
        ({"task": {"name": "polcy"}}, r"task.name is 'polcy'; expected policy, .*, or my_module:MyTask. Did you mean policy\?"),
        ({"task": {"stop": ["x"]}}, r"task.stop is \['x'\], which does nothing unless task.name is prompts; it is policy"),
        ({"task": {"name": "m:T", "rewards": {"x": 1}}}, r"task.rewards is of built-in tasks; the weights of m:T are its comp"),
        (
            {"task": {"name": "mixed", "mixture": {"policy": {}, "prompts": {"source": "d.jsonl", "rewards": {"x": 1}}}}},
            r"task.mixture.prompts.rewards is of built-in tasks; the weights of prompts are task.reward_weights",
        ),
        (
            {
                "task": {"name": "mixed", "mixture": {"policy": {}, "own": {"task": "m:T", "source": "d.jsonl"}}},
                "evaluation": {"positions": 1, "source": "e.jsonl"},
            },
            r"evaluation.source is 'e.jsonl', but own of task.mixture has a source of its own",
        ),
        (
            {
                "task": {"name": "mixed", "mixture": {"policy": {}, "gym": {"task": "reasoning_gym", "datasets": {"gcd": {}}}}},
                "evaluation": {"positions": 1, "source": "e.parquet"},
            },
            r"evaluation.source is 'e.parquet', but gym of task.mixture has a source of its own",
        ),
    ],
)  # fmt: skip
def test_settings_that_do_nothing_are_refused(sections, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**sections)


def test_a_source_of_a_part_that_is_not_there_is_told_at_once(tmp_path):
    mixture = {"policy": {}, "prompts": {"source": str(tmp_path / "no.jsonl")}}
    config = tiny_config(task={"name": "mixed", "mixture": mixture, "rewards_from": ["math:sqrt"]})
    with pytest.raises(ConfigError, match=r"task.mixture.prompts.source is .*no.jsonl': no such file"):
        check_files(config)


# A task of the user's own --------------------------------------------------------------------------------------------

OWN = """
import jax_grpo
import numpy as np

class Echo(jax_grpo.Task):
    name, reads = "echo", "prompts"
    component_weights = {"same": 1.0}
    stop_rule = jax_grpo.text_stop("!")

    def prompt(self, row, seed):
        return jax_grpo.Prompt(row.prompt, 0, answer=str(row.columns["answer"]))

    def score(self, prompts, completions):
        return {"same": np.array([p.answer == c for p, c in zip(prompts, completions)], np.float32)}

class Half(jax_grpo.Task):
    name, component_weights, stop_rule = "half", {}, jax_grpo.word_stop()
    def prompt(self, row, seed): return jax_grpo.Prompt("p", 0)

class Needy(Echo):
    def __init__(self, size): pass

class Structural:
    name = "structural"

class Faulty(Echo):
    def score(self, prompts, completions):
        return {"same": np.array([1 / len(c) for c in completions])}
"""


@pytest.fixture
def own_file(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Half", r"task.name is '.*own.py:Half': Half has no score"),
        ("Needy", r"task.name is .*; calling it failed: .*TypeError: .*missing 1 required positional argument: 'size'"),
        ("Structural", r"is no task; expected a class derived from jax_grpo.Task"),
        ("np", r"calling it failed: .*'module' object is not callable"),
    ],
)
def test_a_class_that_is_no_task_is_one_error(own_file, name, words):
    with pytest.raises(ImportedError, match=words):
        make_task(task_of(name=f"{own_file}:{name}"))


def test_a_fault_in_a_task_is_told_with_the_users_file_and_line(own_file):
    task = make_task(task_of(name=f"{own_file}:Faulty"))
    prompts = [task.prompt(row, 0) for row in ROWS[:2]]
    with pytest.raises(
        RewardError, match=r"own.py:28: task 'echo' raised ZeroDivisionError: .* Sample 1: prompt '0\+1='"
    ):
        checked_score(task, prompts, ["a", ""])


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        (
            "prompts",
            r"prompts.source is 'packaged', which has chess positions, and task 'own' reads prompts: expected a",
        ),
        ("positons", r"task 'own' reads 'positons'; expected one of prompts, positions"),
    ],
)
def test_what_a_task_reads_is_what_its_source_has(reads, message):
    task = Task()
    task.name, task.reads = "own", reads
    with pytest.raises(ConfigError, match=message):
        task.read(PromptsConfig(), 0, None)


# Mixtures ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=2, max_size=4))
def test_tables_take_turns_in_their_shares(sizes):
    class Table(list):
        identity, apart = "x", None

    tables = {str(number): Table(range(size)) for number, (size, _) in enumerate(sizes)}
    shares = {str(number): share for number, (_, share) in enumerate(sizes)}
    mixed = Interleaved(tables, shares)
    seen = list(mixed)
    for name, table in tables.items():
        rows = [requested.row for requested in seen if requested.table == name]
        assert set(rows) == set(table) and rows == [i % len(table) for i in range(len(rows))], "each row, in its order"
        share = shares[name] / sum(shares.values())
        for count in range(1, len(seen) + 1):
            assert (
                abs(sum(requested.table == name for requested in seen[:count]) - share * count) <= len(tables) / 2 + 0.5
            )
    assert mixed[-1] == seen[-1] and mixed[1:3] == seen[1:3]


def mixture(tmp_path, own_file, rewards_from: bool = True, **parts) -> Config:
    parts = {
        "policy": {"share": 2, "max_new_tokens": 4, "prompt_style": "best_move"},
        "prompts": {"share": 1, "source": str(jsonl(tmp_path))},
        "own": {"share": 1, "task": f"{own_file}:Echo", "source": str(jsonl(tmp_path, ROWS[:20], "own.jsonl"))},
    } | parts
    task = rewarded(tmp_path, name="mixed", mixture=parts, stop=["\n"])
    if not rewards_from:  # Python gives functions
        task.pop("rewards_from")
    return tiny_config(task=task, prompts={"split": "all", "max_prompt_tokens": 26})


def test_a_mixture_asks_rewards_and_reports_each_task_as_it_is_alone(tmp_path, own_file):
    config = mixture(tmp_path, own_file)
    task = make_task(config.task)
    table = task.read(config.prompts, 0, None)
    assert "prompts, 0.25: sha256:" in table.identity and len(table) >= 4 * 60
    prompts = [task.prompt(row, seed) for seed, row in enumerate(table[:40])]
    counts = {name: sum(p.task == name for p in prompts) for name in ("policy", "prompts", "own")}
    assert counts == {"policy": 20, "prompts": 10, "own": 10}
    requested = [p for p in prompts if p.task == "prompts"]
    assert [p.text for p in requested] == [row.prompt for row in ROWS[:10]] and requested[3].columns == ROWS[3].columns
    cut = {"policy": "e2e4 and", "prompts": "3\n8", "own": "3!8"}
    texts = [task.stop_rule.truncate(cut[p.task], p.start_state)[0] for p in prompts]
    assert {p.task: text for p, text in zip(prompts, texts, strict=True)} == {
        "policy": "e2e4",
        "prompts": "3",
        "own": "3",
    }
    scores = checked_score(task, prompts, texts, [[1]] * 40, TrainerState(1, 2))
    for name in ("prompts/right", "own/same"):
        expected = [p.task == name.split("/")[0] and eval(p.text[:-1]) == 3 for p in prompts]
        assert scores[name].tolist() == expected and any(expected)
    total = total_reward(scores, task.component_weights)
    own_B = np.array([p.task == "own" for p in prompts])
    assert np.array_equal(total[own_B], scores["own/same"].values_B[own_B]) and scores["policy/legal"].values_B.any()


def test_a_function_called_reward_is_trained_on_in_a_mixture(tmp_path, own_file):
    def reward(completions):
        return [float(len(c)) for c in completions]

    def half(completions):
        return [0.5] * len(completions)

    config = mixture(tmp_path, own_file, rewards_from=False)
    task = make_task(config.task, [reward, half])
    prompts = [task.prompt(row, seed) for seed, row in enumerate(task.read(config.prompts, 0, None)[:12])]
    scores = checked_score(task, prompts, ["abc"] * 12, [[1]] * 12, TrainerState(0, 1))
    own_B = np.array([prompt.task == "prompts" for prompt in prompts])
    assert total_reward(scores, task.component_weights)[own_B].tolist() == [3.5] * own_B.sum()
    means = {name: set(values.tolist()) for name, values in applicable(scores, prompts).items() if name[0:2] == "pr"}
    assert means == {"prompts/reward/reward": {3.0}, "prompts/half": {0.5}, "prompts/reward": {3.5}}


def test_what_a_function_says_in_a_mixture_stands_under_its_task(tmp_path, own_file):
    def right(completions, completion_ids, log_metric, log_extra, trainer_state):
        assert completion_ids == [[row] for row in rows] and trainer_state.global_step == 5
        log_metric("seen", len(completions))
        log_extra("length", [len(c) for c in completions])
        return [None if row == rows[0] else 1.0 for (row,) in completion_ids]

    def other(completions):
        return [0.5] * len(completions)

    config = mixture(tmp_path, own_file, rewards_from=False)
    task = make_task(config.task, [right, other])
    table = task.read(config.prompts, 0, None)
    prompts = [task.prompt(row, seed) for seed, row in enumerate(table[:12])]
    rows = [row for row, prompt in enumerate(prompts) if prompt.task == "prompts"]
    scores = checked_score(task, prompts, ["abc"] * 12, [[row] for row in range(12)], TrainerState(5, 9))
    assert (~scores["prompts/right"].about_B).nonzero()[0].tolist() == rows[:1]
    assert task.logged().metrics == {"prompts/seen": [3.0]}
    assert task.logged().extras == {"prompts/length": [3 if row in rows else None for row in range(12)]}


@pytest.mark.parametrize(
    ("parts", "prompts", "words"),
    [
        ({"own": {"task": "{}:Echo"}}, {}, r"task.mixture.own reads prompts and has no source; expected task.mixture.own.source"),
        (
            {"policy": None, "own": {"task": "{}:Echo", "source": "data"}}, {"source": "selfplay"},
            r"prompts.source is 'selfplay', but each task of the mixture has a source of its own",
        ),
    ],
)  # fmt: skip
def test_a_mixture_that_cannot_be_read_is_refused(tmp_path, own_file, parts, prompts, words):
    parts["own"] = parts["own"] | {"task": parts["own"]["task"].format(own_file)}
    if "source" in parts["own"]:
        parts["own"]["source"] = str(jsonl(tmp_path, name="data"))
    config = mixture(tmp_path, own_file, **parts)
    with pytest.raises(ConfigError, match=words):
        make_task(config.task).read(config.prompts.model_copy(update=prompts), 0, None)


def test_a_mixture_of_built_in_tasks_alone_reads_positions_as_ever():
    parts = {"policy": {}, "length": {}}
    task = make_task(task_of(name="mixed", mixture=parts))  # pyright: ignore[reportArgumentType]
    table = task.read(PromptsConfig(), 0, None)
    assert isinstance(table[0], jax_grpo.Position) and ":" in table.identity and "policy" not in table.identity
