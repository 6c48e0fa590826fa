"""The table of what each family cost is the one that the templates give today."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import template_growth  # noqa: E402


@pytest.fixture(scope="module")
def rows():
    return template_growth.growth(ROOT / "specs")


def test_the_table_names_every_spec():
    assert sorted(template_growth.ORDER) == sorted(p.stem for p in (ROOT / "specs").glob("*.yaml"))


def test_the_page_holds_the_table(rows):
    page = (ROOT / template_growth.PAGE).read_text(encoding="utf-8")
    assert template_growth.written(page, rows) == page, "run benchmarks/template_growth.py --write"


def test_templates_grow_by_less_than_fifteen_percent_per_family(rows):
    later = [row["growth"] for row in rows[1:]]
    assert sum(later) / len(later) < 0.15


def test_a_line_of_a_block_counts_for_the_family_that_needs_it(rows):
    blocks = {row["family"]: row["new_blocks"] for row in rows}
    assert "blocks/text/moe.py.j2" in blocks["qwen3_vl_moe"]
    assert "blocks/vision/merger_strided_conv.py.j2" in blocks["glm4v_moe"]
