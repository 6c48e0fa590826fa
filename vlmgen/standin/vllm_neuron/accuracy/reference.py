"""References computed with transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["generate_three_way_reference_logits", "init_hf_model"]


def init_hf_model(
    model_checkpoint: str | Path,
    dtype: torch.dtype,
    config: Any = None,
    attn_implementation: str = "sdpa",
    eager_attn_fallback: bool = False,
) -> torch.nn.Module:
    """Load a transformers model in evaluation mode.

    Args:
        model_checkpoint: local folder or hub id.
        dtype: dtype of the weights.
        config: configuration to use instead of the checkpoint's.
        attn_implementation: ``"sdpa"`` or ``"eager"``.
        eager_attn_fallback: use ``"eager"`` where the model does not support the other.

    Returns:
        The image-text-to-text class for an architecture that ends in ``ForConditionalGeneration``,
        the causal language model class otherwise.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(model_checkpoint) if config is None else config
    architecture = (getattr(config, "architectures", None) or [""])[0]
    multimodal = architecture.endswith("ForConditionalGeneration")
    auto_class = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM

    def load(implementation: str) -> torch.nn.Module:
        return auto_class.from_pretrained(
            model_checkpoint, config=config, dtype=dtype, attn_implementation=implementation
        ).eval()

    try:
        return load(attn_implementation)
    except (ValueError, ImportError):
        if not eager_attn_fallback or attn_implementation == "eager":
            raise
        return load("eager")


@torch.inference_mode()
def generate_three_way_reference_logits(
    model_checkpoint: str | Path,
    target_dtype: torch.dtype,
    output_length: int,
    prompts: Sequence[str],
    tokenizer: Any,
    kv_cache_dtype: str = "auto",
    quant_scale_paths: Any = None,
    config: Any = None,
    model_loader: Callable[..., torch.nn.Module] = init_hf_model,
) -> dict[str, list[torch.Tensor]]:
    """Compute greedy logits in float32, and in a dtype over the same tokens; text prompts only.

    Args:
        model_checkpoint: local folder or hub id.
        target_dtype: the device's dtype.
        output_length: tokens per prompt, ``S``.
        prompts: texts.
        tokenizer: called as ``tokenizer(prompt, return_tensors="pt")``.
        kv_cache_dtype: must be ``"auto"``.
        quant_scale_paths: must be None.
        config: handed to ``model_loader``.
        model_loader: called as :func:`init_hf_model`.

    Returns:
        ``input_ids`` ``[1, P]``, ``fp32_logits`` and ``dtype_logits`` ``[S, 1, V]``, one each per
        prompt.

    Raises:
        NotImplementedError: a quantised cache was asked for.
    """
    if kv_cache_dtype != "auto" or quant_scale_paths is not None:
        raise NotImplementedError("the stand-in has no quantised KV cache references")
    inputs = [tokenizer(prompt, return_tensors="pt")["input_ids"] for prompt in prompts]
    model = model_loader(model_checkpoint, torch.float32, config=config)
    prefixes, fp32_logits = [], []
    for prompt in inputs:
        ids, rows = prompt, []
        for _ in range(output_length):
            row = model(input_ids=ids).logits[:, -1].float()
            rows.append(row)
            ids = torch.cat([ids, row.argmax(dim=-1, keepdim=True)], dim=1)
        prefixes.append(ids[:, :-1])
        fp32_logits.append(torch.stack(rows))
    del model
    model = model_loader(model_checkpoint, target_dtype, config=config)
    dtype_logits = [
        model(input_ids=ids).logits[:, -output_length:].transpose(0, 1).contiguous()
        for ids in prefixes
    ]
    return {"input_ids": inputs, "fp32_logits": fp32_logits, "dtype_logits": dtype_logits}
