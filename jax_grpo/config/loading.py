"""From YAML and command-line overrides to a checked pydantic model, with one clear error for anything wrong.

Also the list of a model's settings, which `--help` shows. Knows files, lines and wording; knows no particular setting.
"""

import difflib
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import pydantic
import yaml
from pydantic.fields import FieldInfo

Model = TypeVar("Model", bound=pydantic.BaseModel)
COMMAND_LINE = "command line"  # the place of a setting that stands in no file


class OtherNames(NamedTuple):
    """Another program's names of settings, and functions that translate them, one after another.

    Each gets the values by these names, and the settings so far in their sections; it returns keys of the model, each with the name
    that it follows from and its value. It raises a ValueError with a `name`: that one cannot be taken.
    """

    names: Collection[str]
    translations: Sequence[Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, tuple[str, Any]]]]


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
    return {dict: "a mapping", list: "a list"}.get(type(value)) or other(
        list(value) if isinstance(value, tuple) else value
    )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key, pairs as lists as JSON has them; an empty mapping is a value."""
    flattened: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{name}.")
        else:
            flattened[f"{prefix}{name}"] = list(value) if isinstance(value, tuple) else value
    return flattened


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """` Did you mean ...?` for the closest of `names`, or nothing."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def read_yaml(path: str) -> tuple[dict, dict[str, str]]:
    """Values, and the place (`path:line`) of each dotted key; a ConfigError: no file, or no YAML mapping of single keys."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        hint = did_you_mean(path, [str(near) for near in Path(path).parent.glob("*.y*ml")])
        raise ConfigError(f"{path}: cannot read the config: no such file.{hint}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot read the config ({error})") from error
    lines: dict[str, int] = {}

    def visit(node: yaml.Node | None, prefix: str) -> None:
        given: set[str] = set()
        if isinstance(node, yaml.SequenceNode):
            children = [(str(index), item.start_mark, item) for index, item in enumerate(node.value)]
        else:
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            children = [(key.value, key.start_mark, value) for key, value in pairs]
        for key, mark, value in children:
            name, line = f"{prefix}{key}", mark.line + 1
            if name in given:
                raise ConfigError(f"{path}:{line}: {name} is given twice (first on line {lines[name]})")
            given.add(name)
            lines[name] = line
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
    return values, {key: f"{path}:{line}" for key, line in lines.items()}


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of `--a.b 1` and `--a.b=1`; values are YAML."""
    rest = iter(overrides)
    for argument in rest:
        if not argument.startswith("--"):
            raise ConfigError(f"command line: {argument!r} has no key; overrides look like --update.learning_rate 3e-5")
        key, equals, text = argument[2:].partition("=")
        if not equals and (text := next(rest, "--")).startswith("--"):
            raise ConfigError(f"command line: --{key} has no value")
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
    for section in {name.partition(".NAME.")[0] for name in known if ".NAME." in name}:
        if name := re.match(rf"{re.escape(section)}\.([^.]+)\.", key):  # the user's own: the list has NAME in its place
            known = [other.replace(f"{section}.NAME.", name[0]) for other in known]
    if hint := did_you_mean(key, known):
        return hint
    section, _, own = key.rpartition(".")
    last = {name.rpartition(".")[2]: name for name in known}
    if close := difflib.get_close_matches(own, last, n=1, cutoff=0.6):
        return f" Did you mean {last[close[0]]}?"
    siblings = [name for name in known if name.rpartition(".")[0] == (section if section in known else "")]
    return f" Known here: {', '.join(siblings)}."


def _unknown(key: str, known: Sequence[str], retired: Mapping[str, str]) -> str:
    return (
        f"{key} is no longer a setting: {retired[key]}"
        if key in retired
        else f"unknown key {key}.{_nearest(key, known)}"
    )


