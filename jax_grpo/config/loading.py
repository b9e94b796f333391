"""From YAML and command-line overrides to a checked pydantic model, with one clear error for anything wrong.

Also the list of a model's settings, which `--help` shows. Knows files, lines and wording; knows no particular setting.
"""

import difflib
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import pydantic
import yaml
from pydantic.fields import FieldInfo

Model = TypeVar("Model", bound=pydantic.BaseModel)


class ConfigError(ValueError):
    """A configuration cannot be used. The message names the file and line, the key, the value and what was expected."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain values. 1.1's `3e-5` is a text, its `off` false, its `1:30` ninety and its dates objects."""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that `_Loader` would read as a number: a folder may be named 1e5."""


_FLOAT = r"[-+]?(\d+\.\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\d+[eE][-+]?\d+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_PLAIN_VALUES = [  # tag, pattern, possible first characters ("" is PyYAML's name for those of an empty value)
    ("null", r"~|null|Null|NULL|", ["", *"~nN"]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
]
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _PLAIN_VALUES:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{_FLOAT})$"), list("-+.0123456789"))

# What SafeLoader's constructors raise for an explicit tag that does not fit (`!!int abc`), and for endless nesting.
_UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


def dump_yaml(values: dict) -> str:
    """YAML that `load_yaml` reads back to equal values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def show(value: Any, other: Callable[[Any], str] = repr) -> str:
    """A value in YAML's words: null, true, containers by kind; by `other` where it is none of these."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return {dict: "a mapping", list: "a list"}.get(type(value)) or other(value)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key; an empty mapping is a value."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        flattened |= flat(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flattened


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """` Did you mean ...?` for the closest of `names`, or nothing."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def _read(path: str) -> tuple[dict, dict[str, int]]:
    """Values, and the 1-based line of each dotted key; a ConfigError where there is no file, or no YAML mapping of single keys."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        hint = did_you_mean(path, [str(near) for near in Path(path).parent.glob("*.y*ml")])
        raise ConfigError(f"{path}: cannot read the config: no such file.{hint}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the config ({error})") from error
    lines: dict[str, int] = {}

    def visit(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                lines[f"{prefix}{index}"] = item.start_mark.line + 1
                visit(item, f"{prefix}{index}.")
        if isinstance(node, yaml.MappingNode):
            given: dict[str, int] = {}
            for key, value in node.value:
                name, line = f"{prefix}{key.value}", key.start_mark.line + 1
                if name in given:
                    raise ConfigError(f"{path}:{line}: {name} is given twice (first on line {given[name]})")
                given[name] = lines[name] = line
                visit(value, f"{name}.")

    try:
        visit(yaml.compose(text, Loader=_Loader), "")
        values = yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except _UNREADABLE as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        reason = "nested too deeply" if isinstance(error, RecursionError) else getattr(error, "problem", None) or error
        reason = " ".join(str(reason).split())  # some of PyYAML's take two lines
        raise ConfigError(f"{where}: not valid YAML ({reason})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {show(values)}")
    return values, lines


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of `--a.b 1` and `--a.b=1`; values are YAML."""
    rest = list(overrides)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ConfigError(f"command line: {argument!r} has no key; overrides look like --update.learning_rate 3e-5")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"command line: --{key} has no value")
            text = rest.pop(0)
        try:
            yield key, yaml.load(text, Loader=_Loader)
        except _UNREADABLE as error:
            raise ConfigError(f"command line: --{key}: {text!r} is not a YAML value") from error


