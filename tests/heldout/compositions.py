"""Three models that nobody published, put together directly from transformers' own parts.

Each is a tower and a decoder that never met: the spec of the same name in `specs/` describes it
from the axes alone. A composition knows its config.json, its weights under the names of the spec,
and how to compute vision rows and logits without anything that vlmgen generated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.glm4v.configuration_glm4v import Glm4vTextConfig
from transformers.models.glm4v.modeling_glm4v import Glm4vTextModel
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeTextConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeTextModel
from transformers.models.internvl.configuration_internvl import InternVLConfig, InternVLVisionConfig
from transformers.models.internvl.modeling_internvl import (
    InternVLModel,
    InternVLMultiModalProjector,
    InternVLVisionModel,
)
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    get_vision_window_index,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import (
    Qwen3VLMoeTextConfig,
    Qwen3VLMoeVisionConfig,
)
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeTextModel,
    Qwen3VLMoeVisionPatchMerger,
)

IMAGE, VIDEO, START, END = 300, 301, 302, 303
TOP = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
TEXT = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


class HeldOutConfig(PreTrainedConfig):
    """config.json of a composition, both towers as plain sections."""

    model_type = "held_out"
    sub_configs = {"text_config": PreTrainedConfig, "vision_config": PreTrainedConfig}

    text_config: Any = None
    vision_config: Any = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in ("text_config", "vision_config"):
            section = getattr(self, name)
            if not isinstance(section, PreTrainedConfig):
                kind = {"model_type": (section or {}).get("model_type", "")}
                setattr(self, name, type("Section", (PreTrainedConfig,), kind)(**(section or {})))
        super().__post_init__(**kwargs)


class Composition(nn.Module, ABC):
    """A tower, a decoder and a head; weights drawn so that every part matters."""

    family: str
    model_type: str
    architecture: str
    patch_dim: int
    merge = 2

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.build()
        self.head = nn.Linear(TEXT["hidden_size"], TEXT["vocab_size"], bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                noise = torch.randn(parameter.shape)
                if "embed_tokens" in name or "pos" in name:
                    parameter.copy_(noise * 0.5)
                elif parameter.dim() <= 1 or name.endswith("cls_token"):
                    parameter.add_(noise * 0.1)
                else:
                    parameter.copy_(noise * parameter[0].numel() ** -0.5)
            for name, buffer in self.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.copy_(torch.randn(buffer.shape) * 0.2)
        self.eval()

    @abstractmethod
    def build(self) -> None:
        """Make the parts."""

    @abstractmethod
    def sections(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Text section, vision section and further keys of config.json."""

    @abstractmethod
    def rows(self, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Merged rows of one item, then those of every deepstack level, `[rows, H]` each."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every weight under its checkpoint name."""

    def positions(self, tokens: torch.Tensor, grids: list[list[int]]) -> torch.Tensor:
        """int64 `[3, n]`: text moves on, a picture is a block that starts where it stands."""
        parts, place, position = [], 0, 0
        starts = [i for i, t in enumerate(tokens.tolist()) if t == IMAGE]
        for _, h, w in grids:
            first = next(i for i in starts if i >= place)
            text = torch.arange(position, position + first - place).repeat(3, 1)
            rows, cols = h // self.merge, w // self.merge
            position += first - place
            block = torch.cartesian_prod(
                torch.zeros(1, dtype=torch.int64), torch.arange(rows), torch.arange(cols)
            )
            parts += [text, block.T + position]
            position += max(rows, cols)
            place = first + rows * cols
        parts.append(torch.arange(position, position + len(tokens) - place).repeat(3, 1))
        return torch.cat(parts, dim=1)

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, rows: list[tuple[torch.Tensor, ...]]
    ) -> torch.Tensor:
        """`[n, V]` for tokens `[n]` with the rows of their pictures in order."""
        hidden = self.text.embed_tokens(tokens[None]).clone()
        mask = (tokens == IMAGE)[None]
        if rows:
            hidden[mask] = torch.cat([item[0] for item in rows])
        levels = [torch.cat(level) for level in zip(*(item[1:] for item in rows), strict=True)]
        tables = self.text.rotary_emb(hidden, positions[:, None])
        length = len(tokens)
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for index, layer in enumerate(self.text.layers):
            hidden = layer(hidden, attention_mask=causal, position_embeddings=tables)
            if index < len(levels):
                hidden = hidden.clone()
                hidden[mask] += levels[index]
        return self.head(self.text.norm(hidden))[0]

    def config(self) -> HeldOutConfig:
        """What the checkpoint's config.json holds."""
        text, vision, top = self.sections()
        text["model_type"] = f"{self.model_type}_text"
        vision["model_type"] = f"{self.model_type}_vision"
        config = HeldOutConfig(text_config=text, vision_config=vision, **{**TOP, **top})
        config.architectures = [self.architecture]
        return config

    def _text_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}{name}": value for name, value in self.text.state_dict().items()}