_EXPECTED = {
    **dict.fromkeys(["int_type", "int_from_float", "int_parsing", "int_parsing_size"], "a whole number"),
    **dict.fromkeys(["float_type", "float_parsing"], "a number"),
    **dict.fromkeys(["bool_type", "bool_parsing"], "true or false"),
    **dict.fromkeys(["model_type", "model_attributes_type"], "a mapping of settings"),
    **dict.fromkeys(["string_type", "string_unicode"], "a text"),
    "invalid_key": "a text as the key",
    "dict_type": "a mapping",
    **dict.fromkeys(["list_type", "tuple_type"], "a list"),
    "too_long": "at most {max_length} values",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "one of {expected}",
    "string_too_short": "a text that is not empty",
    "string_pattern_mismatch": "a text as {pattern}",
}


def _describe(problem: Any, fields: Mapping[str, FieldInfo], retired: Mapping[str, str]) -> tuple[list[str], str]:
    """(dotted keys concerned, sentence) of one pydantic problem, in this project's words."""
    known, parts = list(fields), list(map(str, problem["loc"]))
    # Behind a section of several classes pydantic puts the name of the class that was chosen, which is no key.
    tagged = {name for name, field in fields.items() if field.discriminator}
    parts = [part for place, part in enumerate(parts) if part != "[key]" and ".".join(parts[:place]) not in tagged]
    key = ".".join(parts)
    key_type = "[key]" in problem["loc"] and problem["type"] != "string_pattern_mismatch"
    kind = "invalid_key" if key_type else problem["type"]
    context = problem.get("ctx", {})
    if kind == "extra_forbidden":
        return [key], _unknown(key, known, retired)
    if kind == "missing":
        return [key], f"{key} is missing"
    if kind == "value_error":  # a check of our own: its sentence names the keys, or speaks of this one
        sentence = str(context["error"])
        named = [name for name in re.findall(r"\w+(?:\.\w+)+", sentence) if name in known]
        if not named and not sentence.startswith(f"{key}."):
            sentence = f"{key} {sentence}" if sentence.startswith("is ") else f"{key}: {sentence}"
        return [*named, key], sentence
    if kind == "union_tag_invalid":
        name, expected = context["discriminator"].strip("'"), " or ".join(context["expected_tags"].rsplit(", ", 1))
        return [f"{key}.{name}"], f"{key}.{name} is {show(problem['input'].get(name))}; expected one of {expected}"
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else problem["msg"]
    return [key], f"{key} is {show(problem['input'])}; expected {expected}"


def _with_sections(key: str) -> list[str]:
    """A dotted key and the sections it is in, from the inside: `a.b.c`, `a.b`, `a`."""
    return [key.rsplit(".", depth)[0] for depth in range(key.count(".") + 1)]


def load_yaml(model: type[Model], path: str, overrides: Sequence[str] = ()) -> Model:
    """A checked `model` from a YAML file and dotted overrides; a ConfigError lists every problem, one a line."""
    return checked(model, *read_yaml(path), path, overrides)


def checked(
    model: type[Model],
    values: Mapping[str, Any],
    places: Mapping[str, str],
    source: str,
    overrides: Sequence[str] = (),
    others: OtherNames | None = None,
    retired: Mapping[str, str] = types.MappingProxyType({}),
) -> Model:
    """A `model` of nested values, and of dotted overrides, which go before them.

    `places` say where in the `source` each dotted key stands. `retired` are keys of earlier versions, each with what has its place.
    A ConfigError lists every problem, one a line.
    """
    values, places = dict(values), dict(places)
    names = set(others.names) - {*model.model_fields} if others else set()
    other = {name: values.pop(name) for name in [*values] if name in names}
    given = {*places, *flat(values)}  # in the source, by our own names
    overridden: set[str] = set()  # on the command line
    for key, value in _pairs(overrides):
        if key in names:
            other[key] = value
        elif _may_be_set(model, key):
            _override(values, key, value)
            overridden.add(key)
        else:
            raise ConfigError(f"{COMMAND_LINE}: {_unknown(key, list(dict(settings(model))), retired)}")
        places[key] = COMMAND_LINE
        for section in _with_sections(key)[1:]:  # which the command line made, if the source has none
            places.setdefault(section, COMMAND_LINE)
    for translated in others.translations if others else ():
        try:
            own = translated(other, values)
        except ValueError as error:
            raise ConfigError(f"{places.get(getattr(error, 'name', ''), source)}: {error}") from error
        for key, (name, value) in own.items():
            place = places.get(name, source)
            if key in overridden and place != COMMAND_LINE:
                continue  # the command line goes before the source
            if key in (overridden if place == COMMAND_LINE else given):
                raise ConfigError(f"{place}: {name} is TRL's name of {key}, which is given too; give one of them")
            _override(values, key, value)
            places[key] = place
            if place == COMMAND_LINE:
                overridden.add(key)
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        fields = dict(settings(model))
        described = [_describe(problem, fields, retired) for problem in error.errors()]
        messages = [f"{_place(keys, places, overridden, source)}: {sentence}" for keys, sentence in described]
        raise ConfigError("\n".join(dict.fromkeys(messages))) from error


