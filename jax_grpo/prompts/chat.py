"""Lists of messages as one text, by the chat template that lies beside a tokenizer, as `transformers.apply_chat_template` does it.

Differs on purpose in one thing: a template is not told the day (`strftime_now` is undefined, and templates that ask whether it is
there have a day of their own), since a run that continues must ask what it asked. Knows no token ids.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

from jax_grpo.config.files import CHAT_TEMPLATE, TOKENIZER_CONFIG, read_settings, tokenizer_path
from jax_grpo.prompts.tokenizer_files import read_folder

Message = Mapping[str, Any]
MORE_TEMPLATES = "additional_chat_templates"  # a folder of NAME.jinja
REASONING = ("reasoning_content", "thinking", "reasoning")  # what a message may call it


class ChatTemplateError(ValueError):
    """Messages cannot be rendered; says which file, and what was expected."""


class Rendered(str):
    """A text that a chat template made: the special tokens that belong to it are in it."""


class ChatTemplate:
    """The template of a tokenizer, as `model.tokenizer` names it; read when the first messages are rendered."""

    def __init__(self, tokenizer: str):
        path = tokenizer_path(tokenizer)
        self._name, self._path, self._folder = tokenizer, path, path if path.is_dir() else path.parent
        self._compiled: dict[str, jinja2.Template] = {}
        self._tokens: Mapping[str, str] = {}
        self.source = ""  # its text, once it is read

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> Rendered:
        """The text of `messages`, to which the assistant's answer is added.

        `tools` are JSON schemas of functions; `arguments` is what else the template is given (TRL: chat_template_kwargs).

        Raises:
            ChatTemplateError: there is no template, or it fails.
        """
        if not self._compiled:
            self._compiled = self._read()
        if (name := "tool_use" if tools and "tool_use" in self._compiled else "default") not in self._compiled:
            raise ChatTemplateError(
                f"{self._folder} has the chat templates {', '.join(sorted(self._compiled))}, and none called 'default'"
            )
        given = {"tools": tools or None, "documents": None, "add_generation_prompt": True, **self._tokens, **arguments}
        try:
            return Rendered(self._compiled[name].render(given | {"messages": [_reasoned(each) for each in messages]}))
        except Exception as error:  # a template is anybody's code
            raise ChatTemplateError(
                f"the chat template of {self._folder} raised {type(error).__name__}: {error}"
            ) from error

    def _read(self) -> dict[str, jinja2.Template]:
        if self._name in ("gpt2", "chess"):
            raise ChatTemplateError(f"messages need a chat template, and the tokenizer {self._name!r} has none")
        try:
            sources = _templates(self._folder)
            self._tokens = read_folder(self._path).special
        except ValueError as error:  # of a template's file, or a TokenizerError
            raise ChatTemplateError(str(error)) from error
        # As it always was for a single one: a run that continues knows it again by this.
        self.source = sources["default"] if sources.keys() == {"default"} else json.dumps(sources)
        compiled, environment = {}, _environment()
        for name, source in sources.items():
            try:
                compiled[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"the chat template of {self._folder}, line {error.lineno}: {error.message}"
                ) from error
        return compiled


def _templates(folder: Path) -> dict[str, str]:
    """Texts by name: those of the files, else those of tokenizer_config.json, where one without a name is the default."""
    file, settings = folder / CHAT_TEMPLATE, folder / TOKENIZER_CONFIG
    files = {path.stem: path for path in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if file.is_file():
        files["default"] = file
    if files:
        return {name: _utf8(path) for name, path in files.items()}
    templates = read_settings(settings).get("chat_template")
    if templates is None:
        raise ChatTemplateError(f"messages need a chat template; expected {file}, or chat_template in {settings}")
    if isinstance(templates, str):
        return {"default": templates}
    made: dict[str, str] = {}
    for each in templates if isinstance(templates, list) else [templates]:
        name, text = (each.get("name"), each.get("template")) if isinstance(each, Mapping) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            raise ChatTemplateError(
                f"{settings}: chat_template has {each!r:.60}; expected a text, or a list of {{'name': ..., 'template': ...}}"
            )
        made[name] = text
    return made


def _utf8(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ChatTemplateError(f"{path}: not UTF-8 ({error})") from error


def _reasoned(message: Message) -> Message:
    """A message's reasoning by the names that templates read it by."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def messages_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a row, without keys that have no value, as other rows of an Arrow table may have.

    Raises:
        ChatTemplateError: it is no list of messages, each with a text as `role` and one as `content`, or `tool_calls` for that.
    """
    if not isinstance(value, list) or not value:
        raise ChatTemplateError(
            f"{value!r:.80} is not a list of messages; expected [{{'role': ..., 'content': ...}}, ...]"
        )
    if isinstance(value[-1], Mapping) and value[-1].get("role") == "assistant":
        raise ChatTemplateError(
            f"the last message {value[-1]!r:.80} is the assistant's, whose turn the template would begin again; expected one "
            "that the assistant answers"
        )
    for message in value:
        fields = message if isinstance(message, Mapping) else {}
        calls = fields.get("content") is None and fields.get("tool_calls")
        for key in ("role",) if calls else ("role", "content"):
            if not isinstance(fields.get(key), str):
                raise ChatTemplateError(f"the message {message!r:.80} has no text as {key!r}")
    return [{key: part for key, part in message.items() if part is not None} for message in value]


class _Generation(ext.Extension):
    """`{% generation %}`, which marks an assistant's text in templates for supervised training; the text stays."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """Without attributes of Python's own, which a template could get out of the sandbox by."""

    def __init__(self, *values: Any, **named: Any):
        values_by_name = dict(*values, **named)
        _refuse_private(values_by_name)
        super().__init__(values_by_name)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private([name])
        super().__setitem__(name, value)


def _refuse_private(names: Iterable[Any]) -> None:
    for name in names:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r} of a namespace")


def _environment() -> jinja2.Environment:
    """`transformers`' sandbox, in which a template can neither change what it is given nor reach Python's own objects."""
    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "namespace": _Namespace, "dict": _dict}
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
):
    """Jinja's own escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _dict(*values: Any, **named: Any) -> dict[Any, Any]:
    """Not the class, whose attributes lead out of the sandbox."""
    return dict(*values, **named)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
