"""The sandboxed Jinja2 environment, and where its templates come from."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.runtime import BlockReference, Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlmgen.errors import OutputError
from vlmgen.render import templates
from vlmgen.render.escaping import (
    FILTERS,
    INERT,
    Rendered,
    UnsafeValueError,
    escape_invisible,
    python_literal,
)


class TemplateError(OutputError):
    """A template that cannot be read or rendered; says which template and line."""

    code = "VG915"


def checked(value: Any) -> Any:
    """Let a value into the output if it cannot mean anything else there than what it is.

    Numbers, lists of numbers, filtered text and text of harmless characters pass.

    Raises:
        UnsafeValueError: Text with other characters that went through no filter.
    """
    if isinstance(value, (Rendered, int, float, jinja2.Undefined)) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and INERT.match(value):
        return value
    if isinstance(value, (list, tuple)) and all(type(item) in (int, float) for item in value):
        return python_literal(value)
    if isinstance(value, str):
        shown = escape_invisible(value if len(value) <= 60 else value[:57] + "...")
        raise UnsafeValueError(
            f"a template puts {shown!r} into its output unfiltered; "
            f"legal is text through one of the filters {', '.join(FILTERS)}"
        )
    raise UnsafeValueError(
        f"a template puts a {type(value).__name__} into its output; use the filter `py`, `toml`, "
        "`yaml` or `md`"
    )


def _of_defined(function: Callable[..., Rendered]) -> Callable[..., Rendered]:
    """A filter that reports an undefined value as such, and not as one of an odd type."""

    @functools.wraps(function)
    def filtered(value: Any) -> Rendered:
        return function(str(value) if isinstance(value, jinja2.Undefined) else value)

    return filtered


def _join(items: Iterable[Any], separator: str = "") -> Rendered:
    """Jinja's `join` over items that are each filtered or harmless."""
    return Rendered(separator.join(str(checked(item)) for item in items))


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> Rendered:
    """Jinja's `indent` for filtered text."""
    pad = " " * width
    lines = checked(text).split("\n")
    return Rendered(
        "\n".join(
            pad + line if (line or blank) and (number or first) else line
            for number, line in enumerate(lines)
        )
    )


class GeneratorEnvironment(ImmutableSandboxedEnvironment):
    """Sandboxed, strict about undefined names, and about text that went through no filter.

    Args:
        directories: Template directories, the first that has a name wins.

    Attributes:
        used: Hash of every template loaded so far, by name.
        asked: Names of the templates that the last rendered file was made from.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        self.used: dict[str, str] = {}
        self.asked: set[str] = set()
        super().__init__(
            loader=jinja2.FunctionLoader(functools.partial(self._load, tuple(directories))),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
            finalize=checked,
            auto_reload=False,
        )
        self.filters.update({name: _of_defined(function) for name, function in FILTERS.items()})
        self.filters.update(join=_join, indent=_indent)

    def _load(self, directories: Sequence[Path], name: str) -> tuple[str, str, Callable[[], bool]]:
        content = templates.read(directories, name)
        self.used[name] = hashlib.sha256(content).hexdigest()
        return content.decode("utf-8"), name, lambda: True

    def _load_template(self, name: str, globals: Any) -> jinja2.Template:
        """Note every template that is asked for, loaded before or not."""
        self.asked.add(name)
        return super()._load_template(name, globals)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Mark the string literals that a template itself outputs as safe."""
        tree = super()._parse(source, name, filename)
        for output in tree.find_all(nodes.Output):
            output.nodes = [_literals_marked(child) for child in output.nodes]
        return tree

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """What a macro returns has been checked piece by piece."""
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(obj, (Macro, BlockReference)) and isinstance(result, str):
            return Rendered(result)
        return result

    def render_file(self, name: str, context: dict[str, Any]) -> str:
        """Render one template.

        Raises:
            TemplateError: It is missing, has a syntax error, or uses an undefined name.
            UnsafeValueError: A value cannot stand where the template puts it.
        """
        self.asked = set()
        try:
            return self.get_template(name).render(context)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"template {error.name}:{error.lineno}: {error.message}") from error
        except jinja2.TemplateNotFound as error:
            raise TemplateError(f"template {name}: there is no template {error.name}") from error
        except (jinja2.UndefinedError, jinja2.exceptions.SecurityError) as error:
            raise TemplateError(f"template {_where(error, name)}: {error.message}") from error
        except UnsafeValueError as error:
            raise UnsafeValueError(f"template {_where(error, name)}: {error.message}") from error


def _literals_marked(node: nodes.Expr) -> nodes.Expr:
    """Wrap string constants, also those a condition chooses between, in the filter `verbatim`."""
    if isinstance(node, nodes.Const) and isinstance(node.value, str):
        return nodes.Filter(
            node, "verbatim", [], [], None, None, lineno=node.lineno, environment=node.environment
        )
    if isinstance(node, nodes.CondExpr):
        node.expr1 = _literals_marked(node.expr1)
        node.expr2 = _literals_marked(node.expr2) if node.expr2 is not None else None
    return node


def _where(error: Exception, default: str) -> str:
    """`name:line` of the innermost template frame of a traceback."""
    where, frame = default, error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if "__jinja_template__" in frame.tb_frame.f_globals or code.co_filename.endswith(".j2"):
            where = f"{code.co_filename}:{frame.tb_lineno}"
        frame = frame.tb_next
    return where


def environment(directories: Sequence[Path] | None = None) -> GeneratorEnvironment:
    """The environment of a generation.

    Args:
        directories: Template directories; by default those that ship with vlmgen.
    """
    return GeneratorEnvironment(directories or templates.directories())
