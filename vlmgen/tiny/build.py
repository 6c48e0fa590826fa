"""Build a tiny random checkpoint: config, safetensors as published, tokenizer, processor.

The weights are drawn here and not by the library's initialisation, in which images hardly move the
logits and a forgotten bias goes unseen: matrices get unit gain (each expert its own), vectors are
moved off their start value, position tables and class tokens are as large as what they are added
to, routers prefer some experts clearly, and a router's correction bias changes its choice.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmgen.errors import OutputError, UsageError
from vlmgen.tiny.family import family_of, load_family, merge

if TYPE_CHECKING:
    import torch

MARKER = "tiny.json"
"""File that says how a tiny checkpoint was made; only a directory that holds it is replaced."""

_TABLES = ("pos_embed", "position_embedding", "positional_embedding", "cls_token")
_TIED_EMBEDDING_STD, _EMBEDDING_STD, _HEAD_STD, _TABLE_STD, _VECTOR_STD = 0.05, 0.5, 0.2, 0.3, 0.1
_ROUTER, _ROUTER_GAIN = "mlp.gate.weight", 2.0
_CORRECTION, _CORRECTION_STD = "e_score_correction_bias", 0.2


def build_tiny(
    spec_or_family: Any,
    out: str | Path,
    seed: int = 0,
    tied: bool = False,
    as_saved: bool = False,
    *,
    dtype: str = "float32",
    parallel: bool = False,
    text: Mapping[str, Any] | None = None,
    vision: Mapping[str, Any] | None = None,
    layout: str | None = None,
    max_shard_size: int | None = None,
) -> Path:
    """Build a tiny checkpoint; the directory appears complete or not at all.

    Args:
        spec_or_family: A loaded spec, the path of a YAML spec, or the name of a tiny family.
        out: Directory to make; an earlier tiny checkpoint in its place is replaced.
        seed: Seed of the weights.
        tied: Use the embedding as the head, as the family's small checkpoints do.
        as_saved: Keep the tensor names that transformers writes, instead of the published ones.
        dtype: `float32` or `bfloat16`, of weights and config.
        parallel: Take the family's sizes for runs on ranks; `text` and `vision` go before them.
        text: Other sizes for the text config, such as `{"num_attention_heads": 8}`.
        vision: Other sizes for the vision config.
        layout: Name of a published naming; None is the first.
        max_shard_size: Bytes per safetensors file; None writes a single file.

    Returns:
        `out` as a path.

    Raises:
        UsageError: An unknown family, layout or dtype.
        OutputError: `out` holds something else.
    """
    name = family_of(spec_or_family, tied=tied)
    family = load_family(name)
    on_ranks = family["parallel"] if parallel else {}
    text = merge(on_ranks.get("text", {}), text or {})
    vision = merge(on_ranks.get("vision", {}), vision or {})
    changes = {"text_config": text, "vision_config": vision}
    family["config_kwargs"] = merge(family["config_kwargs"], changes)
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"dtype is {dtype!r}; legal: float32, bfloat16")
    layout = layout or family["published_layout"]
    if layout not in family["layouts"]:
        raise UsageError(f"{name} has no layout {layout!r}; legal: {', '.join(family['layouts'])}")
    rules = [] if as_saved else family["layouts"][layout]
    config_rules = [] if as_saved else family.get("configs", {}).get(layout, [])
    made_from = {
        "family": name,
        "seed": seed,
        "dtype": dtype,
        "layout": "as saved" if as_saved else layout,
        "text": text,
        "vision": vision,
    }
    out = Path(out)
    with _staged(out) as stage, quiet_transformers():
        _write_checkpoint(family, stage, seed, dtype, rules, max_shard_size)
        _rewrite_config(stage / "config.json", config_rules)
        (stage / MARKER).write_text(json.dumps(made_from, indent=2) + "\n", encoding="utf-8")
    return out


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no load report of transformers inside a `with` block."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """A directory next to `out` that takes its place when the block ends without an error."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"{out} is not a directory; nothing was written")
    if out.is_dir() and any(out.iterdir()) and not (out / MARKER).is_file():
        raise OutputError(
            f"{out} holds files that are no tiny checkpoint (no {MARKER}); nothing was written",
            hint="name another directory",
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise OutputError(f"{out}: cannot be written: {error.strerror}") from None
    try:
        yield stage
        stage.chmod(0o755)
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.old.", dir=out.parent))
            out.rename(old / out.name)
            stage.rename(out)
            shutil.rmtree(old)
        else:
            stage.rename(out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _write_checkpoint(
    family: Mapping[str, Any],
    folder: Path,
    seed: int,
    dtype: str,
    rules: list[Mapping[str, Any]],
    max_shard_size: int | None,
) -> None:
    import torch

    tokenizer = _make_tokenizer(family["tokenizer"])
    _check_token_ids(family, tokenizer)
    model = _rounded(_make_model(family, seed), getattr(torch, dtype))
    part = family["tokenizer"]
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(part["eos"])
    model.generation_config.pad_token_id = tokenizer.convert_tokens_to_ids(part["pad"])
    model.save_pretrained(folder)
    if rules or max_shard_size is not None:
        _rewrite_tensors(folder, rules, max_shard_size)
    tokenizer.save_pretrained(folder)
    _make_processor(family, tokenizer).save_pretrained(folder)


def _class(name: str) -> Any:
    from vlmgen.standin.torchvision_ops import declare_missing_ops

    declare_missing_ops()  # the image processors import torchvision
    import transformers

    return getattr(transformers, name)


def _make_tokenizer(part: Mapping[str, Any]) -> Any:
    """A byte-level tokenizer: ids 0 to 255 are bytes, the special tokens follow."""
    from tokenizers import Tokenizer, decoders, models
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    vocab = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(part["specials"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=part["eos"],
        pad_token=part["pad"],
        extra_special_tokens=dict(part.get("named", {})),
        clean_up_tokenization_spaces=False,
    )


def _check_token_ids(family: Mapping[str, Any], tokenizer: Any) -> None:
    for field, token in family["token_ids"].items():
        stated, real = family["config_kwargs"][field], tokenizer.convert_tokens_to_ids(token)
        if stated != real:
            raise ValueError(f"{field} is {stated} in the config, but {token} has id {real}")


def _chat_template(chat: Mapping[str, str]) -> str:
    """Turns between markers; an image or a video becomes its slot."""

    def text(literal: str) -> str:
        return "{{ " + json.dumps(literal) + " }}"

    opening = text(chat["turn_open"]) + "{{ %s }}" + text(chat["turn_sep"])
    video = ""
    if "video_slot" in chat:
        video = "{% elif part['type'] == 'video' %}" + text(chat["video_slot"])
    content = (
        "{% for part in message['content'] %}"
        "{% if part['type'] in ('image', 'image_url') %}"
        + text(chat["image_slot"])
        + video
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    )
    return (
        (text(chat["start"]) if "start" in chat else "")
        + "{% for message in messages %}"
        + opening % "message['role']"
        + "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        + content
        + "{% endif %}"
        + text(chat["turn_close"])
        + "{% endfor %}{% if add_generation_prompt %}"
        + opening % "'assistant'"
        + "{% endif %}"
    )


def _make_processor(family: Mapping[str, Any], tokenizer: Any) -> Any:
    part = family["processor"]
    pieces = {
        role: _class(part[role][0])(**part[role][1])
        for role in ("image_processor", "video_processor")
        if role in part
    }
    return _class(part["class"])(
        tokenizer=tokenizer,
        chat_template=_chat_template(family["chat"]),
        **pieces,
        **part.get("kwargs", {}),
    )


def _make_model(family: Mapping[str, Any], seed: int) -> Any:
    import torch

    config = _class(family["config_class"])(**family["config_kwargs"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _class(family["model_class"])(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    words = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is words:
                noise *= _TIED_EMBEDDING_STD if head is words else _EMBEDDING_STD
            elif parameter is head:
                noise *= _HEAD_STD
            elif any(table in name for table in _TABLES):
                noise *= _TABLE_STD
            elif parameter.dim() <= 1:
                noise = parameter + noise * _VECTOR_STD
            elif parameter.dim() == 3:  # experts, each a matrix of its own
                noise *= parameter.shape[-1] ** -0.5
            else:
                noise *= parameter[0].numel() ** -0.5  # fan-in
                if name.endswith(_ROUTER):
                    noise *= _ROUTER_GAIN
            parameter.copy_(noise)
        head[[family["config_kwargs"][field] for field in family.get("never_said", ())]] = 0.0
        for name, buffer in model.named_buffers():
            if name.endswith(_CORRECTION):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * _CORRECTION_STD)
    return model


def _rounded(model: Any, dtype: torch.dtype) -> Any:
    """The model in another dtype, but for what its class keeps in float32 in every checkpoint."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            for key, value in own.items():
                strict = any(part in f"{name}.{key}" for part in kept)
                if value is not None and value.is_floating_point() and not strict:
                    value.data = value.data.to(dtype)
    return model


def _rewrite_tensors(
    folder: Path, rules: list[Mapping[str, Any]], max_shard_size: int | None
) -> None:
    """Apply the rules of a layout to the saved tensors, and split them into files.

    Each rule has one entry: `rename`, a regular expression and its replacement on every name;
    `transpose`, an expression: the last two dimensions of the tensors in whose name it is found;
    `add`, names and shapes of tensors that published files hold and no model reads.
    """
    import torch
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    for rule in rules:
        ((verb, argument),) = rule.items()
        if verb == "rename":
            pattern, replacement = argument
            tensors = {re.sub(pattern, replacement, name): t for name, t in tensors.items()}
        elif verb == "transpose":
            tensors = {
                name: t.transpose(-1, -2).contiguous() if re.search(argument, name) else t
                for name, t in tensors.items()
            }
        elif verb == "add":
            dtype = min((t.dtype for t in tensors.values()), key=lambda kind: kind.itemsize)
            tensors |= {
                name: torch.full(shape, 7.0, dtype=dtype) for name, shape in argument.items()
            }
        else:
            raise ValueError(f"a layout has the unknown rule {verb!r}")
    save_torch_state_dict(
        tensors,
        folder,
        max_shard_size=max_shard_size or sum(t.nbytes for t in tensors.values()) + 1,
        metadata={"format": "pt"},
    )


def _rewrite_config(path: Path, rules: list[Mapping[str, Any]]) -> None:
    """Apply the rules of a layout to the saved config.json.

    Each rule has one entry: `flatten`, a section whose fields move to the top, with
    `rope_parameters` as `rope_theta` and `rope_scaling` of the given `type`; `rename`, the path of
    a field and its other name; `remove`, a field at the top.
    """
    if not rules:
        return
    config = json.loads(path.read_text(encoding="utf-8"))
    for rule in rules:
        ((verb, argument),) = rule.items()
        if verb == "flatten":
            section = config.pop(argument["section"])
            rope = section.pop("rope_parameters")
            section["rope_theta"] = rope.pop("rope_theta")
            section["rope_scaling"] = {**rope, **argument["rope_scaling"]}
            section.pop("model_type")
            config = {**section, **config}
        elif verb == "rename":
            field, new = argument
            *parents, old = field.split(".")
            section = config[parents[0]] if parents else config
            section[new] = section.pop(old)
        elif verb == "remove":
            del config[argument]
        else:
            raise ValueError(f"a config has the unknown rule {verb!r}")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
