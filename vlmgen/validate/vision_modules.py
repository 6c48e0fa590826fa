"""Modules of the vision tower alone: the same weights, the same real inputs, both results.

Hugging Face's towers order their rows in different ways, the package has one order of places. Each
case therefore knows, for every place of the package's blocks, the row of Hugging Face's tensors
that belongs there: of its patch embedding, of its blocks and of its merger.

Shapes: p patches of an item, r merged rows, n vision blocks of S places, m patches per merged row,
H width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from vlmgen.spec.types import stated
from vlmgen.validate.checks import Check, InputsOf, parent, spread
from vlmgen.validate.driver import Feature, PackageDriver
from vlmgen.validate.pictures import moving_view, picture
from vlmgen.validate.reference import Media, Reference, pair, pixels_name, pixels_of

if TYPE_CHECKING:
    from vlmgen.spec.vision import VisionSpec


@dataclass(frozen=True)
class Order:
    """Where rows of a tensor stand in the package's blocks.

    Args:
        places: int64 `[n * S]`, the row at each place, -1 where there is none.
        blocks: n.
    """

    places: torch.Tensor
    blocks: int

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """`[p, H]` -> blocks `[n, S, H]`, zeros where there is none."""
        packed = rows.new_zeros(len(self.places), rows.shape[-1])
        packed[self.places >= 0] = rows[self.places[self.places >= 0]]
        return packed.view(self.blocks, -1, rows.shape[-1])

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """`[n, S, H]` -> `[p, H]`."""
        flat = packed.reshape(-1, packed.shape[-1])
        real = self.places >= 0
        rows = flat.new_empty(int(real.sum()), flat.shape[-1])
        rows[self.places[real]] = flat[real]
        return rows


@dataclass
class VisionCase:
    """One picture or video in both forms.

    Args:
        name: For messages.
        feature: The item.
        grid: int64 `[1, 3]`; tiles are frames.
        tower: Keyword arguments that the package's `embed_multimodal` gave its tower.
        patches: Order of the patch embedding's output.
        hidden: Order of the blocks' hidden states, with class tokens.
        merged: Order of the merger's input.
        rows: Order of its output; a place is a merge window.
        inputs: Hugging Face module path -> what it received, rows `[., H]`.
    """

    name: str
    feature: Feature
    grid: torch.Tensor
    tower: dict[str, torch.Tensor]
    patches: Order
    hidden: Order
    merged: Order
    rows: Order
    inputs: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Items that are encoded in one call, and share blocks where they fit."""

    name: str
    features: list[Feature]


