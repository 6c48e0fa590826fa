"""From a spec file to a package: statuses, previews, determinism, and what counts as unchanged."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import black
import pytest

from tests.render.conftest import PATHS
from vlmgen.errors import OutputError, SpecError, UsageError
from vlmgen.render import generate as generation
from vlmgen.render import manifest, package, plan
from vlmgen.render.drift import drift
from vlmgen.render.environment import TemplateError
from vlmgen.render.format import LINE_LENGTH
from vlmgen.render.generate import generate
from vlmgen.render.package import render_package
from vlmgen.render.plan import spec_text
from vlmgen.render.publish import EditedFilesError, ForeignFilesError
from vlmgen.spec.load import load_spec, load_spec_text

Search = tuple[Path]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "generated" / "qwen3_vl"


def statuses(result: generation.GenerationResult) -> dict[str, str]:
    return dict(result.files)


def test_new_package(spec_path: Path, target: Path, search: Search) -> None:
    result = generate(spec_path, target, search=search)
    assert statuses(result) == dict.fromkeys(PATHS, "new") and result.written
    files = sorted(p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file())
    assert files == PATHS
    config = (target / "vllm_neuron_qwen3_vl/config.py").read_text()
    assert config == 'HIDDEN_SIZE = 4_096\nSECTIONS = (24, 20, 20)\nGREETING = "hello"\n'


def test_unchanged_regeneration_does_not_render(
    spec_path: Path, target: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(spec_path, target, search=search)

    def rendered(*arguments: object) -> None:
        raise AssertionError("rendered")

    monkeypatch.setattr(generation, "render_spec_file", rendered)
    result = generate(spec_path, target, search=search)
    assert statuses(result) == dict.fromkeys(PATHS, "unchanged")
    assert result.is_unchanged and not result.written


def test_unchanged_regeneration_imports_neither_jinja_nor_black(
    spec_path: Path, target: Path, search: Search
) -> None:
    generate(spec_path, target, search=search)
    script = (
        "import sys; from pathlib import Path; from vlmgen.render.generate import generate\n"
        "assert generate(sys.argv[1], sys.argv[2], search=(Path(sys.argv[3]),)).is_unchanged\n"
        "print(sorted({'jinja2', 'black', 'torch', 'pydantic', 'yaml'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(spec_path), str(target), str(search[0])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "[]\n"


def edit_spec(spec_path: Path, target: Path, search: Search) -> str:
    text = spec_path.read_text()
    spec_path.write_text(text.replace("title: Qwen3-VL", "title: Qwen3 VL (edited)"))
    return "vllm_neuron_qwen3_vl/__init__.py"


def edit_template(spec_path: Path, target: Path, search: Search) -> str:
    (search[0] / "utils/mrope.py.j2").write_text("A = 2\n")
    return "vllm_neuron_qwen3_vl/utils/mrope.py"


def edit_block(spec_path: Path, target: Path, search: Search) -> str:
    (search[0] / "blocks/greeting.py.j2").write_text("GREETING = 'hi'\n")
    return "vllm_neuron_qwen3_vl/config.py"


def store_results(spec_path: Path, target: Path, search: Search) -> str:
    results = spec_path.parent / "results" / "qwen3_vl.json"
    results.parent.mkdir()
    results.write_text('{"state": "validated"}')
    return "README.md"


@pytest.mark.parametrize("edit", [edit_spec, edit_template, edit_block, store_results])
def test_every_input_is_noticed(spec_path: Path, target: Path, search: Search, edit) -> None:
    generate(spec_path, target, search=search)
    changed = edit(spec_path, target, search)
    result = statuses(generate(spec_path, target, search=search))
    assert result[changed] == "changed" and result[".vlmgen/manifest.json"] == "changed"
    assert generate(spec_path, target, search=search).is_unchanged


def test_change_of_the_generator_is_noticed(
    spec_path: Path, target: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(spec_path, target, search=search)
    for module in (generation, package):
        monkeypatch.setattr(module, "generator_sha256", lambda: "1" * 64)
    result = statuses(generate(spec_path, target, search=search))
    assert {path for path, status in result.items() if status != "unchanged"} == {
        ".vlmgen/manifest.json"
    }


def test_generator_hash_covers_every_module_that_rendering_imports(
    qwen3_vl_spec: Path, repository: Path
) -> None:
    decides_nothing = {
        "__init__.py",
        "errors.py",
        "check/__init__.py",
        "render/__init__.py",
        "render/generate.py",
        "render/manifest.py",
        "render/paths.py",
        "render/publish.py",
        "render/templates.py",
        "spec/__init__.py",
        "spec/axes.py",
        "spec/load.py",
        "spec/source.py",
        "spec/types.py",
        "tiny/__init__.py",
        "weights/__init__.py",
    }
    script = SCRIPT + (
        "top = Path(sys.modules['vlmgen'].__file__).parent\n"
        "print('imported', *(Path(m.__file__).relative_to(top).as_posix()\n"
        "    for n, m in sorted(sys.modules.items()) if n.split('.')[0] == 'vlmgen'))"
    )
    output = subprocess.run(
        [sys.executable, "-c", script, str(qwen3_vl_spec)],
        capture_output=True,
        text=True,
        check=True,
        cwd=repository,
    ).stdout
    imported = {
        name for name in output.splitlines()[-1].split()[1:] if not name.startswith("spec/rules/")
    }
    assert imported - decides_nothing == set(manifest.GENERATOR)


def test_generator_hash_changes_with_each_module(tmp_path: Path) -> None:
    for name in (*manifest.GENERATOR, "cli.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    hashes = [manifest.generator_sha256(tmp_path)]
    (tmp_path / "cli.py").write_text("x = 2\n")
    assert manifest.generator_sha256(tmp_path) == hashes[0]
    for name in manifest.GENERATOR:
        (tmp_path / name).write_text("x = 2\n")
        hashes.append(manifest.generator_sha256(tmp_path))
    assert len(set(hashes)) == 1 + len(manifest.GENERATOR)


@pytest.mark.parametrize("older", [{"format": 0}, {"sources": None}, {"added": 1}])
def test_package_of_another_version_is_taken_over(
    spec_path: Path, target: Path, search: Search, older: dict[str, object]
) -> None:
    generate(spec_path, target, search=search)
    path = target / manifest.MANIFEST_PATH
    whole = path.read_bytes()
    body = {**json.loads(whole), **older}
    path.write_text(json.dumps({key: value for key, value in body.items() if value is not None}))
    (target / "README.md").write_text("edited")
    with pytest.raises(EditedFilesError, match="README.md"):
        generate(spec_path, target, search=search)
    assert generate(spec_path, target, search=search, force=True).written
    assert path.read_bytes() == whole


def test_quoted_data_is_noticed(
    spec_path: Path, target: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(spec_path, target, search=search)
    sources = json.loads((target / manifest.MANIFEST_PATH).read_text())["sources"]
    assert "tiny/families/qwen3_vl.json" in sources
    original = plan.source_bytes
    monkeypatch.setattr(plan, "source_bytes", lambda name: original(name) + b"\n")
    assert not generate(spec_path, target, search=search).is_unchanged


def test_template_that_renders_to_nothing_gives_no_file(
    spec_path: Path, target: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "{% if text.rope.kind == 'plain' %}\nA = 1\n{% endif %}\n"
    (search[0] / "utils/plain.py.j2").write_text(text)
    result = generate(spec_path, target, search=search)
    assert statuses(result) == dict.fromkeys(PATHS, "new")
    monkeypatch.setattr(generation, "render_spec_file", None)
    assert generate(spec_path, target, search=search).is_unchanged


def test_new_and_removed_templates_need_no_code(
    spec_path: Path, target: Path, search: Search
) -> None:
    generate(spec_path, target, search=search)
    (search[0] / "tests/test_more.py.j2").write_text("A = 1\n")
    (search[0] / "utils/mrope.py.j2").unlink()
    result = statuses(generate(spec_path, target, search=search))
    assert result["tests/test_more.py"] == "new"
    assert result["vllm_neuron_qwen3_vl/utils/mrope.py"] == "removed"
    assert not (target / "vllm_neuron_qwen3_vl/utils/mrope.py").exists()


@pytest.mark.parametrize("how", ["edited", "deleted"])
def test_touched_output_is_noticed(spec_path: Path, target: Path, search: Search, how: str) -> None:
    generate(spec_path, target, search=search)
    path = target / "README.md"
    whole = path.read_bytes()
    if how == "deleted":
        path.unlink()
        assert statuses(generate(spec_path, target, search=search))["README.md"] == "new"
    else:
        path.write_bytes(whole + b"mine\n")
        with pytest.raises(EditedFilesError, match="README.md"):
            generate(spec_path, target, search=search)
        assert path.read_bytes() == whole + b"mine\n"
        preview = generate(spec_path, target, search=search, diff=True)
        assert statuses(preview)["README.md"] == "edited" and "-mine" in preview.diff
        generate(spec_path, target, search=search, force=True)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("keywords", [{"dry_run": True}, {"diff": True}])
def test_previews_write_nothing(
    spec_path: Path, target: Path, search: Search, keywords: dict[str, bool]
) -> None:
    result = generate(spec_path, target, search=search, **keywords)
    assert statuses(result) == dict.fromkeys(PATHS, "new") and not result.written
    assert not target.parent.exists()
    generate(spec_path, target, search=search)
    changed = edit_template(spec_path, target, search)
    before = (target / changed).read_bytes()
    result = generate(spec_path, target, search=search, **keywords)
    assert statuses(result)[changed] == "changed"
    assert (target / changed).read_bytes() == before
    expected = f"--- a/{changed}\n+++ b/{changed}\n" if keywords.get("diff") else ""
    assert result.diff.startswith(expected) and bool(result.diff) == bool(expected)


def test_default_directory(
    spec_path: Path, tmp_path: Path, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert generate(spec_path, search=search).target == Path("generated/qwen3_vl")
    assert generate(spec_path, search=search).is_unchanged


def test_in_tree_layout(spec_path: Path, target: Path, search: Search) -> None:
    result = generate(spec_path, target, "in-tree", search=search)
    copied = [row.to.format(family="qwen3_vl") for row in plan.IN_TREE.copied]
    assert [path for path, _ in result.files if path not in copied] == [
        ".vlmgen/manifest.json",
        "tests/model/qwen3_vl/test_config.py",
        "vllm_neuron/model/qwen3_vl/__init__.py",
        "vllm_neuron/model/qwen3_vl/config.py",
        "vllm_neuron/model/qwen3_vl/utils/__init__.py",
        "vllm_neuron/model/qwen3_vl/utils/mrope.py",
    ]


def test_unknown_layout(spec_path: Path, target: Path) -> None:
    with pytest.raises(UsageError, match="legal are out-of-tree, in-tree"):
        generate(spec_path, target, "sideways")  # type: ignore[arg-type]


def test_foreign_directory_is_refused(spec_path: Path, target: Path, search: Search) -> None:
    target.mkdir(parents=True)
    (target / "mine").write_text("mine")
    for keywords in ({}, {"dry_run": True}, {"diff": True}, {"force": True}):
        with pytest.raises(ForeignFilesError, match="mine"):
            generate(spec_path, target, search=search, **keywords)
    assert os.listdir(target) == ["mine"]


def test_bad_spec_writes_nothing(spec_path: Path, target: Path, search: Search) -> None:
    spec_path.write_text(spec_path.read_text().replace("num_layers: 36", "num_layers: many", 1))
    with pytest.raises(SpecError):
        generate(spec_path, target, search=search)
    assert not target.parent.exists()


def test_bad_results_write_nothing(spec_path: Path, target: Path, search: Search) -> None:
    store_results(spec_path, target, search)
    (spec_path.parent / "results" / "qwen3_vl.json").write_text("[")
    with pytest.raises(OutputError, match="not JSON"):
        generate(spec_path, target, search=search)
    assert not target.parent.exists()


def test_template_that_is_no_python_writes_nothing(
    spec_path: Path, target: Path, search: Search
) -> None:
    (search[0] / "utils/mrope.py.j2").write_text("def f(:\n")
    with pytest.raises(TemplateError, match="utils/mrope.py: the rendered text is not Python"):
        generate(spec_path, target, search=search)
    assert not target.parent.exists()


def test_manifest_holds_hashes_only(spec_path: Path, target: Path, search: Search) -> None:
    generate(spec_path, target, search=search)
    text = (target / manifest.MANIFEST_PATH).read_text()
    body = json.loads(text)
    assert set(body["files"]) == {*PATHS} - {manifest.MANIFEST_PATH}
    for path, recorded in body["files"].items():
        assert recorded == manifest.sha256((target / path).read_bytes())
    assert set(body["templates"]) == {
        "blocks/greeting.py.j2",
        "package/README.md.j2",
        "package/__init__.py.j2",
        "package/config.py.j2",
        "package/pyproject.toml.j2",
        "tests/test_config.py.j2",
        "utils/__init__.py.j2",
        "utils/mrope.py.j2",
    }
    assert body["spec"] == manifest.sha256(spec_path.read_bytes())
    assert str(target.parent.parent) not in text


def test_resolved_spec_gives_the_same_package(
    qwen3_vl_spec: Path, tmp_path: Path, search: Search
) -> None:
    spec = load_spec(qwen3_vl_spec)
    again = load_spec_text(spec_text(spec))
    assert again == spec
    assert render_package(again, search=search).texts == render_package(spec, search=search).texts


def test_change_of_a_base_is_noticed(spec_path: Path, target: Path, search: Search) -> None:
    own = spec_path.with_name("own.yaml")
    own.write_text("extends: qwen3_vl.yaml\nfamily: own\n")
    target = target.with_name("own")
    generate(own, target, search=search)
    assert generate(own, target, search=search).is_unchanged
    edit_spec(spec_path, target, search)
    changed = {
        p for p, s in statuses(generate(own, target, search=search)).items() if s == "changed"
    }
    # The title is in one template of this test's, and in the resolved spec.
    assert changed == {
        ".vlmgen/manifest.json",
        "README.md",
        "spec.yaml",
        "vllm_neuron_own/__init__.py",
    }
    spec_path.write_text(spec_path.read_text() + "# a comment is a change of the base too\n")
    assert not generate(own, target, search=search).is_unchanged


def test_resolved_spec_of_a_package_needs_no_base(
    spec_path: Path, target: Path, search: Search
) -> None:
    own = spec_path.with_name("own.yaml")
    own.write_text("extends: qwen3_vl.yaml\nfamily: own\ntext: {rope: {theta: 10000}}\n")
    generate(own, target.with_name("own"), search=search)
    expected = load_spec(own)
    spec_path.unlink()
    own.unlink()
    resolved = target.with_name("own") / "spec.yaml"
    assert "extends" not in resolved.read_text()
    assert load_spec(resolved) == expected


def test_another_spec_changes_no_byte_of_a_package(
    spec_path: Path, target: Path, search: Search
) -> None:
    def content() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in target.rglob("*") if p.is_file()}

    generate(spec_path, target, search=search)
    before = content()
    other = spec_path.with_name("other.yaml")
    other.write_text("extends: qwen3_vl.yaml\nfamily: other\ntitle: Other\n")
    generate(other, target.with_name("other"), search=search)
    assert generate(spec_path, target, search=search).is_unchanged
    assert generate(spec_path, target, search=search, force=True).is_unchanged
    assert content() == before
    assert drift(spec_path.parent, target.parent, search) == []


def test_drift(spec_path: Path, target: Path, search: Search) -> None:
    specs, generated = spec_path.parent, target.parent
    (missing,) = drift(specs, generated, search)
    assert (missing.path, missing.kind) == ("qwen3_vl", "missing")
    generate(spec_path, target, search=search)
    assert drift(specs, generated, search) == []
    (target / "__pycache__").mkdir()
    (target / "__pycache__/x.pyc").write_text("cache")
    assert drift(specs, generated, search) == []
    (target / "README.md").write_text("edited\n")
    (target / "extra.txt").write_text("extra\n")
    (target / "spec.yaml").unlink()
    (generated / "unknown").mkdir()
    found = {d.path: d for d in drift(specs, generated, search)}
    assert {path: d.kind for path, d in found.items()} == {
        "qwen3_vl/README.md": "changed",
        "qwen3_vl/extra.txt": "extra",
        "qwen3_vl/spec.yaml": "missing",
        "unknown": "extra",
    }
    assert "\n-edited\n" in found["qwen3_vl/README.md"].diff
    assert "\n+family: qwen3_vl\n" in found["qwen3_vl/spec.yaml"].diff


def test_drift_names_a_spec_without_a_package(
    spec_path: Path, target: Path, search: Search
) -> None:
    generate(spec_path, target, search=search)
    other = spec_path.with_name("other.yaml")
    other.write_text("extends: qwen3_vl.yaml\nfamily: other\n")
    (missing,) = drift(spec_path.parent, target.parent, search)
    assert (missing.path, missing.kind, missing.diff) == ("other", "missing", "")
    assert missing.message == f"{target.parent / 'other'}: no package: run `vlmgen new {other}`"


def test_drift_of_a_template_without_regeneration(
    spec_path: Path, target: Path, search: Search
) -> None:
    generate(spec_path, target, search=search)
    changed = edit_block(spec_path, target, search)
    found = {d.path: d.kind for d in drift(spec_path.parent, target.parent, search)}
    assert found == {
        "qwen3_vl/.vlmgen/manifest.json": "changed",
        f"qwen3_vl/{changed}": "changed",
    }


def test_drift_refuses_two_specs_of_one_family(
    spec_path: Path, target: Path, search: Search
) -> None:
    (spec_path.parent / "copy.yaml").write_bytes(spec_path.read_bytes())
    with pytest.raises(OutputError, match="both name the family"):
        drift(spec_path.parent, target.parent, search)


def test_drift_without_specs(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no specs"):
        drift(tmp_path, tmp_path)


# The committed packages, from the templates that ship.


def committed_modules(repository: Path) -> list[Path]:
    return sorted(
        path
        for directory in (repository / "generated").iterdir()
        if (directory / manifest.MANIFEST_PATH).is_file()
        for path in directory.rglob("*.py")
        if ".vlmgen" not in path.parts
    )


def test_committed_packages_are_formatted_and_mean_what_was_rendered(repository: Path) -> None:
    """black in full: both passes, and the comparison of syntax trees."""
    mode = black.Mode(target_versions={black.TargetVersion.PY311}, line_length=LINE_LENGTH)
    modules = committed_modules(repository)
    assert modules
    for path in modules:
        text = path.read_text(encoding="utf-8")
        ast.parse(text)
        with pytest.raises(black.NothingChanged):
            black.format_file_contents(text, fast=False, mode=mode)
            pytest.fail(f"{path} is not as black writes it")


def test_formatting_keeps_the_meaning(qwen3_vl_spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The syntax tree of every rendered module is the same before and after formatting."""
    from vlmgen.render import format as formatting

    checked: list[str] = []
    original = formatting.format_python

    def compare(text: str, path: str) -> str:
        formatted = original(text, path)
        black.assert_equivalent(text, formatted)
        checked.append(path)
        return formatted

    monkeypatch.setattr(formatting, "format_python", compare)
    monkeypatch.setattr(formatting, "_may_fork", lambda: False)
    rendered = render_package(load_spec(qwen3_vl_spec))
    assert len(checked) > 10 and set(checked) <= set(rendered.texts)


SCRIPT = """
import sys
from pathlib import Path
from vlmgen.render.generate import render_spec_file
from vlmgen.render.manifest import sha256
_, files = render_spec_file(Path(sys.argv[1]))
for path in sorted(files):
    print(sha256(files[path]), path)
"""


def rendered_by(python: str, spec: Path, seed: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(cwd)}
    run = subprocess.run(
        [python, "-c", SCRIPT, str(spec)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=spec.parent,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_bytes_do_not_depend_on_hash_seed_or_process(qwen3_vl_spec: Path, repository: Path) -> None:
    outputs = {
        rendered_by(sys.executable, qwen3_vl_spec, seed, repository) for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    assert "vllm_neuron_qwen3_vl/model.py" in outputs.pop()


def test_formatting_in_two_processes_gives_the_same(
    qwen3_vl_spec: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vlmgen.render import format as formatting

    monkeypatch.setattr(formatting, "_may_fork", lambda: False)
    _, files = generation.render_spec_file(qwen3_vl_spec)
    one = "".join(f"{manifest.sha256(files[path])} {path}\n" for path in sorted(files))
    assert rendered_by(sys.executable, qwen3_vl_spec, "0", repository) == one
