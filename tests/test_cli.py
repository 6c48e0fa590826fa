"""The command line: exit codes, messages, JSON, start-up cost."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import vlmgen
from tests.render.conftest import TEMPLATES
from vlmgen import cli
from vlmgen.check.finding import Finding
from vlmgen.errors import CheckFailed, VlmgenError
from vlmgen.terminal import progress

ROOT = Path(__file__).resolve().parents[1]
SPEC = ROOT / "specs" / "qwen3_vl.yaml"
COMMANDS = (
    "new",
    "diff",
    "update",
    "adopt",
    "check",
    "validate",
    "tiny",
    "show",
    "parallel",
    "import",
    "families",
    "schema",
    "serve",
    "ask",
    "doctor",
    "compare",
    "explain",
    "migrate",
    "watch",
)

runner = CliRunner()


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -m vlmgen` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "vlmgen", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", **env},
        timeout=60,
    )


@pytest.fixture
def broken_spec(tmp_path: Path) -> Path:
    """A spec with two faults."""
    path = tmp_path / "broken.yaml"
    text = SPEC.read_text(encoding="utf-8")
    text = text.replace("sections: [24, 20, 20]", "sections: [24, 20, 24]")
    path.write_text(text.replace("bounds: frame", "bounds: fram"), encoding="utf-8")
    return path


@pytest.fixture
def module(monkeypatch):
    """Put a stand-in module where a command imports its work from."""

    def install(name: str, **functions):
        fake = types.ModuleType(name)
        for key, value in functions.items():
            setattr(fake, key, value)
        monkeypatch.setitem(sys.modules, name, fake)

    return install


# --- help, version, usage ---------------------------------------------------------------------


def test_help_names_every_command_and_the_exit_codes():
    result = run("--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert command in result.stdout
    text = " ".join(result.stdout.split())
    assert "2 usage, 3 bad spec, 4 check failed, 5 validation failed, 6 conflict or" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command):
    result = runner.invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: vlmgen {command}" in " ".join(result.stdout.split())


def test_version():
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"vlmgen {vlmgen.__version__}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["show"],
        ["show", str(SPEC), "--nonsense"],
        ["new", str(SPEC), "--layout", "sideways"],
        ["parallel", str(SPEC), "--world-size", "0"],
        ["parallel", str(SPEC), "--checkpoint", "Qwen3-VL-7B"],
        ["show", str(SPEC), "--checkpoint", "Qwen3-VL-7B"],
        ["check"],
        ["check", "pkg", "--all"],
        ["validate", "pkg"],
        ["validate", "pkg", "--tiny", "--checkpoint", "dir"],
    ],
)
def test_usage_errors_exit_2_without_a_traceback(arguments):
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert result.stderr.strip()


def test_unknown_checkpoint_lists_the_known_ones():
    result = runner.invoke(cli.app, ["parallel", str(SPEC), "--checkpoint", "Qwen3-VL-7B"])
    assert "Qwen3-VL-8B-Instruct" in result.stderr


# --- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["show", "parallel"])
def test_bad_spec_exits_3_with_every_problem_on_stderr(broken_spec, command):
    result = run(command, str(broken_spec))
    assert result.returncode == 3
    assert result.stdout == ""
    assert f"{broken_spec}:36:15: VG521 M-RoPE sections 24 + 20 + 24 = 68" in result.stderr
    assert "did you mean 'frame'?" in result.stderr
    assert result.stderr.endswith("2 problems in the spec\n")
    assert "Traceback" not in result.stderr


def test_new_with_a_bad_spec_exits_3_and_writes_nothing(broken_spec, tmp_path):
    result = run("new", str(broken_spec), "--out", str(tmp_path / "out"))
    assert result.returncode == 3
    assert not (tmp_path / "out").exists()


def test_bad_spec_as_json(broken_spec):
    result = runner.invoke(cli.app, ["show", str(broken_spec), "--json"])
    assert result.exit_code == 3
    first, second = json.loads(result.stdout)["problems"]
    assert (first["path"], first["line"], first["column"]) == ("text.rope.sections", 36, 15)
    assert second["path"] == "vision.attention.bounds"


def test_missing_spec_exits_3():
    result = runner.invoke(cli.app, ["show", "none.yaml"])
    assert result.exit_code == 3
    assert "none.yaml: VG501 no such file" in result.stderr


@pytest.mark.parametrize("code", [2, 3, 4, 5])
def test_user_error_ends_with_its_code_message_and_hint(monkeypatch, code):
    error = VlmgenError("it is wrong", hint="mend it")
    error.exit_code = code
    monkeypatch.setattr("vlmgen.spec.load.load_spec", raiser(error))
    result = runner.invoke(cli.app, ["show", str(SPEC)])
    assert result.exit_code == code
    assert result.stderr == "it is wrong\nhint: mend it\n"


def test_fault_of_vlmgen_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("vlmgen.spec.load.load_spec", raiser(ZeroDivisionError("a bug")))
    result = runner.invoke(cli.app, ["show", str(SPEC)])
    assert isinstance(result.exception, ZeroDivisionError)


def test_interrupt_exits_130(monkeypatch):
    monkeypatch.setattr("vlmgen.spec.load.load_spec", raiser(KeyboardInterrupt()))
    result = runner.invoke(cli.app, ["show", str(SPEC)])
    assert result.exit_code == 130
    assert result.stderr == "interrupted\n"


def test_closed_pipe_is_quiet():
    process = subprocess.Popen(
        [sys.executable, "-m", "vlmgen", "schema"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0


def test_missing_extra_names_it():
    with pytest.raises(ModuleNotFoundError):
        with cli.needs_extra("cpu"):
            raise ModuleNotFoundError("No module named 'left_pad'", name="left_pad")
    with pytest.raises(VlmgenError) as caught:
        with cli.needs_extra("cpu"):
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
    assert "torch is not installed; this command needs the extra 'cpu'" in str(caught.value)
    assert caught.value.hint == "pip install 'vlmgen[cpu]'"
    assert caught.value.code == "VG903"


def raiser(error: BaseException):
    def function(*arguments, **keywords):
        raise error

    return function


# --- show, parallel, schema -------------------------------------------------------------------


def test_show_prints_both_towers_checkpoints_and_weights():
    result = run("show", str(SPEC))
    assert result.returncode == 0
    for part in (
        "vision tower  576.4 M",
        "level 2       block 24 -> merger (layer norm after_merge) -> decoder layer 2",
        "mrope interleaved t:24 h:20 w:20",
        "<|image_pad|>",
        "Qwen3-VL-32B-Thinking",
        "512 merged rows of 16384",
        "layers.{layer}.self_attn.q_proj.weight",
        "layout flat: text model.  vision visual.",
    ):
        assert part in result.stdout
    assert "\x1b" not in result.stdout


# Lines of each family's own parts; what a family has not is not shown.
PARTS = {
    "qwen3_vl": ("pos_embed     learned_bilinear, table 48 x 48", "deepstack     3 levels"),
    "qwen3_vl_moe": ("experts                    8 of 128, swiglu 2048 -> 768", "128 of 1536"),
    "qwen2_vl": ("mrope contiguous t:16 h:24 w:24", "1280 -> 5120 -> 1280, quick_gelu"),
    "qwen2_5_vl": (
        "within windows of 112 x 112 pixels, in blocks 7, 15, 23, 31 one frame",
        "positions mrope_block, 2 a second (second_per_grid_ts)",
    ),
    "paddleocr_vl": ("patches_raster", "final_norm    layer", "merger mlp_AR."),
    "glm4v": ("embed_norm    rms", "post_mlp_layernorm", "adjacent pairs, 64 of 128"),
    "glm4v_moe": (
        "sigmoid_bias, renormalized, 1 shared, in layers from 1 on, stored per_expert",
        "swiglu 4096 -> 10944 -> 4096, silu, in the first 1",
        "swiglu 4096 -> 10944 -> 4096, gelu",
        "<|begin_of_video|>",
    ),
    "internvl": ("class_token   first", "table 32 x 32 + 1 x 1024", "scale2        1024", "plain,"),
    "internvl_6b": ("q/k norm full_width_rms, bias on the output only",),
    "internvl3_5": ("q/k norm head_rms_pre_rope",),
    "internvl3_5_moe": ("8 of 128, swiglu 2048 -> 768 -> 2048, router softmax",),
}


def test_every_family_has_parts_to_show():
    assert sorted(PARTS) == sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


@pytest.mark.parametrize("family", PARTS)
def test_show_prints_the_parts_of_every_family(family):
    spec = ROOT / "specs" / f"{family}.yaml"
    result = runner.invoke(cli.app, ["show", str(spec)])
    assert result.exit_code == 0, result.output
    for part in PARTS[family]:
        assert part in result.stdout
    parts, _, weights = result.stdout.partition("Weights")
    assert "None" not in parts
    if family == "qwen2_vl":  # the plainest
        absent = ("pos_embed", "class_token", "final_norm", "experts", "deepstack", "scale1")
        assert not [part for part in absent if part in parts]
    data = json.loads(runner.invoke(cli.app, ["show", str(spec), "--json"]).stdout)
    assert data["spec"]["family"] == family
    assert set(data["derived"]) == {c["name"] for c in data["spec"]["checkpoints"]}


@pytest.mark.parametrize("family", PARTS)
def test_parallel_of_every_family(family):
    spec = ROOT / "specs" / f"{family}.yaml"
    result = runner.invoke(cli.app, ["parallel", str(spec), "--json"])
    assert result.exit_code == 0, result.output
    for table in json.loads(result.stdout):
        assert table["text"][0]["legal"], table["checkpoint"]
        assert any(split["legal"] for split in table["vision"]["1"])


def test_show_with_the_sizes_of_a_checkpoint():
    result = runner.invoke(cli.app, ["show", str(SPEC), "--checkpoint", "Qwen3-VL-2B-Instruct"])
    assert "level 0       block 5 " in result.stdout
    assert "tied to embed_tokens" in result.stdout


def test_show_as_json():
    data = json.loads(runner.invoke(cli.app, ["show", str(SPEC), "--json"]).stdout)
    assert data["spec"]["text"]["rope"]["sections"] == [24, 20, 20]
    assert data["derived"]["Qwen3-VL-2B-Instruct"]["fat_width"] == 8192
    assert data["weights"]["text_layer"]


def test_parallel_gives_a_reason_for_each_illegal_size():
    arguments = ["parallel", str(SPEC), "--checkpoint", "Qwen3-VL-2B-Instruct"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert "heads per rank: 16 / 16 = 1 is odd" in result.stdout


def test_parallel_as_json():
    result = runner.invoke(cli.app, ["parallel", str(SPEC), "--json", "--world-size", "2"])
    tables = {table["checkpoint"]: table for table in json.loads(result.stdout)}
    assert len(tables) == 4
    (text,) = tables["Qwen3-VL-8B-Instruct"]["text"]
    assert (text["tp"], text["legal"], text["qkv_width"]) == (2, True, 3072)
    assert "wrong results were reported" in text["warnings"][0]
    splits = tables["Qwen3-VL-8B-Instruct"]["vision"]["2"]
    assert [(s["tp"], s["dp"], s["legal"]) for s in splits] == [(1, 2, True), (2, 1, True)]


def test_schema_is_the_committed_file(tmp_path):
    committed = (ROOT / "vlmgen" / "spec" / "schema.json").read_text(encoding="utf-8")
    assert runner.invoke(cli.app, ["schema"]).stdout == committed
    out = tmp_path / "schema.json"
    assert runner.invoke(cli.app, ["schema", "--out", str(out)]).exit_code == 0
    assert out.read_text(encoding="utf-8") == committed
    assert list(tmp_path.iterdir()) == [out]


def test_schema_into_a_missing_directory(tmp_path):
    result = runner.invoke(cli.app, ["schema", "--out", str(tmp_path / "none" / "x.json")])
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in result.stderr


# --- commands whose work lies elsewhere: what is passed on, what comes back --------------------


@dataclass(frozen=True)
class Result:
    target: Path
    files: tuple[tuple[str, str], ...]
    diff: str = ""
    written: bool = True


@pytest.fixture
def generate(monkeypatch):
    """Records the calls of `generate` and returns a fixed result."""
    calls: list[dict] = []

    def record(spec, **keywords):
        calls.append({"spec": spec, **keywords})
        diff = "--- a/x\n+++ b/x\n" if keywords["diff"] else ""
        files = (("a.py", "new"), ("b.py", "unchanged"))
        return Result(Path("generated/q"), files, diff)

    monkeypatch.setattr("vlmgen.render.generate.generate", record)
    return calls


def test_new_passes_its_options_on(generate):
    result = runner.invoke(cli.app, ["new", "s.yaml", "-o", "out", "--layout", "in-tree"])
    assert result.exit_code == 0
    assert generate == [
        {
            "spec": Path("s.yaml"),
            "out": Path("out"),
            "layout": "in-tree",
            "dry_run": False,
            "diff": False,
            "force": False,
            "templates": None,
        }
    ]
    assert result.stdout.splitlines() == [
        "new       a.py",
        "wrote generated/q: 1 changed, 1 unchanged",
    ]


def test_new_dry_run_says_so(generate):
    result = runner.invoke(cli.app, ["new", "s.yaml", "--dry-run"])
    assert generate[0]["dry_run"] is True
    assert "would write generated/q: 1 changed" in result.stdout


def test_new_diff_prints_the_diff_alone(generate):
    result = runner.invoke(cli.app, ["new", "s.yaml", "--diff"])
    assert result.stdout == "--- a/x\n+++ b/x\n"


def test_new_as_json(generate):
    data = json.loads(runner.invoke(cli.app, ["new", "s.yaml", "--json"]).stdout)
    assert data["files"][0] == {"path": "a.py", "status": "new"}
    assert data["written"] is True


FINDING = Finding("pkg/model.py", 7, "VG103", "call has keyword x", "remove it")


def test_check_prints_a_line_per_finding_and_exits_4(module):
    module("vlmgen.check.run", run_checks=lambda packages, plugin, progress: [FINDING])
    result = runner.invoke(cli.app, ["check", "pkg"])
    assert result.exit_code == 4
    assert result.stdout == f"{FINDING}\n"
    assert result.stderr == "1 finding\n"


def test_check_without_findings(module):
    seen = []

    def run_checks(packages, plugin, progress):
        progress("pkg")
        seen.append((packages, plugin))
        return []

    module("vlmgen.check.run", run_checks=run_checks)
    result = runner.invoke(cli.app, ["check", "a", "b", "--plugin", "installed"])
    assert (result.exit_code, result.stdout) == (0, "checked 2 package(s): no findings\n")
    assert seen == [([Path("a"), Path("b")], "installed")]


def test_check_all_shows_drift_and_exits_4(module, monkeypatch, tmp_path):
    @dataclass
    class Difference:
        path: str
        kind: str
        message: str
        diff: str

    package = tmp_path / "q"
    package.mkdir()
    (package / "pyproject.toml").write_text("")
    (tmp_path / "notes").mkdir()
    difference = Difference("q/x.py", "changed", "q/x.py: differs", "-old\n+new\n")
    monkeypatch.setattr(
        "vlmgen.render.drift.drift", lambda specs, generated, templates: [difference]
    )
    seen = []
    module(
        "vlmgen.check.run",
        run_checks=lambda packages, plugin, progress, processes: seen.append(packages) or [],
    )
    arguments = ["check", "--all", "--generated", str(tmp_path)]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 4
    assert result.stdout == "drift: VG007 q/x.py: differs\n-old\n+new\n"
    assert seen == [[package]]
    data = json.loads(runner.invoke(cli.app, [*arguments, "--json"]).stdout)
    assert data["drift"][0]["kind"] == "changed"


def test_check_as_json(module):
    module("vlmgen.check.run", run_checks=lambda packages, plugin, progress: [FINDING])
    result = runner.invoke(cli.app, ["check", "pkg", "--json"])
    assert result.exit_code == 4
    (row,) = json.loads(result.stdout)["findings"]
    assert (row["code"], row["line"], row["fix"]) == ("VG103", 7, "remove it")


def test_check_prints_the_details_of_a_finding(module):
    finding = Finding("mine/x.j2", 1, "VG005", "changed", "copy it", detail="-old\n+new\n")
    module("vlmgen.check.run", run_checks=lambda packages, plugin, progress: [finding])
    result = runner.invoke(cli.app, ["check", "pkg"])
    assert result.stdout == f"{finding}\n-old\n+new\n"
    data = json.loads(runner.invoke(cli.app, ["check", "pkg", "--json"]).stdout)
    assert data["findings"][0]["detail"] == "-old\n+new\n"


@dataclass(frozen=True)
class Row:
    name: str
    error: float
    passed: bool


@dataclass(frozen=True)
class Report:
    rows: list[Row]

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def to_json(self) -> str:
        return "{}\n"

    def to_html(self) -> str:
        return "<html></html>\n"


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 5)])
def test_validate_prints_rows_and_writes_reports(module, tmp_path, passed, code):
    calls = []

    def validate(package, **keywords):
        calls.append((package, keywords))
        return Report([Row("rms_norm", 1.5e-7, True), Row("logits", 0.25, passed)])

    module("vlmgen.validate.run", validate=validate)
    files = [tmp_path / "r.json", tmp_path / "r.html"]
    result = runner.invoke(
        cli.app,
        ["validate", "pkg", "--tiny", "--json", str(files[0]), "--html", str(files[1]),
         "--only", "logits"],
    )  # fmt: skip
    assert result.exit_code == code
    assert "1.5e-07" in result.stdout
    assert [path.read_text() for path in files] == ["{}\n", "<html></html>\n"]
    ((package, keywords),) = calls
    assert package == Path("pkg")
    assert keywords["tiny"] is True
    assert keywords["only"] == ["logits"]
    if not passed:
        assert "FAIL" in result.stdout
        assert result.stderr == "1 of 2 validations failed\nmore: vlmgen explain VG907\n"


def test_tiny_passes_its_options_on(module):
    calls = []
    module("vlmgen.tiny.build", build_tiny=lambda *a, **k: calls.append((a, k)))
    result = runner.invoke(cli.app, ["tiny", "s.yaml", "out", "--seed", "3", "--tied"])
    assert result.exit_code == 0
    expected = {"seed": 3, "tied": True, "as_saved": False}
    assert calls == [((Path("s.yaml"), Path("out")), expected)]


# --- packages over time ------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with a spec and its package, the working directory."""
    (tmp_path / "specs").mkdir()
    shutil.copy(SPEC, tmp_path / "specs")
    monkeypatch.chdir(tmp_path)
    # A few templates render quickly.
    templates = tmp_path / "packaged"
    for name, text in TEMPLATES.items():
        (templates / name).parent.mkdir(parents=True, exist_ok=True)
        (templates / name).write_text(text)
    monkeypatch.setattr("vlmgen.render.templates.directories", lambda: (templates,))
    assert runner.invoke(cli.app, ["new", "specs/qwen3_vl.yaml"]).exit_code == 0
    return tmp_path


