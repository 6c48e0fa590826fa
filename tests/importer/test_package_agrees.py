"""What `vlmgen import` says of a config, next to what the generated package does with it."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest

from vlmgen.errors import CheckpointError
from vlmgen.importer import ContradictionError, import_checkpoint
from vlmgen.spec.load import load_spec

from .checkpoints import Headers

PACKAGES = sorted(
    path.parent for path in (Path(__file__).resolve().parents[2] / "generated").glob("*/spec.yaml")
)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config", config)


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    text = text_of(config)
    return text.get("rope_parameters") or text["rope_scaling"]


def set_text(key: str, value: Any):
    return lambda config: text_of(config).update({key: value})


def set_vision(key: str, value: Any):
    return lambda config: config["vision_config"].update({key: value})


def set_rope(key: str, value: Any):
    return lambda config: rope_of(config).update({key: value})


def theta(config: dict[str, Any]) -> None:
    holder = rope_of(config) if "rope_theta" in rope_of(config) else text_of(config)
    holder["rope_theta"] = 12345.0


CHANGES = {
    "as it is": lambda config: None,
    "another base": theta,
    "another context": set_text("max_position_embeddings", 777),
    "another vocabulary": set_text("vocab_size", 999),
    "more layers": set_text("num_hidden_layers", 6),
    "another activation": set_text("hidden_act", "gelu"),
    "another activation in the tower": set_vision("hidden_act", "gelu_pytorch_tanh"),
    "GELU in the tower": set_vision("hidden_act", "gelu"),
    "sliding window": lambda c: text_of(c).update(use_sliding_window=True, sliding_window=64),
    "linear attention": set_text("layer_types", ["linear_attention"]),
    "YaRN": set_rope("rope_type", "yarn"),
    "a rope setting": set_rope("factor", 2.0),
    "half a head": lambda c: (
        text_of(c).pop("partial_rotary_factor", None),
        set_rope("partial_rotary_factor", 0.25)(c),
    ),
    "sections in another order": set_rope("mrope_interleaved", False),
    "quantised": lambda config: config.update(quantization_config={"quant_method": "fp8"}),
    "another architecture": lambda config: config.update(architectures=["OtherForCausalLM"]),
    "another model type": lambda config: config.update(model_type="other"),
    "no deepstack": set_vision("deepstack_visual_indexes", []),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_import_and_package_take_the_same_configs(tiny, tmp_path, package, change):
    from vlmgen.validate.package import import_package

    spec = load_spec(package / "spec.yaml")
    config = copy.deepcopy(tiny(spec.tiny).config)
    CHANGES[change](config)
    Headers(config, None).write(tmp_path / "checkpoint")
    try:
        match = import_checkpoint(tmp_path / "checkpoint" / "config.json").match
        serves = match.serves and match.known.spec.family == spec.family
    except (CheckpointError, ContradictionError):
        serves = False
    module = importlib.import_module(f"{import_package(package).__name__}.config")
    config_class = getattr(module, f"{spec.class_prefix}Config")
    try:
        config_class.from_configs(config)
        taken = True
    except ValueError:
        taken = False
    assert serves == taken
