"""The layout of expert matrices is declared in the spec and never guessed from a shape.

With hidden_size = 2 x moe_intermediate_size a gate_up matrix is as high as it is wide. transformers
decides by shape and reads the published file wrong; it reads the file as it was saved right, and
that is the reference here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vlmgen.render.generate import generate
from vlmgen.spec.load import load_spec
from vlmgen.standin.ranks import one_rank
from vlmgen.tiny.build import build_tiny
from vlmgen.validate.driver import PackageDriver
from vlmgen.validate.package import load_factory
from vlmgen.validate.pictures import picture
from vlmgen.validate.reference import Media, Prompt, Reference, text_settings, vision_settings

FAMILY, SQUARE = "qwen3_vl_moe", "qwen3_vl_moe_square"
LIMIT = 1e-4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights, as published and as saved."""
    folder = tmp_path_factory.mktemp("square")
    return {
        "fused_in_out": build_tiny(SQUARE, folder / "published"),
        "fused_out_in": build_tiny(SQUARE, folder / "saved", as_saved=True),
    }


@pytest.fixture(scope="module")
def reference(files: dict[str, Path], repository: Path) -> Reference:
    return Reference(files["fused_out_in"], load_spec(repository / "specs" / f"{FAMILY}.yaml"))


@pytest.fixture(scope="module")
def prompt(reference: Reference) -> Prompt:
    return reference.prompt("picture", Media("image", picture("coffee", 128, 192)), "What is it?")


@pytest.fixture(scope="module")
def logits(
    repository: Path, reference: Reference, prompt: Prompt, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, Path], torch.Tensor]:
    """Logits of a file through the package of a spec that declares a layout."""
    packages: dict[str, Path] = {}

    def run(declared: str, file: Path) -> torch.Tensor:
        if declared not in packages:
            folder = tmp_path_factory.mktemp("declared")
            for spec in (repository / "specs").glob("*.yaml"):
                text = spec.read_text().replace(
                    "checkpoint: fused_in_out", f"checkpoint: {declared}"
                )
                (folder / spec.name).write_text(text)
            packages[declared] = folder / FAMILY
            generate(folder / f"{FAMILY}.yaml", packages[declared])
        with one_rank(), torch.no_grad():
            driver = PackageDriver(
                load_factory(packages[declared]),
                file,
                vision_neuron_config=vision_settings(reference, [prompt]),
                **text_settings([prompt], 1),
            )
            request = driver.add_request(prompt.token_ids, prompt.features)
            return driver.prefill(request, rows=range(len(prompt.token_ids)))

    return run


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("declared", ["fused_in_out", "fused_out_in"])
def test_a_file_in_the_declared_layout_is_read_right(
    declared: str,
    files: dict[str, Path],
    reference: Reference,
    prompt: Prompt,
    logits: Callable[[str, Path], torch.Tensor],
) -> None:
    actual = logits(declared, files[declared])
    assert difference(actual, reference.logits(prompt)) < LIMIT


@pytest.mark.parametrize(
    ("declared", "stored"), [("fused_in_out", "fused_out_in"), ("fused_out_in", "fused_in_out")]
)
def test_a_file_in_the_other_layout_is_refused(
    declared: str,
    stored: str,
    files: dict[str, Path],
    logits: Callable[[str, Path], torch.Tensor],
) -> None:
    """gate_up has the right shape either way; that of down tells."""
    with pytest.raises(ValueError, match=r"experts\.down_proj: shape in the checkpoint"):
        logits(declared, files[stored])


def test_a_guess_by_shape_is_seen(
    files: dict[str, Path], reference: Reference, prompt: Prompt, repository: Path
) -> None:
    """What the comparison above measures when gate_up is not turned: transformers' own reading."""
    guessed = Reference(files["fused_in_out"], reference.spec).logits(prompt)
    assert difference(guessed, reference.logits(prompt)) > 0.1