class VisionChecks:
    """Checks of the tower's modules.

    Args:
        reference: Float32 reference; its modules' inputs become the inputs of the checks.
        driver: The package, loaded from the same checkpoint.
        round_to: Inputs are rounded to this dtype first, for comparisons in it.
    """

    def __init__(
        self, reference: Reference, driver: PackageDriver, round_to: torch.dtype | None = None
    ) -> None:
        self.names = VisionNames(reference)
        items = standard_items(reference)
        self.cases = [
            self._case(reference, driver, name, feature, round_to) for name, feature in items
        ]
        self.batches = _batches([feature for _, feature in items], driver.max_vision_blocks)

    def checks(self) -> list[Check]:
        """Checks of the vision tower, bottom up."""
        names, cases, vision = self.names, self.cases, self.names.spec
        checks = [self._part("patch embed", hf_patch_embed, our_patch_embed)]
        if vision.embed_norm is not None:
            checks.append(self._norm("embed norm", names.embed_norm, "embed_norm"))
        if vision.position is not None:
            checks.append(self._part("position embedding", hf_position, our_position))
        checks.append(self._part("embeddings", hf_embeddings, our_embeddings))
        if vision.rope is not None:
            checks.append(self._part("rotary tables", hf_rotary_tables, our_rotary_tables))
        blocks = [(case, index) for case in cases for index in names.blocks]
        checks += [
            Check("attention", partial(hf_attention, names), partial(our_attention, names), blocks),
            Check("mlp", partial(hf_mlp, names), partial(our_mlp, names), blocks),
            Check("block", partial(hf_block, names), partial(our_block, names), blocks),
        ]
        if vision.final_norm is not None:
            checks.append(self._norm("final norm", names.final_norm, "final_norm"))
        if vision.merger.op == "strided_conv":
            checks.append(self._part("downsample", hf_downsample, our_downsample))
        checks.append(self._part("merger", hf_merger, our_merger))
        for level in range(names.num_levels):
            checks.append(
                Check(
                    f"deepstack merger {level}",
                    partial(hf_deepstack_merger, names, level),
                    partial(our_deepstack_merger, names, level),
                    cases,
                )
            )
        return [*checks, Check("full tower", hf_tower, our_tower, self.batches)]

    def _part(
        self, name: str, hf: Callable[..., torch.Tensor], ours: Callable[..., torch.Tensor]
    ) -> Check:
        return Check(name, partial(hf, self.names), partial(ours, self.names), self.cases)

    def _norm(self, name: str, path: str, attribute: str) -> Check:
        def hf(model: Reference, case: VisionCase) -> torch.Tensor:
            return model.model.get_submodule(path)(case.inputs[path].to(model.dtype))

        def ours(driver: PackageDriver, case: VisionCase) -> torch.Tensor:
            norm = getattr(driver.model.visual, attribute)
            return norm(case.inputs[path].to(driver.dtype))

        return Check(name, hf, ours, self.cases)

    def _case(
        self,
        reference: Reference,
        driver: PackageDriver,
        name: str,
        feature: Feature,
        round_to: torch.dtype | None,
    ) -> VisionCase:
        names = self.names
        grid = torch.tensor([reference.grid_of(feature)])
        with InputsOf(reference.model, names.paths()) as recorded, torch.no_grad():
            reference.rows_of(feature)
        inputs = {path: names.as_rows(path, hidden[0]) for path, hidden in recorded.items()}
        if round_to is not None:
            inputs = {path: hidden.to(round_to) for path, hidden in inputs.items()}
        places, blocks = patch_places(reference, driver, feature)
        orders = _orders(names, grid, places)
        return VisionCase(
            name,
            feature,
            grid,
            tower=tower_arguments(driver, feature),
            **{kind: Order(order, blocks) for kind, order in orders.items()},
            inputs=inputs,
        )


