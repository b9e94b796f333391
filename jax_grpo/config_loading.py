"""From YAML and command-line overrides to a checked pydantic model, with one clear error for anything wrong.

Knows files, lines and wording; knows no particular setting.
"""

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import pydantic
import yaml

Model = TypeVar("Model", bound=pydantic.BaseModel)


class ConfigError(ValueError):
    """A configuration cannot be used. The message names the file and line, the key, the value and what was expected."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as people mean it: `3e-5` is a number, and a key given twice is an error."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _read(path: str) -> tuple[Any, dict[str, int]]:
    """Values, and the 1-based line of each dotted key.

    Raises:
        ConfigError: missing file, invalid YAML, duplicate key, or not a mapping.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the config ({error})") from error
    lines: dict[str, int] = {}

    def visit(node: yaml.Node, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if name in lines:
                raise ConfigError(
                    f"{path}:{key.start_mark.line + 1}: {name} is given twice (first on line {lines[name]})"
                )
            lines[name] = key.start_mark.line + 1
            visit(value, f"{name}.")

    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is not None:
            visit(root, "")
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', error)})") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, found {type(values).__name__}")
    return values, lines


def _pairs(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """(dotted key, value) of `--a.b 1` and `--a.b=1`; values are YAML."""
    pairs, rest = [], list(overrides)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ConfigError(f"command line: {argument!r} has no key; overrides look like --update.learning_rate 3e-5")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"command line: --{key} has no value")
            text = rest.pop(0)
        try:
            pairs.append((key, yaml.load(text, Loader=_Loader)))
        except yaml.YAMLError as error:
            raise ConfigError(f"command line: --{key}: {text!r} is not a YAML value") from error
    return pairs


def _override(values: dict, key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(values.get(parent), dict):
            values[parent] = {}
        values = values[parent]
    values[last] = value


def _known_keys(model: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a model, sections included."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                keys += _known_keys(kind, f"{prefix}{name}.")
    return keys


def _nearest(key: str, known: list[str]) -> str:
    """` Did you mean ...?` for the closest known key, comparing whole dotted names and then last parts."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        last = {name.rsplit(".", 1)[-1]: name for name in known}
        close = [last[name] for name in difflib.get_close_matches(key.rsplit(".", 1)[-1], list(last), n=1, cutoff=0.5)]
    return f" Did you mean {close[0]}?" if close else f" Known here: {', '.join(_siblings(key, known))}."


def _siblings(key: str, known: list[str]) -> list[str]:
    prefix = key.rpartition(".")[0]
    return [name for name in known if name.rpartition(".")[0] == prefix]


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "model_type": "a mapping of settings",
    "model_attributes_type": "a mapping of settings",
    "list_type": "a list",
    "finite_number": "a finite number",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal_error": "one of {expected}",
}


def _describe(problem: Any, known: list[str]) -> tuple[str, str]:
    """(dotted key, sentence) of one pydantic problem, in this project's words."""
    # pydantic puts the tried member of a union into the location; a key part is one that is known or the last
    key = ".".join(
        str(part) for part in problem["loc"] if not (isinstance(part, str) and part in ("str", "int", "float"))
    )
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return key, f"unknown key {key}.{_nearest(key, known)}"
    if kind == "missing":
        return key, f"{key} is missing"
    if kind == "value_error":
        return key, str(context["error"])
    expected = (_EXPECTED.get(kind) or str(problem["msg"])).format(**context)
    found = (
        problem["input"]
        if isinstance(problem["input"], str | int | float | bool | None)
        else type(problem["input"]).__name__
    )
    return key, f"{key} is {found!r}; expected {expected}"


def load_yaml(model: type[Model], path: str, overrides: Sequence[str] = ()) -> Model:
    """A checked `model` from a YAML file and dotted overrides.

    Raises:
        ConfigError: see the class; lists every problem, one a line.
    """
    values, lines = _read(path)
    known = _known_keys(model)
    overridden = _pairs(overrides)
    for key, value in overridden:
        if key not in known and key.rpartition(".")[0] not in known:
            raise ConfigError(f"command line: unknown key {key}.{_nearest(key, known)}")
        _override(values, key, value)
    from_command_line = {key for key, _ in overridden}
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        messages = []
        for problem in error.errors():
            key, sentence = _describe(problem, known)
            where = "command line" if key in from_command_line else f"{path}:{lines[key]}" if key in lines else path
            messages.append(f"{where}: {sentence}")
        raise ConfigError("\n".join(dict.fromkeys(messages))) from error


def parse_arguments(argv: Sequence[str], prog: str) -> tuple[argparse.Namespace, list[str]]:
    """`--config FILE`, `--print-config`, and everything else as overrides."""
    parser = argparse.ArgumentParser(
        prog=prog, allow_abbrev=False, epilog="any setting can be overridden: --update.learning_rate 3e-5"
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML settings, see configs/")
    parser.add_argument("--print-config", action="store_true", help="show the resolved settings and exit")
    return parser.parse_known_args(argv)
