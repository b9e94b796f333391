"""What settings a pydantic model has: their dotted names, and the list that `--help` shows.

Knows the models' shape and documentation; knows no files, values or errors.
"""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true|false", types.NoneType: "null"}


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


def takes_any_key(field: FieldInfo) -> bool:
    """Whether the setting is a mapping whose keys the model does not fix."""
    return any(get_origin(part) is dict for part in (field.annotation, *get_args(field.annotation)))


def _kind(annotation: Any) -> str:
    """An annotation in words: `whole number`, `clip|cispo`, `number or null`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "|".join(map(str, parts))
    if origin is Annotated:
        return _kind(parts[0])
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(part) for part in parts)
    if origin in (dict, list):
        return {dict: "mapping", list: "list"}[origin]
    return _WORDS.get(annotation, "section")


def _default(value: Any) -> str:
    """` = ...` in YAML's words; nothing for a setting that must be given or a section."""
    if value is PydanticUndefined or isinstance(value, pydantic.BaseModel):
        return " (required)" if value is PydanticUndefined else ""
    return f" = {'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"


def reference(model: type[pydantic.BaseModel]) -> str:
    """Every setting with its kind, default and documentation, one or two lines each."""
    lines = []
    for name, field in settings(model):
        inner = _models(field.annotation)
        notes = [" ".join((text or "").split()) for text in (field.description, *(part.__doc__ for part in inner))]
        lines.append(f"  {name}: {_kind(field.annotation)}{_default(field.default)}")
        lines += [f"      {note}" for note in notes if note]
    return "\n".join(lines)
