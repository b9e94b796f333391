"""`prompts.template`: prompts and messages of a row's columns, in every format, for files as they are published."""

import json

import pyarrow as pa
import pytest
from architecture import ROOT
from pyarrow import parquet

from jax_grpo.config import ConfigError, load_config
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.prompts.rows import PromptFileError, load_prompts
from jax_grpo.tasks import make_task

ROWS = [{"question": f"What is {a} + {a}?", "answer": f"{a} + {a} = {2 * a}\n#### {2 * a}"} for a in range(30)]
ASK = "{{ question }} Put it into \\boxed{}.\n"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "{{ question }}"}]
TOKENIZER = "<|im_start|>{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        values = [",".join(json.dumps(row[name]) for name in row) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *values]) + "\n")
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def load(path, chat=None, **settings):
    return load_prompts(PromptsConfig(source=path, **({"split": "all"} | settings)), chat)


@pytest.fixture
def chat(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(TOKENIZER)
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}})
    )
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    return ChatTemplate(str(tmp_path / "tokenizer"))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_text_is_made_of_the_columns_of_every_format(tmp_path, suffix):
    rows = [{"question": f"What is {a}+{a}?", "answer": str(2 * a)} for a in range(30)]
    table = load(write(tmp_path / f"rows{suffix}", rows), template=ASK)
    assert table[3].prompt == "What is 3+3? Put it into \\boxed{}.\n" and table[3].messages is None
    assert [dict(row.columns) for row in table] == rows, "every column reaches the rewards"
    assert table.columns == ["question", "answer"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_messages_are_made_of_the_columns_and_rendered(tmp_path, suffix, chat):
    table = load(write(tmp_path / f"rows{suffix}", ROWS), chat, template=CHAT)
    requested = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 3 + 3?"}]
    assert table[3].messages == requested and table[3].prompt == chat.render(requested)
    assert table[3].prompt == "<|im_start|>system: Be brief.|user: What is 3 + 3?|"
    path = str(tmp_path / f"rows{suffix}")
    train, heldout = (load(path, chat, template=CHAT, split=split) for split in ("train", "heldout"))
    assert len(train) + len(heldout) == len(ROWS)
    assert {row.prompt for row in train} | {row.prompt for row in heldout} == {row.prompt for row in table}
    assert all(row.messages[1]["content"] == row.columns["question"] for row in heldout), (
        "a split numbers its rows anew"
    )


def test_lists_and_a_rows_own_prompt_may_stand_in_a_template(tmp_path, chat):
    rows = [{"nums": [1, 2, 3], "target": 6, "prompt": "Reach it"}, {"nums": [4], "target": 4, "prompt": "Again"}]
    ask = "{{ prompt }}: {{ target }} of {{ nums | join(', ') }}"
    for name in ("rows.jsonl", "rows.parquet"):
        table = load(write(tmp_path / name, rows), template=ask)
        assert [row.prompt for row in table] == ["Reach it: 6 of 1, 2, 3", "Again: 4 of 4"]
        assert table[0].columns == {"nums": [1, 2, 3], "target": 6}
    wrapped = load(str(tmp_path / "rows.jsonl"), chat, template=[{"role": "user", "content": "{{ prompt }}"}])
    assert wrapped[1].messages == [{"role": "user", "content": "Again"}]


def test_a_run_is_not_continued_with_another_template(tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    one, same, other = (load(path, template=text).identity for text in (ASK, ASK, ASK + " "))
    assert one == same != other != load(write(tmp_path / "prompts.jsonl", [{"prompt": "a"}])).identity


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ query }}", r"rows\.jsonl:1: prompts\.template: UndefinedError: 'query' is undefined; the row has question, answer"),
        ("{{ question", r"prompts\.template: '\{\{ question', line 1: unexpected end of template"),
        ("{{ '' }}", r"rows\.jsonl:1: prompt is ''; expected a text that is not empty"),
        ("{{ question.__class__.__mro__ }}", r"prompts\.template: SecurityError"),
        (CHAT, r"rows\.jsonl:1: messages need a chat template"),
    ],
)  # fmt: skip
def test_a_template_that_makes_nothing_is_refused(tmp_path, template, sentence):
    with pytest.raises(PromptFileError, match=sentence):
        load(write(tmp_path / "rows.jsonl", ROWS), template=template)


def test_a_message_without_a_text_is_refused(tmp_path, chat):
    with pytest.raises(
        PromptFileError, match=r"rows\.jsonl:1: the message \{'role': 'user'\} has no text as 'content'"
    ):
        load(write(tmp_path / "rows.jsonl", ROWS), chat, template=[{"role": "user"}])


def test_the_published_form_without_a_template_says_what_is_missing(tmp_path):
    with pytest.raises(PromptFileError, match=r"rows\.jsonl:1: it has question, answer; expected .* prompts\.template"):
        load(write(tmp_path / "rows.jsonl", ROWS))


def test_a_template_where_nothing_reads_one_is_refused():
    task = make_task(load_config(str(ROOT / "configs" / "length_toy.yaml")).task)
    with pytest.raises(
        ConfigError, match=r"prompts\.template 'a' would do nothing: task 'length' asks about positions"
    ):
        task.read(PromptsConfig(template="a"), 0, None)


def test_in_a_mixture_the_template_is_of_the_parts_that_read_files(tmp_path):
    source = write(tmp_path / "rows.jsonl", ROWS)
    parts = {"prompts": {"source": source, "rewards_from": ["jax_grpo.rewards:last_number"]}, "length": {}}
    table = make_task(task_of(name="mixed", mixture=parts)).read(PromptsConfig(template=ASK), 0, None)
    made = {row.table: row.row for row in table[:50]}
    assert set(made) == {"prompts", "prompts.source"}
    assert made["prompts"].prompt.endswith(" Put it into \\boxed{}.\n") and hasattr(made["prompts.source"], "fen")