class VisionNames:
    """Paths of Hugging Face's modules, derived from the names of their weights."""

    def __init__(self, reference: Reference) -> None:
        spec, config = reference.spec, reference.config.vision_config
        self.spec: VisionSpec = spec.vision
        self.config = config
        self._names = spec.weights.vision
        self._root = f"{spec.reference.vision_path}."
        self._projector = spec.reference.projector_path
        self.blocks = spread(getattr(config, self.spec.keys.depth))
        self.num_levels = len(config.deepstack_visual_indexes) if self.spec.deepstack else 0
        self.area = self.spec.merge_area

    def block(self, index: int) -> str:
        """A block."""
        return self._root + self._names.block.format(block=index).rstrip(".")

    def attention(self, index: int) -> str:
        """A block's attention."""
        return f"{self.block(index)}.{parent(stated(self._names.qkv or self._names.q))}"

    def mlp(self, index: int) -> str:
        """A block's MLP."""
        return f"{self.block(index)}.{parent(stated(self._names.fc1 or self._names.gate))}"

    @property
    def patch_embed(self) -> str:
        """The convolution over patches."""
        return self._root + self._names.patch_embed

    @property
    def embed_norm(self) -> str:
        """Norm of the patch embedding."""
        return f"{self._root}{self._names.embed_norm}"

    @property
    def final_norm(self) -> str:
        """Norm after the last block."""
        return f"{self._root}{self._names.final_norm}"

    @property
    def position(self) -> str:
        """The position table."""
        return f"{self._root}{self._names.pos_embed}"

    @property
    def downsample(self) -> str:
        """The convolution that merges."""
        return f"{self._root}{self._names.merger.conv}"

    @property
    def merger(self) -> str:
        """The merger, or what comes after the convolution that merges."""
        prefix = self._names.merger.prefix
        return str(self._projector) if prefix is None else self._root + prefix.rstrip(".")

    def deepstack_merger(self, level: int) -> str:
        """The merger of one deepstack level."""
        prefix = stated(self._names.deepstack).prefix
        return self._root + prefix.format(level=level).rstrip(".")

    def sees_frame(self, index: int) -> bool:
        """Whether a block attends over the whole frame or tile."""
        return self.spec.attention.window is None or index in self.config.fullatt_block_indexes

    @property
    def before_merge(self) -> str:
        """The module that receives what is merged."""
        return self.downsample if self.spec.merger.op == "strided_conv" else self.merger

    def paths(self) -> list[str]:
        """Every module whose input is needed."""
        paths = [
            path(index) for index in self.blocks for path in (self.block, self.attention, self.mlp)
        ]
        if self.spec.embed_norm is not None:
            paths.append(self.embed_norm)
        if self.spec.final_norm is not None:
            paths.append(self.final_norm)
        paths += [self.before_merge, *map(self.deepstack_merger, range(self.num_levels))]
        return paths

    def as_rows(self, path: str, hidden: torch.Tensor) -> torch.Tensor:
        """What a module received, as rows `[., H]`."""
        if path != self.before_merge:
            return hidden.flatten(0, -2)
        if self.spec.merger.op == "strided_conv":  # [r, H, side, side]
            return hidden.permute(0, 2, 3, 1).flatten(0, 2)
        # A projector that receives joined windows; others receive patches.
        return hidden.reshape(-1, self._width)

    @property
    def _width(self) -> int:
        return getattr(self.config, self.spec.keys.hidden_size)


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
    if reference.spec.inputs.video is not None:
        items.append(("video 6x64x96", Media("video", moving_view("flower", 6, 64, 96))))
        items.append(("video 9x96x128", Media("video", moving_view("china", 9, 96, 128))))
    return [(name, reference.prompt(name, media).features[0]) for name, media in items]


def _batches(features: Sequence[Feature], most: int) -> list[Batch]:
    """Ten calls of at most so many items: pictures in growing company, and videos."""
    images = [feature for feature in features if feature.modality == "image"]
    videos = [feature for feature in features if feature.modality == "video"]
    groups = [images[i : i + 1 + i % min(4, most)] for i in range(len(images) - 2)]
    groups += [images[:1] + images[2:4], videos[:1], videos]
    return [
        Batch(f"{len(group)} {group[0].modality}s, call {index}", group)
        for index, group in enumerate(filter(None, groups))
    ]


# ------------------------------------------------------------------------------------------ orders


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


