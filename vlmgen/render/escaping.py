"""Filters that put a value into generated text so that it stays where it was put.

Each returns `Rendered`, a string that the environment lets into the output. What counts as visible
is decided by the Unicode 3.2 tables that every Python carries, so that the same value gives the
same bytes under each Python version; every other character is escaped.
"""

from __future__ import annotations

import enum
import json
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any
from unicodedata import ucd_3_2_0

import pydantic
import yaml

from vlmgen.errors import OutputError

INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"})
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
# Text that means the same in a string, a comment, a name or a path: it may go in unfiltered.
INERT = re.compile(r"[A-Za-z0-9_.,/+-]*\Z")
SHORT_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


class Rendered(str):
    """Text that a filter has made safe for the place it stands in."""

    __slots__ = ()


class UnsafeValueError(OutputError):
    """A spec value that cannot stand at the place where a template puts it."""

    code = "VG914"


def is_visible(character: str) -> bool:
    """Whether a character shows as itself: no control, bidi, line separator or odd space."""
    return character == " " or ucd_3_2_0.category(character) not in INVISIBLE


def escape_invisible(text: str) -> str:
    r"""Replace every character that does not show as itself by `\xNN`, `\uNNNN` or `\UNNNNNNNN`."""
    return "".join(c if is_visible(c) else _numeric_escape(c) for c in text)


def _numeric_escape(character: str) -> str:
    code = ord(character)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def python_literal(value: Any) -> Rendered:
    """`py`: the value as a Python literal.

    Args:
        value: None, bool, int, float, str, enum member, pydantic model, or a list, tuple, set,
            frozenset or mapping of these.

    Returns:
        Text that `ast.literal_eval` reads back (infinities and NaN excepted, which become
        `float("inf")` and so on). Mappings keep their order; sets are sorted by their text.

    Raises:
        UnsafeValueError: The value is of another type.
    """
    return Rendered(_literal(value))


