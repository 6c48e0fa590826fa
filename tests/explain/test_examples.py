"""The examples of the pages are real: vlmgen says what the page shows, and not of the mended one.

How an example is produced stands in the page's `how`:

* `snippet`: the code is a module of a tiny package, `model.py` if the page names no file;
* `spec LINE`: the line of specs/qwen3_vl.yaml is replaced by the example;
* `command`: the command is run in a folder with specs/ and generated/;
* `legality`, `coverage`: the text on the right is replaced by the one on the left in the package;
* `test`: a function of this module;
* a path: the test that shows it, since it needs torch, a server or another plugin.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vlmgen.check.api import recorded_api
from vlmgen.check.contract import check_contract
from vlmgen.check.device_rules import check_device_rules
from vlmgen.check.finding import Finding
from vlmgen.check.integrity import check_integrity, check_overrides
from vlmgen.check.legality import check_legality, default_problems
from vlmgen.check.model_class import check_model_class
from vlmgen.check.source import read_package
from vlmgen.cli import app
from vlmgen.errors import SpecError, VlmgenError
from vlmgen.explain import Page, pages
from vlmgen.render import templates
from vlmgen.render.drift import drift
from vlmgen.render.environment import TemplateError, environment
from vlmgen.render.escaping import UnsafeValueError
from vlmgen.render.generate import generate
from vlmgen.spec.load import load_spec, load_spec_text
from vlmgen.spec.migrate import migrate_text

HEAD = (
    "import torch\nfrom torch import nn\nimport vllm_neuron.functional as NF\n"
    "import vllm_neuron.nn as neuron_nn\n\n"
)
ARCHITECTURE = "TinyForConditionalGeneration"
INPUTS = ["pixel_values", "image_grid_thw"]

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


def made_by(how: str) -> list[str]:
    return sorted(code for code, p in pages().items() if p.how.split(" ")[0] == how)


def test_every_page_says_how_its_example_is_produced(repository: Path) -> None:
    ways = ("snippet", "spec", "command", "legality", "coverage")
    for code, p in pages().items():
        way = p.how.split(" ")[0]
        if way == "test":
            assert f"test_{code.lower()}" in globals(), code
        elif way not in ways:
            assert code in (repository / way).read_text("utf-8"), f"{way} does not show {code}"


# --- code ---------------------------------------------------------------------------------------


def findings_of(root: Path, file: str, code: str) -> list[Finding]:
    """Findings of a tiny package with this code in one of its modules."""
    home = root / "package" / "vllm_neuron_tiny"
    home.mkdir(parents=True, exist_ok=True)
    for name in ("__init__.py", "config.py", "factory.py", "model.py"):
        (home / name).write_text(HEAD if name == "model.py" else "")
    (home / file).write_text(f"{HEAD if file == 'model.py' else ''}{code}\n")
    source = read_package(home.parent)
    api = recorded_api()
    return [
        *source.findings,
        *check_contract(source, api),
        *check_device_rules(source, api),
        *check_model_class(source, api, ARCHITECTURE, INPUTS),
    ]


def mended(p: Page) -> str:
    """The right code; where it is indented, it takes the place of the example's last lines."""
    if not p.right.startswith(" "):
        return p.right
    kept = p.wrong.splitlines()[: -len(p.right.splitlines())]
    return "\n".join([*kept, p.right])


@pytest.mark.parametrize("code", made_by("snippet"))
def test_code(code: str, tmp_path: Path) -> None:
    p = pages()[code]
    file = p.file or "model.py"
    found = [f.message for f in findings_of(tmp_path, file, p.wrong) if f.code == code]
    assert p.says in found
    if p.right:
        again = [f.message for f in findings_of(tmp_path, file, mended(p)) if f.code == code]
        assert p.says not in again


@pytest.mark.parametrize("code", made_by("legality"))
def test_parallel_sizes(code: str, edited: Callable[[str, str, str], Path], qwen3_vl_spec) -> None:
    p = pages()[code]
    source = read_package(edited(p.file, p.right, p.wrong))
    found = check_legality(source, load_spec(qwen3_vl_spec))
    assert p.says in [f.message for f in found if f.code == code]


@pytest.mark.slow
@pytest.mark.parametrize("code", made_by("coverage"))
def test_weights(code: str, edited: Callable[[str, str, str], Path], qwen3_vl_spec) -> None:
    from vlmgen.weights.coverage import check_coverage

    p, spec = pages()[code], load_spec(qwen3_vl_spec)
    smallest = spec.model_copy(update={"checkpoints": spec.checkpoints[:1]})
    found = check_coverage(read_package(edited(p.file, p.right, p.wrong)), smallest)
    messages = [f.message for f in found if f.code == code]
    assert any(message.startswith(p.says) for message in messages), messages


