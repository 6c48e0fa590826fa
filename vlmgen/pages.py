"""HTML pages of reports: a template beside the module that fills it, values escaped."""

from __future__ import annotations

from typing import Any


def render_page(package: str, template: str, **values: Any) -> str:
    """A page without any other file.

    Args:
        package: Package that the template is in.
        template: Its file name.
        values: What it is given; a value that it asks for and does not get is an error.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(package, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)