def patch_places(
    reference: Reference, driver: PackageDriver, feature: Feature
) -> tuple[torch.Tensor, int]:
    """Where each patch went: the item is encoded with patch numbers for pixels.

    Numbers are written as two digits to the base 128, exact in every dtype; 0 0 is padding.

    Returns:
        int64 `[n * S]`, the patch at each place, numbered as the processor orders them (tiles row
        by row), -1 where there is none; and n.
    """
    name = pixels_name(feature)
    assert feature.data is not None
    pixels = feature.data[name].data
    side = pair(reference.config.vision_config.patch_size)[0]
    tiles = reference.spec.vision.input == "tiles"
    count = pixels.shape[0]
    if tiles:
        count *= (pixels.shape[-2] // side) * (pixels.shape[-1] // side)
    numbers = torch.arange(1, count + 1)
    stamped = torch.zeros(count, pixels.numel() // count, dtype=pixels.dtype)
    stamped[:, 0], stamped[:, 1] = numbers // 128, numbers % 128
    if tiles:
        columns = stamped.view(pixels.shape[0], -1, stamped.shape[-1]).transpose(1, 2)
        stamped = torch.nn.functional.fold(columns, pixels.shape[-2:], side, stride=side)
    item = replace(
        feature,
        identifier=f"{feature.identifier}-stamped",
        data={**feature.data, name: replace(feature.data[name], data=stamped.view(pixels.shape))},
    )
    found = tower_arguments(driver, item)["pixel_values"].float()
    return (found[..., 0] * 128 + found[..., 1]).round().long().flatten() - 1, found.shape[0]


def _orders(
    names: VisionNames, grid: torch.Tensor, places: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The row of Hugging Face's tensors at each place, from the patch at each place."""
    vision, area = names.spec, names.area
    if vision.input == "patches_merge_order":
        hidden = places
        if vision.attention.window is not None:
            by_window = window_patches(names, grid)
            row_of_patch = torch.empty_like(by_window)
            row_of_patch[by_window] = torch.arange(len(by_window))
            hidden = torch.where(places < 0, places, row_of_patch[places])
        merged, rows = hidden, hidden[::area].div(area, rounding_mode="floor")
        return {"patches": places, "hidden": hidden, "merged": merged, "rows": rows}
    _, h, w = grid[0].tolist()
    m = vision.merger.merge_size
    frame, inside = places // (h * w), places % (h * w)
    row, column = inside // w, inside % w
    window = frame * (h * w // area) + row // m * (w // m) + column // m
    window = torch.where(places < 0, -1, window)
    rows = window[::area]
    if vision.input == "patches_raster":
        return {"patches": places, "hidden": places, "merged": places, "rows": rows}
    tokens = h * w + 1
    hidden = torch.where(places < 0, -1, frame * tokens + 1 + inside)
    for tile in range(int(grid[0, 0])):  # the class token stands before its tile
        first = int((hidden > tile * tokens).nonzero()[0])
        hidden[first - 1] = tile * tokens
    merged = torch.where(places < 0, -1, window * area + row % m * m + column % m)
    return {"patches": places, "hidden": hidden, "merged": merged, "rows": rows}


def window_patches(names: VisionNames, grid: torch.Tensor) -> torch.Tensor:
    """Patches of an item in the order of Hugging Face's attention windows, int64 `[p]`."""
    index, _ = _windows(names, grid)
    return (index[:, None] * names.area + torch.arange(names.area)).flatten()


def _windows(names: VisionNames, grid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from transformers.vision_utils import get_vision_window_index

    config = names.config
    return get_vision_window_index(
        grid, config.spatial_merge_size, config.window_size, config.patch_size
    )


# -------------------------------------------------------------------------------------- embeddings


def hf_patch_embed(names: VisionNames, model: Reference, case: VisionCase) -> torch.Tensor:
    convolution = model.model.get_submodule(names.patch_embed)
    pixels = pixels_of(case.feature).to(model.dtype)
    if names.spec.input == "tiles":
        return convolution(pixels).flatten(2).transpose(1, 2).flatten(0, 1)
    shape = (len(pixels), names.spec.patch_embed.in_channels, *convolution.kernel_size)
    return convolution(pixels.view(shape)).flatten(1)


def our_patch_embed(names: VisionNames, driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    pixels = case.tower["pixel_values"].to(driver.dtype)
    index = [case.tower["pos_emb_idx"]] if names.spec.class_token else []
    return case.patches.unpack(driver.model.visual.patch_embed(pixels, *index))


def hf_position(names: VisionNames, model: Reference, case: VisionCase) -> torch.Tensor:
    """By Hugging Face's own functions, which differ from tower to tower."""
    table = model.model.get_submodule(parent(names.position))
    t, h, w = case.grid[0].tolist()
    kind = stated(names.spec.position).kind
    if kind == "learned_fixed":
        return model.model.get_parameter(names.position)[0].repeat(t, 1)
    if kind == "learned_grid_sample_bicubic":
        from transformers.vision_utils import get_vision_position_ids

        places = get_vision_position_ids(case.grid, model.vision.spatial_merge_size)
        frames = torch.tensor([[1, h, w]]).repeat(t, 1)
        nothing = torch.zeros(len(places), table.embed_dim, dtype=model.dtype)
        return table(nothing, frames.prod(-1), frames, places[:, 0], places[:, 1])
    index, weight = model.module.get_vision_interpolation_indices_and_weights(
        case.grid,
        num_grid_per_side=table.num_grid_per_side,
        mode=table.interpolation_mode,
        align_corners=table.interpolation_align_corners,
        spatial_merge_size=_merge_order(names),
        kwargs={},
    )
    embedding = model.model.get_submodule(names.position)
    return (embedding(index) * weight[:, :, None]).sum(1).to(model.dtype)


def _merge_order(names: VisionNames) -> int:
    """Merge size by which Hugging Face orders the patches; 1 is row by row."""
    return names.spec.merger.merge_size if names.spec.input == "patches_merge_order" else 1


def our_position(names: VisionNames, driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    given = [case.tower[name] for name in ("pos_emb_idx", "pos_emb_weight") if name in case.tower]
    order = case.hidden if names.spec.class_token else case.patches
    return order.unpack(driver.model.visual.pos_embed(*given))


def hf_embeddings(names: VisionNames, model: Reference, case: VisionCase) -> torch.Tensor:
    """What the first block receives, from pixels."""
    with InputsOf(model.model, [names.block(0)]) as recorded:
        model.rows_of(case.feature)
    return recorded[names.block(0)][0].flatten(0, -2)


def our_embeddings(names: VisionNames, driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    with InputsOf(driver.model.visual, ["blocks.0"]) as recorded:
        driver.encode_batch([case.feature])
    driver.encoder_cache.free(case.feature.identifier)
    return case.hidden.unpack(recorded["blocks.0"][0])


def _rotary(names: VisionNames, model: Reference, case: VisionCase) -> tuple[torch.Tensor, ...]:
    """cos and sin of the patches, in the order of the blocks."""
    from transformers.vision_utils import get_vision_position_ids

    rotary = next(
        module
        for module in model.vision.modules()
        if type(module).__name__.endswith("VisionRotaryEmbedding")
    )
    places = get_vision_position_ids(case.grid, _merge_order(names))
    tables = rotary(pixels_of(case.feature), places)
    if names.spec.attention.window is None:
        return tables
    order = window_patches(names, case.grid)
    return tuple(table[order] for table in tables)


def hf_rotary_tables(names: VisionNames, model: Reference, case: VisionCase) -> torch.Tensor:
    return torch.cat(_rotary(names, model, case), dim=-1)


def our_rotary_tables(names: VisionNames, driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    return case.hidden.unpack(torch.cat([case.tower["cos"], case.tower["sin"]], dim=-1))


# ------------------------------------------------------------------------------------------ blocks

Block = tuple[VisionCase, int]


def _hf_call(names: VisionNames, model: Reference, block: Block, path: str) -> torch.Tensor:
    """A block, or its attention, in Hugging Face's calling convention."""
    case, index = block
    module = model.model.get_submodule(path)
    hidden = case.inputs[path].to(model.dtype)
    if names.spec.input == "tiles":
        output = module(hidden.view(int(case.grid[0, 0]), -1, hidden.shape[-1]))
    else:
        output = module(
            hidden,
            cu_seqlens=_limits(names, case, index),
            position_embeddings=_rotary(names, model, case),
        )
    output = output[0] if isinstance(output, tuple) else output
    return output.reshape(hidden.shape)


def _limits(names: VisionNames, case: VisionCase, index: int) -> torch.Tensor:
    """Where the units begin and end within which a block's patches attend."""
    if not names.sees_frame(index):
        return _windows(names, case.grid)[1]
    frames = torch.repeat_interleave(case.grid[:, 1] * case.grid[:, 2], case.grid[:, 0])
    return torch.cat([frames.new_zeros(1), frames.cumsum(0)]).to(torch.int32)


def _our_call(
    names: VisionNames, driver: PackageDriver, block: Block, path: str, attribute: str = ""
) -> torch.Tensor:
    case, index = block
    module = driver.model.visual.blocks[index]
    module = getattr(module, attribute) if attribute else module
    unit = "bound" if names.sees_frame(index) else "window"
    given = [case.tower[name] for name in ("cos", "sin") if name in case.tower]
    given += [case.tower[f"{unit}_min"], case.tower[f"{unit}_max"]]
    hidden = case.hidden.pack(case.inputs[path].to(driver.dtype))
    return case.hidden.unpack(module(hidden, *given))


def hf_attention(names: VisionNames, model: Reference, block: Block) -> torch.Tensor:
    return _hf_call(names, model, block, names.attention(block[1]))


def our_attention(names: VisionNames, driver: PackageDriver, block: Block) -> torch.Tensor:
    return _our_call(names, driver, block, names.attention(block[1]), "attn")


def hf_block(names: VisionNames, model: Reference, block: Block) -> torch.Tensor:
    return _hf_call(names, model, block, names.block(block[1]))


def our_block(names: VisionNames, driver: PackageDriver, block: Block) -> torch.Tensor:
    return _our_call(names, driver, block, names.block(block[1]))


def hf_mlp(names: VisionNames, model: Reference, block: Block) -> torch.Tensor:
    case, index = block
    path = names.mlp(index)
    return model.model.get_submodule(path)(case.inputs[path].to(model.dtype))


def our_mlp(names: VisionNames, driver: PackageDriver, block: Block) -> torch.Tensor:
    case, index = block
    hidden = case.inputs[names.mlp(index)].to(driver.dtype)
    return driver.model.visual.blocks[index].mlp(hidden[None])[0]


# ------------------------------------------------------------------------------------------ merger


def _to_merge(names: VisionNames, case: VisionCase, dtype: torch.dtype) -> torch.Tensor:
    return case.inputs[names.before_merge].to(dtype)


def hf_downsample(names: VisionNames, model: Reference, case: VisionCase) -> torch.Tensor:
    side = names.spec.merger.merge_size
    hidden = _to_merge(names, case, model.dtype)
    windows = hidden.view(-1, side, side, hidden.shape[-1]).permute(0, 3, 1, 2)
    return model.model.get_submodule(names.downsample)(windows).flatten(1)


def our_downsample(names: VisionNames, driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    merger = driver.model.visual.merger
    joined = _to_merge(names, case, driver.dtype).view(-1, merger.conv_weight.shape[0])
    return torch.nn.functional.linear(joined, merger.conv_weight.t(), merger.conv_bias)


def hf_merger(names: VisionNames, model: Reference, case: VisionCase) -> torch.Tensor:
    module = model.model.get_submodule(names.merger)
    if names.spec.merger.op == "strided_conv":
        return module(hf_downsample(names, model, case))
    hidden = _to_merge(names, case, model.dtype)
    if names.spec.input == "patches_raster":
        return module(hidden, case.grid)
    if names.spec.input == "tiles":  # the windows are joined before
        hidden = hidden.view(-1, names.area * hidden.shape[-1])
    return module(hidden)


def our_merger(names: VisionNames, driver: PackageDriver, case: VisionCase) -> torch.Tensor:
    hidden = case.merged.pack(_to_merge(names, case, driver.dtype))
    return case.rows.unpack(driver.model.visual.merger(hidden))


def hf_deepstack_merger(
    names: VisionNames, level: int, model: Reference, case: VisionCase
) -> torch.Tensor:
    path = names.deepstack_merger(level)
    return model.model.get_submodule(path)(case.inputs[path].to(model.dtype))


def our_deepstack_merger(
    names: VisionNames, level: int, driver: PackageDriver, case: VisionCase
) -> torch.Tensor:
    hidden = case.hidden.pack(case.inputs[names.deepstack_merger(level)].to(driver.dtype))
    return case.rows.unpack(driver.model.visual.deepstack_merger_list[level](hidden))


# ------------------------------------------------------------------------------------------- tower


def hf_tower(model: Reference, batch: Batch) -> torch.Tensor:
    return torch.cat([model.rows_of(feature) for feature in batch.features])


def our_tower(driver: PackageDriver, batch: Batch) -> torch.Tensor:
    driver.encode_batch(batch.features)
    rows = torch.cat([driver.cached_rows(feature) for feature in batch.features])
    for feature in batch.features:
        driver.encoder_cache.free(feature.identifier)
    return rows
