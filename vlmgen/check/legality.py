"""Parallel legality: the spec's defaults, and the generated config against vlmgen's tables.

No torch: of the generated `config.py` only the methods that judge sizes are compiled, with the
sizes of each published checkpoint as their attributes.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vlmgen.check.finding import Finding
from vlmgen.check.parallel import MAX_RANKS, legal_text_tp, legal_vision_tp, padded_vocab
from vlmgen.check.source import PackageSource

if TYPE_CHECKING:
    from vlmgen.spec.model import ResolvedCheckpoint, Spec

BLOCK_MULTIPLE = 128


def check_legality(source: PackageSource, spec: Spec) -> list[Finding]:
    """Defaults of the spec, then the generated config, for every published checkpoint.

    Args:
        source: The package.
        spec: The spec it came from.
    """
    spec_path = source.root.joinpath("spec.yaml").as_posix()
    checkpoints = [spec.checkpoint(entry.name) for entry in spec.checkpoints]
    findings = [
        Finding(spec_path, 1, "VG401", message, fix) for message, fix in default_problems(spec)
    ]
    for checkpoint in checkpoints:
        findings += _config(source, spec, checkpoint)
    return sorted(set(findings))


def default_problems(spec: Spec) -> Iterator[tuple[str, str]]:
    """(message, fix) of every default that some published checkpoint cannot run with."""
    neuron, block = spec.neuron, spec.neuron.vision_attention_block_size
    buckets = neuron.num_vision_tokens_buckets
    if list(buckets) != sorted(set(buckets)):
        yield f"num_vision_tokens_buckets {list(buckets)} do not ascend", "list them ascending"
    for entry in spec.checkpoints:
        checkpoint = spec.checkpoint(entry.name)
        area = checkpoint.vision.merge_area
        if block % BLOCK_MULTIPLE or block % area:
            yield (
                f"vision_attention_block_size {block} is illegal for {entry.name}",
                f"use a multiple of {BLOCK_MULTIPLE} and of the merge area {area}",
            )
        for bucket in buckets:
            if bucket % block:
                yield (
                    f"vision bucket {bucket} is no multiple of the block size {block}",
                    f"use multiples of {block}: blocks are whole",
                )
        if not legal_text_tp(checkpoint.text):
            yield f"{entry.name} has no legal text TP", "check heads and widths"
        if not legal_vision_tp(checkpoint.vision):
            yield f"{entry.name} has no legal vision TP", "check heads and widths"


def _config(source: PackageSource, spec: Spec, checkpoint: ResolvedCheckpoint) -> Iterator[Finding]:
    module = source.modules["config"]
    for tower, sizes, legal in (
        ("Text", text_sizes(checkpoint), legal_text_tp(checkpoint.text)),
        ("Vision", vision_sizes(checkpoint), legal_vision_tp(checkpoint.vision)),
    ):
        name = f"{spec.class_prefix}{tower}Config"
        node = module.classes.get(name)
        methods = {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)} if node else {}
        if node is None or not {"tp_problems", "legal_tp_sizes"} <= set(methods):
            yield Finding(
                module.path,
                node.lineno if node else 1,
                "VG402",
                f"{name} has no tp_problems and legal_tp_sizes",
                "define both",
            )
            continue
        try:
            config = _stand_in(node, sizes)
            refused = {tp: list(config.tp_problems(tp)) for tp in range(1, MAX_RANKS + 1)}
            listed = list(config.legal_tp_sizes())
            padded = {}
            if "padded_vocab_size" in methods:
                padded = {tp: config.padded_vocab_size(tp) for tp in legal}
        except Exception as error:  # the package's code: whatever it raises is its fault
            yield Finding(
                module.path,
                node.lineno,
                "VG402",
                f"{name} cannot judge sizes of {checkpoint.name}: {error!r}",
                "use only the fields of the config",
            )
            continue
        line = methods["tp_problems"].lineno
        for tp, problems in refused.items():
            if bool(problems) == (tp in legal):
                verdict = f"refuses: {'; '.join(problems)}" if problems else "accepts"
                yield Finding(
                    module.path,
                    line,
                    "VG402",
                    f"{name} {verdict}; TP {tp} of {checkpoint.name} is "
                    f"{'legal' if tp in legal else 'illegal'}",
                    "follow the rules of vlmgen/check/parallel.py",
                )
        if listed != [tp for tp in legal if tp <= max([*listed, *legal])]:
            yield Finding(
                module.path,
                methods["legal_tp_sizes"].lineno,
                "VG403",
                f"{name} lists {listed} for {checkpoint.name}",
                f"legal are {list(legal)}",
            )
        for tp, rows in padded.items():
            if rows != padded_vocab(checkpoint.text.vocab_size, tp):
                yield Finding(
                    module.path,
                    methods["padded_vocab_size"].lineno,
                    "VG402",
                    f"{name} pads the vocabulary of {checkpoint.name} at TP {tp} to {rows}",
                    f"pad to {padded_vocab(checkpoint.text.vocab_size, tp)}",
                )


def text_sizes(checkpoint: ResolvedCheckpoint) -> dict[str, Any]:
    """Text sizes under the names of a Hugging Face config."""
    text, moe = checkpoint.text, checkpoint.text.moe
    experts = (
        {}
        if moe is None
        else {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.intermediate_size,
            "first_dense": moe.first_dense,
            "num_shared_experts": moe.shared.count if moe.shared else 0,
        }
    )
    return {
        **experts,
        "hidden_size": text.hidden_size,
        "intermediate_size": text.mlp.intermediate_size,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.attention.num_heads,
        "num_key_value_heads": text.attention.num_kv_heads,
        "head_dim": text.attention.head_dim,
        "vocab_size": text.vocab_size,
    }


def vision_sizes(checkpoint: ResolvedCheckpoint) -> dict[str, Any]:
    """Vision sizes under the names of a Hugging Face config."""
    vision = checkpoint.vision
    return {
        "depth": vision.depth,
        "hidden_size": vision.hidden_size,
        "intermediate_size": vision.mlp.intermediate_size,
        "num_heads": vision.attention.num_heads,
        "spatial_merge_size": vision.merger.merge_size,
        "patch_size": vision.patch_embed.patch_size,
        "temporal_patch_size": vision.patch_embed.temporal_patch_size,
        "in_channels": vision.patch_embed.in_channels,
        "out_hidden_size": vision.out_hidden_size,
        "merger_intermediate_size": vision.merger_width,
        "deepstack_visual_indexes": tuple(vision.deepstack.indices) if vision.deepstack else (),
    }


def _stand_in(node: ast.ClassDef, sizes: Mapping[str, Any]) -> Any:
    """An object with a config class's methods and properties, and these sizes."""
    body: list[ast.stmt] = []
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and not item.name.startswith("__"):
            decorators = {ast.unparse(d) for d in item.decorator_list}
            if decorators <= {"property", "staticmethod"}:
                body.append(item)
    bare = ast.ClassDef(node.name, [], [], body, [], type_params=[])  # type: ignore[call-arg]
    future = ast.parse("from __future__ import annotations").body
    tree = ast.fix_missing_locations(ast.Module([*future, bare], []))
    namespace: dict[str, Any] = {"__builtins__": builtins, "__name__": "generated_config"}
    exec(compile(tree, "config.py", "exec"), namespace)
    made = namespace[node.name]()
    for name, value in sizes.items():
        setattr(made, name, value)
    return made
