"""The Hugging Face model that a package is compared with, and the prompts of the comparison."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vlmgen.errors import CheckpointError
from vlmgen.standin.torchvision_ops import declare_missing_ops
from vlmgen.tiny.build import quiet_transformers
from vlmgen.validate.driver import Feature, read_config
from vlmgen.validate.pictures import moving_view, picture
from vlmgen.validate.upstream import upstream_positions

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
    """A prompt as the Hugging Face processor made it, and the same as vLLM features.

    Args:
        name: For messages.
        inputs: Model inputs.
        token_ids: The tokens.
        features: Images and videos.
        composed: transformers' model cannot take these inputs, or gives them positions that the
            family was not trained with. It then gets embeddings, into which its own tower's rows
            are put here, and vLLM's positions.
    """

    name: str
    inputs: dict[str, torch.Tensor]
    token_ids: list[int]
    features: list[Feature]
    composed: bool = False


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
        features = f"vlmgen.validate.features_{spec.tokens.video_prompt}"
        self.features_of: Callable[..., list[Feature]]
        self.features_of = partial(
            importlib.import_module(features).features_of, config=self.config
        )

    def prompt(self, name: str, *parts: str | Media, composed: bool = False) -> Prompt:
        """Build a prompt from texts, pictures and videos in order, with the chat template."""
        content: list[dict[str, str]] = []
        media: dict[str, list[np.ndarray]] = {"image": [], "video": []}
        for part in parts:
            if isinstance(part, str):
                content.append({"type": "text", "text": part})
            else:
                content.append({"type": part.kind})
                media[part.kind].append(part.pixels)
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        kwargs: dict[str, Any] = {}
        if media["image"]:
            kwargs["images"] = media["image"]
        if media["video"]:
            kwargs |= {
                "videos": media["video"],
                "video_metadata": [_metadata(video) for video in media["video"]],
                "do_sample_frames": False,
            }
        batch = self.processor(text=[text], return_tensors="pt", **kwargs)
        inputs = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        tokens = inputs["input_ids"][0].tolist()
        items = [part for part in parts if isinstance(part, Media)]
        frames = [len(item.pixels) if item.kind == "video" else 0 for item in items]
        extra = {"frames": frames} if self.spec.vision.input == "tiles" else {}
        features = self.features_of(inputs, **extra)
        return Prompt(name, inputs, tokens, features, composed)

    @torch.no_grad()
    def logits(self, prompt: Prompt) -> torch.Tensor:
        """Logits of every token of a prompt, `[n, V]`."""
        inputs = self._composed(prompt) if prompt.composed else prompt.inputs
        return self.model(**inputs).logits[0]

    @torch.no_grad()
    def greedy(self, prompt: Prompt, new_tokens: int) -> list[int]:
        """The tokens of `generate` without sampling; an end token does not stop it."""
        if prompt.composed:
            return self._composed_greedy(prompt, new_tokens)
        self.model.generation_config.eos_token_id = None
        tokens = self.model.generate(
            **prompt.inputs, max_new_tokens=new_tokens, do_sample=False, use_cache=True
        )
        return tokens[0, len(prompt.token_ids) :].tolist()

    def _composed(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """Inputs of a prompt that does without transformers' own merge and positions."""
        ids = prompt.inputs["input_ids"]
        embeddings = self.text.get_input_embeddings()(ids).clone()
        for feature in prompt.features:
            embeddings[0, places_of(feature)] = self.rows_of(feature)
        positions, _ = upstream_positions(self.spec, self.config, prompt.token_ids, prompt.features)
        return {
            "inputs_embeds": embeddings,
            "position_ids": positions[:, None],
            "attention_mask": torch.ones_like(ids),
        }

    def _composed_greedy(self, prompt: Prompt, new_tokens: int) -> list[int]:
        """As `generate`, which would place the new tokens by its own rule."""
        inputs, tokens = self._composed(prompt), []
        position = int(inputs["position_ids"].max())
        for _ in range(new_tokens):
            output = self.model(**inputs, use_cache=True)
            tokens.append(int(output.logits[0, -1].argmax()))
            position += 1
            inputs = {
                "input_ids": torch.tensor([tokens[-1:]]),
                "position_ids": torch.full((3, 1, 1), position),
                "past_key_values": output.past_key_values,
            }
        return tokens

    @torch.no_grad()
    def rows_of(self, feature: Feature) -> torch.Tensor:
        """Rows as the encoder cache holds them: merged rows, then one part per deepstack level."""
        pixels, of_item = pixels_of(feature), {}
        if self.spec.vision.input != "tiles":
            key = f"{feature.modality}_grid_thw"
            of_item[key] = torch.tensor([self.grid_of(feature)])
        # A model without videos of their own takes frames as pictures.
        name = f"get_{feature.modality}_features"
        encode = getattr(self.model.model, name, None) or self.model.model.get_image_features
        output = encode(pixels, **of_item, return_dict=True)
        levels = getattr(output, "deepstack_features", None) or []
        parts = (output.pooler_output, *levels)  # each a tensor per item, or per tile
        return torch.cat([torch.cat(list(part)) for part in parts], dim=-1)

    def grid_of(self, feature: Feature) -> tuple[int, int, int]:
        """Temporal, height, width of a feature in patches; tiles are frames."""
        assert feature.data is not None
        if self.spec.vision.input == "tiles":
            tiles, _, height, width = pixels_of(feature).shape
            rows, columns = pair(self.config.vision_config.patch_size)
            return tiles, height // rows, width // columns
        t, h, w = feature.data[f"{feature.modality}_grid_thw"].data.tolist()
        return t, h, w


