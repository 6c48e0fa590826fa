"""Every finding of a compiled graph has a code and a page whose example is real."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from vlmgen.compile.findings import CODES, Finding, Sources
from vlmgen.explain import pages

HEAD = "import torch\nfrom torch import nn\n\n"
INPUTS = {
    "x": torch.linspace(-1, 1, 64).reshape(4, 16),
    "place": torch.tensor(3),
    "rows": torch.tensor([3, 1, 0, 2]),
    "columns": torch.tensor([[7, 1], [0, 5], [2, 3], [4, 4]]),
    "edges": torch.linspace(-1, 1, 5),
    "noise": torch.zeros(4, 16),
}
EXAMPLES = (
    "VG601", "VG602", "VG604", "VG605", "VG606", "VG607", "VG608", "VG609", "VG610", "VG611",
    "VG612", "VG613", "VG614", "VG615", "VG616", "VG617", "VG618", "VG619", "VG620",
)  # fmt: skip


def test_every_rule_has_a_code_and_a_page() -> None:
    from vlmgen.compile.census import DENIED

    denied = [entry["rule"] for entry in yaml.safe_load(DENIED.read_text(encoding="utf-8"))]
    assert set(denied) < set(CODES) and len(set(CODES.values())) == len(CODES)
    assert {code for code in pages() if code[2] == "6"} == set(CODES.values())
    assert set(EXAMPLES) == set(CODES.values()) - {"VG603"}


def findings_of(code: str, folder: Path) -> list[Finding]:
    """What compiling the class `Layer` of some code finds."""
    from vlmgen.compile.artifacts import ArtifactCache
    from vlmgen.compile.build import GraphBuilder
    from vlmgen.compile.calls import Call
    from vlmgen.compile.graphs import Graph

    package = folder / "package"
    package.mkdir(parents=True)
    (package / "model.py").write_text(f"{HEAD}{code}\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"example_{folder.name}", package / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where torch.export looks a frame's module up
    spec.loader.exec_module(module)
    layer = module.Layer()
    names = inspect.signature(layer.forward).parameters
    call = Call(Graph("decode", 4), layer, {name: INPUTS[name].clone() for name in names})
    return GraphBuilder(package, ArtifactCache(folder / "cache")).build(call).findings


@pytest.mark.needs_jax
@pytest.mark.parametrize("code", EXAMPLES)
def test_the_example_of_a_page_is_found_and_the_mended_one_is_not(
    code: str, tmp_path: Path
) -> None:
    page = pages()[code]
    found = [f for f in findings_of(page.wrong, tmp_path / "wrong") if f.code == code]
    assert found and page.says in found[0].message, found
    assert found[0].place.path == "model.py"
    assert f" {code} {found[0].rule}: " in str(found[0])
    if page.right:
        right = page.right
        if right.startswith(" "):  # it takes the place of the example's last lines
            first = page.wrong.splitlines()[: -len(right.splitlines()) - 1]
            right = "\n".join([*first, right])
        again = findings_of(right, tmp_path / "right")
        assert code not in {f.code for f in again}
        assert "error" not in {f.severity for f in again}, list(map(str, again))


@pytest.mark.needs_jax
def test_a_size_that_is_not_known_is_found() -> None:
    """VG603: no export has one, so the program is JAX's own, with a size that has only a name."""
    from vlmgen.compile import torchax_import
    from vlmgen.compile.census import denied, operators_of

    jax = torchax_import.load().jax
    (size,) = jax.export.symbolic_shape("size")
    lowered = jax.jit(lambda x: x + 1.0).lower(jax.ShapeDtypeStruct((size, 8), "float32"))
    call = SimpleNamespace(graph=SimpleNamespace(name="decode-4"))
    found = denied(operators_of(lowered), SimpleNamespace(call=call), Sources(Path("none")))
    assert {finding.code for finding in found} == {"VG603"}
    assert found[0].message == pages()["VG603"].says