def _override(values: dict, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.get(parent)
        if inner is not None and not isinstance(inner, dict):
            raise ConfigError(f"command line: --{key} goes into {parent}, which is {show(inner)}; expected a mapping")
        values[parent] = dict(inner or {})  # a copy: two sections of a file may be one mapping by a YAML alias
        values = values[parent]
    values[last] = value


def _nearest(key: str, known: Sequence[str]) -> str:
    """The closest known key, comparing whole dotted names and then last parts; else the keys that would do there."""
    if key in known:
        return " Dots are for the command line; in a file, indent the last part under its section."
    key = re.sub(r"\.\d+(?=\.)", "", key)  # an item of a list is known by the list's name
    if hint := did_you_mean(key, known):
        return hint
    section, _, own = key.rpartition(".")
    last = {name.rpartition(".")[2]: name for name in known}
    if close := difflib.get_close_matches(own, last, n=1, cutoff=0.6):
        return f" Did you mean {last[close[0]]}?"
    siblings = [name for name in known if name.rpartition(".")[0] == (section if section in known else "")]
    return f" Known here: {', '.join(siblings)}."


_EXPECTED = {
    **dict.fromkeys(["int_type", "int_from_float", "int_parsing", "int_parsing_size"], "a whole number"),
    **dict.fromkeys(["float_type", "float_parsing"], "a number"),
    **dict.fromkeys(["bool_type", "bool_parsing"], "true or false"),
    **dict.fromkeys(["model_type", "model_attributes_type"], "a mapping of settings"),
    **dict.fromkeys(["string_type", "string_unicode"], "a text"),
    "invalid_key": "a text as the key",
    "dict_type": "a mapping",
    "list_type": "a list",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "one of {expected}",
    "string_too_short": "a text that is not empty",
}


def _describe(problem: Any, known: Sequence[str]) -> tuple[list[str], str]:
    """(dotted keys concerned, sentence) of one pydantic problem, in this project's words."""
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    kind = "invalid_key" if "[key]" in problem["loc"] else problem["type"]
    context = problem.get("ctx", {})
    if kind == "extra_forbidden":
        return [key], f"unknown key {key}.{_nearest(key, known)}"
    if kind == "missing":
        return [key], f"{key} is missing"
    if kind == "value_error":  # a check of our own: its sentence names the keys, or speaks of this one
        sentence = str(context["error"])
        named = [name for name in re.findall(r"\w+(?:\.\w+)+", sentence) if name in known]
        return [*named, key], sentence if named else f"{key}: {sentence}"
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else problem["msg"]
    return [key], f"{key} is {show(problem['input'])}; expected {expected}"


def _origin(keys: Sequence[str], path: str, lines: dict[str, int], overridden: Sequence[str]) -> str:
    """Where to look: the command line if one of `keys` was set there, else the first line that sets one or its section."""
    names = [name for key in keys for name in _with_sections(key)]
    created = {name for key in overridden for name in _with_sections(key)} - set(lines)
    where = next((name for name in names if name in created or name in lines), None)
    if where in created or any(name in overridden for name in names):  # an overridden section replaced the file's lines
        return "command line"
    return path if where is None else f"{path}:{lines[where]}"


def _with_sections(key: str) -> list[str]:
    """A dotted key and the sections it is in, from the inside: `a.b.c`, `a.b`, `a`."""
    return [key.rsplit(".", depth)[0] for depth in range(key.count(".") + 1)]


def load_yaml(model: type[Model], path: str, overrides: Sequence[str] = ()) -> Model:
    """A checked `model` from a YAML file and dotted overrides; a ConfigError lists every problem, one a line."""
    values, lines = _read(path)
    fields = dict(settings(model))
    known, overridden = list(fields), []
    for key, value in list(_pairs(overrides)):
        section = key.rpartition(".")[0]
        if key not in fields and not (section in fields and _takes_any_key(fields[section])):
            raise ConfigError(f"command line: unknown key {key}.{_nearest(key, known)}")
        _override(values, key, value)
        overridden.append(key)
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        described = [_describe(problem, known) for problem in error.errors()]
        messages = [f"{_origin(keys, path, lines, overridden)}: {sentence}" for keys, sentence in described]
        raise ConfigError("\n".join(dict.fromkeys(messages))) from error


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The models in an annotation: a section, an optional one, or the items of a list."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def settings(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted name, field) of every setting, each section before what is in it."""
    for name, field in model.model_fields.items():
        yield prefix + name, field
        for inner in _models(field.annotation):
            yield from settings(inner, f"{prefix}{name}.")


def _takes_any_key(field: FieldInfo) -> bool:
    """Whether the setting is a mapping whose keys the model does not fix."""
    return any(get_origin(part) is dict for part in (field.annotation, *get_args(field.annotation)))


_WORDS = {int: "whole number", float: "number", str: "text", bool: "true|false", types.NoneType: "null"}


def _kind(annotation: Any) -> str:
    """An annotation in words: `whole number`, `clip|cispo`, `number or null`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is Annotated:
        return _kind(parts[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in parts)
    return {dict: "mapping", list: "list"}.get(origin) or _WORDS.get(annotation, "section")


def reference(model: type[pydantic.BaseModel]) -> str:
    """Every setting with its kind, its default in YAML's words (a section has none) and documentation, one or two lines each."""
    lines = []
    for name, field in settings(model):
        default = "" if isinstance(field.default, pydantic.BaseModel) else f" = {show(field.default, str)}"
        lines.append(f"  {name}: {_kind(field.annotation)}{' (required)' if field.is_required() else default}")
        texts = (field.description, *(inner.__doc__ for inner in _models(field.annotation)))
        lines += [f"      {' '.join(text.split())}" for text in texts if text]
    return "\n".join(lines)
