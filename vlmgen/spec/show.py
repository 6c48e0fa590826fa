"""What `vlmgen show` prints: both towers, derived values, checkpoints, the weight table."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vlmgen.spec.derive import Derived, derive
from vlmgen.spec.dump import spec_data
from vlmgen.spec.model import Spec
from vlmgen.spec.text import TextSpec
from vlmgen.spec.vision import VisionSpec

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

    width, merger = vision.hidden_size, vision.merger
    embed, grid = vision.patch_embed, derived.position_grid
    root = Tree(f"vision tower  {derived.vision_parameters / 1e6:.1f} M", highlight=False)
    root.add(
        f"patch_embed   {embed.kind} {embed.in_channels}x{embed.temporal_patch_size}x"
        f"{embed.patch_size}x{embed.patch_size} = {derived.patch_dim} -> {width}{_bias(embed.bias)}"
    )
    root.add(f"pos_embed     {vision.position.kind}, table {grid} x {grid} x {width}")
    root.add(
        f"rotary        {vision.rope.kind}, theta {vision.rope.theta:g}, "
        f"{derived.vision_head_dim // 4} frequencies each for row and column"
    )
    blocks = root.add(f"blocks        x {vision.depth}")
    blocks.add(f"norm1         {vision.norm.kind}, eps {vision.norm.eps:g}")
    attention = vision.attention
    blocks.add(
        f"attention     {attention.num_heads} heads of {derived.vision_head_dim}, "
        f"{attention.qkv_layout}, within one {attention.bounds}{_bias(attention.qkv_bias)}"
    )
    blocks.add(f"norm2         {vision.norm.kind}, eps {vision.norm.eps:g}")
    mlp = vision.mlp
    blocks.add(
        f"mlp           {mlp.kind} {width} -> {mlp.intermediate_size} -> {width}, "
        f"{mlp.activation}{_bias(mlp.bias)}"
    )
    joined = derived.merged_width
    root.add(
        f"merger        {merger.op} {merger.merge_size}x{merger.merge_size}, {merger.norm} norm "
        f"{merger.norm_position}, {joined} -> {joined} -> {vision.out_hidden_size}, "
        f"{merger.activation}"
    )
    stack = root.add(f"deepstack     {derived.levels} levels, {vision.deepstack.inject}")
    level_norm = vision.deepstack.merger
    for level, block in enumerate(vision.deepstack.indices):
        stack.add(
            f"level {level}       block {block} -> merger ({level_norm.norm} norm "
            f"{level_norm.norm_position}) -> decoder layer {level}"
        )
    return root


def _text_tree(text: TextSpec, vision: VisionSpec, derived: Derived) -> Tree:
    from rich.tree import Tree

    hidden, attention, rope = text.hidden_size, text.attention, text.rope
    root = Tree(f"text tower    {derived.text_parameters / 1e9:.3f} B", highlight=False)
    root.add(f"embed_tokens  {text.vocab_size} x {hidden}")
    sections = " ".join(f"{a}:{n}" for a, n in zip("thw", rope.sections, strict=True))
    root.add(
        f"rotary        {rope.kind} {rope.order} {sections}, {rope.pairing} pairs, "
        f"{derived.rotary_dim} of {attention.head_dim}, theta {rope.theta:g}"
    )
    layers = root.add(f"layers        x {text.num_layers}, {text.norm.topology}-norm")
    layers.add(f"input_layernorm            {text.norm.kind}, eps {text.norm.eps:g}")
    layers.add(
        f"attention                  {attention.kind} {attention.num_heads} / "
        f"{attention.num_kv_heads} heads of {attention.head_dim}, q/k norm {attention.qk_norm}"
        f"{_bias(attention.qkv_bias)}"
    )
    layers.add(f"post_attention_layernorm   {text.norm.kind}, eps {text.norm.eps:g}")
    layers.add(
        f"mlp                        {text.mlp.kind} {hidden} -> {text.mlp.intermediate_size} -> "
        f"{hidden}, {text.mlp.activation}{_bias(text.mlp.bias)}"
    )
    layers.add(f"+ deepstack                after layers 0 to {vision.num_levels - 1}")
    root.add(f"norm          {text.norm.kind}, eps {text.norm.eps:g}")
    head = "tied to embed_tokens" if text.tie_word_embeddings else f"{text.vocab_size} x {hidden}"
    root.add(f"lm_head       {head}")
    return root


def _print_prompt(spec: Spec, console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    tokens = spec.tokens
    table = Table("token", "text", "id", "config.json", title="Placeholders", title_justify="left")
    for name in ("image", "video", "vision_start", "vision_end"):
        token = getattr(tokens, name)
        table.add_row(name, Text(token.token), str(token.id), token.config_key)
    console.print(table)
    console.print(
        f"positions {tokens.positions}, video prompt {tokens.video_prompt}\n", highlight=False
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

    table = Table(
        "name",
        "B",
        "text H / L / heads / kv / ffn",
        "tied",
        "vision D / L / heads / ffn",
        "deepstack",
        "text TP",
        title="Checkpoints",
        title_justify="left",
    )
    for entry in spec.checkpoints:
        derived = derive(spec, entry.name)
        text, vision = entry.text, entry.vision
        table.add_row(
            "\n".join((entry.name, *entry.also)),
            f"{derived.parameters / 1e9:.2f}",
            f"{text.hidden_size} / {text.num_layers} / {text.num_heads} / {text.num_kv_heads} / "
            f"{text.intermediate_size}",
            "yes" if text.tie_word_embeddings else "no",
            f"{vision.hidden_size} / {vision.depth} / {vision.num_heads} / "
            f"{vision.intermediate_size}",
            ",".join(map(str, vision.deepstack)),
            " ".join(map(str, derived.text_tp)),
        )
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
            f"layout {layout.name}: text {layout.text}  vision {layout.vision}  head {layout.head}",
            highlight=False,
        )


def _bias(bias: bool) -> str:
    return ", bias" if bias else ""
