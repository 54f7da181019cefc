"""Files that people write: ServingPlans in YAML and plans in JSON, read with messages one can act on.

A file may hold several documents: ServingPlans are parsed, ConfigMaps give the recorded lengths that plans refer to,
other kinds pass unread, so that one file serves `kubectl apply` and `kvantile` alike. Every fault becomes one line of
an `InputError`: the path, what was found, what is allowed. What is allowed is read off the models' own JSON schema, so
a field that is added to the models needs no wording here; only the patterns have words of their own (`_PATTERNS`).
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.constructor import ConstructorError, SafeConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from kvantile_optimizer.errors import InputError
from kvantile_optimizer.plan import Plan
from kvantile_optimizer.spec import KIND, ServingPlan

ConfigMapKeys = Mapping[tuple[str, str, str], str]
"""(namespace, name, key) to text."""

_PATTERNS = {
    r"^[0-9]{1,9}(\.[0-9]{1,9})?$": 'a decimal of at least zero in quotes, such as "0.5", of up to 9 digits on a side',
    r"^[^\x00-\x1f\x7f]+$": "text of 1 to 512 characters, no control characters among them",
    r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$": "lower-case letters, digits and inner hyphens, at most 63",
    r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$": "lower-case letters, digits, inner hyphens and dots, at most 253",
    r"^(auto|[0-9]{1,9}(\.[0-9]{1,9})?)$": '"auto" or a number of tokens below 1e9 in quotes, such as "20"',
}
_TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}


MOST_MERGED = 10_000
"""Keys of one mapping after its merges (`<<`): far above any use, far below what merges of merges reach."""


@dataclass(frozen=True, slots=True)
class SpecFile:
    """What a file holds."""

    plans: tuple[ServingPlan, ...]
    config_maps: ConfigMapKeys


def load(path: Path | None) -> SpecFile:
    """Reads ServingPlans and ConfigMaps; None or `-` is standard input.

    Raises InputError with one line for each fault, sorted.
    """
    documents = _documents(_text(path), _name(path))
    plans: list[ServingPlan] = []
    maps: dict[tuple[str, str, str], str] = {}
    faults: list[str] = []
    for number, document in enumerate(documents, 1):
        try:
            _take(document, plans, maps)
        except InputError as error:
            prefix = f"document {number}: " if len(documents) > 1 else ""
            faults += [prefix + line for line in str(error).splitlines()]
    if faults:
        raise InputError("\n".join(faults))
    if not plans:
        kinds = ", ".join(_show(document["kind"])[1:-1] for document in documents)
        raise InputError(
            f"{_name(path)}: found no ServingPlan but {kinds}, allowed at least one{_guess(kinds, [KIND])}"
        )
    return SpecFile(tuple(plans), maps)


def serving_plan(data: object) -> ServingPlan:
    """The ServingPlan of one parsed document. Raises InputError with one line for each fault, sorted."""
    faults = list(_not_finite(data, (), set()))
    if faults:
        raise InputError("\n".join(sorted(faults)))
    try:
        return ServingPlan.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise InputError("\n".join(explain(error, data))) from None


def load_plan(path: Path | None) -> Plan:
    """Reads a plan as `kvantile plan -o json` printed it; None or `-` is standard input. Raises InputError."""
    where = _name(path)
    try:
        data = json.loads(_text(path), parse_constant=_refuse_constant, object_pairs_hook=_without_twins)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where}:{error.lineno}: found {error.msg[:1].lower()}{error.msg[1:]}, allowed JSON"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: found {error}, allowed JSON") from None
    if isinstance(data, list) and len(data) != 1:
        raise InputError(f"{where}: found {len(data)} plans, allowed one")
    plan = data[0] if isinstance(data, list) else data
    try:
        return Plan.model_validate(plan)
    except ValidationError as error:
        raise InputError("\n".join(f"{where}: {line}" for line in explain(error, plan, Plan))) from None


def explain(error: ValidationError, data: object, model: type[BaseModel] = ServingPlan) -> list[str]:
    """One sorted line for each fault: its path, what was found and what is allowed. `data` is what was validated."""
    root = _schema(model)
    lines = {_line(detail, root, data) for detail in error.errors(include_url=False)}
    return sorted(lines)


def _line(detail: ErrorDetails, root: dict[str, Any], data: object) -> str:
    loc, kind = detail["loc"], detail["type"]
    if kind == "extra_forbidden":
        known = sorted(_at(root, loc[:-1]).get("properties", {}))
        allowed = f"one of {', '.join(known)}" if known else "nothing"
        return f"{_path(loc)}: found an unknown key, allowed {allowed}{_guess(str(loc[-1]), known)}"
    if kind == "missing":
        return f"{_path(loc)}: found nothing, allowed {_describe(_at(root, loc), root)}{_misspelt(loc, root, data)}"
    if kind == "value_error" and not _negative(detail["input"]):
        return f"{_path(loc)}: {_said(str(detail['ctx']['error']), detail['input'])}"
    if kind == "invalid_key" or loc[-1:] == ("[key]",):
        where = _path(loc[:-1] if kind == "invalid_key" else loc[:-2])
        return f"{where}: found the key {_show(detail['input'])}, allowed text as keys"
    if kind == "recursion_loop":
        return f"{_path(loc)}: found a part that contains itself, allowed a finite document"
    return f"{_path(loc)}: found {_show(detail['input'])}, allowed {_describe(_at(root, loc), root)}"


def _negative(value: object) -> bool:
    """Such a number would be wrong in quotes too, whatever the check that met it first says."""
    return isinstance(value, (int, float)) and value < 0


def _said(message: str, value: object) -> str:
    """The models' own checks say what is allowed, and sometimes `(found X)`, which is nearer than the whole value."""
    allowed, _, rest = message.partition(" (found ")
    return f"found {rest.removesuffix(')') if rest else _show(value)}, allowed {allowed}"


