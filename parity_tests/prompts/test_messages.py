"""Rows of messages: the chat template's text, as `transformers` makes it, what a reward is given, as TRL, and what is refused."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
import tokenizers
from pyarrow import parquet
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl.rewards import think_format_reward

from jax_grpo.config import ConfigError
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.config.tasks import task_of
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.prompts.chat import ChatTemplate, ChatTemplateError
from jax_grpo.prompts.rows import PromptFileError, load_prompts
from jax_grpo.tasks import make_task
from jax_grpo.tasks.checked import checked_score

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + eos_token + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
RICH = """{{ bos_token }}{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% generation %}{{ loop.index }}:{{ message | tojson(indent=1) }}<b>{% endgeneration %}
    {% if not tools and ns.count > 3 %}{{ raise_exception('too <many>') }}{% endif %}
{% endfor %}{{ dict(a=ns.count) }}{{ unk_token }}"""
CHATS = [
    [{"role": "user", "content": " Hällo <you>\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
    ],
    [{"role": "tool", "content": "x"}, {"role": "user", "content": "{{ 1 }}", "name": "Ann"}],
]
TOKENS = {"eos_token": "</s>", "bos_token": {"content": "<s>"}}


def folder_with(path: Path, template: object, *, as_file: bool = False) -> Path:
    """A word-level tokenizer that has a chat template, in tokenizer_config.json or a file of its own."""
    path.mkdir(exist_ok=True)
    vocabulary = {word: i for i, word in enumerate(["</s>", "<s>", "<unk>", "user", "assistant", "Hi"])}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>", "<s>", "<|im_start|>"])
    made.save(str(path / "tokenizer.json"))
    settings = TOKENS | ({} if as_file or template is None else {"chat_template": template})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if as_file:
        (path / "chat_template.jinja").write_text(str(template), encoding="utf-8")
    return path


def rows_of(path: Path, *rows: object) -> PromptsConfig:
    """A JSONL file of rows, all of it."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptsConfig(source=str(path), split="all")


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("template", [CHATML, RICH])
def test_messages_have_the_text_and_the_ids_of_transformers(tmp_path, template, as_file):
    folder = folder_with(tmp_path, template, as_file=as_file)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="</s>", bos_token="<s>", chat_template=template
    )
    ours, tokenizer = ChatTemplate(str(folder)), Tokenizer.load(str(folder))
    for chat in CHATS:
        text = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert ours.render(chat) == text
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert tokenizer.encode(ours.render(chat)) == ids
    # The file itself may be named, and of several templates the default is meant.
    assert ChatTemplate(str(folder / "tokenizer.json")).render(CHATS[0]) == ours.render(CHATS[0])
    several = folder_with(
        tmp_path / "several", [{"name": "x", "template": ""}, {"name": "default", "template": template}]
    )
    assert ChatTemplate(str(several)).render(CHATS[0]) == ours.render(CHATS[0])


def test_the_day_is_not_told(tmp_path):
    folder = folder_with(tmp_path, "{{ strftime_now('%Y') if strftime_now is defined else 'a day' }}")
    assert ChatTemplate(str(folder)).render(CHATS[0]) == "a day", "a run that continues asks what it asked"


def test_rows_of_messages_are_prompts_and_rewards_are_given_what_trl_gives(tmp_path):
    folder = folder_with(tmp_path / "chat", CHATML)
    given: dict = {}

    def remembers(prompts, completions, level, **columns):
        given.update(prompts=prompts, completions=completions, level=level, columns=columns)
        return [1.0] * len(prompts)

    source = rows_of(
        tmp_path / "rows.jsonl",
        {"messages": CHATS[0], "level": 1},
        {"prompt": CHATS[1][:2], "level": 2},
        {"prompt": "as it is", "level": 3},
    )
    task = make_task(task_of(name="prompts"), [remembers, think_format_reward], str(folder))
    with pytest.raises(TypeError):  # TRL's function is of messages alone
        think_format_reward(["<think>a</think>b"])
    table = task.read(source, 0, None)
    prompts = [task.prompt(row, 0) for row in table]
    assert [p.text for p in prompts] == [
        "<|im_start|>user\nHällo <you></s>\n<|im_start|>assistant\n",
        "<|im_start|>system\nBe brief.</s>\n<|im_start|>user\n2+2?</s>\n<|im_start|>assistant\n",
        "as it is",
    ]
    answers = ["<think>\na\n</think>\nb", "b"]
    scores = checked_score(task, prompts[:2], answers, [[1], [2]])
    assert scores["think_format_reward"].tolist() == [1.0, 0.0]
    checked_score(make_task(task_of(name="prompts"), [remembers], str(folder)), prompts, [*answers, "c"], [[1]] * 3)
    assert given["prompts"] == [CHATS[0], CHATS[1][:2], "as it is"] and given["level"] == [1, 2, 3]
    assert given["completions"] == [*([{"role": "assistant", "content": text}] for text in answers), "c"]
    assert "messages" not in given["columns"]


