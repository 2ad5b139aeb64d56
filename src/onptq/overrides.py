"""Dotted paths of a recipe: overrides such as "branch.horizon=8", differences, and errors that name the field."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from onptq.errors import OnPTQError, did_you_mean
from onptq.plain_yaml import parse_yaml

Overrides = Mapping[str, Any] | Iterable[str]
Implied = Callable[[str], Mapping[str, Any]]  # of a method: the fields, by dotted path, that its name decides


def parse_override(text: str) -> tuple[str, Any]:
    """Read "branch.horizon=8" as ("branch.horizon", 8); the value is YAML."""
    path, equals, value = (part.strip() for part in text.partition("="))
    if not (path and equals and value):
        raise OnPTQError(f"cannot read the override {text!r}: expected field=value, e.g. branch.horizon=8")
    try:
        return path, parse_yaml(value)
    except OnPTQError as error:
        raise OnPTQError(f"cannot read the value of the override {text!r}: {error}") from error


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Each leaf that differs, as "dotted.path: old -> new"."""
    old, new = flatten(a), flatten(b)
    return [
        f"{path}: {_shown(old, path)} -> {_shown(new, path)}"
        for path in dict.fromkeys((*old, *new))
        if path not in old or path not in new or old[path] != new[path]
    ]


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}."""
    leaves: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, f"{prefix}{name}."))
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def _shown(leaves: Mapping[str, Any], path: str) -> str:
    return repr(leaves[path]) if path in leaves else "(absent)"


def override(base: Mapping[str, Any], overrides: Overrides, implied: Implied) -> dict[str, Any]:
    """A copy of `base` changed by `overrides`. A change of `method` drops what either method implies."""
    if isinstance(overrides, str):
        overrides = [overrides]
    pairs = flatten(overrides).items() if isinstance(overrides, Mapping) else map(parse_override, overrides)
    changes = dict(pairs)
    result = copy.deepcopy(dict(base))
    old_method = result.get("method", "onptq")
    if changes.get("method", old_method) != old_method:
        for method in (old_method, changes["method"]):
            for path in implied(method) if isinstance(method, str) else ():
                _remove(result, path)
    for path, value in changes.items():
        if value != {}:  # an empty section changes nothing
            put(result, path, value)
    return result


def put(data: dict[str, Any], path: str, value: Any) -> None:
    """Set the value under a dotted path; create missing sections."""
    *sections, leaf = path.split(".")
    for depth, section in enumerate(sections):
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise OnPTQError(f"cannot set {path!r}: {'.'.join(sections[: depth + 1])} is {data!r}, not a section")
    data[leaf] = value


def _remove(data: dict[str, Any], path: str) -> None:
    *sections, leaf = path.split(".")
    for section in sections:
        data = data.get(section, {})
        if not isinstance(data, dict):
            return
    data.pop(leaf, None)


def with_implied(data: Mapping[str, Any], implied: Implied) -> dict[str, Any]:
    """A copy with the fields that the method implies; a field with another value is refused."""
    method = data.get("method")
    result = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else copy.deepcopy(value)
        for name, value in data.items()
    }
    given = flatten(result)
    for path, value in implied(method).items() if isinstance(method, str) else ():
        if path not in given:
            put(result, path, value)
        elif given[path] != value:
            raise OnPTQError(
                f"method={method} means {path}={value}, but {path}={given[path]} was given: "
                f"leave {path} out or choose another method"
            )
    return result


def explain(error: ValidationError, model: type[BaseModel], root: type[BaseModel]) -> str:
    """One line per error of `model`; a misspelled field is matched against the fields of `root` too."""
    lines = [_explain_one(dict(item), model, root) for item in error.errors(include_url=False)]
    return "invalid recipe: " + lines[0] if len(lines) == 1 else "invalid recipe:\n  " + "\n  ".join(lines)


def _explain_one(item: Mapping[str, Any], model: type[BaseModel], root: type[BaseModel]) -> str:
    *sections, name = [str(part) for part in item["loc"]] or [""]
    for section in sections:
        inner = model.model_fields[section].default if section in model.model_fields else None
        if not isinstance(inner, BaseModel):  # a field that is a mapping of names
            message = str(item["msg"])
            return f"{'.'.join((*sections, name))} = {item['input']!r}: {message[:1].lower()}{message[1:]}"
        model = type(inner)
    prefix = "".join(f"{section}." for section in sections)
    path, given, field = prefix + name, item["input"], model.model_fields.get(name)
    if item["type"] == "extra_forbidden":
        leaf = next(iter(flatten({path: given})))  # brnch.horizon rather than brnch, so that branch.horizon is found
        valid = dict.fromkeys((*_leaves(model, prefix), *_leaves(root)))
        hint = did_you_mean(leaf, valid, [path for path in valid if _last(path) == _last(leaf)])
        return f"unknown field {leaf!r}{hint}; valid fields{_of(sections)}: {', '.join(model.model_fields)}"
    if item["type"] == "model_type" and field is not None:
        return f"{path} = {given!r}: expected a section with the fields {', '.join(type(field.default).model_fields)}"
    if item["type"] == "string_pattern_mismatch" and field is not None:
        return f"{path} = {given!r}: expected {field.description}"
    message = str(item["msg"]).removeprefix("Value error, ")
    optional = " or null" if field is not None and field.default is None else ""
    return f"{path} = {given!r}: {message[:1].lower()}{message[1:]}{optional}"


def _of(sections: list[str]) -> str:
    return f" of {'.'.join(sections)}" if sections else ""


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from _leaves(type(field.default), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _last(path: str) -> str:
    return path.rsplit(".", 1)[-1]
