"""Comparison, report and stored figures."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from vlmgen.errors import UsageError
from vlmgen.validate.compare import Comparison, relative_error
from vlmgen.validate.precision import rms_ratio
from vlmgen.validate.report import Report, Row
from vlmgen.validate.run import rounded_up, store_results, validate


def test_the_error_is_relative_to_the_largest_reference_value() -> None:
    reference = torch.tensor([1.0, -4.0])
    assert relative_error(torch.tensor([1.0, -3.0]), reference) == 0.25
    assert relative_error(reference, reference) == 0.0
    assert relative_error(torch.tensor([1.0, math.nan]), reference) == math.inf
    assert relative_error(torch.tensor([1e-9]), torch.zeros(1)) == math.inf
    with pytest.raises(ValueError, match="shape"):
        relative_error(torch.zeros(2), torch.zeros(3))


def test_a_comparison_keeps_the_worst_input_and_counts_every_element() -> None:
    comparison = Comparison()
    comparison.add("a", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    comparison.add("b", torch.tensor([1.0, 2.002]), torch.tensor([1.0, 2.0]))
    assert (comparison.inputs, comparison.worst_input) == (2, "b")
    assert comparison.worst == pytest.approx(1e-3, rel=1e-3)
    assert comparison.zero == 3 and sum(comparison.bins) == 1
    assert comparison.bins[35:37] in ([1, 0], [0, 1])  # 1e-3 is where bin 36 begins


def test_a_report_passes_only_if_there_is_a_row_and_all_pass() -> None:
    report = Report("x")
    assert not report.passed
    report.compared("g", "a", Comparison(1, 1e-6), 1e-5)
    assert report.passed
    report.compared("g", "b", Comparison(1, 1.1e-5), 1e-5)
    assert not report.passed and [row.passed for row in report.rows] == [True, False]


def test_nothing_compared_does_not_pass() -> None:
    report = Report("x")
    report.compared("g", "a", Comparison(), 1e-5)
    assert not report.passed


def test_not_a_number_never_passes() -> None:
    report, comparison = Report("x"), Comparison()
    comparison.add("a", torch.tensor([math.nan]), torch.tensor([1.0]))
    report.compared("g", "a", comparison, 1e-5)
    assert not report.passed
    assert json.loads(report.to_json())["rows"][0]["value"] is None


def make_report() -> Report:
    report, comparison = Report("Qwen3-VL", facts={"package": "<b>&"}), Comparison()
    comparison.add("a", torch.tensor([1.0, 2.0 + 2e-6]), torch.tensor([1.0, 2.0]))
    report.compared("modules", "mlp <1>", comparison, 1e-5)
    report.crashed("positions", "random", ValueError("bad <thing>"))
    return report


def body_of(report: Report) -> ElementTree.Element:
    page = report.to_html()
    return ElementTree.fromstring(page[page.index("<body>") : page.index("</html>")])


def test_the_page_is_well_formed_and_needs_no_other_file() -> None:
    report = make_report()
    page = report.to_html()
    assert len(body_of(report).findall(".//tbody/tr")) == 4  # two groups, two rows
    assert "1 of 2 checks failed" in page and "bad &lt;thing&gt;" in page
    assert "http" not in page and "src=" not in page and "<script" not in page


def test_a_histogram_has_a_bar_per_filled_bin_and_the_limit() -> None:
    (picture,) = body_of(make_report()).findall(".//td/svg")
    bars = picture.findall("rect")
    assert [bar.get("class") for bar in bars] == ["zero", "error"]
    line = picture.find("line")
    assert line is not None and float(line.get("x1")) == 20 + 7 * 288 / 12  # 1e-5 on 1e-12 .. 1
    assert float(bars[1].get("x")) < float(line.get("x1"))
    assert [bar.findtext("title") for bar in bars][0] == "1 without an error"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.02e-6, "2e-06"), (2e-6, "2e-06"), (9.1e-7, "1e-06"), (1.0, "1"), (0.978, "1")],
)
def test_stored_figures_are_rounded_up_to_one_digit(value: float, text: str) -> None:
    assert rounded_up(value) == text


def test_stored_results_are_the_same_bytes_for_the_same_figures(tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs" / "qwen3_vl.yaml").write_text("")
    package = tmp_path / "generated" / "qwen3_vl"
    package.mkdir(parents=True)
    report = Report("Qwen3-VL")
    report.rows += [
        Row("end to end", "logits", 13, 1.29e-6, 1e-4, True),
        Row("end to end", "tokens", 13, 0.0, 0.0, True),
    ]
    target = store_results(report, package, "qwen3_vl")
    first = target.read_bytes()
    assert store_results(report, package, "qwen3_vl").read_bytes() == first
    (group,) = json.loads(first)["groups"]
    assert group == {
        "name": "end to end",
        "checks": 2,
        "worst": "2e-06",
        "limit": "0.0001",
        "passed": True,
    }
    assert str(tmp_path) not in first.decode()


def test_figures_of_a_part_are_not_recorded(repository: Path) -> None:
    package = repository / "generated" / "qwen3_vl"
    with pytest.raises(UsageError, match="complete run"):
        validate(package, tiny=True, only=["positions"], record=True)


def test_an_unknown_group_is_named_with_the_legal_ones(repository: Path) -> None:
    with pytest.raises(UsageError, match="no validation 'modles'; legal: vision modules"):
        validate(repository / "generated" / "qwen3_vl", tiny=True, only=["modles"])


def test_the_rms_ratio_compares_two_errors() -> None:
    baseline = [torch.zeros(2)]
    assert rms_ratio(baseline, [torch.tensor([0.0, 2.0])], [torch.tensor([1.0, 0.0])]) == 0.5
    assert rms_ratio(baseline, baseline, baseline) == 0.0
    assert rms_ratio(baseline, baseline, [torch.ones(2)]) == math.inf