def _misspelt(loc: tuple[int | str, ...], root: dict[str, Any], data: object) -> str:
    """A hint when a key beside the missing one looks like it."""
    for step in loc[:-1]:
        match data:
            case dict():
                data = data[step]
            case list() if isinstance(step, int):
                data = data[step]
    beside = [key for key in data if isinstance(key, str)] if isinstance(data, dict) else []
    unknown = [key for key in beside if key not in _at(root, loc[:-1]).get("properties", {})]
    return f" (misspelt as {near[0]}?)" if (near := get_close_matches(str(loc[-1]), unknown, 1)) else ""


def _guess(found: str, known: list[str]) -> str:
    near = get_close_matches(found.replace("_", "").lower(), [key.lower() for key in known], 1, 0.6)
    return next((f"; did you mean {key}?" for key in known if near and key.lower() == near[0]), "")


def _path(loc: tuple[int | str, ...]) -> str:
    text = ""
    for step in loc:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier():
            text += f".{step}"
        else:
            text += f"[{json.dumps(step)}]"
    return text.lstrip(".") or "document"


def _show(value: object) -> str:
    """A found value as people say it: short values themselves, the rest by kind."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case str():
            shown = json.dumps(value if len(value) <= 40 else value[:40] + "…", ensure_ascii=False)
            # Half of a surrogate pair is text to YAML, and nothing that can be printed.
            return shown.encode("utf-8", "backslashreplace").decode("utf-8")
        case int() | float():
            return str(value) if abs(value) < 1e40 else "a huge number"
        case dict():
            keys = ", ".join(str(key) for key in list(value)[:8])
            return f"a mapping of {keys}" if keys else "an empty mapping"
        case list():
            return f"a list of {len(value)}" if value else "an empty list"
        case date():
            return f"the date {value} (without quotes)"
        case _:
            return type(value).__name__


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """Follows references and drops the `nothing` of optional fields."""
    while True:
        if "$ref" in schema:
            schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
        elif "anyOf" in schema and len(rest := [part for part in schema["anyOf"] if part.get("type") != "null"]) == 1:
            schema = rest[0]
        else:
            return schema


def _at(root: dict[str, Any], loc: tuple[int | str, ...]) -> dict[str, Any]:
    """The schema of the value at `loc`; empty where anything goes."""
    schema = _resolved(root, root)
    for step in loc:
        if isinstance(step, int):
            schema = schema.get("items", {})
        else:
            other = schema.get("additionalProperties")
            schema = schema.get("properties", {}).get(step, other if isinstance(other, dict) else {})
        schema = _resolved(schema, root)
    return schema


def _describe(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """What a schema allows, in words."""
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(str(choice) for choice in schema["enum"])
    if "pattern" in schema:
        return _PATTERNS.get(schema["pattern"], f"text of the form {schema['pattern']}")
    kind = schema.get("type", "")
    words = _TYPES.get(kind, "a value")
    if kind in ("integer", "number"):
        bounds = _bounds(schema, "minimum", "maximum")
        return (
            words
            + (" from" if " to " in bounds else "")
            + bounds
            + (" above 0" if "exclusiveMinimum" in schema else "")
        )
    if kind == "string":
        bounds = _bounds(schema, "minLength", "maxLength")
        return f"{words} of{bounds} characters" if bounds else words
    if kind == "array":
        return f"{words} of{_bounds(schema, 'minItems', 'maxItems')} {_plural(schema, root)}"
    if kind == "object" and "required" in schema:
        return f"{words} with {', '.join(schema['required'])}"
    return words


def _plural(schema: dict[str, Any], root: dict[str, Any]) -> str:
    kind = _resolved(schema.get("items", {}), root).get("type")
    return {"object": "mappings", "string": "texts"}.get(str(kind), "values")


def _bounds(schema: dict[str, Any], lower: str, upper: str) -> str:
    low, high = schema.get(lower), schema.get(upper)
    if low is not None and high is not None:
        return f" {low} to {high}"
    if high is not None:
        return f" at most {high}"
    return f" at least {low}" if low is not None else ""


def _name(path: Path | None) -> str:
    return "standard input" if path is None or str(path) == "-" else str(path)


def _text(path: Path | None) -> str:
    try:
        if path is None or str(path) == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{_name(path)}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{_name(path)}: found bytes that are not UTF-8 at offset {error.start}, allowed text"
        ) from None


class _Constructor(SafeConstructor):
    """Builds YAML's values, but not merges that multiply each other: nine in nine in nine are soon all the memory."""

    def flatten_mapping(self, node: Any) -> Any:  # noqa: ANN401 - as ruamel declares it
        """Resolves a mapping's merges. Raises ConstructorError for too many."""
        merged = super().flatten_mapping(node)
        if len(node.value) > MOST_MERGED:
            raise ConstructorError(problem=f"more than {MOST_MERGED} merged keys", problem_mark=node.start_mark)
        return merged


