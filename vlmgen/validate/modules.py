"""Every module alone: the same weights, the same real inputs, Hugging Face's result and ours.

Inputs of the inner modules are what Hugging Face's own modules receive when real pictures and
prompts run through them. Names of Hugging Face's modules follow from the spec's weight names.

Shapes: p patches of an item, r merged rows, n vision blocks of S patches, t tokens, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vlmgen.validate.compare import Comparison
from vlmgen.validate.driver import Feature, FieldElement, PackageDriver
from vlmgen.validate.pictures import moving_view, picture
from vlmgen.validate.reference import Media, Prompt, Reference, pixels_name, pixels_of

LIMIT = 1e-5
"""Largest relative error of a module in float32."""

DECODE_STEPS = 3
CLEARLY_AHEAD = 0.1  # in standard deviations of a token's scores over the experts
TEXT_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)
_MOST_LAYERS = 4  # of a deep model, so many layers are checked, from the first to the last


@dataclass
class VisionCase:
    """One picture or video in both forms.

    Args:
        name: For messages.
        feature: The item.
        grid: int64 `[1, 3]`.
        tower: Keyword arguments that the package's `embed_multimodal` gave its tower.
        places: int64 `[n * S]`, the patch at each place of the blocks, -1 for padding.
        inputs: Hugging Face module path -> the hidden states it received, `[p, H]`.
    """

    name: str
    feature: Feature
    grid: torch.Tensor
    tower: dict[str, torch.Tensor]
    places: torch.Tensor
    inputs: dict[str, torch.Tensor]

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """`[p, H]` -> blocks `[n, S, H]`, zeros in padding."""
        blocks = self.tower["pixel_values"].shape[:2]
        packed = rows.new_zeros(len(self.places), rows.shape[-1])
        packed[self.places >= 0] = rows[self.places[self.places >= 0]]
        return packed.view(*blocks, -1)

    def unpack(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[n, S, H]` -> `[p, H]`, or merged `[n, S / m, H]` -> `[r, H]`."""
        flat = blocks.reshape(-1, blocks.shape[-1])
        area = len(self.places) // len(flat)
        places = self.places.view(-1, area)[:, 0]
        real = places >= 0
        rows = flat.new_empty(int(real.sum()), flat.shape[-1])
        rows[places[real] // area] = flat[real]
        return rows


@dataclass
class TextCase:
    """One prompt, with what Hugging Face's decoder modules received for it.

    Args:
        prompt: The prompt.
        positions: int64 `[3, t]`, or `[t]` where the text has one position axis.
        inputs: Hugging Face module path -> hidden states `[t, H]`.
        rows: Item -> Hugging Face's vision rows, `[r, W]`, so that the tower's error stays out.
        settled: Layer with experts -> bool `[t]`, tokens whose choice of experts is clear.
    """

    prompt: Prompt
    positions: torch.Tensor
    inputs: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    settled: dict[int, torch.Tensor]

    @property
    def name(self) -> str:
        """For messages."""
        return self.prompt.name


@dataclass(frozen=True)
class Check:
    """One module, both ways.

    Args:
        name: Row of the report.
        reference: Hugging Face's result for a case, as a tensor.
        actual: The package's result for the same case, of the same shape.
        cases: The inputs.
    """

    name: str
    reference: Callable[[Reference, Any], torch.Tensor]
    actual: Callable[[PackageDriver, Any], torch.Tensor]
    cases: Sequence[Any]


class ModuleChecks:
    """All module checks of one package and one reference.

    Args:
        reference: Float32 reference; its modules' inputs become the inputs of the checks.
        driver: The package, loaded from the same checkpoint.
        prompts: Prompts for the text modules.
        round_to: Inputs are rounded to this dtype first, for comparisons in it.
    """

    def __init__(
        self,
        reference: Reference,
        driver: PackageDriver,
        prompts: Sequence[Prompt],
        round_to: torch.dtype | None = None,
    ) -> None:
        self.names = HuggingFaceNames(reference)
        self._round_to = round_to
        items = standard_items(reference)
        self.vision_cases = [
            self._vision_case(reference, driver, name, feature) for name, feature in items
        ]
        self.text_cases = [self._text_case(reference, driver, prompt) for prompt in prompts]
        self.batches = _batches([feature for _, feature in items])

    # ---------------------------------------------------------------------------------- the list

    def vision(self) -> list[Check]:
        """Checks of the vision tower, bottom up."""
        names, cases = self.names, self.vision_cases
        levels = range(names.num_levels)
        return [
            Check("patch embed", hf_patch_embed, our_patch_embed, cases),
            Check("position embedding", hf_position, our_position, cases),
            Check("rotary tables", hf_vision_rotary, our_vision_rotary, cases),
            *self._per_block("attention", names.vision_attention, "attn", bounds=True),
            *self._per_block("mlp", names.vision_mlp, "mlp", bounds=False),
            *self._per_block("block", names.block, "", bounds=True),
            self._merger("merger", names.merger, "merger"),
            *(
                self._merger(
                    f"deepstack merger {level}",
                    names.deepstack_merger(level),
                    f"deepstack_merger_list.{level}",
                )
                for level in levels
            ),
            Check("full tower", hf_tower, our_tower, self.batches),
        ]

    def text(self) -> list[Check]:
        """Checks of the text decoder, bottom up.

        Where values are rounded, two equally good results may choose different experts for a token
        whose best scores are close, and differ by a whole expert. The parts in which that can
        happen are compared on the tokens whose choice is clear in the float32 reference.
        """
        names, cases = self.names, self.text_cases
        layers = [(case, index) for case in cases for index in names.layers]
        dense = [(case, index) for case, index in layers if not names.has_experts(index)]
        experts = [(case, index) for case, index in layers if names.has_experts(index)]

        def part(
            name: str,
            hf: Callable[..., Any],
            ours: Callable[..., Any],
            over: Sequence[Any],
            chooses: bool = False,
        ) -> Check:
            def rows(output: torch.Tensor, case: Any) -> torch.Tensor:
                if self._round_to is None or not chooses or not names.has_experts(case[1]):
                    return output
                return output[case[0].settled[case[1]]]

            return Check(
                name,
                lambda reference, case: rows(hf(names, reference, case), case),
                lambda driver, case: rows(ours(names, driver, case), case),
                over,
            )

        return [
            part("rms norm", hf_text_norm, our_text_norm, layers),
            part("rotary tables", hf_text_rotary, our_text_rotary, cases),
            part("attention prefill", hf_text_attention, our_attention_prefill, layers),
            part("attention decode", hf_attention_decode, our_attention_decode, layers),
            *([part("mlp", hf_text_mlp, our_text_mlp, dense)] if dense else []),
            *(
                [
                    part("router", hf_router, our_router, experts),
                    part("experts prefill", hf_text_mlp, our_text_mlp, experts),
                    part("experts decode", hf_experts_decode, our_experts_decode, experts, True),
                ]
                if experts
                else []
            ),
            *([part("shared experts", hf_shared, our_shared, experts)] if names.shared(0) else []),
            part("decoder layer", hf_layer, our_layer, layers, True),
            part("full text tower", hf_text_tower, our_text_tower, cases),
        ]

    def _per_block(
        self, name: str, path: Callable[[int], str], attribute: str, *, bounds: bool
    ) -> list[Check]:
        """One check over some blocks of the tower; attribute "" is the block itself."""
        cases = [(case, index) for case in self.vision_cases for index in self.names.blocks]

        def reference(model: Reference, case: tuple[VisionCase, int]) -> torch.Tensor:
            item, index = case
            hidden = item.inputs[path(index)].to(model.dtype)
            module = model.vision.get_submodule(path(index))
            return (
                module(hidden, **hf_attention_arguments(model, item)) if bounds else module(hidden)
            )

        def actual(driver: PackageDriver, case: tuple[VisionCase, int]) -> torch.Tensor:
            item, index = case
            hidden = item.pack(item.inputs[path(index)].to(driver.dtype))
            block = driver.model.visual.blocks[index]
            module = getattr(block, attribute) if attribute else block
            names = ("cos", "sin", "bound_min", "bound_max") if bounds else ()
            return item.unpack(module(hidden, *(item.tower[name] for name in names)))

        return [Check(name, reference, actual, cases)]

    def _merger(self, name: str, path: str, attribute: str) -> Check:
        def reference(model: Reference, case: VisionCase) -> torch.Tensor:
            return model.vision.get_submodule(path)(case.inputs[path].to(model.dtype))

        def actual(driver: PackageDriver, case: VisionCase) -> torch.Tensor:
            module = driver.model.visual.get_submodule(attribute)
            return case.unpack(module(case.pack(case.inputs[path].to(driver.dtype))))

        return Check(name, reference, actual, self.vision_cases)

    # --------------------------------------------------------------------------------- the inputs

    def _vision_case(
        self, reference: Reference, driver: PackageDriver, name: str, feature: Feature
    ) -> VisionCase:
        grid = torch.tensor([reference.grid_of(feature)])
        with _inputs_of(reference.vision, self.names.vision_paths()) as inputs:
            reference.rows_of(feature)
        return VisionCase(
            name,
            feature,
            grid,
            tower=tower_arguments(driver, feature),
            places=patch_places(driver, feature),
            inputs={path: self._rounded(hidden[0]) for path, hidden in inputs.items()},
        )

    def _text_case(self, reference: Reference, driver: PackageDriver, prompt: Prompt) -> TextCase:
        with _inputs_of(reference.text, self.names.text_paths()) as inputs:
            reference.logits(prompt)
        if reference.spec.text.rope.kind == "plain":
            positions = torch.arange(len(prompt.token_ids))
        else:
            positions, _ = driver.model.get_mrope_input_positions(prompt.token_ids, prompt.features)
        hidden = {path: self._rounded(value[0][0]) for path, value in inputs.items()}
        rows = {f.identifier: self._rounded(reference.rows_of(f)) for f in prompt.features}
        settled = {
            index: settled_tokens(reference, self.names.router(index), inputs[path][0][0])
            for index in self.names.layers
            if self.names.has_experts(index) and (path := self.names.mlp(index))
        }
        return TextCase(prompt, positions, hidden, rows, settled)

    def _rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._round_to is None else hidden.to(self._round_to)


class HuggingFaceNames:
    """Paths of Hugging Face's modules below its two towers, derived from the weight names."""

    def __init__(self, reference: Reference) -> None:
        weights = reference.spec.weights
        self._text, self._vision = weights.text, weights.vision
        self._moe = reference.spec.text.moe
        config = reference.config
        self.first_dense = self._first_dense(config.get_text_config())
        self.blocks = _spread(config.vision_config.depth)
        self.layers = _spread(config.get_text_config().num_hidden_layers)
        self.num_levels = len(config.vision_config.deepstack_visual_indexes)

    def block(self, index: int) -> str:
        """A block of the tower."""
        return self._vision.block.format(block=index).rstrip(".")

    def vision_attention(self, index: int) -> str:
        """A block's attention."""
        return f"{self.block(index)}.{_parent(self._vision.qkv)}"

    def vision_mlp(self, index: int) -> str:
        """A block's MLP."""
        return f"{self.block(index)}.{_parent(self._vision.fc1)}"

    @property
    def merger(self) -> str:
        """The tower's merger."""
        return self._vision.merger.prefix.rstrip(".")

    def deepstack_merger(self, level: int) -> str:
        """The merger of one deepstack level."""
        return self._vision.deepstack.prefix.format(level=level).rstrip(".")

    def layer(self, index: int) -> str:
        """A decoder layer."""
        return self._text.layer.format(layer=index).rstrip(".")

    def attention(self, index: int) -> str:
        """A decoder layer's attention."""
        return f"{self.layer(index)}.{_parent(self._text.q)}"

    def has_experts(self, index: int) -> bool:
        """Whether a decoder layer has experts in the place of its MLP."""
        return self._moe is not None and index >= self.first_dense

    def _first_dense(self, config: Any) -> int:
        keys = self._moe.config_keys.first_dense if self._moe else ()
        return next((getattr(config, key) for key in keys if hasattr(config, key)), 0)

    def mlp(self, index: int) -> str:
        """A decoder layer's MLP, or what holds its experts."""
        text = self._text
        key = text.moe.router if self.has_experts(index) else text.gate or text.gate_up
        return f"{self.layer(index)}.{_parent(key)}"

    def router(self, index: int) -> str:
        """A decoder layer's router."""
        return f"{self.layer(index)}.{self._text.moe.router}"

    def shared(self, index: int) -> str | None:
        """A decoder layer's shared experts, where the family has them."""
        shared = self._text.moe.shared if self._text.moe else None
        return f"{self.layer(index)}.{_parent(shared.gate)}" if shared else None

    def norms(self, index: int) -> dict[str, str]:
        """The norms of a decoder layer: the package's name -> path."""
        norms = {name: getattr(self._text, name) for name in TEXT_NORMS}
        return {name: f"{self.layer(index)}.{key}" for name, key in norms.items() if key}

    def vision_paths(self) -> list[str]:
        """Every module of the tower whose input is needed."""
        per_block = (self.block, self.vision_attention, self.vision_mlp)
        inner = [path(index) for index in self.blocks for path in per_block]
        return [*inner, self.merger, *map(self.deepstack_merger, range(self.num_levels))]

    def text_paths(self) -> list[str]:
        """Every module of the decoder whose input is needed."""
        per_layer = (self.layer, self.attention, self.mlp)
        inner = [path(index) for index in self.layers for path in per_layer]
        return [*inner, *(norm for i in self.layers for norm in self.norms(i).values())]


def run_checks(
    checks: Iterable[Check], reference: Reference, driver: PackageDriver
) -> Iterator[tuple[str, Comparison | Exception]]:
    """Run checks one by one; a check that raises yields its exception."""
    for check in checks:
        comparison = Comparison()
        try:
            with torch.no_grad():
                for case in check.cases:
                    expected = check.reference(reference, case)
                    comparison.add(case_name(case), check.actual(driver, case), expected)
        except Exception as error:
            yield check.name, error
        else:
            yield check.name, comparison


def case_name(case: Any) -> str:
    """Name of a case for messages."""
    if isinstance(case, tuple):
        return f"{case[0].name}, layer {case[1]}"
    return case.name


# ------------------------------------------------------------------------------------ vision parts


@dataclass(frozen=True)
class Batch:
    """Items that are encoded in one call, and share blocks where they fit."""

    name: str
    features: list[Feature]


def standard_items(reference: Reference) -> list[tuple[str, Feature]]:
    """Ten pictures of different shapes and two videos, through the processor."""
    sizes = [
        ("coffee", 128, 192),
        ("rocket", 192, 96),
        ("chelsea", 32, 32),
        ("astronaut", 160, 160),
        ("camera", 96, 128),
        ("china", 64, 160),
        ("flower", 160, 64),
        ("coins", 96, 96),
        ("astronaut", 32, 64),
        ("coffee", 224, 32),
    ]
    items = [(f"{name} {h}x{w}", Media("image", picture(name, h, w))) for name, h, w in sizes]
    items.append(("video 6x64x96", Media("video", moving_view("flower", 6, 64, 96))))
    items.append(("video 9x96x128", Media("video", moving_view("china", 9, 96, 128))))
    return [(name, reference.prompt(name, media).features[0]) for name, media in items]


def _batches(features: Sequence[Feature]) -> list[Batch]:
    """Ten calls: pictures in growing and mixed company, and videos alone and together."""
    images = [feature for feature in features if feature.modality == "image"]
    videos = [feature for feature in features if feature.modality == "video"]
    groups = [images[i : i + 1 + i % 4] for i in range(len(images) - 2)]
    groups += [images[:1] + images[2:4], videos[:1], videos]
    return [
        Batch(f"{len(group)} {group[0].modality}s, call {index}", group)
        for index, group in enumerate(groups)
    ]


def tower_arguments(driver: PackageDriver, feature: Feature) -> dict[str, torch.Tensor]:
    """What the package hands to its tower for one item."""
    seen: dict[str, torch.Tensor] = {}

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.update(kwargs)

    handle = driver.model.visual.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        driver.encode_batch([feature])
    finally:
        handle.remove()
        driver.encoder_cache.free(feature.identifier)
    return seen


def patch_places(driver: PackageDriver, feature: Feature) -> torch.Tensor:
    """Where each patch went: the item is encoded with patch numbers for pixels.

    Numbers are written as two digits to the base 128, exact in every dtype; 0 0 is padding.
    """
    name = pixels_name(feature)
    assert feature.data is not None
    numbers = torch.arange(1, len(feature.data[name].data) + 1)
    stamped = torch.zeros_like(feature.data[name].data)
    stamped[:, 0], stamped[:, 1] = numbers // 128, numbers % 128
    item = replace(
        feature,
        identifier=f"{feature.identifier}-stamped",
        data={**feature.data, name: FieldElement(stamped)},
    )
    pixels = tower_arguments(driver, item)["pixel_values"].float()
    return (pixels[..., 0] * 128 + pixels[..., 1]).round().long().flatten() - 1


def hf_attention_arguments(model: Reference, case: VisionCase) -> dict[str, Any]:
    """Sequence bounds and rotary tables as Hugging Face's blocks take them."""
    frames = case.grid[:, 1] * case.grid[:, 2]
    lengths = torch.repeat_interleave(frames, case.grid[:, 0])
    return {
        "cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32),
        "position_embeddings": _hf_rotary(model, case),
    }


def _hf_rotary(model: Reference, case: VisionCase) -> tuple[torch.Tensor, torch.Tensor]:
    vision = model.vision
    places = model.module.get_vision_position_ids(case.grid, vision.spatial_merge_size, kwargs={})
    return vision.rotary_pos_emb(pixels_of(case.feature), places)


def hf_patch_embed(model: Reference, case: VisionCase) -> torch.Tensor:
    return model.vision.patch_embed(pixels_of(case.feature).to(model.dtype))


def our_patch_embed(driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    pixels = case.tower["pixel_values"].to(driver.dtype)
    return case.unpack(driver.model.visual.patch_embed(pixels))


def hf_position(model: Reference, case: VisionCase) -> torch.Tensor:
    vision = model.vision
    index, weight = model.module.get_vision_interpolation_indices_and_weights(
        case.grid,
        num_grid_per_side=vision.num_grid_per_side,
        mode=vision.interpolation_mode,
        align_corners=vision.interpolation_align_corners,
        spatial_merge_size=vision.spatial_merge_size,
        kwargs={},
    )
    return (vision.pos_embed(index) * weight[:, :, None]).sum(1).to(model.dtype)


def our_position(driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    tower = case.tower
    return case.unpack(driver.model.visual.pos_embed(tower["pos_emb_idx"], tower["pos_emb_weight"]))


def hf_vision_rotary(model: Reference, case: VisionCase) -> torch.Tensor:
    return torch.cat(_hf_rotary(model, case), dim=-1)


def our_vision_rotary(driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    return case.unpack(torch.cat([case.tower["cos"], case.tower["sin"]], dim=-1))


def hf_tower(model: Reference, batch: Batch) -> torch.Tensor:
    return torch.cat([model.rows_of(feature) for feature in batch.features])


def our_tower(driver: PackageDriver, batch: Batch) -> torch.Tensor:
    driver.encode_batch(batch.features)
    rows = torch.cat([driver.cached_rows(feature) for feature in batch.features])
    for feature in batch.features:
        driver.encoder_cache.free(feature.identifier)
    return rows


# -------------------------------------------------------------------------------------- text parts

Layer = tuple[TextCase, int]


def _hf_tables(
    names: HuggingFaceNames, model: Reference, case: TextCase
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[1, t, R]` in the model's dtype, R rotated elements of a head."""
    anything = torch.empty(1, dtype=model.dtype)
    batch = case.positions[..., None, :]  # [3, 1, t] or [1, t]
    return model.text.rotary_emb(anything, batch)


def _our_tables(
    driver: PackageDriver, case: TextCase, first: int = 0, last: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[t, D / 2]` of the tokens first .. last - 1."""
    return driver.model.language_model.rotary_emb(case.positions[..., first:last])


def _causal_mask(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    lowest = torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype)
    return lowest.triu(1)[None, None]


def hf_text_norm(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    return torch.cat(
        [
            model.text.get_submodule(path)(case.inputs[path].to(model.dtype))
            for path in names.norms(index).values()
        ]
    )


def our_text_norm(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    layer = driver.model.language_model.layers[index]
    return torch.cat(
        [
            getattr(layer, name)(case.inputs[path].to(driver.dtype))
            for name, path in names.norms(index).items()
        ]
    )


def hf_text_rotary(names: HuggingFaceNames, model: Reference, case: TextCase) -> torch.Tensor:
    """One angle per pair; pairs that are not rotated have the angle zero."""
    text = model.spec.text
    angles = []
    for table, unrotated in zip(_hf_tables(names, model, case), (1.0, 0.0), strict=True):
        rotated = table[0]
        half = rotated.shape[-1] // 2
        pairs = rotated[:, ::2] if text.rope.pairing == "adjacent" else rotated[:, :half]
        rest = round(half / text.rope.partial) - half
        angles += [pairs, pairs.new_full((len(pairs), rest), unrotated)]
    return torch.cat(angles, dim=-1)


def our_text_rotary(names: HuggingFaceNames, driver: PackageDriver, case: TextCase) -> torch.Tensor:
    return torch.cat(_our_tables(driver, case), dim=-1)


def hf_text_attention(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    path = names.attention(index)
    hidden = case.inputs[path].to(model.dtype)
    return model.text.get_submodule(path)(
        hidden_states=hidden[None],
        position_embeddings=_hf_tables(names, model, case),
        attention_mask=_causal_mask(len(hidden), model.dtype),
    )[0][0]


def our_attention_prefill(
    names: HuggingFaceNames, driver: PackageDriver, layer: Layer
) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.attention(index)].to(driver.dtype)
    attention = driver.model.language_model.layers[index].self_attn
    return _prefilled(driver, case, attention, hidden)


def _prefilled(
    driver: PackageDriver, case: TextCase, module: torch.nn.Module, hidden: torch.Tensor
) -> torch.Tensor:
    """A layer or its attention over all tokens at once."""
    request = driver.add_request(case.prompt.token_ids, case.prompt.features)
    metadata = driver.attention_metadata(request, 0, len(hidden))
    output = module(hidden, *_our_tables(driver, case), torch.arange(len(hidden)), metadata)
    driver.release(request)
    return output


def hf_attention_decode(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    return hf_text_attention(names, model, layer)[-DECODE_STEPS:]


def our_attention_decode(
    names: HuggingFaceNames, driver: PackageDriver, layer: Layer
) -> torch.Tensor:
    """All but the last tokens as a prefill, then one token at a time through the paged cache."""
    case, index = layer
    hidden = case.inputs[names.attention(index)].to(driver.dtype)
    attention = driver.model.language_model.layers[index].self_attn
    request = driver.add_request(case.prompt.token_ids, case.prompt.features)
    start = len(hidden) - DECODE_STEPS
    outputs = []
    for first, last in [(0, start), *((t, t + 1) for t in range(start, len(hidden)))]:
        metadata = driver.attention_metadata(request, first, last - first)
        tables = _our_tables(driver, case, first, last)
        places = torch.arange(first, last)
        outputs.append(attention(hidden[first:last], *tables, places, metadata))
    driver.release(request)
    return torch.cat(outputs[1:])


def hf_text_mlp(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    path = names.mlp(index)
    return model.text.get_submodule(path)(case.inputs[path].to(model.dtype)[None])[0]


def our_text_mlp(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(driver.dtype)
    return driver.model.language_model.layers[index].mlp(hidden)


def hf_experts_decode(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    """The experts with the norm before them."""
    case, index = layer
    path = names.norms(index)["post_attention_layernorm"]
    hidden = model.text.get_submodule(path)(case.inputs[path].to(model.dtype))
    return model.text.get_submodule(names.mlp(index))(hidden[None])[0]


def our_experts_decode(
    names: HuggingFaceNames, driver: PackageDriver, layer: Layer
) -> torch.Tensor:
    """The same token by token, by the decode step where the package has one of its own."""
    case, index = layer
    ours = driver.model.language_model.layers[index]
    norm = ours.post_attention_layernorm
    tokens = case.inputs[names.norms(index)["post_attention_layernorm"]].to(driver.dtype).split(1)
    if hasattr(ours.mlp, "decode"):
        return torch.cat([ours.mlp.decode(token, norm) for token in tokens])
    return torch.cat([ours.mlp(norm(token)) for token in tokens])


def hf_router(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    """Weight of every expert for every token, `[t, E]`."""
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(model.dtype)
    logits, weights, chosen = model.text.get_submodule(names.router(index))(hidden)
    return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, chosen, weights.float())


def our_router(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(driver.dtype)
    return driver.model.language_model.layers[index].mlp.route(hidden)


def settled_tokens(reference: Reference, router: str, hidden: torch.Tensor) -> torch.Tensor:
    """Tokens whose last chosen expert is clearly ahead of the first that is not: bool `[t]`.

    Args:
        reference: The float32 reference.
        router: Path of the router.
        hidden: What it receives, `[t, H]`.
    """
    moe = reference.spec.text.moe
    module = reference.text.get_submodule(router)
    with torch.no_grad():
        scores = module(hidden)[0]
        if moe.router == "sigmoid_bias":
            scores = scores.sigmoid() + module.e_score_correction_bias
    top_k = module.top_k
    best = scores.sort(dim=-1, descending=True).values
    gap = best[:, top_k - 1] - best[:, min(top_k, best.shape[1] - 1)]
    return gap > CLEARLY_AHEAD * scores.std(dim=-1)


def hf_shared(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(model.dtype)
    return model.text.get_submodule(names.shared(index))(hidden)


def our_shared(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(driver.dtype)
    return driver.model.language_model.layers[index].mlp.shared(hidden)


def hf_layer(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    path = names.layer(index)
    hidden = case.inputs[path].to(model.dtype)
    return model.text.get_submodule(path)(
        hidden[None],
        position_embeddings=_hf_tables(names, model, case),
        attention_mask=_causal_mask(len(hidden), model.dtype),
    )[0]


def our_layer(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.layer(index)].to(driver.dtype)
    return _prefilled(driver, case, driver.model.language_model.layers[index], hidden)


def hf_text_tower(names: HuggingFaceNames, model: Reference, case: TextCase) -> torch.Tensor:
    """The decoder's output; vision rows are merged in and added by deepstack."""
    ids = case.prompt.inputs["input_ids"]
    embeddings = model.text.embed_tokens(ids).clone()
    width = embeddings.shape[-1]
    vision: dict[str, Any] = {}
    if case.rows:
        rows = torch.cat([case.rows[f.identifier] for f in case.prompt.features]).to(model.dtype)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for feature in case.prompt.features:
            span = feature.mm_position
            embed = True if span.is_embed is None else span.is_embed
            mask[0, span.offset : span.offset + span.length] = embed
        main, *levels = rows.split(width, dim=-1)
        embeddings[mask] = main
        if levels:
            vision = {"visual_pos_masks": mask, "deepstack_visual_embeds": levels}
    positions = case.positions[..., None, :]
    output = model.text(
        inputs_embeds=embeddings,
        attention_mask=torch.ones_like(ids),
        position_ids=positions,
        use_cache=False,
        **vision,
    )
    return output.last_hidden_state[0]


def our_text_tower(names: HuggingFaceNames, driver: PackageDriver, case: TextCase) -> torch.Tensor:
    """The same from the reference's vision rows, put into the encoder cache by the host."""
    request = driver.add_request(case.prompt.token_ids, case.prompt.features)
    for feature in request.features:
        driver.encoder_cache.put(feature.identifier, case.rows[feature.identifier])
    output: list[torch.Tensor] = []
    handle = driver.model.language_model.register_forward_hook(
        lambda module, args, result: output.append(result)
    )
    try:
        driver.prefill(request)
    finally:
        handle.remove()
        driver.release(request)
    return output[0][: len(request.token_ids)]


# ------------------------------------------------------------------------------------------ parts


def _inputs_of(module: torch.nn.Module, paths: Sequence[str]) -> Any:
    """Record the hidden states that submodules receive, path -> list of them."""
    return _Recorder(module, paths)


class _Recorder:
    def __init__(self, module: torch.nn.Module, paths: Sequence[str]) -> None:
        self._module, self._paths = module, paths
        self._seen: dict[str, list[torch.Tensor]] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> dict[str, list[torch.Tensor]]:
        for path in self._paths:
            hook = self._hook(path)
            module = self._module.get_submodule(path)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self._seen

    def _hook(self, path: str) -> Callable[..., None]:
        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            self._seen.setdefault(path, []).append(hidden.detach().clone())

        return record

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()


def _parent(path: str) -> str:
    """`self_attn.q_proj` -> `self_attn`."""
    return path.rpartition(".")[0]


def _spread(count: int) -> list[int]:
    """Indexes of at most `_MOST_LAYERS` layers, first and last included."""
    if count <= _MOST_LAYERS:
        return list(range(count))
    step = (count - 1) / (_MOST_LAYERS - 1)
    return [round(i * step) for i in range(_MOST_LAYERS)]
