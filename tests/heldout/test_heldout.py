"""Specs of models that nobody published generate packages that compute what they describe.

The packages are generated from the axes alone, load random weights from a checkpoint under the
names of the spec, and are compared with a composition of transformers' own parts: the tower's rows,
the decoder's logits, a decode step, and all of it again as one graph each.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from vlmgen.render.generate import generate
from vlmgen.standin.ranks import one_rank
from vlmgen.standin.torchvision_ops import declare_missing_ops
from vlmgen.validate.driver import FieldElement, PackageDriver, make_feature
from vlmgen.validate.package import load_factory

declare_missing_ops()  # the parts of transformers import torchvision

from .compositions import (  # noqa: E402
    COMPOSITIONS,
    END,
    IMAGE,
    START,
    HeldOutConfig,
    TilesSigmoidMoe,
)

SPECS = Path(__file__).with_name("specs")
LIMIT, LOGITS_LIMIT = 1e-5, 1e-4
BLOCK = 256

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def world():
    with one_rank():
        yield


@dataclass
class Case:
    """A composition, the package of the same spec with the same weights, and a prompt."""

    model: Any
    driver: PackageDriver
    tokens: list[int]
    features: list[Any]
    grids: list[list[int]]
    pixels: list[torch.Tensor]

    def rows(self) -> list[tuple[torch.Tensor, ...]]:
        items = zip(self.pixels, self.grids, strict=True)
        return [self.model.rows(pixels, torch.tensor([grid])) for pixels, grid in items]

    def logits(self, extra: tuple[int, ...] = ()) -> torch.Tensor:
        tokens = torch.tensor([*self.tokens, *extra])
        return self.model.logits(tokens, self.model.positions(tokens, self.grids), self.rows())


@pytest.fixture(scope="module", params=COMPOSITIONS, ids=lambda cls: cls.family)
def case(request, tmp_path_factory) -> Case:
    model = request.param()
    package = tmp_path_factory.mktemp("package") / model.family
    generate(SPECS / f"{model.family}.yaml", package)
    checkpoint = tmp_path_factory.mktemp("checkpoint")
    tensors = {name: value.detach().contiguous() for name, value in model.tensors().items()}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    settings = model.config().to_dict() | {"model_type": model.model_type, "dtype": "float32"}
    (checkpoint / "config.json").write_text(json.dumps(settings))
    AutoConfig.register(
        model.model_type, type("Config", (HeldOutConfig,), {"model_type": model.model_type}), True
    )
    driver = PackageDriver(
        load_factory(package),
        checkpoint,
        dtype=torch.float32,
        max_model_len=512,
        token_buckets=(256,),
        seq_buckets=(1, 2),
        vision_neuron_config={
            "vision_attention_block_size": BLOCK,
            "num_vision_tokens_buckets": [BLOCK, 4 * BLOCK],
        },
    )
    return Case(model, driver, *prompt(model))


def prompt(model: Any) -> tuple[list[int], list[Any], list[list[int]], list[torch.Tensor]]:
    """Text and three pictures, one of them of an odd shape."""
    tiles = isinstance(model, TilesSigmoidMoe)
    grids = [[1, 4, 4], [3, 4, 4], [1, 4, 4]] if tiles else [[1, 4, 6], [1, 10, 14], [1, 2, 2]]
    generator, dice = torch.Generator().manual_seed(1), random.Random(1)
    tokens: list[int] = []
    features, pixels = [], []
    for t, h, w in grids:
        tokens += [dice.randrange(256) for _ in range(5)] + [START]
        first, count = len(tokens), t * h * w // 4
        tokens += [IMAGE] * count + [END]
        shape = (t, 3, 56, 56) if tiles else (t * h * w, model.patch_dim)
        pixels.append(torch.randn(shape, generator=generator))
        data = {"pixel_values": FieldElement(pixels[-1])}
        if tiles:
            data["image_num_patches"] = FieldElement(torch.tensor(t), "batched")
        else:
            data["image_grid_thw"] = FieldElement(torch.tensor([t, h, w]), "batched")
        features.append(make_feature("image", data, tokens, first, first + count))
    return tokens + [7, 8, 9], features, grids, pixels


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def test_rows_of_the_tower(case):
    request = case.driver.add_request(case.tokens, case.features)
    case.driver.encode(request)
    for feature, levels in zip(case.features, case.rows(), strict=True):
        ours = case.driver.cached_rows(feature)
        assert error(ours, torch.cat(levels, dim=-1)) <= LIMIT
    case.driver.release(request)


@torch.no_grad()
def test_logits_of_every_token(case):
    request = case.driver.add_request(case.tokens, case.features)
    ours = case.driver.prefill(request, rows=range(len(case.tokens)))
    case.driver.release(request)
    assert error(ours, case.logits()) <= LOGITS_LIMIT


@torch.no_grad()
def test_logits_of_decode_steps(case):
    request = case.driver.add_request(case.tokens, case.features)
    case.driver.prefill(request)
    more = (11, 250, 33)
    ours = [case.driver.decode([request], [token])[0] for token in more]
    case.driver.release(request)
    assert error(torch.stack(ours), case.logits(more)[-len(more) :]) <= LOGITS_LIMIT


@torch.no_grad()
@pytest.mark.parametrize("part", ["visual.merger.fc1_weight", "visual.blocks.1.norm2.weight"])
def test_a_wrong_weight_of_the_tower_is_noticed(case, part):
    weight = case.driver.model.get_parameter(part)
    right = weight.clone()
    weight[..., :1] *= 1.01
    request = case.driver.add_request(case.tokens, case.features)
    case.driver.encode(request)
    ours = case.driver.cached_rows(case.features[1])
    case.driver.release(request)
    weight.copy_(right)
    assert error(ours, torch.cat(case.rows()[1], dim=-1)) > LIMIT


@torch.no_grad()
@pytest.mark.parametrize("part", ["norm.weight", "layers.1.self_attn.o_proj_weight"])
def test_a_wrong_weight_of_the_decoder_is_noticed(case, part):
    weight = case.driver.model.language_model.get_parameter(part)
    right = weight.clone()
    weight[..., :1] *= 1.01
    request = case.driver.add_request(case.tokens, case.features)
    ours = case.driver.prefill(request, rows=range(len(case.tokens)))
    case.driver.release(request)
    weight.copy_(right)
    assert error(ours, case.logits()) > LOGITS_LIMIT


@pytest.mark.parametrize("family", [cls.family for cls in COMPOSITIONS])
def test_a_spec_extends_a_published_one_and_names_no_published_model(family):
    text = (SPECS / f"{family}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# No published model")
    assert "extends: ../../../specs/" in text


@torch.no_grad()
def test_every_graph_is_whole(case):
    """The tower, a prefill and a decode step trace without a break and give the same numbers."""
    torch._dynamo.reset()
    model, visual = case.driver.model, case.driver.model.visual
    expected = case.logits((11,))
    eager, tower = model.forward, visual.forward
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    try:
        visual.forward = torch.compile(tower, fullgraph=True, dynamic=False, backend=backend)
        model.forward = torch.compile(eager, fullgraph=True, dynamic=False, backend=backend)
        request = case.driver.add_request(case.tokens, case.features)
        prefill = case.driver.prefill(request)
        decode = case.driver.decode([request], [11])
        case.driver.release(request)
    finally:
        model.forward, visual.forward = eager, tower
    assert len(graphs) == 3
    assert error(prefill[0], expected[-2]) <= LOGITS_LIMIT
    assert error(decode[0], expected[-1]) <= LOGITS_LIMIT
