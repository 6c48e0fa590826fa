"""Which template lines each family is the first to use: what adding it cost.

    python benchmarks/template_growth.py [--json] [--write]

Every template is rendered with a mark at the start of each of its lines; the marks that come out
say which lines a family's package was made from. Families are taken in the order in which they
were added, so a line counts for the first that needs it. Lines that only control the rendering
(`{% if %}`) count for the family whose rendering reaches what stands before them.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import jinja2

from vlmgen.render import plan, templates
from vlmgen.render.environment import GeneratorEnvironment
from vlmgen.spec import load_spec

# The order in which the families were added.
ORDER = (
    "qwen3_vl",
    "qwen3_vl_moe",
    "qwen2_vl",
    "qwen2_5_vl",
    "paddleocr_vl",
    "glm4v_moe",
    "glm4v",
    "internvl",
    "internvl_6b",
    "internvl3_5",
    "internvl3_5_moe",
)
PAGE = "docs/new-family.md"
BEGIN, END = "<!-- growth:begin -->", "<!-- growth:end -->"
_MARK = re.compile("\x01([^\x01\x02]+):([0-9]+)\x02")


class MarkedEnvironment(GeneratorEnvironment):
    """The generator's environment; every line of a template that is text begins with its place."""

    def _load(self, directories: Any, name: str) -> Any:
        source, filename, current = super()._load(directories, name)
        return self._marked(source, name), filename, current

    def _marked(self, source: str, name: str) -> str:
        plain = jinja2.Environment()  # without trimming, so that the tokens add up to the source
        in_text = {1}
        line = 1
        for _, kind, value in plain.lex(source):
            ends = value.count("\n")
            if kind == "data":
                in_text.update(range(line + 1, line + ends + 1))
            line += ends
        lines = source.split("\n")
        marked = [
            f"\x01{name}:{number}\x02{text}" if number in in_text and text.strip() else text
            for number, text in enumerate(lines, 1)
        ]
        return "\n".join(marked)


def lines_used(spec_path: Path) -> set[tuple[str, int]]:
    """(template, line) of everything that went into a package."""
    spec = load_spec(spec_path)
    package_plan = plan.plan_package(spec.family)
    environment = MarkedEnvironment(templates.directories())
    context = plan.template_context(spec, package_plan, None)
    used: set[tuple[str, int]] = set()
    for file in package_plan.files:
        if file.mode == "render":
            text = environment.get_template(file.template).render(context)
            used |= {(name, int(line)) for name, line in _MARK.findall(text)}
    return used


def growth(specs: Path) -> list[dict[str, Any]]:
    """One row per family, in the order in which they were added."""
    known: set[tuple[str, int]] = set()
    rows = []
    for family in ORDER:
        used = lines_used(specs / f"{family}.yaml")
        new = used - known
        known |= used
        blocks = sorted({name for name, _ in new} - {name for name, _ in known - new})
        spec_lines = (specs / f"{family}.yaml").read_text(encoding="utf-8").count("\n")
        rows.append(
            {
                "family": family,
                "spec_lines": spec_lines,
                "template_lines": len(used),
                "first_used": len(new),
                "new_blocks": blocks,
            }
        )
    first = rows[0]["first_used"]
    for row in rows:
        row["growth"] = row["first_used"] / first
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, and the average below."""
    lines = [
        "| family | spec lines | template lines used | first used here | growth | new blocks |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        first = row is rows[0]
        names = (name.removeprefix("blocks/") for name in row["new_blocks"])
        blocks = ", ".join(f"`{name.removesuffix('.py.j2')}`" for name in names)
        lines.append(
            f"| {row['family']} | {row['spec_lines']} | {row['template_lines']} | "
            f"{row['first_used']} | {'' if first else format(row['growth'], '.1%')} | "
            f"{'' if first else blocks} |"
        )
    later = rows[1:]
    average = sum(row["growth"] for row in later) / len(later)
    return "\n".join([*lines, "", f"Average growth per added family: {average:.1%}."]) + "\n"


def written(page: str, rows: list[dict[str, Any]]) -> str:
    """A page with the table between its two marks."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table(rows)}{END}{tail}"


def main() -> None:
    """Print the table, or put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE}")
    arguments = parser.parse_args()
    rows = growth(templates.shipped_specs())
    if arguments.write:
        page = Path(__file__).resolve().parents[1] / PAGE
        page.write_text(written(page.read_text(encoding="utf-8"), rows), encoding="utf-8")
    print(json.dumps(rows, indent=2) if arguments.json else table(rows), end="")


if __name__ == "__main__":
    main()
