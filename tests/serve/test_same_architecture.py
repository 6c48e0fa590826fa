"""Packages that register under one architecture name: each serves its own checkpoints only."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.conftest import ROOT
from vlmgen.errors import CheckpointError
from vlmgen.serve import doctor, packages
from vlmgen.serve.command import serve_command
from vlmgen.serve.packages import (
    installed_packages,
    plugins_without_rivals,
    shared_architectures,
)
from vlmgen.spec import load_spec

SPECS = {
    path.parent: load_spec(path) for path in sorted((ROOT / "generated").glob("*/spec.yaml"))
}
# (package, another one of the same architecture)
PAIRS = [
    (one, other)
    for one, spec in SPECS.items()
    for other, its in SPECS.items()
    if one != other and spec.architecture == its.architecture
]


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory):
    """Tiny checkpoint of a package."""
    from vlmgen.tiny.build import build_tiny

    made: dict[Path, Path] = {}

    def tiny(package: Path) -> Path:
        if package not in made:
            folder = tmp_path_factory.mktemp("same") / package.name
            made[package] = build_tiny(SPECS[package], folder)
        return made[package]

    return tiny


@pytest.mark.parametrize(("package", "other"), PAIRS, ids=lambda path: path.name)
def test_package_refuses_the_checkpoint_of_another_with_the_reason(package, other, tiny_of):
    with pytest.raises(CheckpointError) as caught:
        serve_command(package, tiny_of(other), [])
    message = caught.value.render()
    assert f"cannot be served by the {SPECS[package].family} package" in message
    assert "the specification (" in message
    assert f"`vlmgen import {tiny_of(other)}` names the family" in message


@pytest.mark.parametrize("package", sorted({one for one, _ in PAIRS}), ids=lambda path: path.name)
def test_package_takes_its_own_checkpoint(package, tiny_of):
    command = serve_command(package, tiny_of(package), [])
    assert command.environment["VLMGEN_SERVE_PACKAGES"] == str(package.resolve())
    assert packages.PLUGINS_VARIABLE not in command.environment


def test_import_names_the_family_of_the_refused_checkpoint(tiny_of):
    from vlmgen.importer import import_checkpoint

    for _, other in PAIRS:
        match = import_checkpoint(tiny_of(other)).match
        assert match.serves and match.known.spec.family == SPECS[other].family


# --- with packages that pip installed -----------------------------------------------------------


def install(site: Path, *sources: Path) -> None:
    """Lay packages and their entry points out as pip does."""
    for source in sources:
        module = f"vllm_neuron_{source.name}"
        shutil.copytree(source / module, site / module)
        info = site / f"{module}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[vllm.general_plugins]\n{module} = {module}:register\n"
        )


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """Two packages of one architecture, and one of another, on the path."""
    assert PAIRS, "no two packages have one architecture"
    one, other = PAIRS[0]
    different = next(p for p, s in SPECS.items() if s.architecture != SPECS[one].architecture)
    folder = tmp_path / "site"
    folder.mkdir()
    install(folder, one, other, different)
    for name in names(one, other, different):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    return folder


def names(*folders: Path) -> set[str]:
    return {f"vllm_neuron_{folder.name}" for folder in folders}


def test_installed_packages_are_found_without_running_them(site):
    one, other = PAIRS[0]
    (site / f"vllm_neuron_{one.name}" / "__init__.py").write_text(
        f'raise SystemExit("run")\nARCHITECTURE = {SPECS[one].architecture!r}\n'
    )
    found = {p.plugin: p.architecture for p in installed_packages()}
    assert found[f"vllm_neuron_{one.name}"] == SPECS[one].architecture
    shared = shared_architectures(installed_packages())
    assert {name: set(plugins) for name, plugins in shared.items()} == {
        SPECS[one].architecture: names(one, other)
    }


def test_module_that_says_nothing_is_no_rival(site):
    one, other = PAIRS[0]
    for package in (one, other):
        (site / f"vllm_neuron_{package.name}" / "__init__.py").write_text("def (:\n")
    assert shared_architectures(installed_packages()) == {}


def test_serve_leaves_installed_packages_of_the_architecture_out(site, tiny_of):
    one, other = PAIRS[0]
    command = serve_command(one, tiny_of(one), [])
    plugins = set(command.environment[packages.PLUGINS_VARIABLE].split(","))
    assert not plugins & names(one, other)
    different = {p.plugin for p in installed_packages()} - names(one, other)
    assert plugins >= different | {"vlmgen_packages"}
    assert f"{packages.PLUGINS_VARIABLE}=" in command.shell()


def test_plugins_that_the_user_named_are_kept_but_for_rivals(site):
    one, other = PAIRS[0]
    architecture = SPECS[one].architecture
    own = {"vlmgen_packages"}
    given = ",".join(["mine", *sorted(names(one))])
    kept = set((plugins_without_rivals(architecture, given) or "").split(","))
    assert kept >= own | {"mine"} and not kept & names(one, other)
    assert plugins_without_rivals("Nothing", ",".join(sorted(kept))) is None
    assert plugins_without_rivals("Nothing", None) is None


def test_doctor_names_packages_of_one_architecture(site):
    one, other = PAIRS[0]
    lines = {line.name: line for line in doctor._lines("standin")}
    line = lines[f"packages of {SPECS[one].architecture}"]
    assert (line.state, set(line.found.split(", "))) == ("note", names(one, other))
    assert "vlmgen serve FOLDER" in line.remedy


def test_package_that_takes_the_place_of_another_says_so(site):
    """Plain vLLM keeps the class that registered last; the log then says which two there are."""
    one, other = PAIRS[0]
    script = (
        "import logging; logging.basicConfig(level=logging.WARNING)\n"
        "from vlmgen import standin; standin.require()\n"
        f"import vllm_neuron_{one.name} as one, vllm_neuron_{other.name} as other\n"
        "one.register(); one.register(); other.register()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    warnings = [line for line in run.stderr.splitlines() if "takes the place of" in line]
    assert len(warnings) == 1
    assert f"vllm_neuron_{other.name} takes the place of vllm_neuron_{one.name}" in warnings[0]
    assert "VLLM_PLUGINS" in warnings[0]


@pytest.mark.slow
def test_served_package_answers_beside_an_installed_one(site, tiny_of, tmp_path):
    """The installed rival registers in the same processes, and must not be asked."""
    from tests.serve.test_families import OPTIONS
    from vlmgen.serve.launch import package_server

    one, _ = PAIRS[0]
    path = os.pathsep.join([str(site), str(ROOT)])
    with package_server(one, tiny_of(one), tmp_path, *OPTIONS, PYTHONPATH=path) as server:
        answer = server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=2
        )
        assert answer.choices[0].message.content is not None
        log = server.log.read_text()
    assert f"Loaded {SPECS[one].class_prefix}NeuronModel" in log