CONFIG = "vllm_neuron_qwen3_vl/config.py"


def conflict_in(project):
    """Change one line by hand and in its template."""
    path = project / "generated/qwen3_vl" / CONFIG
    path.write_text(path.read_text().replace("4_096", "4_097"))
    template = project / "packaged/package/config.py.j2"
    template.write_text(template.read_text().replace("{{ text.hidden_size | num }}", "8_192"))


def test_update_carries_an_edit_and_says_so(project):
    path = project / "generated/qwen3_vl" / CONFIG
    path.write_text(path.read_text().replace("hello", "hello, reader"))
    (project / "packaged/utils/mrope.py.j2").write_text("A = 1\n")
    result = runner.invoke(cli.app, ["update", "generated/qwen3_vl"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        f"edited    generated/qwen3_vl/{CONFIG}",
        "changed   generated/qwen3_vl/vllm_neuron_qwen3_vl/utils/mrope.py",
        "updated generated/qwen3_vl: 1 changed, 1 edited, 8 unchanged",
    ]
    result = runner.invoke(cli.app, ["update", "--all"])
    assert result.stdout.splitlines()[-1] == ("left generated/qwen3_vl: 1 edited, 9 unchanged")


def test_update_with_a_conflict_exits_6_and_lists_the_lines(project):
    conflict_in(project)
    for again in ("", "again"):
        result = runner.invoke(cli.app, ["update", "generated/qwen3_vl"])
        assert result.exit_code == 6, again
        assert f"conflict  generated/qwen3_vl/{CONFIG}:1-5\n" in result.stdout
        assert result.stderr.startswith("1 conflict in 1 file\nhint: edit the files until")
    result = runner.invoke(cli.app, ["update", "generated/qwen3_vl", "--on-conflict", "ours"])
    assert result.exit_code == 0
    assert f"edited    generated/qwen3_vl/{CONFIG}  (1 conflict settled)" in result.stdout


def test_update_that_must_not_conflict_changes_nothing(project):
    conflict_in(project)
    path = project / "generated/qwen3_vl" / CONFIG
    before = path.read_bytes()
    result = runner.invoke(cli.app, ["update", "--all", "--on-conflict", "fail"])
    assert result.exit_code == 6 and path.read_bytes() == before
    assert result.stderr.startswith("1 conflict in 1 file; nothing was written")


def test_update_as_json(project):
    conflict_in(project)
    result = runner.invoke(cli.app, ["update", "generated/qwen3_vl", "--json"])
    assert result.exit_code == 6
    (package,) = json.loads(result.stdout)["packages"]
    assert package["written"] is True and package["spec"] == "specs/qwen3_vl.yaml"
    files = {file["path"]: file for file in package["files"]}
    assert (files[CONFIG]["status"], files[CONFIG]["conflicts"]) == ("conflict", [[1, 5]])


def test_update_of_the_working_directory(project, monkeypatch):
    (project / "packaged/utils/mrope.py.j2").write_text("A = 1\n")
    monkeypatch.chdir(project / "generated/qwen3_vl")
    result = runner.invoke(cli.app, ["update"])
    assert result.exit_code == 0
    assert "note: the working directory was replaced" in result.stdout
    monkeypatch.chdir(project)
    result = runner.invoke(cli.app, ["update"])
    assert result.exit_code == 2 and "is not a package" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["generated/qwen3_vl", "--all"],
        ["--all", "--spec", "specs/qwen3_vl.yaml"],
        ["generated/qwen3_vl", "--on-conflict", "sideways"],
        ["generated/qwen3_vl", "--spec", "absent.yaml", "--templates", "absent"],
        ["generated/absent"],
    ],
)
def test_usage_errors_of_update(project, arguments):
    result = runner.invoke(cli.app, ["update", *arguments])
    assert result.exit_code == 2 and result.stderr.strip()