def _documents(text: str, where: str) -> list[dict[str, Any]]:
    """The mappings of a YAML stream, empty documents left out."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Constructor = _Constructor
    try:
        documents = [part for part in yaml.load_all(text) if part is not None]
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        found = str(error.problem or error.context).partition("\n")[0]
        raise InputError(f"{where}:{line}: {found}, allowed YAML without repeated keys") from None
    except (YAMLError, ValueError, LookupError, RecursionError) as error:
        # ruamel looks up what an explicit tag such as `!!bool` promises without asking whether it is there.
        raise InputError(f"{where}: found {str(error).partition(chr(10))[0]}, allowed YAML") from None
    if not documents:
        raise InputError(f"{where}: found nothing, allowed a ServingPlan")
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict):
            raise InputError(f"{where}: document {number}: found {_show(document)}, allowed a mapping")
        if not isinstance(document.get("kind"), str):
            found = _show(document.get("kind"))
            raise InputError(f"{where}: document {number}: kind: found {found}, allowed {KIND} or another kind's name")
    return documents


def _take(document: dict[str, Any], plans: list[ServingPlan], maps: dict[tuple[str, str, str], str]) -> None:
    if document["kind"] == KIND:
        plans.append(serving_plan(document))
    elif document["kind"] == "ConfigMap":
        maps.update(_config_map(document))


def _config_map(document: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], str]]:
    metadata, data = document.get("metadata"), document.get("data")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        raise InputError(f"metadata.name: found {_show(metadata)}, allowed the ConfigMap's name")
    if not isinstance(data, dict):
        data = {}
    for key, value in data.items():
        if not isinstance(value, str):
            raise InputError(f"{_path(('data', str(key)))}: found {_show(value)}, allowed text")
        yield (str(metadata.get("namespace", "default")), metadata["name"], str(key)), value


def _not_finite(value: object, loc: tuple[int | str, ...], seen: set[int]) -> Iterator[str]:
    """Lines for NaN and infinities; each shared part is walked once, so aliases cannot blow the walk up."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{_path(loc)}: found {value}, allowed a finite number"
    if not isinstance(value, (dict, list)) or id(value) in seen:
        return
    seen.add(id(value))
    for step, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _not_finite(part, (*loc, step if isinstance(step, int) else str(step)), seen)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} (not a finite number)")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {json.dumps(max(keys, key=keys.count))} twice")
    return result
