"""The checkpoint for runs on ranks: every text logit is negative, a padded row would be picked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vlmgen.spec.load import load_spec
from vlmgen.tiny.build import quiet_transformers
from vlmgen.tiny.family import family_names
from vlmgen.validate.parallel import build_parallel_checkpoint

FAMILIES = [name for name in family_names() if not name.endswith(("_tied", "_square"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_logits_of_text_are_negative(repository: Path, tmp_path: Path, family: str) -> None:
    import transformers

    spec = load_spec(repository / "specs" / f"{family}.yaml")
    folder = build_parallel_checkpoint(spec, tmp_path / family)
    with quiet_transformers():
        model = getattr(transformers, spec.reference.model_class).from_pretrained(folder)
    tokens = torch.randint(0, 250, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    assert logits.shape == (1, 200, 323)
    assert float(logits.max()) < 0.0
    assert len(set(logits[0].argmax(-1).tolist())) > 2  # and they still depend on the text


def test_the_families_with_specs_are_all_here(repository: Path) -> None:
    specs = {path.stem for path in (repository / "specs").glob("*.yaml")}
    assert set(FAMILIES) == {name for name in specs if name in family_names()}
