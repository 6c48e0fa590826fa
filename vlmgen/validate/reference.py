"""The Hugging Face model that a package is compared with, and the prompts of the comparison."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlmgen.errors import CheckpointError
from vlmgen.standin.torchvision_ops import declare_missing_ops
from vlmgen.tiny.build import quiet_transformers
from vlmgen.validate.driver import GRIDS, Feature, features_of, read_config
from vlmgen.validate.pictures import moving_view, picture

if TYPE_CHECKING:
    from vlmgen.spec import Spec

VIDEO_FPS = 2.0


@dataclass(frozen=True)
class Media:
    """One picture or video of a prompt.

    Args:
        kind: `image` or `video`.
        pixels: uint8 `[height, width, 3]`, or `[frames, height, width, 3]`.
    """

    kind: str
    pixels: np.ndarray


@dataclass(frozen=True)
class Prompt:
    """A prompt as the Hugging Face processor made it, and the same as vLLM features."""

    name: str
    inputs: dict[str, torch.Tensor]
    token_ids: list[int]
    features: list[Feature]


class Reference:
    """A checkpoint in Hugging Face transformers, on the CPU.

    Args:
        checkpoint: Folder of the checkpoint.
        spec: Names the classes and the published layouts.
        dtype: Dtype of the model.

    Raises:
        CheckpointError: transformers cannot read it, or found tensors missing, left over or of
            another shape.
    """

    def __init__(
        self, checkpoint: str | Path, spec: Spec, dtype: torch.dtype = torch.float32
    ) -> None:
        declare_missing_ops()  # the processors import torchvision
        import transformers

        self.spec, self.dtype = spec, dtype
        self.module = importlib.import_module(spec.reference.module)
        self.config = read_config(checkpoint, dtype)
        model_class = getattr(transformers, spec.reference.model_class)
        with quiet_transformers():
            try:
                model, info = model_class.from_pretrained(
                    checkpoint,
                    dtype=dtype,
                    attn_implementation="eager",
                    key_mapping=_key_mapping(checkpoint, spec),
                    output_loading_info=True,
                )
                self.processor = transformers.AutoProcessor.from_pretrained(checkpoint)
            except (OSError, ValueError, RuntimeError) as error:
                raise CheckpointError(f"{checkpoint}: {error}") from error
        wrong = {key: sorted(map(str, names)) for key, names in info.items() if names}
        if wrong:
            listing = "; ".join(
                f"{key} ({len(names)}): {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
                for key, names in sorted(wrong.items())
            )
            raise CheckpointError(f"{checkpoint}: transformers reports {listing}")
        self.model = model.eval()
        self.text = self.model.get_submodule(spec.reference.text_path)
        self.vision = self.model.get_submodule(spec.reference.vision_path)

    def prompt(self, name: str, *parts: str | Media) -> Prompt:
        """Build a prompt from texts, pictures and videos in order, with the chat template."""
        content: list[dict[str, str]] = []
        images: list[np.ndarray] = []
        videos: list[np.ndarray] = []
        for part in parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": part.kind})
                (images if part.kind == "image" else videos).append(part.pixels)
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        kwargs: dict[str, Any] = {}
        if images:
            kwargs["images"] = images
        if videos:
            kwargs |= {
                "videos": videos,
                "video_metadata": [_metadata(video) for video in videos],
                "do_sample_frames": False,
            }
        batch = self.processor(text=[text], return_tensors="pt", **kwargs)
        inputs = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        tokens = inputs["input_ids"][0].tolist()
        return Prompt(name, inputs, tokens, features_of(inputs, self.config))

    @torch.no_grad()
    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Logits of every token of a prompt, `[n, V]`."""
        return self.model(**prompt.inputs).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: Prompt, new_tokens: int) -> list[int]:
        """The tokens of `generate` without sampling; an end token does not stop it."""
        self.model.generation_config.eos_token_id = None
        tokens = self.model.generate(
            **prompt.inputs, max_new_tokens=new_tokens, do_sample=False, use_cache=True
        )
        return tokens[0, len(prompt.token_ids) :].tolist()

    @torch.no_grad()
    def vision_rows(self, pixels: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Rows as the encoder cache holds them: merged rows, then one part per deepstack level."""
        output = self.vision(pixels.to(self.dtype), grid_thw=grid.reshape(-1, 3))
        levels = getattr(output, "deepstack_features", None) or []
        return torch.cat([output.pooler_output, *levels], dim=-1)

    def rows_of(self, feature: Feature) -> torch.Tensor:
        """`vision_rows` of one feature."""
        assert feature.data is not None
        grid = feature.data[GRIDS[feature.modality]].data
        return self.vision_rows(pixels_of(feature), grid)


def pixels_of(feature: Feature) -> torch.Tensor:
    """Processor pixels of a feature, `[patches, patch_dim]`."""
    assert feature.data is not None
    return next(v.data for name, v in feature.data.items() if name.startswith("pixel_values"))


def grid_of(feature: Feature) -> tuple[int, int, int]:
    """Temporal, height, width of a feature, in patches."""
    assert feature.data is not None
    t, h, w = feature.data[GRIDS[feature.modality]].data.tolist()
    return t, h, w


def standard_prompts(reference: Reference) -> list[Prompt]:
    """Twelve prompts: text, pictures of all shapes, videos, and mixtures in both orders."""

    def image(name: str, height: int, width: int) -> Media:
        return Media("image", picture(name, height, width))

    def video(name: str, frames: int, height: int, width: int) -> Media:
        return Media("video", moving_view(name, frames, height, width))

    landscape, portrait = image("coffee", 128, 192), image("rocket", 192, 96)
    smallest = image("chelsea", 32, 32)  # scaled up to the least that the processor makes
    clip, long_clip = video("flower", 6, 64, 96), video("china", 9, 96, 128)
    ask = "What is in the picture?"
    return [
        reference.prompt("text", "The capital of France is"),
        reference.prompt("long text", "Count the words of this sentence, please. " * 12),
        reference.prompt("picture", landscape, ask),
        reference.prompt("portrait", portrait, ask),
        reference.prompt("smallest picture", smallest, ask),
        reference.prompt("grey picture", image("camera", 160, 160), "Who is that?"),
        reference.prompt("three pictures", landscape, "one", portrait, "two", smallest, ask),
        reference.prompt("same picture twice", portrait, " and ", portrait, "Are they equal?"),
        reference.prompt("video", clip, "What moves?"),
        reference.prompt("long video", "Look: ", long_clip, "What moves?"),
        reference.prompt("picture and video", landscape, "then", clip, "Compare."),
        reference.prompt("video and picture", clip, "then", portrait, "Compare."),
        reference.prompt(
            "mixture", portrait, "a", clip, "b", smallest, "c", long_clip, "d", landscape, "?"
        ),
    ]


def vision_settings(prompts: Sequence[Prompt], *, scale: int = 1) -> dict[str, Any]:
    """Smallest legal vision block and buckets that serve the prompts.

    Args:
        prompts: All prompts of the run.
        scale: Factor on the block size, for a second run with larger blocks.
    """
    grids = [[grid_of(feature) for feature in prompt.features] for prompt in prompts]
    largest = max((h * w for items in grids for _, h, w in items), default=1)
    block = -(-largest // 128) * 128 * scale
    blocks = [sum(-(-(t * h * w) // block) for t, h, w in items) for items in grids]
    most = max([*blocks, 1])
    return {
        "vision_attention_block_size": block,
        "num_vision_tokens_buckets": sorted({block, 2 * block, most * block}),
        "encoder_cache_num_blocks": 2 * most + 1,
    }


def text_settings(prompts: Sequence[Prompt], new_tokens: int) -> dict[str, Any]:
    """Driver arguments for the longest of the prompts and what is generated after it."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    step = 256
    top = -(-(longest + new_tokens) // step) * step
    buckets = sorted({min(128, top), step, top})
    return {"max_model_len": top, "token_buckets": buckets}


def _metadata(video: np.ndarray) -> Any:
    from transformers.video_utils import VideoMetadata

    frames, height, width, _ = video.shape
    return VideoMetadata(
        total_num_frames=frames,
        fps=VIDEO_FPS,
        frames_indices=list(range(frames)),
        height=height,
        width=width,
        duration=frames / VIDEO_FPS,
    )


def _key_mapping(checkpoint: str | Path, spec: Spec) -> Mapping[str, str] | None:
    """Renaming for a checkpoint in another published layout than the first, which HF reads."""
    import re

    from vllm_neuron.utils.checkpoints import SafetensorsCheckpoint

    try:
        names = SafetensorsCheckpoint(str(checkpoint)).get_tensor_names()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(str(error)) from error
    first, *others = spec.weights.layouts
    for layout in others:
        # Applied in this order, and the result of the second may not be taken for the first's.
        towers = ((layout.text, first.text), (layout.vision, first.vision))
        known = any(name.startswith((first.text, first.vision)) for name in names)
        if not known and any(name.startswith(layout.vision) for name in names):
            return {f"^{re.escape(theirs)}": ours for theirs, ours in towers}
    return None