def test_adopt_reports_and_takes_over(project):
    package = project / "generated/qwen3_vl"
    shutil.rmtree(package / ".vlmgen")
    (package / CONFIG).write_text("MINE = 1\n")
    arguments = ["adopt", "generated/qwen3_vl", "--spec", "specs/qwen3_vl.yaml"]
    result = runner.invoke(cli.app, [*arguments, "--dry-run", "--diff"])
    assert result.exit_code == 0 and "+MINE = 1\n" in result.stdout
    assert f"differs   {CONFIG}  +1 -3\n" in result.stdout
    assert "would adopt generated/qwen3_vl: 9 as generated, 1 edited" in result.stdout
    data = json.loads(runner.invoke(cli.app, [*arguments, "--json"]).stdout)
    assert data["written"] is True
    assert runner.invoke(cli.app, arguments).exit_code == 2
    assert runner.invoke(cli.app, ["update", "generated/qwen3_vl"]).exit_code == 0


def test_templates_are_listed_shown_and_copied(project):
    block = "blocks/greeting.py.j2"
    assert f"packaged   {block}\n" in runner.invoke(cli.app, ["templates", "list"]).stdout
    shown = runner.invoke(cli.app, ["templates", "show", block]).stdout
    assert shown == TEMPLATES[block]
    result = runner.invoke(cli.app, ["templates", "copy", block, "--to", "mine"])
    assert (result.exit_code, result.stdout) == (0, f"new       mine/{block}\n")
    (project / "mine" / block).write_text("GREETING = 'mine'\n")
    result = runner.invoke(cli.app, ["templates", "list", "--templates", "mine"])
    assert f"overridden {block}\n" in result.stdout
    assert runner.invoke(cli.app, ["update", "--all", "--templates", "mine"]).exit_code == 0
    assert '"mine"' in (project / "generated/qwen3_vl" / CONFIG).read_text()
    (project / "packaged" / block).write_text("GREETING = 'moved on'\n")
    result = runner.invoke(cli.app, ["templates", "copy", block, "--to", "mine"])
    assert (result.exit_code, result.stdout) == (6, f"conflict  mine/{block}:1-5\n")
    assert runner.invoke(cli.app, ["templates", "show", "absent.j2"]).exit_code == 2
    assert "overridden" in runner.invoke(
        cli.app, ["templates", "list", "--templates", "mine", "--json"]
    ).stdout  # fmt: skip


