"""Published sizes from shapes alone."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs_jax, pytest.mark.slow]


@pytest.mark.matrix
def test_a_published_checkpoint_compiles_and_its_operations_are_counted_right(
    repository: Path,
) -> None:
    from vlmgen.compile.published import compile_published

    package, name = repository / "generated" / "qwen3_vl", "Qwen3-VL-2B-Instruct"
    vision, prefill, decode = compile_published(package, name)
    assert [vision.problem, prefill.problem, decode.problem] == ["", "", ""]
    assert (vision.layers, prefill.layers, decode.layers) == ("3 of 24", "1 of 28", "1 of 28")
    # 1.72 billion parameters of the decoder, the tied head once more, two bytes each.
    assert decode.weights / 2**30 == pytest.approx(3.78, abs=0.01)
    # 28 layers, keys and values, 8 heads of 128, 8 requests of 4096 tokens and the null block.
    assert decode.caches == 28 * 2 * (1 + 8 * 128) * 8 * 32 * 128 * 2


def test_unknown_names_are_refused(repository: Path) -> None:
    from vlmgen.compile.published import names_of
    from vlmgen.errors import UsageError

    package = repository / "generated" / "qwen3_vl"
    assert names_of(package, ["all"])[0] == "Qwen3-VL-2B-Instruct"
    with pytest.raises(UsageError, match="no checkpoint Qwen9; legal: all, Qwen3-VL-2B-Instruct"):
        names_of(package, ["Qwen9"])
