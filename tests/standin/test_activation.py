"""When the stand-in answers ``import vllm_neuron``, and when it must not.

Each case runs in a fresh interpreter, since an import cannot be undone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from vlmgen import standin
from vlmgen.standin import ranks


def run(
    code: str,
    repository: Path,
    folder: Path,
    cpu_mode: str | None = "1",
    extra_path: Path | None = None,
) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != standin.CPU_MODE_VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(
        str(path) for path in (extra_path, repository) if path is not None
    )
    if cpu_mode is not None:
        environment[standin.CPU_MODE_VARIABLE] = cpu_mode
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def fake_plugin(folder: Path) -> Path:
    """A folder for the Python path with something that could be the installed plugin."""
    package = folder / "site" / "vllm_neuron"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text("WHO = 'real plugin'\n")
    (package / "utils" / "__init__.py").write_text("WHO = 'real plugin'\n")
    return package.parent


WHO = """
    from vlmgen import standin
    found = standin.activate()
    import vllm_neuron
    print(found, standin.which(), getattr(vllm_neuron, "WHO", "stand-in"))
"""


@pytest.mark.parametrize("spelling", ["1", "true", "True", "yes", "ON"])
def test_standin_answers_in_cpu_mode(repository: Path, tmp_path: Path, spelling: str) -> None:
    assert run(WHO, repository, tmp_path, spelling) == "standin standin stand-in"


def test_installed_plugin_is_not_shadowed(repository: Path, tmp_path: Path) -> None:
    site = fake_plugin(tmp_path)
    assert run(WHO, repository, tmp_path, extra_path=site) == "plugin plugin real plugin"


def test_installed_plugin_is_not_given_the_standins_submodules(
    repository: Path, tmp_path: Path
) -> None:
    site = fake_plugin(tmp_path)
    code = """
        from vlmgen import standin
        standin.activate()
        import vllm_neuron.utils
        for name in ("vllm_neuron.envs", "nkilib"):
            try:
                __import__(name)
                print("shadowed")
            except ImportError:
                print("absent")
        try:
            import vlmgen.standin.vllm_neuron
            print("shadowed")
        except ImportError as error:
            print("refused", "'plugin'" in str(error))
    """
    assert run(code, repository, tmp_path, extra_path=site).split("\n") == [
        "absent",
        "absent",
        "refused True",
    ]


def test_plugin_behind_a_finder_appended_later_wins(repository: Path, tmp_path: Path) -> None:
    """An editable install that is found by a finder at the end of the list."""
    site = fake_plugin(tmp_path)
    code = f"""
        import importlib.machinery, sys
        from vlmgen import standin
        standin.activate()
        class Late:
            @staticmethod
            def find_spec(name, path=None, target=None):
                return importlib.machinery.PathFinder.find_spec(name, path or [{str(site)!r}])
        sys.meta_path.append(Late)
        import vllm_neuron
        print(standin.which(), vllm_neuron.WHO)
    """
    assert run(code, repository, tmp_path) == "plugin real plugin"


@pytest.mark.parametrize("spelling", [None, "", "0", "false", "no"])
def test_nothing_answers_with_the_switch_off(
    repository: Path, tmp_path: Path, spelling: str | None
) -> None:
    code = """
        from vlmgen import standin
        print(standin.activate())
        for name in ("vllm_neuron", "nkilib", "vlmgen.standin.vllm_neuron.envs"):
            try:
                __import__(name)
                print("found", name)
            except ImportError:
                pass
        try:
            standin.require()
        except standin.PluginMissingError as error:
            print(error)
    """
    said = run(code, repository, tmp_path, spelling).split("\n")
    state = "is not set" if spelling is None else f"is {spelling!r}"
    assert said[0] == "none"
    assert said[1].startswith(
        f"the vLLM Neuron plugin is not installed and {standin.CPU_MODE_VARIABLE} {state}"
    )
    assert len(said) == 2


def test_switch_is_read_when_the_import_happens(repository: Path, tmp_path: Path) -> None:
    code = f"""
        import os
        from vlmgen import standin
        print(standin.activate())
        os.environ[{standin.CPU_MODE_VARIABLE!r}] = "1"
        import vllm_neuron
        print(standin.which())
    """
    assert run(code, repository, tmp_path, None).split() == ["none", "standin"]


def test_bare_folder_is_named(repository: Path, tmp_path: Path) -> None:
    """A folder called vllm_neuron without an __init__.py, such as in-tree output."""
    (tmp_path / "vllm_neuron" / "model").mkdir(parents=True)
    code = """
        from vlmgen import standin
        print(standin.activate())
        try:
            standin.require()
        except standin.PluginMissingError as error:
            print(error)
    """
    said = run(code, repository, tmp_path).split("\n")
    assert said[0] == "none"
    assert str(tmp_path / "vllm_neuron") in said[1]


def test_one_module_object_under_both_names(repository: Path, tmp_path: Path) -> None:
    code = """
        from vlmgen import standin
        standin.activate()
        import vlmgen.standin.vllm_neuron.model.kv_cache as by_file
        import vllm_neuron.model.kv_cache as by_name
        import vlmgen.standin.vllm_neuron, vllm_neuron
        print(by_file is by_name, vlmgen.standin.vllm_neuron is vllm_neuron)
        print(by_name.__spec__.name, by_name.__name__, by_name.LayerSpec.__module__)
    """
    assert run(code, repository, tmp_path).split("\n") == [
        "True True",
        "vllm_neuron.model.kv_cache vllm_neuron.model.kv_cache vllm_neuron.model.kv_cache",
    ]


def test_activate_imports_neither_torch_nor_vllm(repository: Path, tmp_path: Path) -> None:
    code = """
        import sys
        from vlmgen import standin
        import vlmgen.standin.pytest_plugin
        standin.require()
        print([name for name in ("torch", "vllm", "transformers", "numpy") if name in sys.modules])
    """
    assert run(code, repository, tmp_path) == "[]"


def test_activate_is_idempotent_and_can_be_undone(repository: Path, tmp_path: Path) -> None:
    code = """
        import sys
        from vlmgen import standin
        before = list(sys.meta_path)
        for _ in range(3):
            standin.activate()
        print(len(sys.meta_path) - len(before))
        standin.deactivate()
        print(sys.meta_path == before, standin.which())
    """
    assert run(code, repository, tmp_path).split("\n") == ["4", "True none"]


def test_pytest_plugin_activates(repository: Path, tmp_path: Path) -> None:
    code = """
        import vlmgen.standin.pytest_plugin as plugin
        import vllm_neuron
        print(plugin.pytest_report_header())
    """
    assert run(code, repository, tmp_path) == "vllm_neuron: standin"


def _module_of_kv_spec(rank: int) -> tuple[int, str]:
    from vllm_neuron.model.kv_cache import KVSpec

    return rank, KVSpec.__module__


def test_spawned_rank_has_the_standin() -> None:
    found = ranks.run_ranks(_module_of_kv_spec, 1, start_method="spawn")
    assert found == [(0, "vllm_neuron.model.kv_cache")]


def test_torchvision_imports_and_the_processors_work(repository: Path, tmp_path: Path) -> None:
    """The first import of torchvision declares what its wheel lacks beside a CPU torch."""
    code = """
        from vlmgen import standin
        standin.activate()
        from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor
        import numpy, torchvision
        from vlmgen.standin.torchvision_ops import declare_missing_ops
        print(declare_missing_ops())
        picture = numpy.zeros((64, 96, 3), dtype=numpy.uint8)
        images = Qwen2VLImageProcessor(patch_size=16)(images=[picture], return_tensors="pt")
        print(images["image_grid_thw"].tolist(), list(images["pixel_values"].shape))
        clip = numpy.zeros((4, 128, 128, 3), dtype=numpy.uint8)
        videos = Qwen3VLVideoProcessor()(videos=[clip], return_tensors="pt", do_sample_frames=False)
        grid = videos["video_grid_thw"][0]
        print(grid[0].item(), videos["pixel_values_videos"].shape[0] == grid.prod().item())
    """
    assert run(code, repository, tmp_path).split("\n") == [
        "[]",
        "[[1, 4, 6]] [24, 1536]",
        "2 True",
    ]
