"""Random JSON schemas, and other grammars, for tests of structured outputs."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = ("^[a-z]{1,6}$", "^(foo|ba[rz]+){1,3}$", r"^[0-9]{3}-[0-9]{4}$", "^[A-F0-9]{2,8}$")
REGEXES = (
    r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)",
    r"(0|[1-9][0-9]{0,4})(\.[0-9]{1,3})?",
    r"(yes|no|maybe), (yes|no)!?",
    r"\[([0-9],){0,4}[0-9]\]",
    r"#[0-9a-fA-F]{6}",
    r"(a|b){3}(c|d|)",
    r"[^\n]{1,12}",
    r"\"[^\"\\]{0,9}\"",
    "á{2,3}é?/\\\\x",
)


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of objects and arrays at most `depth` levels deep.

    Every value can be written with few tokens.
    """
    kinds = ["integer", "number", "string", "pattern", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf"]
    kind = rng.choice(kinds) if depth < 3 else rng.choice(["object", "array"])
    match kind:
        case "integer":
            low = rng.randint(-100, 100)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
        case "number":
            low = rng.randint(-10, 10)
            return {"type": "number", "minimum": low, "exclusiveMaximum": low + rng.randint(1, 20)}
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case "enum":
            return {
                "enum": rng.sample(
                    ["red", "green", 1, -2.5, None, True, 'ü"\\', ["x"], {"k": 0}], 3
                )
            }
        case "const":
            return {"const": rng.choice(["only", 7, {"a": [1, "b"]}, None])}
        case "object":
            return _object(rng, depth)
        case "array":
            least = rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": least,
                "maxItems": least + rng.randint(0, 2),
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)]}
        case _:
            return {"type": kind}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "age", "tags", "x y", "ключ", 'a"b', "n/m"], rng.randint(0, 4))
    properties = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
