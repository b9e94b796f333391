"""`prompts.template`: what makes a row's prompt of its columns, a text or messages. Knows no files, tasks or tokens."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import sandbox


class TemplateError(ValueError):
    """A template cannot be read, or makes nothing of a row; says which text, and what the row has."""


class PromptTemplate:
    """A Jinja text over a row's columns, or a list of messages whose texts are such."""

    def __init__(self, template: str | Sequence[Mapping[str, str]]):
        environment = sandbox.ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, keep_trailing_newline=True
        )
        self._environment, self._messages = environment, not isinstance(template, str)
        self._parts = [
            {key: self._compiled(text) for key, text in part.items()}
            for part in ([{"content": template}] if isinstance(template, str) else template)
        ]
        self.identity = hashlib.sha256(json.dumps(template).encode()).hexdigest()

    def __call__(self, row: Mapping[str, Any]) -> str | list[dict[str, str]]:
        """The prompt of a row, or its messages; a column that is None is none.

        Raises:
            TemplateError: it names a column that the row lacks, or fails.
        """
        columns = {name: value for name, value in row.items() if value is not None}
        try:
            made = [{key: text.render(columns) for key, text in part.items()} for part in self._parts]
        except Exception as error:  # a template is anybody's code
            have = ", ".join(columns) or "nothing"
            raise TemplateError(f"prompts.template: {type(error).__name__}: {error}; the row has {have}") from error
        return made if self._messages else made[0]["content"]

    def _compiled(self, text: str) -> jinja2.Template:
        try:
            return self._environment.from_string(text)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"prompts.template: {text[:80]!r}, line {error.lineno}: {error.message}") from error
