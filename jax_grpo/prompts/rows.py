"""Rows of a user's file: a `prompt` each, or `messages`, and other columns that reach the reward as they are.

`prompts.template` makes the one or the other of a row's columns, where a file has neither.

Sources: JSONL, CSV, Parquet, or a folder that Hugging Face's `datasets` saved (`Dataset.save_to_disk`). A tenth of the prompts
is held out by a hash of the prompt's text, so that no text is in both splits; messages have the text that their chat template
makes of them. Every bad row is one clear error.
"""

import contextlib
import csv
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jax_grpo.config.files import parsed_json
from jax_grpo.config.sections import PromptsConfig
from jax_grpo.prompts.chat import ChatTemplate, ChatTemplateError, messages_of
from jax_grpo.prompts.table import Rows, SourceError, digest, of_split, read_parquet
from jax_grpo.prompts.template import PromptTemplate, TemplateError
from jax_grpo.system.whole_files import file_hash

PROMPT, MESSAGES = "prompt", "messages"  # TRL has both kinds in a column called prompt; so may a row here
# Columns that a row's chat template is given; rewards get them too.
TOOLS, TEMPLATE_KWARGS = "tools", "chat_template_kwargs"
READ = (PROMPT, MESSAGES, TOOLS, TEMPLATE_KWARGS)  # what a prompt is made of
FORMATS = {".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
# Of a folder that `datasets` saved: what names its Arrow files, or says that it holds several such folders.
STATE, SPLITS = "state.json", "dataset_dict.json"


class PromptFileError(SourceError):
    """A file of prompts cannot be used; names the file, the line or row, what is there and what was expected."""


class Row(NamedTuple):
    """One row of a file: its prompt's text, every other column of the file (None where the row has none), and its messages."""

    prompt: str
    columns: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] | None = None  # that the prompt is the text of


class PromptTable(Rows[Row]):
    """Rows in the order of their source; `columns` are the names of all but the prompt and messages, `columns_of` has all of a row.

    `identity` is of the source's bytes.
    """

    noun, error = "prompts", PromptFileError

    def __init__(
        self,
        prompts: Sequence[str],
        columns: Sequence[str],
        columns_of: Callable[[int], Mapping[str, Any]],
        identity: str,
        apart: int | None = None,
        template: PromptTemplate | None = None,
    ):
        self.columns, self.identity, self.apart = list(columns), identity, apart
        self._prompts, self._columns_of, self._template = prompts, columns_of, template

    def __len__(self) -> int:
        return len(self._prompts)

    def row(self, index: int) -> Row:
        columns = dict(self._columns_of(index))
        made = None if self._template is None else self._template(columns)
        given = columns.pop(PROMPT, None), columns.pop(MESSAGES, None)
        own = given if made is None else (made,)
        messages = next((messages_of(value) for value in own if isinstance(value, list)), None)
        return Row(self._prompts[index], columns, messages)

    def keys(self) -> np.ndarray:
        """64 bits of each prompt's text, which its split is taken from."""
        return np.array([digest(text) for text in self._prompts], np.uint64)

    def where(self, mask: np.ndarray, identity: str) -> "PromptTable":
        """The rows where the mask [len] is true; the others are the source's other split."""
        numbers: list[int] = np.flatnonzero(mask).tolist()
        prompts = [self._prompts[number] for number in numbers]
        apart = len(self) - len(numbers)
        return PromptTable(
            prompts, self.columns, lambda i: self._columns_of(numbers[i]), identity, apart, self._template
        )


def load_prompts(config: PromptsConfig, chat: ChatTemplate | None = None) -> PromptTable:
    """Rows of the config's source and split, messages rendered by `chat`, or a PromptFileError."""
    path = Path(config.source)
    try:
        template = None if config.template is None else PromptTemplate(config.template)
    except TemplateError as error:
        raise PromptFileError(str(error)) from error
    texts = _Texts(chat, config.chat_template_kwargs, template)
    table = _read(path, texts)
    if config.chat_template_kwargs and not texts.rendered:
        raise PromptFileError(
            f"{path}: prompts.chat_template_kwargs {config.chat_template_kwargs} do nothing, for its prompts are texts, which go "
            "through no chat template"
        )
    return of_split(table, path, config.split, "prompt")