# --- specs --------------------------------------------------------------------------------------


def problems_of(text: str) -> list[tuple[str, str]]:
    try:
        load_spec_text(text, "x.yaml")
    except SpecError as error:
        return [(problem.code, problem.message) for problem in error.problems]
    return []


@pytest.mark.parametrize("code", made_by("spec"))
def test_specs(code: str, qwen3_vl_spec: Path) -> None:
    p = pages()[code]
    text, line = qwen3_vl_spec.read_text("utf-8"), p.how.removeprefix("spec ")
    assert text.count(f"\n{line}") >= 1
    assert (code, p.says) in problems_of(text.replace(f"\n{line}", f"\n{p.wrong}", 1))
    right = problems_of(text.replace(f"\n{line}", f"\n{p.right}", 1))
    assert code not in [found for found, _ in right]


# --- commands -----------------------------------------------------------------------------------


@pytest.fixture
def workplace(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a spec and its package, as the commands of the pages find them."""
    shutil.copytree(repository / "specs", tmp_path / "specs")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        repository / "generated" / "qwen3_vl", tmp_path / "generated" / "qwen3_vl", ignore=ignored
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("code", made_by("command"))
def test_commands(code: str, workplace: Path) -> None:
    p = pages()[code]
    program, *arguments = shlex.split(p.wrong.removeprefix("$ "))
    assert program == "vlmgen"
    result = runner.invoke(app, arguments)
    assert p.says in result.stderr.splitlines() and "Traceback" not in result.output
    if code != "VG904":  # its problems have codes of their own
        assert f"more: vlmgen explain {code}" in result.stderr.splitlines()


def says(code: str, error: VlmgenError) -> None:
    assert error.code == code
    assert error.message.startswith(pages()[code].says), error.message


# --- the rest, one by one -----------------------------------------------------------------------


def test_vg001(workplace: Path) -> None:
    from vlmgen.check.run import run_checks

    (workplace / "generated/qwen3_vl/spec.yaml").unlink()
    found = [f.message for f in run_checks([Path("generated/qwen3_vl")]) if f.code == "VG001"]
    assert found == [pages()["VG001"].says]


def test_vg003(workplace: Path) -> None:
    shutil.rmtree(workplace / "generated/qwen3_vl/.vlmgen")
    (finding,) = check_integrity(Path("generated/qwen3_vl"))
    assert (finding.code, finding.message) == ("VG003", pages()["VG003"].says)


def test_vg004(workplace: Path) -> None:
    with (workplace / "generated/qwen3_vl/README.md").open("a") as stream:
        stream.write("# mine\n")
    (finding,) = check_integrity(Path("generated/qwen3_vl"))
    assert (finding.code, finding.message) == ("VG004", pages()["VG004"].says)


def test_vg005(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copying, updating, _ = pages()["VG005"].wrong.splitlines()
    for line in (copying, updating):
        assert runner.invoke(app, shlex.split(line)[1:]).exit_code == 0
    newer = workplace / "newer"
    shutil.copytree(templates.directories()[0], newer)
    original = newer / "blocks/text/norm_rms.py.j2"
    original.write_text(f"# Another line.\n{original.read_text()}")
    monkeypatch.setattr(templates, "directories", lambda: (newer,))
    (finding,) = check_overrides(Path("generated/qwen3_vl"))
    assert (finding.code, finding.message) == ("VG005", pages()["VG005"].says)
    assert "+# Another line." in finding.detail
    mending = finding.fix.split("`")[1]
    assert runner.invoke(app, shlex.split(mending)[1:]).exit_code == 0
    assert check_overrides(Path("generated/qwen3_vl")) == []


def test_vg006(workplace: Path) -> None:
    p = pages()["VG006"]
    path = workplace / "generated/qwen3_vl/vllm_neuron_qwen3_vl/config.py"
    lines = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:3], f"{p.wrong}\n", *lines[3:]]), "utf-8")
    (finding,) = check_integrity(Path("generated/qwen3_vl"))
    assert (finding.code, finding.line, finding.message) == ("VG006", 4, p.says)


def test_vg007(workplace: Path) -> None:
    for spec in (workplace / "specs").glob("*.yaml"):
        if spec.stem != "qwen3_vl":
            spec.unlink()
    (workplace / "generated/qwen3_vl/README.md").unlink()
    found = drift(Path("specs"), Path("generated"))
    assert pages()["VG007"].says in [difference.message for difference in found]


def test_vg401(qwen3_vl_spec: Path) -> None:
    spec = load_spec(qwen3_vl_spec)
    neuron = spec.neuron.model_copy(update={"num_vision_tokens_buckets": (2048, 3000)})
    found = [message for message, _ in default_problems(spec.model_copy(update={"neuron": neuron}))]
    assert pages()["VG401"].says in found


def test_vg501(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "none.yaml")
    (problem,) = caught.value.problems
    assert (problem.code, problem.message) == ("VG501", pages()["VG501"].says)


def test_vg502(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"title: \xff\n")
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    (problem,) = caught.value.problems
    assert (problem.code, problem.message) == ("VG502", pages()["VG502"].says)


def test_vg531(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("extends: b.yaml\n")
    (tmp_path / "b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / "a.yaml")
    (problem,) = caught.value.problems
    assert (problem.code, problem.message) == ("VG531", pages()["VG531"].says)


def test_vg543() -> None:
    p = pages()["VG543"]
    with pytest.raises(SpecError) as caught:
        migrate_text(p.wrong)
    (problem,) = caught.value.problems
    assert (problem.code, problem.message) == ("VG543", p.says)
    assert "vllm_module: vllm.model_executor.models.qwen3_vl" in migrate_text(p.right).text


def test_vg906(workplace: Path) -> None:
    p = pages()["VG906"]
    shutil.copytree(workplace / "generated" / "qwen3_vl", workplace / "edited")
    (workplace / "edited" / "notes.py").write_text("")
    # The weights need torch; whether files are foreign does not.
    from vlmgen.check import run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "_spec_checks", lambda source, say: [])
        result = runner.invoke(app, shlex.split(p.wrong)[2:])
    assert (result.exit_code, result.stderr) == (4, f"{p.says}\n")


def test_vg911(workplace: Path) -> None:
    (workplace / "docs").mkdir()
    (workplace / "docs" / "serving.md").write_text("mine\n")
    with pytest.raises(VlmgenError) as caught:
        generate("specs/qwen3_vl.yaml", "docs")
    says("VG911", caught.value)


def test_vg912(workplace: Path) -> None:
    (workplace / "generated/qwen3_vl/README.md").write_text("mine\n")
    with pytest.raises(VlmgenError) as caught:
        generate("specs/qwen3_vl.yaml")
    says("VG912", caught.value)


def test_vg913(workplace: Path) -> None:
    (workplace / "elsewhere").mkdir()
    (workplace / "link").symlink_to("elsewhere")
    with pytest.raises(VlmgenError) as caught:
        generate("specs/qwen3_vl.yaml", "link")
    says("VG913", caught.value)


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")


def test_vg916(workplace: Path) -> None:
    config = workplace / "generated/qwen3_vl/vllm_neuron_qwen3_vl/config.py"
    replaced(config, "rope_theta: float = 5000000.0", "rope_theta: float = 2000000.0")
    replaced(workplace / "specs/qwen3_vl.yaml", "theta: 5000000", "theta: 1000000")
    p = pages()["VG916"]
    result = runner.invoke(app, shlex.split(p.wrong)[2:])
    assert (result.exit_code, result.stderr.splitlines()[0]) == (6, p.says)
    # The page of the markers shows what stands in the file now.
    shown, kept = pages()["VG006"].wrong, pages()["VG006"].right
    assert shown in config.read_text("utf-8")
    replaced(config, shown, kept)
    assert check_integrity(Path("generated/qwen3_vl")) == []


def test_vg917(workplace: Path) -> None:
    for family in ("qwen2_vl", "glm4v"):
        shutil.copytree(ROOT / "generated" / family, workplace / "generated" / family)
    for path in (workplace / "specs").glob("*.yaml"):
        text = path.read_text("utf-8")
        path.write_text(text.replace("vlmgen: 1", "vlmgn: 1"), "utf-8")
    p = pages()["VG917"]
    result = runner.invoke(app, shlex.split(p.wrong)[2:])
    assert result.exit_code == 3 and p.says in result.stderr.splitlines()
    assert result.stderr.endswith("more: vlmgen explain VG917\n")


def render(folder: Path, template: str, spec) -> str:
    (folder / "x.py.j2").write_text(template + "\n")
    return environment((folder,)).render_file("x.py.j2", {"spec": spec, "text": spec.text})


def test_vg914(tmp_path: Path, qwen3_vl_spec: Path) -> None:
    p, spec = pages()["VG914"], load_spec(qwen3_vl_spec)
    spec = spec.model_copy(update={"title": "A (B)"})
    with pytest.raises(UnsafeValueError) as caught:
        render(tmp_path, p.wrong, spec)
    says("VG914", caught.value)
    assert render(tmp_path, p.right, spec)


def test_vg915(tmp_path: Path, qwen3_vl_spec: Path) -> None:
    p, spec = pages()["VG915"], load_spec(qwen3_vl_spec)
    with pytest.raises(TemplateError) as caught:
        render(tmp_path, p.wrong, spec)
    says("VG915", caught.value)
    assert render(tmp_path, p.right, spec) == "WIDTH = 4096\n"