class DeepstackSandwich(Composition):
    """Qwen3-VL's tower with deepstack, GLM-4.1V's decoder."""

    family, model_type = "deepstack_sandwich", "sandwich"
    architecture = "SandwichForConditionalGeneration"
    patch_dim = 3 * 2 * 16 * 16

    def build(self) -> None:
        self.text_config = Glm4vTextConfig(
            **TEXT,
            rms_norm_eps=1e-5,
            attention_bias=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 2, 2],
                "partial_rotary_factor": 0.5,
            },
            attn_implementation="eager",
            pad_token_id=0,
        )
        self.vision_config = Qwen3VLVisionConfig(
            depth=4,
            hidden_size=64,
            intermediate_size=104,
            num_heads=4,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=96,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 2],
            attn_implementation="eager",
        )
        self.text = Glm4vTextModel(self.text_config)
        self.tower = Qwen3VLVisionModel(self.vision_config)

    def sections(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.text_config.to_dict(), self.vision_config.to_dict(), {}

    def rows(self, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.tower(pixels, grid_thw=grid)
        return (output.pooler_output, *output.deepstack_features)

    def tensors(self) -> dict[str, torch.Tensor]:
        tower = {f"model.visual.{name}": v for name, v in self.tower.state_dict().items()}
        return {
            **self._text_tensors("model.language_model."),
            **tower,
            "lm_head.weight": self.head.weight,
        }


class WindowMoeDeepstack(Composition):
    """Qwen2.5-VL's tower with windows, deepstack mergers of Qwen3-VL, a decoder with experts."""

    family, model_type = "window_moe_deepstack", "window_moe"
    architecture = "WindowMoeForConditionalGeneration"
    patch_dim = 3 * 2 * 14 * 14
    levels = (1, 2)

    def build(self) -> None:
        self.text_config = Qwen3VLMoeTextConfig(
            **TEXT,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 5000000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            attn_implementation="eager",
            pad_token_id=0,
        )
        self.vision_config = Qwen2_5_VLVisionConfig(
            depth=4,
            hidden_size=64,
            intermediate_size=104,
            num_heads=4,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=96,
            window_size=56,
            fullatt_block_indexes=[1, 3],
            hidden_act="silu",
            attn_implementation="eager",
        )
        merger = Qwen3VLMoeVisionConfig(hidden_size=64, spatial_merge_size=2, out_hidden_size=96)
        self.text = Qwen3VLMoeTextModel(self.text_config)
        self.tower = Qwen2_5_VisionTransformerPretrainedModel(self.vision_config)
        self.mergers = nn.ModuleList(
            Qwen3VLMoeVisionPatchMerger(merger, use_postshuffle_norm=True) for _ in self.levels
        )

    def sections(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        vision = self.vision_config.to_dict()
        vision["deepstack_visual_indexes"] = list(self.levels)
        return self.text_config.to_dict(), vision, {}

    def rows(self, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen: dict[int, torch.Tensor] = {}
        handles = [
            self.tower.blocks[index].register_forward_hook(
                lambda module, args, output, index=index: seen.__setitem__(index, output)
            )
            for index in self.levels
        ]
        main = self.tower(pixels, grid_thw=grid).pooler_output
        for handle in handles:
            handle.remove()
        order, _ = get_vision_window_index(
            grid, spatial_merge_size=2, window_size=56, patch_size=14, kwargs={}
        )
        back = torch.argsort(order)
        merged = [m(seen[i])[back] for m, i in zip(self.mergers, self.levels, strict=True)]
        return (main, *merged)

    def tensors(self) -> dict[str, torch.Tensor]:
        text = self._text_tensors("model.language_model.")
        for name in [n for n in text if ".mlp.experts." in n]:  # published input dimension first
            text[name] = text[name].transpose(1, 2).contiguous()
        tower = {f"model.visual.{name}": v for name, v in self.tower.state_dict().items()}
        prefix = "model.visual.deepstack_merger_list."
        levels = {f"{prefix}{name}": v for name, v in self.mergers.state_dict().items()}
        return {**text, **tower, **levels, "lm_head.weight": self.head.weight}


class TilesSigmoidMoe(Composition):
    """InternVL3's 6B tower in tiles, GLM-4.5V's decoder with positions of one axis."""

    family, model_type = "tiles_sigmoid_moe", "tiles"
    architecture = "TilesForConditionalGeneration"
    patch_dim = 3 * 14 * 14

    def build(self) -> None:
        self.text_config = Glm4vMoeTextConfig(
            **TEXT,
            head_dim=32,
            rms_norm_eps=1e-5,
            attention_bias=True,
            moe_intermediate_size=40,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            norm_topk_prob=True,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
                "partial_rotary_factor": 0.5,
            },
            attn_implementation="eager",
            pad_token_id=0,
        )
        self.vision_config = InternVLVisionConfig(
            hidden_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=104,
            image_size=[56, 56],
            patch_size=[14, 14],
            attention_bias=False,
            use_qk_norm=True,
            norm_type="rms_norm",
            layer_norm_eps=1e-6,
            hidden_act="gelu",
            attn_implementation="eager",
        )
        joint = InternVLConfig(vision_config=self.vision_config, text_config=self.text_config)
        self.text = Glm4vMoeTextModel(self.text_config)
        self.tower = InternVLVisionModel(self.vision_config)
        self.projector = InternVLMultiModalProjector(joint)

    def sections(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        text = self.text_config.to_dict()
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        }
        return text, self.vision_config.to_dict(), {"downsample_ratio": 0.5}

    def positions(self, tokens: torch.Tensor, grids: list[list[int]]) -> torch.Tensor:
        return torch.arange(len(tokens)).repeat(3, 1)

    def rows(self, pixels: torch.Tensor, grid: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.tower(pixels).last_hidden_state[:, 1:]
        tiles, patches, width = hidden.shape
        side = round(patches**0.5)
        grid_of_patches = hidden.reshape(tiles, side, side, width)
        shuffled = InternVLModel.pixel_shuffle(None, grid_of_patches, scale_factor=0.5)
        rows = self.projector(shuffled.reshape(tiles, -1, shuffled.shape[-1]))
        return (rows.flatten(0, 1),)

    def tensors(self) -> dict[str, torch.Tensor]:
        text = self._text_tensors("language_model.model.")
        for name in [n for n in text if ".mlp.experts." in n]:
            stacked, base = text.pop(name), name.rpartition(".")[0]
            for expert, matrix in enumerate(stacked):
                if name.endswith("gate_up_proj"):
                    gate, up = matrix.chunk(2)
                    text[f"{base}.{expert}.gate_proj.weight"] = gate.contiguous()
                    text[f"{base}.{expert}.up_proj.weight"] = up.contiguous()
                else:
                    text[f"{base}.{expert}.down_proj.weight"] = matrix.contiguous()
        tower = {f"vision_tower.{name}": v for name, v in self.tower.state_dict().items()}
        projector = {
            f"multi_modal_projector.{name}": v for name, v in self.projector.state_dict().items()
        }
        return {**text, **tower, **projector, "language_model.lm_head.weight": self.head.weight}


COMPOSITIONS = (DeepstackSandwich, WindowMoeDeepstack, TilesSigmoidMoe)