class _Texts:
    """The text of each row's prompt or messages, or of those that the template makes of it."""

    def __init__(self, chat: ChatTemplate | None, arguments: Mapping[str, Any], template: PromptTemplate | None):
        self._chat, self._arguments, self.template, self.rendered = chat, arguments, template, False

    def __call__(self, place: str, row: Mapping[str, Any]) -> str:
        if self.template is not None:
            try:
                row = {**row, PROMPT: self.template(row), MESSAGES: None}
            except TemplateError as error:
                raise PromptFileError(f"{place}: {error}") from error
        prompt, messages = row.get(PROMPT), row.get(MESSAGES)
        if prompt is not None and messages is not None:
            raise PromptFileError(f"{place}: it has {PROMPT!r} and {MESSAGES!r}; expected one of the two")
        given = row.get(TEMPLATE_KWARGS)
        if messages is None and not isinstance(prompt, list):
            if given is not None:
                raise PromptFileError(
                    f"{place}: {TEMPLATE_KWARGS!r} do nothing for a text, which goes through no chat template"
                )
            return _prompt(prompt, place, row)
        if given is not None and not isinstance(given, Mapping):
            raise PromptFileError(f"{place}: {TEMPLATE_KWARGS!r} is {given!r:.80}; expected an object")
        if self._chat is None:
            raise PromptFileError(
                f"{place}: messages need a chat template, and there is no tokenizer here that has one"
            )
        try:
            own = {name: value for name, value in (given or {}).items() if value is not None}
            read = messages_of(prompt if messages is None else messages)
            text = self._chat.render(read, _tools(row), {**self._arguments, **own})
        except ChatTemplateError as error:
            raise PromptFileError(f"{place}: {error}") from error
        self.rendered = True
        return _prompt(text, f"{place}: of what the chat template makes", {PROMPT: text})

    def identity(self, source: str) -> str:
        """Of the prompts of a source with this identity: messages are what their template makes of them."""
        if self.template is not None:
            source = f"{source}; template {self.template.identity}"
        if not self.rendered or self._chat is None:
            return source
        arguments = json.dumps(self._arguments, sort_keys=True) if self._arguments else ""
        return f"{source}; chat template {hashlib.sha256((self._chat.source + arguments).encode()).hexdigest()}"


