"""What `vlmgen show` prints: both towers, derived values, checkpoints, the weight table."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vlmgen.spec.derive import Derived, derive
from vlmgen.spec.dump import spec_data
from vlmgen.spec.model import Spec
from vlmgen.spec.text import TextMoe, TextSpec
from vlmgen.spec.vision import VisionNorm, VisionSpec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.tree import Tree


def show_data(spec: Spec) -> dict[str, Any]:
    """Everything that `show_spec` prints, as plain data for `--json`."""
    from vlmgen.weights import weight_table

    return {
        "spec": spec_data(spec),
        "derived": {c.name: _derived_data(derive(spec, c.name)) for c in spec.checkpoints},
        "weights": {
            group: [
                {"parameter": row.parameter, "keys": list(row.keys), "verb": row.verb}
                for row in rows
            ]
            for group, rows in weight_table(spec).groups()
        },
    }


def show_spec(spec: Spec, console: Console, checkpoint: str | None = None) -> None:
    """Print a spec for a person.

    Args:
        spec: The spec.
        console: Where to.
        checkpoint: Whose sizes the towers show; the default checkpoint if left out.

    Raises:
        UsageError: The spec lists no such checkpoint.
    """
    name = checkpoint or spec.defaults_from
    resolved, derived = spec.checkpoint(name), derive(spec, name)
    console.print(
        f"{spec.title}: {spec.architecture} ({spec.model_type}), package vllm_neuron_{spec.family}",
        highlight=False,
    )
    console.print(
        f"sizes of {name}, {derived.parameters / 1e9:.2f} B parameters\n", highlight=False
    )
    console.print(_vision_tree(resolved.vision, derived))
    console.print()
    console.print(_text_tree(resolved.text, resolved.vision, derived))
    console.print()
    _print_prompt(spec, console)
    _print_neuron(spec, derived, console)
    _print_checkpoints(spec, console)
    _print_weights(spec, console)


def _derived_data(derived: Derived) -> dict[str, Any]:
    data = asdict(derived)
    return {
        **{key: list(v) if isinstance(v, tuple) else v for key, v in data.items() if key != "name"},
        "parameters": derived.parameters,
    }


def _vision_tree(vision: VisionSpec, derived: Derived) -> Tree:
    from rich.tree import Tree

    width, embed = vision.hidden_size, vision.patch_embed
    root = Tree(f"vision tower  {derived.vision_parameters / 1e6:.1f} M", highlight=False)
    root.add(f"input         {vision.input}")
    frames = f"{embed.temporal_patch_size}x" if embed.kind == "conv3d" else ""
    root.add(
        f"patch_embed   {embed.kind} {embed.in_channels}x{frames}{embed.patch_size}x"
        f"{embed.patch_size} = {derived.patch_dim} -> {width}{_bias(embed.bias)}"
    )
    if vision.embed_norm:
        root.add(f"embed_norm    {_norm(vision.embed_norm)}")
    if vision.class_token:
        root.add(f"class_token   {vision.class_token}, 1 x {width}")
    if vision.position:
        grid = derived.position_grid
        extra = " + 1" if vision.class_token else ""
        root.add(f"pos_embed     {vision.position.kind}, table {grid} x {grid}{extra} x {width}")
    if vision.rope:
        root.add(
            f"rotary        {vision.rope.kind}, theta {vision.rope.theta:g}, "
            f"{derived.vision_head_dim // 4} frequencies each for row and column"
        )
    blocks = root.add(f"blocks        x {vision.depth}")
    blocks.add(f"norm1         {_norm(vision.norm)}")
    blocks.add(f"attention     {_vision_attention(vision, derived)}")
    if vision.layer_scale:
        blocks.add(f"scale1        {width}")
    blocks.add(f"norm2         {_norm(vision.norm)}")
    mlp = vision.mlp
    blocks.add(
        f"mlp           {mlp.kind} {width} -> {mlp.intermediate_size} -> {width}, "
        f"{mlp.activation}{_bias(mlp.bias)}"
    )
    if vision.layer_scale:
        blocks.add(f"scale2        {width}")
    if vision.final_norm:
        root.add(f"final_norm    {_norm(vision.final_norm)}")
    root.add(f"merger        {_merger(vision, derived)}")
    if vision.deepstack:
        stack = root.add(f"deepstack     {derived.levels} levels, {vision.deepstack.inject}")
        norm = vision.deepstack.merger
        for level, block in enumerate(vision.deepstack.indices):
            stack.add(
                f"level {level}       block {block} -> merger ({norm.norm} norm "
                f"{norm.norm_position}) -> decoder layer {level}"
            )
    return root


def _vision_attention(vision: VisionSpec, derived: Derived) -> str:
    attention = vision.attention
    parts = [f"{attention.num_heads} heads of {derived.vision_head_dim}", attention.qkv_layout]
    if attention.window:
        size, blocks = attention.window.size, ", ".join(map(str, attention.window.full_blocks))
        parts.append(f"within windows of {size} x {size} pixels, in blocks {blocks} one frame")
    else:
        parts.append(f"within one {attention.bounds}")
    if attention.qk_norm != "none":
        parts.append(f"q/k norm {attention.qk_norm}")
    if attention.qkv_bias != attention.output_bias:
        parts.append(f"bias on {'q, k and v' if attention.qkv_bias else 'the output'} only")
    return ", ".join(parts) + _bias(attention.qkv_bias and attention.output_bias)


def _merger(vision: VisionSpec, derived: Derived) -> str:
    merger, out = vision.merger, vision.out_hidden_size
    head = f"{merger.op} {merger.merge_size}x{merger.merge_size}, {merger.norm} norm "
    if merger.op == "strided_conv":
        widths = f"{vision.hidden_size} -> {out} -> {out}, swiglu {out} -> {vision.merger_width}"
        return f"{head}{merger.norm_position}, {widths} -> {out}, {merger.activation}"
    widths = f"{derived.merged_width} -> {vision.merger_width} -> {out}"
    return f"{head}{merger.norm_position}, {widths}, {merger.activation}"


def _text_tree(text: TextSpec, vision: VisionSpec, derived: Derived) -> Tree:
    from rich.tree import Tree

    hidden, attention, rope = text.hidden_size, text.attention, text.rope
    norm = f"{text.norm.kind}, eps {text.norm.eps:g}"
    root = Tree(f"text tower    {derived.text_parameters / 1e9:.3f} B", highlight=False)
    root.add(f"embed_tokens  {text.vocab_size} x {hidden}")
    axes = ""
    if rope.sections:
        sections = " ".join(f"{a}:{n}" for a, n in zip("thw", rope.sections, strict=True))
        axes = f" {rope.order} {sections}"
    root.add(
        f"rotary        {rope.kind}{axes}, {rope.pairing} pairs, "
        f"{derived.rotary_dim} of {attention.head_dim}, theta {rope.theta:g}"
    )
    sandwich = text.norm.topology == "sandwich"
    layers = root.add(f"layers        x {text.num_layers}, {text.norm.topology}-norm")
    layers.add(f"input_layernorm            {norm}")
    layers.add(
        f"attention                  {attention.kind} {attention.num_heads} / "
        f"{attention.num_kv_heads} heads of {attention.head_dim}, q/k norm {attention.qk_norm}"
        f"{_bias(attention.qkv_bias)}"
    )
    if sandwich:
        layers.add(f"post_self_attn_layernorm   {norm}")
    layers.add(f"post_attention_layernorm   {norm}")
    mlp = (
        f"{text.mlp.kind} {hidden} -> {text.mlp.intermediate_size} -> {hidden}, "
        f"{text.mlp.activation}{_bias(text.mlp.bias)}"
    )
    if text.mlp.layout != "separate":
        mlp += f", {text.mlp.layout}"
    if text.moe is None:
        layers.add(f"mlp                        {mlp}")
    else:
        if text.moe.first_dense:
            where = f"in the first {text.moe.first_dense}"
            layers.add(f"mlp                        {mlp}, {where}")
        layers.add(f"experts                    {_experts(text.moe, text)}")
    if sandwich:
        layers.add(f"post_mlp_layernorm         {norm}")
    if vision.num_levels:
        layers.add(f"+ deepstack                after layers 0 to {vision.num_levels - 1}")
    root.add(f"norm          {norm}")
    head = "tied to embed_tokens" if text.tie_word_embeddings else f"{text.vocab_size} x {hidden}"
    root.add(f"lm_head       {head}")
    return root


def _experts(moe: TextMoe, text: TextSpec) -> str:
    hidden = text.hidden_size
    parts = [
        f"{moe.top_k} of {moe.num_experts}, {text.mlp.kind} {hidden} -> {moe.intermediate_size} -> "
        f"{hidden}",
        f"router {moe.router}{', renormalized' if moe.renormalize else ''}",
    ]
    if moe.routed_scale != 1:
        parts.append(f"scale {moe.routed_scale:g}")
    if moe.shared:
        parts.append(f"{moe.shared.count} shared")
    if moe.first_dense:
        parts.append(f"in layers from {moe.first_dense} on")
    return ", ".join([*parts, f"stored {moe.checkpoint}"])


def _print_prompt(spec: Spec, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    tokens = spec.tokens
    table = Table("token", "text", "id", "config.json", title="Placeholders", title_justify="left")
    for name in ("image", "video", "vision_start", "vision_end", "video_start", "video_end"):
        token = getattr(tokens, name)
        if token is not None:
            table.add_row(name, Text(token.token), str(token.id), token.config_key)
    console.print(table)
    seconds = ""
    if tokens.seconds:
        seconds = f", {tokens.seconds.tokens_per_second} a second ({tokens.seconds.input})"
    console.print(
        f"positions {tokens.positions}{seconds}, video prompt {tokens.video_prompt}\n",
        highlight=False,
    )


def _print_neuron(spec: Spec, derived: Derived, console: Console) -> None:
    neuron = spec.neuron
    buckets = ", ".join(map(str, neuron.num_vision_tokens_buckets))
    rows = [
        f"vision block   {neuron.vision_attention_block_size} patches = "
        f"{derived.cache_block_tokens} merged rows of {derived.fat_width} in the encoder cache",
        f"buckets        {buckets} patches",
        f"quantization   {', '.join(neuron.quantization)}",
        f"text TP        {', '.join(map(str, derived.text_tp))}",
        f"vision TP      {', '.join(map(str, derived.vision_tp))}",
    ]
    console.print("\n".join(rows) + "\n", highlight=False)


def _print_checkpoints(spec: Spec, console: Console) -> None:
    from rich.table import Table

    columns = ["name", "B", "text H / L / heads / kv / ffn"]
    columns += ["experts"] if spec.text.moe else []
    columns += ["tied", "vision D / L / heads / ffn"]
    columns += ["deepstack"] if spec.vision.deepstack else []
    table = Table(*columns, "text TP", title="Checkpoints", title_justify="left")
    for entry in spec.checkpoints:
        derived, sizes = derive(spec, entry.name), spec.checkpoint(entry.name)
        text, vision = sizes.text, sizes.vision
        row = [
            "\n".join((entry.name, *entry.also)),
            f"{derived.parameters / 1e9:.2f}",
            f"{text.hidden_size} / {text.num_layers} / {text.attention.num_heads} / "
            f"{text.attention.num_kv_heads} / {text.mlp.intermediate_size}",
        ]
        if text.moe:
            row.append(f"{text.moe.num_experts} of {text.moe.intermediate_size}")
        row += [
            "yes" if text.tie_word_embeddings else "no",
            f"{vision.hidden_size} / {vision.depth} / {vision.attention.num_heads} / "
            f"{vision.mlp.intermediate_size}",
        ]
        if vision.deepstack:
            row.append(",".join(map(str, vision.deepstack.indices)))
        table.add_row(*row, " ".join(map(str, derived.text_tp)))
    console.print(table)
    console.print()


def _print_weights(spec: Spec, console: Console) -> None:
    from rich.table import Table

    from vlmgen.weights import weight_table

    table = Table("parameter", "verb", "checkpoint keys", title="Weights", title_justify="left")
    for _, rows in weight_table(spec).groups():
        table.add_section()
        for row in rows:
            table.add_row(row.parameter, row.verb, "\n".join(row.keys))
    console.print(table)
    for layout in spec.weights.layouts:
        console.print(
            f"layout {layout.name}: text {layout.text}  vision {layout.vision}  "
            f"{f'merger {layout.projector}  ' if layout.projector else ''}head {layout.head}",
            highlight=False,
        )


def _bias(bias: bool) -> str:
    return ", bias" if bias else ""


def _norm(norm: VisionNorm) -> str:
    return f"{norm.kind}, eps {norm.eps:g}"
