"""Lists of messages as one text, by the chat template that lies beside a tokenizer, as `transformers.apply_chat_template` does it.

Differs on purpose in one thing: a template is not told the day (`strftime_now` is undefined, and templates that ask whether it is
there have a day of their own), since a run that continues must ask what it asked. Knows no tokens.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import ext, nodes, sandbox

from jax_grpo.config.files import CHAT_TEMPLATE, TOKENIZER_CONFIG, read_settings, tokenizer_path

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """Messages cannot be rendered; says which file, and what was expected."""


class ChatTemplate:
    """The template of a tokenizer, as `model.tokenizer` names it; read when the first messages are rendered."""

    def __init__(self, tokenizer: str):
        path = tokenizer_path(tokenizer)
        self._name, self._folder = tokenizer, path if path.is_dir() else path.parent
        self._compiled: jinja2.Template | None = None
        self._tokens: dict[str, str] = {}
        self.source = ""  # its text, once it is read

    def render(self, messages: Sequence[Message]) -> str:
        """The text of `messages`, to which the assistant's answer is added.

        Raises:
            ChatTemplateError: there is no template, or it fails.
        """
        if self._compiled is None:
            self._compiled = self._read()
        try:
            return self._compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except Exception as error:  # a template is anybody's code
            raise ChatTemplateError(
                f"the chat template of {self._folder} raised {type(error).__name__}: {error}"
            ) from error

    def _read(self) -> jinja2.Template:
        if self._name in ("gpt2", "chess"):
            raise ChatTemplateError(f"messages need a chat template, and the tokenizer {self._name!r} has none")
        try:
            settings = read_settings(self._folder / TOKENIZER_CONFIG)
        except ValueError as error:
            raise ChatTemplateError(str(error)) from error
        file = self._folder / CHAT_TEMPLATE
        source = file.read_text(encoding="utf-8") if file.is_file() else _template(settings.get("chat_template"))
        if source is None:
            raise ChatTemplateError(
                f"messages need a chat template; expected {file}, or chat_template in {self._folder / TOKENIZER_CONFIG}"
            )
        tokens = {
            name: token["content"] if isinstance(token, Mapping) else token
            for name, token in settings.items()
            if name.endswith("_token")
        }
        self._tokens = {name: token for name, token in tokens.items() if isinstance(token, str)}
        self.source = source
        try:
            return _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template of {self._folder}, line {error.lineno}: {error.message}"
            ) from error


def _template(said: Any) -> str | None:
    """The text of `chat_template`: one template, or several by name, of which `default` is meant."""
    if isinstance(said, list):
        said = {each.get("name"): each.get("template") for each in said}.get("default")
    return said if isinstance(said, str) else None


def messages_of(value: Any) -> list[dict[str, Any]]:
    """The messages of a row, without keys that have no value, as other rows of an Arrow table may have.

    Raises:
        ChatTemplateError: it is no list of messages, each with a text as `role` and one as `content`.
    """
    if not isinstance(value, list) or not value:
        raise ChatTemplateError(
            f"{value!r:.80} is not a list of messages; expected [{{'role': ..., 'content': ...}}, ...]"
        )
    for message in value:
        for key in ("role", "content"):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
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
