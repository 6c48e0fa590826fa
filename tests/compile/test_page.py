"""The HTML page of `vlmgen compile`; tests/compile/test_run.py makes one of real graphs."""

from __future__ import annotations

from html.parser import HTMLParser

from vlmgen.compile.build import BuiltGraph
from vlmgen.compile.calls import Call
from vlmgen.compile.findings import Finding, Place
from vlmgen.compile.graphs import Deployment, Graph
from vlmgen.compile.page import page
from vlmgen.compile.report import CompileReport, GraphReport

DEPLOYMENT = Deployment(256, 32, (256,), (2,), (512,), 256)


class Tags(HTMLParser):
    """Every element that is opened, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.opened.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_graph_that_could_not_be_exported_is_on_the_page_as_it_was_written() -> None:
    graph = Graph("decode", 2)
    line = Place("model.py", 7, "forward", "if hidden.sum() > 0: <b>")
    fault = Finding("value-dependent-branch", "error", graph.name, "a <i>", "why", "legal", line)
    built = BuiltGraph(Call(graph, None, {}), findings=[fault])
    own = GraphReport(graph, DEPLOYMENT.why(graph), built)
    report = CompileReport("<script>", "a & b", "tiny", DEPLOYMENT, [own])

    seen = Tags(page(report))
    assert not {"script", "b"} & set(seen.opened) and seen.opened.count("li") == 1
    assert "<script>: compiled graphs" in seen.text and "a & b" in seen.text
    assert "if hidden.sum() > 0: <b>" in seen.text and "model.py:7" in seen.text
    assert "FAIL" in seen.text and "VG615" in seen.text