def _literal(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return _literal(value.value)
    if isinstance(value, pydantic.BaseModel):
        return _literal(value.model_dump())
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        text = float.__repr__(value)
        return text if math.isfinite(value) else f'float("{text}")'
    if isinstance(value, str):
        return _string_literal(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, frozenset):
        return f"frozenset({_set_literal(value)})" if value else "frozenset()"
    if isinstance(value, Set):
        return _set_literal(value) if value else "set()"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if isinstance(value, tuple):
        items = ", ".join(map(_literal, value))
        return f"({items},)" if len(value) == 1 else f"({items})"
    raise UnsafeValueError(f"filter `py`: {type(value).__name__} has no Python literal")


def _set_literal(value: Set[Any]) -> str:
    return "{" + ", ".join(sorted(map(_literal, value))) + "}"


def _string_literal(value: str) -> str:
    return _double_quoted(value, _numeric_escape)


def _double_quoted(value: str, numeric: Callable[[str], str]) -> str:
    def escape(c: str) -> str:
        if c in '"\\':
            return "\\" + c
        return SHORT_ESCAPES.get(c) or (c if is_visible(c) else numeric(c))

    return '"' + "".join(map(escape, value)) + '"'


def identifier(value: Any) -> Rendered:
    """`ident`: a Python identifier, unchanged.

    Raises:
        UnsafeValueError: It is not an ASCII identifier or it is a keyword.
    """
    text = str(value.value if isinstance(value, enum.Enum) else value)
    if not IDENTIFIER.match(text) or keyword.iskeyword(text):
        raise UnsafeValueError(
            f"filter `ident`: {escape_invisible(text)!r} is not a Python identifier; legal are "
            "letters, digits and underscores, not starting with a digit, and no keyword"
        )
    return Rendered(text)


def dotted(value: Any) -> Rendered:
    """`dotted`: identifiers joined by dots, such as a module or an attribute path, unchanged."""
    return Rendered(".".join(identifier(part) for part in str(value).split(".")))


def comment(value: Any) -> Rendered:
    """`comment`: one line for the rest of a `#` comment, whatever the value holds."""
    text = escape_invisible(" ".join(str(value).split()))
    # "# coding: x" in the first two lines would choose the file's encoding.
    return Rendered(re.sub(r"coding([:=])", r"coding \1", text))


def docstring(value: Any) -> Rendered:
    r'''`doc`: text inside a `"""` docstring, line feeds kept.

    Quotes are escaped where they could end the string: in runs, and at the end.
    '''
    text = str(value).replace("\r\n", "\n").replace("\r", "\n").replace("\\", "\\\\")
    text = "".join(c if c == "\n" else escape_invisible(c) for c in text)
    text = re.sub(r'"{2,}|"\Z', lambda run: '\\"' * len(run[0]), text)
    return Rendered(text)


def _unicode_escape(character: str) -> str:
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise UnsafeValueError(
            f"a lone surrogate (U+{code:04X}) cannot stand in TOML or YAML; "
            "legal are Unicode characters"
        )
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def _quoted(value: str) -> str:
    """A double-quoted string in the escapes that TOML and YAML share."""
    return _double_quoted(value, _unicode_escape)


def toml(value: Any) -> Rendered:
    """`toml`: a TOML value: string, integer, float, boolean or array of these.

    Raises:
        UnsafeValueError: The value is of another type or has a lone surrogate.
    """
    return Rendered(_toml(value))


def _toml(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return _toml(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise UnsafeValueError(f"filter `toml`: {type(value).__name__} is not a TOML value")


def to_yaml(value: Any) -> Rendered:
    """`yaml`: a scalar in flow form, a mapping or sequence as a block that ends in a line feed."""
    plain = _plain(value)
    if isinstance(plain, str):
        return Rendered(_quoted(plain))
    if isinstance(plain, (dict, list)):
        return Rendered(
            yaml.dump(plain, Dumper=_BlockDumper, sort_keys=False, allow_unicode=False, width=100)
        )
    return Rendered(yaml.safe_dump(plain, width=100).split("\n", 1)[0])


class _BlockDumper(yaml.SafeDumper):
    """Block mappings, and lists of scalars on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _short_list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flow = not any(isinstance(item, (list, dict)) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flow)


_BlockDumper.add_representer(list, _short_list)


def _plain(value: Any) -> Any:
    """The value in the types that YAML's safe dumper knows, sets sorted."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, pydantic.BaseModel):
        return _plain(value.model_dump(mode="json", by_alias=True))
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted((_plain(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    raise UnsafeValueError(f"filter `yaml`: {type(value).__name__} is not a YAML value")


def markdown(value: Any) -> Rendered:
    """`md`: text of a Markdown table cell or paragraph, on one line, without markup of its own."""
    text = " ".join(str(value).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"[\\`*\[\]|~$]", r"\\\g<0>", text)
    # GitHub's Markdown takes underscores within a word as they are.
    text = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)
    return Rendered(
        "".join(c if is_visible(c) else f"&#x{ord(c):x};" if ord(c) > 0x20 else "?" for c in text)
    )


def markdown_code(value: Any) -> Rendered:
    """`mdcode`: a Markdown code span that holds the text as it is, also within a table."""
    text = escape_invisible(" ".join(str(value).split())).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    pad = " " if "`" in text else ""
    return Rendered(f"{fence}{pad}{text}{pad}{fence}") if text else Rendered("")


def tuple_literal(value: Any) -> Rendered:
    """`tuple`: a sequence as a Python tuple literal.

    Raises:
        UnsafeValueError: It is not a sequence, or it holds something without a literal.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UnsafeValueError(f"filter `tuple`: {type(value).__name__} is not a sequence")
    return Rendered(_literal(tuple(value)))


def number(value: Any) -> Rendered:
    """`num`: an integer with underscores between thousands (5_000_000), a float by its repr.

    Raises:
        UnsafeValueError: The value is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsafeValueError(f"filter `num`: {type(value).__name__} is not a number")
    if isinstance(value, int):
        return Rendered(f"{value:_}")
    short = value.is_integer() and abs(value) < 1e15
    return Rendered(f"{int(value):_}.0" if short else _literal(value))


def json_text(value: Any) -> Rendered:
    """`json`: the value as ASCII JSON on one line, keys in their order."""
    return Rendered(json.dumps(_plain(value), ensure_ascii=True))


def verbatim(value: Any) -> Rendered:
    """`verbatim`: text the template itself wrote, such as a captured `{% set %}` block.

    Never for spec values.
    """
    return Rendered(value)


FILTERS: dict[str, Callable[..., Rendered]] = {
    "py": python_literal,
    "tuple": tuple_literal,
    "ident": identifier,
    "dotted": dotted,
    "comment": comment,
    "doc": docstring,
    "toml": toml,
    "yaml": to_yaml,
    "json": json_text,
    "md": markdown,
    "mdcode": markdown_code,
    "num": number,
    "verbatim": verbatim,
}