def pair(size: Any) -> tuple[int, int]:
    """Height and width of a size that a config may state as one number."""
    return (size, size) if isinstance(size, int) else tuple(size)


def pixels_name(feature: Feature) -> str:
    """Keyword of a feature's pixels."""
    assert feature.data is not None
    return next(name for name in feature.data if name.startswith("pixel_values"))


def pixels_of(feature: Feature) -> torch.Tensor:
    """Processor pixels of a feature: `[patches, patch_dim]`, `[patches, C, p, p]` or tiles."""
    assert feature.data is not None
    return feature.data[pixels_name(feature)].data


def places_of(feature: Feature) -> torch.Tensor:
    """Tokens of the prompt that the feature's rows take the place of."""
    span = feature.mm_position
    places = torch.arange(span.offset, span.offset + span.length)
    return places if span.is_embed is None else places[span.is_embed]


def continued(prompt: Prompt, tokens: Sequence[int]) -> Prompt:
    """A prompt with text tokens after it."""
    inputs = dict(prompt.inputs)
    more = torch.tensor([list(tokens)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], more], dim=1)
    for name, value in (("attention_mask", 1), ("mm_token_type_ids", 0)):
        if name in inputs:
            filling = torch.full_like(more, value).to(inputs[name].dtype)
            inputs[name] = torch.cat([inputs[name], filling], dim=1)
    return replace(prompt, inputs=inputs, token_ids=[*prompt.token_ids, *tokens])


def standard_prompts(reference: Reference) -> list[Prompt]:
    """Text, pictures of all shapes and, where the family has them, videos and mixtures."""
    prompt = reference.prompt

    def image(name: str, height: int, width: int) -> Media:
        return Media("image", picture(name, height, width))

    def video(name: str, frames: int, height: int, width: int) -> Media:
        return Media("video", moving_view(name, frames, height, width))

    landscape, portrait = image("coffee", 128, 192), image("rocket", 192, 96)
    smallest = image("chelsea", 32, 32)  # scaled up to the least that the processor makes
    ask = "What is in the picture?"
    prompts = [
        prompt("text", "The capital of France is"),
        prompt("long text", "Count the words of this sentence, please. " * 12),
        prompt("picture", landscape, ask),
        prompt("portrait", portrait, ask),
        prompt("smallest picture", smallest, ask),
        prompt("grey picture", image("camera", 160, 160), "Who is that?"),
        prompt("three pictures", landscape, "one", portrait, "two", smallest, ask),
        prompt("same picture twice", portrait, " and ", portrait, "Are they equal?"),
    ]
    spec = reference.spec
    if spec.inputs.video is None:
        return prompts
    clip, long_clip = video("flower", 6, 64, 96), video("china", 9, 96, 128)
    # transformers' model takes the image token for both, and refuses pictures beside a video.
    second = long_clip
    if spec.vision.input == "tiles":  # the processor stacks the videos of a prompt
        second = video("china", 6, 96, 128)
    mixed = partial(prompt, composed=spec.tokens.video_prompt == "per_frame_image_token")
    prompts += [
        prompt("video", clip, "What moves?"),
        prompt("long video", "Look: ", long_clip, "What moves?"),
        mixed("picture and video", landscape, "then", clip, "Compare."),
        mixed("video and picture", clip, "then", portrait, "Compare."),
        mixed("mixture", portrait, "a", clip, "b", smallest, "c", second, "d", landscape, "?"),
    ]
    if spec.tokens.positions == "mrope_block":
        # transformers goes on after a video at its longer side, however many frames there are.
        very_long = video("flower", 14, 64, 96)
        prompts.append(prompt("very long video", "See", very_long, "What moves?", composed=True))
    return prompts


def vision_settings(
    reference: Reference, prompts: Sequence[Prompt], *, scale: int = 1
) -> dict[str, Any]:
    """Smallest legal vision block and buckets that serve the prompts.

    Args:
        reference: Knows the grids.
        prompts: All prompts of the run.
        scale: Factor on the block size, for a second run with larger blocks.
    """
    lead = reference.spec.vision.lead
    grids = [[reference.grid_of(feature) for feature in prompt.features] for prompt in prompts]
    largest = max((h * w + lead for items in grids for _, h, w in items), default=1)
    block = -(-largest // 128) * 128 * scale
    blocks = [sum(-(-t // (block // (h * w + lead))) for t, h, w in items) for items in grids]
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