def test_a_parquet_file_and_a_split_keep_messages_and_their_rows_together(tmp_path):
    folder = folder_with(tmp_path / "chat", CHATML)
    chats = [[{"role": "user", "content": f"number {i}", "name": "a" if i % 2 else None}] for i in range(40)]
    parquet.write_table(pa.table({"messages": chats, "number": list(range(40))}), tmp_path / "rows.parquet")
    for split in ("train", "heldout"):
        config = PromptsConfig(source=str(tmp_path / "rows.parquet"), split=split)
        table = load_prompts(config, ChatTemplate(str(folder)))
        assert table.columns == ["number"] and 0 < len(table) < 40
        for row in table:
            number = row.columns["number"]
            assert row.messages == [{k: v for k, v in chats[number][0].items() if v is not None}]
            assert f"number {number}</s>" in row.prompt
    other = load_prompts(config, ChatTemplate(str(folder_with(tmp_path / "other", RICH))))
    assert other.identity != table.identity, "a run is not continued on other texts"


CHAT = {"messages": CHATS[0]}


@pytest.mark.parametrize(
    "template, row, sentence",
    [
        (CHATML, {"prompt": "a", "messages": CHATS[0]}, "it has 'prompt' and 'messages'; expected one of the two"),
        (CHATML, {"other": 1}, "it has other; expected a text that is not empty as 'prompt', or 'messages'"),
        (CHATML, {"messages": []}, r"\[\] is not a list of messages"),
        (CHATML, {"messages": "Hi"}, "'Hi' is not a list of messages"),
        (CHATML, {"messages": [{"role": "user"}]}, "has no text as 'content'"),
        (CHATML, {"messages": ["Hi"]}, "the message 'Hi' has no text as 'role'"),
        (
            CHATML,
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure:"}]},
            "the last message .*'Sure:'.* is the assistant's, whose turn the template would begin again",
        ),
        (
            None,
            CHAT,
            r"messages need a chat template; expected .*chat_template\.jinja, or chat_template in .*config\.json",
        ),
        ("{% if %}", CHAT, "the chat template of .*, line 1: "),
        ("a\n{{ raise_exception('not so') }}", CHAT, "the chat template of .* raised TemplateError: not so"),
        ("{{ messages[0].content.x.y }}", CHAT, "raised UndefinedError"),
        ("{{ messages.append(1) }}", CHAT, "raised SecurityError"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "raised SecurityError"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", CHAT, "raised SecurityError"),
        ("", CHAT, "of what the chat template makes: prompt is ''"),
    ],
)
def test_a_row_that_is_no_prompt_is_one_error_with_its_line(tmp_path, template, row, sentence):
    config = rows_of(tmp_path / "rows.jsonl", {"prompt": "fine"}, row)
    task = make_task(task_of(name="prompts"), [len], str(folder_with(tmp_path / "chat", template)))
    with pytest.raises(PromptFileError, match=rf"rows\.jsonl:2: .*{sentence}") as raised:
        task.read(config, 0, None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["gpt2", "chess"])
def test_a_tokenizer_without_a_template_is_named(tmp_path, name):
    with pytest.raises(ChatTemplateError, match=f"the tokenizer '{name}' has none"):
        ChatTemplate(name).render(CHATS[0])
    with pytest.raises(
        PromptFileError, match=r"rows\.jsonl:1: messages need a chat template, and there is no tokenizer"
    ):
        load_prompts(rows_of(tmp_path / "rows.jsonl", CHAT))


TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}{{ style | default('plain') }}"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_tools_and_arguments_of_a_row_reach_its_template(tmp_path):
    folder = folder_with(tmp_path / "chat", TOOLS)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=TOOLS)
    rows = [
        {"messages": CHATS[0], "tools": [ADD], "chat_template_kwargs": {"style": "short"}},
        {"prompt": CHATS[0], "tools": json.dumps([ADD])},
        {"messages": CHATS[0], "tools": [], "chat_template_kwargs": None},
        {"prompt": "as it is", "tools": "hammer"},
    ]
    config = rows_of(tmp_path / "rows.jsonl", *rows).model_copy(update={"chat_template_kwargs": {"style": "long"}})
    table = load_prompts(config, ChatTemplate(str(folder)))
    for row, style in zip(list(table)[:3], ("short", "long", "long"), strict=True):
        tools = json.loads(row.columns["tools"]) if isinstance(row.columns["tools"], str) else row.columns["tools"]
        requested = {"tools": tools or None, "add_generation_prompt": True, "tokenize": False, "style": style}
        assert row.prompt == theirs.apply_chat_template(CHATS[0], **requested)
    assert "add" in table[0].prompt and "add" not in table[2].prompt and table[3].columns["tools"] == "hammer"
    other = config.model_copy(update={"chat_template_kwargs": {"style": "other"}})
    assert load_prompts(other, ChatTemplate(str(folder))).identity != table.identity
    # Arrow gives every tool, argument and message the keys that any of them has.
    bare = {"type": "function", "function": {"name": "sub", "strict": True}}
    arrow = pa.table(
        {"messages": [CHATS[0]] * 2, "tools": [[ADD], [bare]], "chat_template_kwargs": [{"style": "x"}, None]}
    )
    parquet.write_table(arrow, tmp_path / "rows.parquet")
    table = load_prompts(PromptsConfig(source=str(tmp_path / "rows.parquet"), split="all"), ChatTemplate(str(folder)))
    assert table[0].prompt == json.dumps([ADD]) + CHATS[0][0]["content"] + "x"
    assert table[1].prompt.startswith(json.dumps([bare])) and table[1].prompt.endswith("plain")


