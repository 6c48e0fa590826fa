"""The members that the runner looks up, and the parameters it passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmgen.check.api import recorded_api
from vlmgen.check.model_class import check_model_class, processor_keywords
from vlmgen.check.source import read_package
from vlmgen.spec.load import load_spec

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
INPUTS = ["pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"]


def check(root: Path):
    return check_model_class(read_package(root), recorded_api(), ARCHITECTURE, INPUTS)


def test_the_committed_package_fits(package: Path) -> None:
    assert check(package) == []


FAULTS = [
    ("model.py", "def get_kv_spec(", "def kv_spec(", "VG110", "get_kv_spec"),
    ("model.py", "self.language_model = ", "self.text_model = ", "VG110", "language_model"),
    ("model.py", "self.config = config", "self.settings = config", "VG110", "'config'"),
    ("model.py", "self, bucket: int, vision_neuron_config: VisionNeuronConfig,",
     "self, vision_neuron_config: VisionNeuronConfig, bucket: int,", "VG111", "order"),
    ("model.py", "self, input_tokens: Sequence[int], mm_features",
     "self, tokens: Sequence[int], mm_features", "VG111", "input_tokens"),
    ("model.py", ", **_: Any) -> None", ") -> None", "VG111", "further keywords"),
    ("model.py", "mm_hashes: Sequence[str] | None=None, pixel_values_videos",
     "hashes: Sequence[str] | None=None, pixel_values_videos", "VG111", "swallows mm_hashes"),
    ("model.py", "cache_dir: str | None=None) -> None",
     "cache_dir: str, revision: str) -> None", "VG111", "revision"),
    ("model.py", "logit_mask: torch.Tensor | None=None,", "mask: torch.Tensor | None=None,",
     "VG112", "lacks logit_mask"),
    ("model.py", "rotary_position_ids: torch.Tensor, attn_metadata: dict[str, dict[str, Any]] |",
     "rotary_position_ids: torch.Tensor | None=None, attn_metadata: dict[str, dict[str, Any]] |",
     "VG112", "default"),
    ("vision_encoder.py", "row_offsets: torch.Tensor, ", "", "VG113", "row_offsets"),
    ("utils/preprocessing.py", "'cos': torch.zeros", "'cosine': torch.zeros", "VG113", "cosine"),
    ("vision_encoder.py", ", write_block_ids: torch.Tensor", "", "VG113", "write_block_ids"),
    ("factory.py", "    @classmethod\n    def get_vision_token_merge_factor",
     "    def get_vision_token_merge_factor", "VG114", "get_vision_token_merge_factor"),
    ("factory.py", "def get_max_pixels_token_count(", "def max_pixels(", "VG114",
     "get_max_pixels_token_count"),
    ("factory.py", "    _processor_factory = ", "    _processor = ", "VG114", "_processor_factory"),
    ("factory.py", f"class {ARCHITECTURE}(", "class Qwen3VlForConditionalGeneration(", "VG114",
     ARCHITECTURE),
    ("factory.py", "text_neuron_config: NeuronConfig | None=None, ", "", "VG111",
     "text_neuron_config"),
    ("__init__.py", "    registry.get_models = get_models", "    pass", "VG115", "get_models"),
    ("__init__.py", "    ModelRegistry.register_model(", "    print(", "VG115", "ModelRegistry"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new", "code", "named"), FAULTS)
def test_a_seeded_fault_is_found(edited, name, old, new, code, named) -> None:
    findings = check(edited(name, old, new))
    found = [finding for finding in findings if finding.code == code]
    assert found and any(named in finding.message for finding in found), findings


def test_processor_keywords_come_from_the_spec(qwen3_vl_spec: Path) -> None:
    assert processor_keywords(load_spec(qwen3_vl_spec)) == INPUTS


def test_the_harness_alone_reports_nothing(edited) -> None:
    assert check(edited("model.py", "self.config = config", "self.config = config")) == []


def test_entry_point(edited) -> None:
    root = edited("__init__.py", "def register", "def register")
    project = root / "pyproject.toml"
    text = project.read_text()
    assert ":register" in text
    project.write_text(text.replace(":register", ":setup"))
    (finding,) = check(root)
    assert finding.code == "VG115" and finding.path.endswith("pyproject.toml")


def test_a_model_without_mrope_takes_no_rotary_positions(edited) -> None:
    root = edited("model.py", "def get_mrope_input_positions(", "def unused_positions(")
    messages = [f.message for f in check(root)]
    assert any("takes besides rotary_position_ids" in message for message in messages)
