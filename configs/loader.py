"""YAML and ``key.path=value`` to validated settings; every fault names its place and a remedy."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from configs.schema import RunConfig

QUICKSTART = Path(__file__).with_name("quickstart.yaml")
_C = TypeVar("_C", bound=BaseModel)


class ConfigError(ValueError):
    """A fault in the settings: one line per fault, each with place, what was got and what was expected."""


def fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf setting as (dotted key, field), in the order of declaration; a group that may be none is one too."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        groups = [one for one in (field.annotation, *get_args(field.annotation)) if _is_group(one)]
        if not groups or groups[0] is not field.annotation:
            yield key, field
        if groups and get_origin(field.annotation) not in (list, dict):
            yield from fields(groups[0], key + ".")


def _is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def load(path: Path | None = None, overrides: list[str] | None = None) -> RunConfig:
    """Read ``path`` (none: the quickstart), apply ``key.path=value`` overrides, validate.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, a value does not fit.
    """
    return load_as(RunConfig, path or QUICKSTART, overrides)


def load_as(model: type[_C], path: Path, overrides: list[str] | None = None) -> _C:
    """``load`` for any settings: ``path`` with its overrides as a ``model``. Raises ConfigError."""
    data = _read(path, model)
    for override in overrides or []:
        _apply(data, override)
    where = _shown(path) + (" with what the command line says" if overrides else "")
    _check_keys(data, where, model)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, where, model)) from None


def dump(config: BaseModel) -> str:
    """The settings as YAML that ``load`` reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False)


def describe(model: type[BaseModel] = RunConfig, file: Path | None = None) -> str:
    """One line per setting: key, default, the value of ``file`` where it is another, type, meaning."""
    lines = []
    file = file or (QUICKSTART if model is RunConfig else None)
    values = {} if file is None else _flat(_read(file, model))
    for key, field in fields(model):
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else yaml.safe_dump(_plain(default), default_flow_style=True)
        shown = shown.replace("\n...", "").strip()
        other = f"   {file.stem}: {values[key]}" if file is not None and values.get(key, default) != default else ""
        lines.append(f"  {key} = {shown}{other}   ({_type_name(field.annotation)})\n      {field.description}")
    return "\n".join(lines)


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def _read(path: Path, model: type[BaseModel]) -> dict[str, Any]:
    if not path.is_file():
        if str(path) in dict(fields(model)):
            raise ConfigError(f"{path}: a setting without a value; expected {path}=VALUE")
        raise ConfigError(f"{path}: no such file; expected a YAML file of settings, for example {_shown(QUICKSTART)}")
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: got {type(data).__name__}, expected a mapping of settings")
    return data


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, raw = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key.path=value, for example rollout.groups=4")
    try:
        value = yaml.safe_load(raw) if raw else None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from None
    parts = key.split(".")
    place = data
    for part in parts[:-1]:
        inner = place.get(part)
        if inner is None:
            inner = place[part] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"override {override!r}: {part!r} holds {inner!r}, expected a group of settings")
        place = inner
    place[parts[-1]] = value


def _check_keys(data: dict[str, Any], where: str, model: type[BaseModel]) -> None:
    leaves = dict(fields(model))
    groups = {key.rsplit(".", n)[0] for key in leaves for n in range(1, key.count(".") + 1)}
    known = sorted(leaves.keys() | groups)
    faults = []

    def walk(value: dict[Any, Any], prefix: str) -> None:
        for name, inner in value.items():
            key = f"{prefix}{name}"
            if key in leaves and "." not in str(name):
                continue
            if key not in groups:
                faults.append(f"unknown key {key!r}{_nearest(key, known)}")
            elif isinstance(inner, dict):
                walk(inner, key + ".")
            elif inner is not None:
                faults.append(f"{key}: got {inner!r}, expected a group of settings such as {key}.<name>")

    walk(data, "")
    if faults:
        raise ConfigError("\n".join(f"{where}: {fault}" for fault in faults))
    for group in [g for g in data if data[g] is None and g in groups]:
        del data[group]


def _shown(path: Path) -> str:
    """A path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _nearest(key: str, known: list[str]) -> str:
    group, _, name = key.rpartition(".")
    inside = [known_key.removeprefix(f"{group}.") for known_key in known if group and known_key.startswith(f"{group}.")]
    close = [f"{group}.{found}" for found in difflib.get_close_matches(name, inside, n=1, cutoff=0.6)]
    if inside and not close:
        return f"; {group} has {', '.join(inside)}"
    close = close or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if not close:
        last = key.rsplit(".", 1)[-1]
        tails = {k.rsplit(".", 1)[-1]: k for k in known}
        close = [tails[m] for m in difflib.get_close_matches(last, list(tails), n=1, cutoff=0.7)]
    return f"; did you mean {close[0]!r}?" if close else "; --help lists every key"


def _explain(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    lines = []
    for fault in error.errors():
        place = ".".join(str(part) for part in fault["loc"])
        # What our own validators say has what they got, and the group that they look at can be long.
        got = "" if fault["type"] in ("missing", "value_error") else f" (got {fault['input']!r})"
        said = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "model_type":
            said = "expected a group of settings such as {name: ...}"
        if fault["type"] == "extra_forbidden":
            # Only groups in lists and mappings come here: what is unknown elsewhere was found before.
            group = _group_at(model, fault["loc"][:-1])
            known = [f"{place.rpartition('.')[0]}.{key}" for key, _ in fields(group)]
            place, said = "", f"unknown key {place!r}{_nearest(place, known)}"
        lines.append(f"{where}: {place + ': ' if place else ''}{said}{got}")
    return "\n".join(lines)


def _group_at(model: type[BaseModel], place: tuple[Any, ...]) -> type[BaseModel]:
    """The group of settings at a place in ``model``, through lists and mappings of groups."""
    for part in place:
        named = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        inner = [arg for arg in (named.get(part), *get_args(named.get(part))) if _is_group(arg)]
        model = inner[0] if inner else model
    return model


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, Path) else value


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Union or origin is types.UnionType:
        return " or ".join(_type_name(a) for a in get_args(annotation))
    if annotation is type(None):
        return "none"
    if origin is not None and str(origin) == "typing.Literal":
        return " | ".join(str(a) for a in get_args(annotation))
    if origin is list:
        return f"list of {_type_name(get_args(annotation)[0])}"
    return getattr(annotation, "__name__", str(annotation))