def test_calls_need_no_content_and_reasoning_has_the_names_that_templates_read(tmp_path):
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls | list }}{% endfor %}"
    folder = folder_with(tmp_path / "chat", template)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=template)
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": 1}], "reasoning": "so"},
        {"role": "tool", "content": "3"},
    ]
    row = load_prompts(rows_of(tmp_path / "rows.jsonl", {"messages": chat}), ChatTemplate(str(folder)))[0]
    assert row.prompt == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    "row, settings, sentence",
    [
        ({"prompt": "a"}, {"style": "x"}, r"prompts\.chat_template_kwargs \{'style': 'x'\} do nothing, for its prompts are texts"),
        ({"prompt": "a", "chat_template_kwargs": {"b": 1}}, {}, r":1: 'chat_template_kwargs' do nothing for a text"),
        (CHAT | {"chat_template_kwargs": [1]}, {}, r":1: 'chat_template_kwargs' is \[1\]; expected an object"),
        (CHAT | {"tools": "hammer"}, {}, r":1: 'tools' is 'hammer'; expected a list of JSON schemas, or its JSON text"),
        (CHAT | {"tools": [1]}, {}, r":1: 'tools' is \[1\]; expected a list"),
    ],
)  # fmt: skip
def test_template_arguments_that_do_nothing_or_are_none_are_refused(tmp_path, row, settings, sentence):
    config = rows_of(tmp_path / "rows.jsonl", row).model_copy(update={"chat_template_kwargs": settings})
    with pytest.raises(PromptFileError, match=sentence):
        load_prompts(config, ChatTemplate(str(folder_with(tmp_path / "chat", TOOLS))))
    with pytest.raises(
        ConfigError, match=r"prompts\.chat_template_kwargs .* do nothing: task 'policy' asks about positions"
    ):
        make_task(task_of()).read(PromptsConfig(chat_template_kwargs={"a": 1}), 0, None)