@pytest.mark.parametrize("command", ["list", "show", "copy"])
def test_help_of_the_template_commands_has_an_example(command):
    result = runner.invoke(cli.app, ["templates", command, "--help"])
    assert result.exit_code == 0
    assert f"Example: vlmgen templates {command}" in " ".join(result.stdout.split())


# --- terminal and start-up --------------------------------------------------------------------


def test_progress_is_silent_off_a_terminal(capsys):
    with progress("working") as report:
        report("half")
    assert capsys.readouterr() == ("", "")


def test_progress_is_on_stderr_of_a_terminal(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress("working") as report:
        report("half")
    assert "working" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_no_color_is_respected():
    colored = run("--help", FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="")
    plain = run("--help", FORCE_COLOR="1", TERM="xterm-256color", NO_COLOR="1")
    colors = [f"\x1b[{kind}3{n}m" for kind in ("", "1;", "0;") for n in range(8)]
    assert any(color in colored.stdout for color in colors)
    assert not any(color in plain.stdout for color in colors)


def test_check_failed_is_a_user_error():
    assert CheckFailed("x").exit_code == 4


@pytest.mark.parametrize(
    "statement",
    [
        "import vlmgen",
        "import vlmgen.cli",
        "from vlmgen.spec import load_spec; load_spec('specs/qwen3_vl.yaml')",
        "import vlmgen.check.parallel, vlmgen.render.generate",
    ],
)
def test_nothing_imports_torch(statement):
    code = f"{statement}\nimport sys; print(sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout == "[]\n"


def test_the_command_line_alone_imports_neither_pydantic_nor_rich_nor_yaml():
    code = "import vlmgen.cli, sys; print(sorted({'pydantic', 'rich', 'yaml'} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout == "[]\n"
