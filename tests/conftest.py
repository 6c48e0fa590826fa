"""What every test of vlmgen relies on: CPU mode, no network, few threads."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, and no verdict by the clock of a busy machine.
settings.register_profile(
    "vlmgen", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("vlmgen")

os.environ.setdefault("VLLM_NEURON_CPU_MODE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "2")

from vlmgen import standin  # noqa: E402

standin.activate()

PROOF = "proof of a family"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-proofs",
        action="store_true",
        help="Store what tests marked `proof` found, for `vlmgen families`.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell the process that reports what a marked test proves, and of which family."""
    marker = item.get_closest_marker("proof")
    family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
    if marker is not None and (family or "family" in marker.kwargs):
        item.user_properties.append((PROOF, [marker.args[0], family or marker.kwargs["family"]]))


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-proofs") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_ProofRecorder(config.rootpath))


class _ProofRecorder:
    """Counts the marked tests of each family and stores the counts at the end.

    A proof is stored if none of its tests was skipped or left out by `-k`: half a proof is none.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._outcomes: dict[tuple[str, str], list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        for name, value in report.user_properties:
            if name == PROOF:
                self._outcomes.setdefault((value[0], value[1]), []).append(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        from vlmgen import proofs

        partial = session.config.getoption("keyword") or session.config.getoption("markexpr")
        for (proof, family), outcomes in sorted(self._outcomes.items()):
            if partial or "skipped" in outcomes:
                continue
            passed = set(outcomes) == {"passed"}
            result = {proof: {"checks": len(outcomes), "passed": passed}}
            proofs.record(self._root / "generated" / family, family, result)


@pytest.fixture(autouse=True, scope="module")
def _packages_as_collected() -> Iterator[None]:
    """Copies of a package that a file loads are forgotten after it, so that files may come in any
    order: others imported the committed package while they were collected.
    """
    collected = {n: m for n, m in sys.modules.items() if n.startswith("vllm_neuron_")}
    yield
    replaced = {
        name.partition(".")[0]
        for name, module in collected.items()
        if sys.modules.get(name) is not module
    }
    for name in [n for n in sys.modules if n.partition(".")[0] in replaced]:
        del sys.modules[name]
    sys.modules.update({n: m for n, m in collected.items() if n.partition(".")[0] in replaced})


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's top directory."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def qwen3_vl_spec(repository: Path) -> Path:
    """The spec of Qwen3-VL."""
    return repository / "specs" / "qwen3_vl.yaml"


@pytest.fixture(scope="session")
def offline_install() -> list[str]:
    """Arguments of `pip install` that take vlmgen's dependencies from wheels fetched at set-up."""
    wheelhouse = Path(sys.prefix) / "wheelhouse"
    if not wheelhouse.is_dir():
        pytest.skip("no wheels at hand; `make install` fetches them")
    return ["--quiet", "--no-index", "--find-links", str(wheelhouse)]


@pytest.fixture(scope="session")
def package(repository: Path) -> Path:
    """The committed Qwen3-VL package."""
    return repository / "generated" / "qwen3_vl"


@pytest.fixture
def edited(package: Path, tmp_path: Path) -> Callable[[str, str, str], Path]:
    """Copy the package and replace text in one module; the text must be there.

    The module is first written as `ast.unparse` writes it, one statement a line, so that the
    formatting of the templates does not matter here.
    """

    def edit(name: str, old: str, new: str) -> Path:
        root = tmp_path / "qwen3_vl"
        if not root.exists():
            shutil.copytree(package, root, ignore=shutil.ignore_patterns("__pycache__"))
        path = next(root.glob("vllm_neuron_*")) / name
        text = ast.unparse(ast.parse(path.read_text()))
        assert old in text, f"{name} does not contain {old!r}"
        path.write_text(text.replace(old, new))
        return root

    return edit