def _tools(row: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """JSON schemas of the functions that the row offers: a list, or, as in TRL, the JSON text of one."""
    tools = row.get(TOOLS)
    with contextlib.suppress(ValueError):
        tools = parsed_json(tools) if isinstance(tools, str) else tools
    if tools is None or (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        return tools
    raise ChatTemplateError(f"{TOOLS!r} is {tools!r:.80}; expected a list of JSON schemas, or its JSON text")


def _read(path: Path, texts: _Texts) -> PromptTable:
    if (path / STATE).is_file():
        return _of_arrow(path, *_saved_dataset(path), texts)
    if path.is_dir():
        sets = sorted(str(part.parent) for part in path.glob(f"*/{STATE}")) if (path / SPLITS).is_file() else []
        hint = f" It holds several data sets; give one: {', '.join(sets)}" if sets else ""
        raise PromptFileError(
            f"{path} has no {STATE}: expected a file, or a folder of `datasets.Dataset.save_to_disk`.{hint}"
        )
    if not path.is_file():
        raise PromptFileError(f"{path}: no such file; expected one with a {PROMPT!r} column")
    if (kind := FORMATS.get(path.suffix.lower())) is None:
        raise PromptFileError(f"{path}: prompts are read from {', '.join(FORMATS)}; not from {path.suffix!r}")
    identity = f"sha256:{file_hash(path)}"
    if kind == "parquet":
        try:
            return _of_arrow(path, read_parquet(path), identity, texts)
        except pa.ArrowException as error:
            raise PromptFileError(f"{path}: not a Parquet file ({str(error).splitlines()[0]})") from error
    return _of_jsonl(path, identity, texts) if kind == "jsonl" else _of_csv(path, identity, texts)


def _of_jsonl(path: Path, identity: str, texts: _Texts) -> PromptTable:
    """The lines are kept as text, and parsed again when they are drawn."""
    lines, prompts, names = [], [], {}
    for number, line in _text_lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line, object_pairs_hook=_Object)
        except (ValueError, RecursionError) as error:
            raise PromptFileError(f"{place}: {line.strip()[:60]!r} is not JSON ({error})") from error
        if not isinstance(row, _Object):
            raise PromptFileError(f"{place}: {line.strip()[:60]!r}; expected an object")
        _require_single(row.names, place)
        prompts.append(texts(place, row))
        lines.append(line)
        names |= dict.fromkeys(row)
    others = [name for name in names if name not in (PROMPT, MESSAGES)]

    def columns_of(index: int) -> dict[str, Any]:
        row = json.loads(lines[index])
        return row | {name: row.get(name) for name in others}

    return PromptTable(prompts, others, columns_of, texts.identity(identity), template=texts.template)


class _Object(dict):
    """A JSON object, with the names that stand in it, one that is there twice included."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]):
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _of_csv(path: Path, identity: str, texts: _Texts) -> PromptTable:
    """The first line names the columns; values are texts."""
    limit = csv.field_size_limit(sys.maxsize)  # of the whole process, 131,072 characters by default
    reader = csv.reader(line for _, line in _text_lines(path))
    try:
        names, rows, prompts = next(reader, []), [], []
        if names and PROMPT not in names and texts.template is None:
            raise PromptFileError(
                f"{path}:1: columns {', '.join(names)}; expected one called {PROMPT!r}, or prompts.template"
            )
        if MESSAGES in names:
            raise PromptFileError(
                f"{path}:1: {MESSAGES!r} are lists, which CSV has none of; expected .jsonl or .parquet"
            )
        _require_single(names, f"{path}:1")
        for values in reader:
            place = f"{path}:{reader.line_num}"
            if not values:  # an empty line
                continue
            if len(values) != len(names):
                raise PromptFileError(f"{place}: {len(values)} values; expected {len(names)}, as in line 1")
            rows.append(dict(zip(names, values, strict=True)))
            prompts.append(texts(place, rows[-1]))
    except csv.Error as error:
        raise PromptFileError(f"{path}:{reader.line_num}: not CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)
    others = [name for name in names if name != PROMPT]
    return PromptTable(prompts, others, rows.__getitem__, texts.identity(identity), template=texts.template)


def _of_arrow(path: Path, table: pa.Table, identity: str, texts: _Texts) -> PromptTable:
    names = table.column_names
    own = [name for name in (PROMPT, MESSAGES) if name in names]
    if not own and texts.template is None:
        expected = f"expected one called {PROMPT!r}, or {MESSAGES!r}, or prompts.template"
        raise PromptFileError(f"{path}: columns {', '.join(names)}; {expected}")
    _require_single(names, str(path))
    table = table.combine_chunks()  # one chunk a column: a row is found without a search
    read = [name for name in READ if name in names]
    rows = table.to_pylist() if texts.template is not None else map(without_none, table.select(read).to_pylist())
    prompts = [texts(f"{path}: row {i}", row) for i, row in enumerate(rows)]
    others = [name for name in names if name not in own]

    def columns_of(index: int) -> dict[str, Any]:
        row = table.slice(index, 1).to_pylist()[0]
        return row | {name: without_none(row[name]) for name in read}

    return PromptTable(prompts, others, columns_of, texts.identity(identity), template=texts.template)


def without_none(value: Any) -> Any:
    """Without the keys that Arrow gives every message, tool or argument because another one has them."""
    if isinstance(value, list):
        return [without_none(part) for part in value]
    if isinstance(value, dict):
        return {name: without_none(part) for name, part in value.items() if part is not None}
    return value


def _saved_dataset(path: Path) -> tuple[pa.Table, str]:
    """The table of a folder that `datasets` saved, and its identity."""
    try:
        names = [file["filename"] for file in parsed_json((path / STATE).read_text(encoding="utf-8"))["_data_files"]]
        tables = [pa.ipc.open_stream(pa.memory_map(str(path / name))).read_all() for name in names]
        return pa.concat_tables(tables), "sha256:" + "+".join(file_hash(path / name) for name in names)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise PromptFileError(
            f"{path}: not a folder that `datasets` saved ({type(error).__name__}: {error})"
        ) from error


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                byte = line[error.start]
                raise PromptFileError(
                    f"{path}:{number}: byte {error.start + 1} is 0x{byte:02x}, which is not UTF-8"
                ) from error


def _require_single(names: Sequence[str], place: str) -> None:
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise PromptFileError(f"{place}: the column {twice[0]!r} is there twice")


def _prompt(value: object, place: str, row: Mapping[str, Any]) -> str:
    if isinstance(value, str) and value:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PromptFileError(
                f"{place}: {PROMPT} {value[:60]!r} holds half a surrogate pair, which is no text"
            ) from None
        return value
    have = f"it has {', '.join(row) or 'nothing'}" if PROMPT not in row else f"{PROMPT} is {value!r:.80}"
    raise PromptFileError(
        f"{place}: {have}; expected a text that is not empty as {PROMPT!r}, or {MESSAGES!r}, or prompts.template"
    )