def _place(keys: Sequence[str], places: Mapping[str, str], overridden: Collection[str], source: str) -> str:
    """Where to look: the command line if one of `keys` or its section was set there, else the first place that is known."""
    names = [name for key in keys for name in _with_sections(key)]
    if any(name in overridden for name in names):
        return COMMAND_LINE
    return next((places[name] for name in names if name in places), source)


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The models in an annotation: a section, an optional one, or the items of a list or a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _variants(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The same, with all classes of a section whose class depends on what is in it: such a section has `variants`."""
    return [kind for model in _models(annotation) for kind in getattr(model, "variants", lambda: [model])()]  # noqa: B023


def settings(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted name, field) of every setting, each section before what is in it; a section of several classes has those of each.

    A section in a mapping stands under `NAME`.
    """
    for name, field in model.model_fields.items():
        yield prefix + name, field
        for inner in _variants(field.annotation):
            yield from settings(inner, f"{prefix}{name}.NAME." if _takes_any_key(field) else f"{prefix}{name}.")


def _may_be_set(model: type[pydantic.BaseModel], key: str) -> bool:
    """Whether a dotted key is a setting, or in a mapping or a section of several classes, where it depends on others."""
    name, _, rest = key.partition(".")
    field = model.model_fields.get(name)
    if field is None:
        return hasattr(model, "variants")
    return not rest or _takes_any_key(field) or any(_may_be_set(inner, rest) for inner in _models(field.annotation))


def _takes_any_key(field: FieldInfo) -> bool:
    """Whether the setting is a mapping whose keys the model does not fix."""
    return any(get_origin(part) is dict for part in (field.annotation, *get_args(field.annotation)))


_WORDS = {int: "whole number", float: "number", str: "text", bool: "true|false", types.NoneType: "null"}


def _kind(annotation: Any) -> str:
    """An annotation in words: `whole number`, `clip|cispo`, `number or null`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(show(part, str) for part in parts)
    if origin is Annotated:
        return _kind(parts[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_kind(part) for part in parts))
    return {dict: "mapping", list: "list", tuple: "two numbers"}.get(origin) or _WORDS.get(annotation, "section")


def reference(model: type[pydantic.BaseModel]) -> str:
    """Every setting with its kind, its default in YAML's words (a section has none) and documentation, one or two lines each."""
    lines: list[str] = []
    for name in dict(settings(model)):
        alike = [field for key, field in settings(model) if key == name]  # one of each class that its section may have
        field = alike[0]
        value = field.get_default(call_default_factory=True)
        default = "" if isinstance(value, pydantic.BaseModel) else f" = {show(value, str)}"
        kinds = "|".join(dict.fromkeys(_kind(other.annotation) for other in alike))
        lines.append(f"  {name}: {kinds}{' (required)' if field.is_required() else default}")
        texts = [*(other.description for other in alike), *(inner.__doc__ for inner in _variants(field.annotation))]
        lines += [f"      {' '.join(text.split())}" for text in dict.fromkeys(texts) if text]
    return "\n".join(lines)
