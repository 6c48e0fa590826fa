"""What names and shapes of tensors say of the axes.

A part of the model is recognised by a name that some known family stores it under; what a shape
can mean in two ways is left to config.json or to the family, and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vlmgen.importer.headers import Shape, printable
from vlmgen.importer.names import Group, TensorNames
from vlmgen.importer.reading import Readings
from vlmgen.spec.model import Spec

MAX_LISTED = 3


class _Part:
    """Tensors of one repeated part, and what is the same in all its members.

    Args:
        group: The members.
        numbers: Which members to look at.
        names: Where used tensors are noted.
        readings: Takes contradictions.
        where: Section of `weights` that the names belong to.
        prefix: Prefix inside the member, such as an expert's.
    """

    def __init__(
        self, group: Group, numbers: Sequence[int], names: TensorNames, readings: Readings,
        where: str,
    ) -> None:  # fmt: skip
        self.group, self.numbers, self.names = group, list(numbers), names
        self.readings, self.where = readings, where

    def find(self, role: str, suffix: str = "weight") -> tuple[str, str] | None:
        """(name, suffix) of a role that some member has, under a known name.

        A role that only some members have is a contradiction.
        """
        end = f".{suffix}" if suffix else ""
        for name in self.names.known.of(f"{self.where}.{role}"):
            having = [n for n in self.numbers if f"{name}{end}" in self.group.members[n]]
            if not having:
                continue
            if len(having) < len(self.numbers):
                lacking = next(n for n in self.numbers if n not in set(having))
                self.readings.conflict(
                    f"weights.{self.where}.{role}",
                    f"{self.group.key(having[0], name + end)} is there",
                    f"{self.group.key(lacking, name + end)} is not",
                )
            for number in having:
                self.names.unused.discard(self.group.key(number, name + end))
            return name, end
        return None

    def shape(self, found: tuple[str, str] | None) -> tuple[Shape | None, str]:
        """Shape and evidence of a tensor; members whose shapes differ contradict each other."""
        if found is None:
            return None, ""
        name, end = found
        shapes: dict[Shape, int] = {}
        for number in self.numbers:
            shape = self.group.members[number].get(name + end)
            if shape is not None:
                shapes.setdefault(shape, number)
        if len(shapes) > 1:
            (one, first), (other, second) = list(shapes.items())[:2]
            self.readings.conflict(
                f"weights.{self.where}",
                f"{self.group.key(first, name + end)} is {list(one)}",
                f"{self.group.key(second, name + end)} is {list(other)}",
            )
        if not shapes:
            return None, self.group.key(self.numbers[0], name + end)
        shape, number = next(iter(shapes.items()))
        return shape, f"{self.group.key(number, name + end)} is {list(shape)}"

    def place(self, found: tuple[str, str] | None) -> str:
        """Evidence that a tensor is there."""
        return "" if found is None else self.group.key(self.numbers[0], found[0] + found[1])


def tensor_readings(names: TensorNames, spec: Spec, readings: Readings) -> None:
    """Read every axis that names and shapes state.

    Args:
        names: The tensors of the checkpoint.
        spec: The family that the checkpoint is compared with.
        readings: Takes the readings; those of config.json are in it already.
    """
    if names.text_prefix is None or names.layers is None:
        readings.gap("text", "no decoder layers under a name of a known family")
    else:
        _text(names, readings)
    if names.vision_prefix is None or names.blocks is None:
        readings.gap("vision", "no tower blocks under a name of a known family")
    else:
        _vision(names, readings)
    _layout(names, spec, readings)
    _head(names, readings)
    _left_over(names, readings)


# --- text -------------------------------------------------------------------------------------


def _text(names: TensorNames, readings: Readings) -> None:
    group, add = names.layers, readings.add
    assert group is not None and names.text_prefix is not None
    add("weights.text.layer", names.layer_name, f"{group.prefix}0.", "tensors")
    embed = names.one(names.text_prefix, "text.embed_tokens")
    if embed:
        add("weights.text.embed_tokens", embed, f"{names.text_prefix}{embed}.weight", "tensors")
        key = f"{names.text_prefix}{embed}.weight"
        shape = names.shapes[key]
        if shape is not None and len(shape) == 2:
            add("text.vocab_size", shape[0], f"{key} is {list(shape)}", "tensors")
            add("text.hidden_size", shape[1], f"{key} is {list(shape)}", "tensors")
    norm = names.one(names.text_prefix, "text.norm")
    if norm:
        add("weights.text.norm", norm, f"{names.text_prefix}{norm}.weight", "tensors")
    count = _count(group)
    key = group.prefix + str(count - 1)
    evidence = f"layers up to {key}."
    add("text.num_layers", count, evidence, "tensors")
    numbers = range(count)
    part = _Part(group, numbers, names, readings, "text")
    _text_norms(part, readings)
    _text_attention(part, readings)
    routed = [n for n in numbers if _has(part, n, "text.moe.router")]
    dense = [n for n in numbers if n not in set(routed)]
    if dense:
        _text_mlp(_Part(group, dense, names, readings, "text"), readings)
    if routed:
        _moe(group, routed, dense, names, readings)
    else:
        add("text.moe", None, f"no router among {group.prefix}0. and others", "tensors")


def _count(group: Group) -> int:
    """Members numbered from 0 without a gap."""
    count = 0
    while count in group.members:
        count += 1
    return count


def _has(part: _Part, number: int, place: str) -> bool:
    members = part.group.members[number]
    return any(f"{name}.weight" in members for name in part.names.known.of(place))


def _text_norms(part: _Part, readings: Readings) -> None:
    for role in ("input_layernorm", "post_attention_layernorm"):
        found = part.find(role)
        _name(part, role, found, readings)
        if part.find(role, "bias"):
            readings.refuse("text.norm.kind", f"{part.place(found)} has a bias beside it")
    extra = ("post_self_attn_layernorm", "post_mlp_layernorm")
    found_extra = [part.find(role) for role in extra]
    for role, found in zip(extra, found_extra, strict=True):
        _name(part, role, found, readings)
    if all(found_extra):
        evidence = f"{part.place(found_extra[0])} and {part.place(found_extra[1])}"
        readings.add("text.norm.topology", "sandwich", evidence, "tensors")
    elif not any(found_extra):
        evidence = f"no norm of an output among {part.group.prefix}0. and others"
        readings.add("text.norm.topology", "pre", evidence, "tensors")
    else:
        there = next(found for found in found_extra if found)
        readings.refuse("text.norm.topology", f"{part.place(there)} without its partner")


def _text_attention(part: _Part, readings: Readings) -> None:
    add = readings.add
    roles = {role: part.find(role) for role in ("q", "k", "v", "o")}
    for role, found in roles.items():
        _name(part, role, found, readings)
    if all(roles.values()):
        evidence = f"{part.place(roles['q'])}, of k and of v"
        add("text.attention.qkv_layout", "separate", evidence, "tensors")
    biases = {role: part.find(role, "bias") for role in ("q", "k", "v", "o")}
    _even(part, "text.attention.qkv_bias", biases, ("q", "k", "v"), readings, roles["q"])
    if biases["o"]:
        readings.refuse("text.attention.output_bias", part.place(biases["o"]))
    head_dim = readings.get("text.attention.head_dim")
    _head_width(part, roles, readings)
    norms = {role: part.find(role) for role in ("q_norm", "k_norm")}
    for role, found in norms.items():
        _name(part, role, found, readings)
    shape, says = part.shape(norms["q_norm"])
    if shape is None and not norms["q_norm"]:
        evidence = f"no norm of queries among {part.group.prefix}0. and others"
        add("text.attention.qk_norm", "none", evidence, "tensors")
    elif shape is not None:
        q_rows = (part.shape(roles["q"])[0] or (0,))[0]
        if shape == (q_rows,) and q_rows != (head_dim or 0):
            readings.refuse("text.attention.qk_norm", f"{says}, as wide as all heads together")
        else:
            add("text.attention.qk_norm", "head_rms_pre_rope", says, "tensors")
            add("text.attention.head_dim", shape[0], says, "tensors")


def _head_width(part: _Part, roles: dict[str, tuple[str, str] | None], readings: Readings) -> None:
    """Heads times their width, which a matrix shows as a product only."""
    head_dim = readings.reading("text.attention.head_dim")
    for role, path in (("q", "text.attention.num_heads"), ("k", "text.attention.num_kv_heads")):
        shape, says = part.shape(roles[role])
        if shape is None or len(shape) != 2:
            continue
        readings.add("text.hidden_size", shape[1], says, "tensors")
        heads = readings.reading(path)
        if heads is None or head_dim is None:
            continue
        if heads.value * head_dim.value == shape[0]:
            readings.add(path, heads.value, says, "tensors")
        elif head_dim.weak and shape[0] % heads.value == 0 and role == "q":
            # The config leaves the width to its class, which does not derive it from the heads.
            width = shape[0] // heads.value
            evidence = f"{says}, {heads.evidence}"
            readings.add("text.attention.head_dim", width, evidence, "tensors")
            head_dim = readings.reading("text.attention.head_dim")
        else:
            readings.conflict(
                path,
                f"{heads.evidence} and {head_dim.evidence}: {heads.value * head_dim.value} rows",
                says,
            )


def _text_mlp(part: _Part, readings: Readings) -> None:
    roles = {role: part.find(role) for role in ("gate", "up", "gate_up", "down")}
    for role, found in roles.items():
        _name(part, role, found, readings)
        bias = part.find(role, "bias") if found else None
        if bias:
            readings.refuse("text.mlp.bias", part.place(bias))
    layout = "fused_gate_up" if roles["gate_up"] else "separate"
    found = roles["gate_up"] or roles["gate"]
    if found is None:
        readings.gap("text.mlp", f"no gate under a known name in {part.group.prefix}"
                     f"{part.numbers[0]}.")  # fmt: skip
        return
    readings.add("text.mlp.layout", layout, part.place(found), "tensors")
    shape, says = part.shape(found)
    if shape is not None:
        rows = shape[0] // 2 if layout == "fused_gate_up" else shape[0]
        readings.add("text.mlp.intermediate_size", rows, says, "tensors")
    for name in ("gate", "up") if layout == "fused_gate_up" else ("gate_up",):
        readings.add(f"weights.text.{name}", None, says, "tensors")


def _moe(
    group: Group, routed: list[int], dense: list[int], names: TensorNames, readings: Readings
) -> None:
    add = readings.add
    part = _Part(group, routed, names, readings, "text.moe")
    if dense and dense != list(range(len(dense))):
        readings.refuse("text.moe.first_dense", f"experts not in layers {dense[:4]} and others")
    evidence = f"{group.prefix}{routed[0]}. is the first layer with a router"
    add("text.moe.first_dense", len(dense), evidence, "tensors")
    router = part.find("router")
    _name(part, "router", router, readings)
    shape, says = part.shape(router)
    if shape is not None:
        add("text.moe.num_experts", shape[0], says, "tensors")
    bias = part.find("correction_bias", "")
    _name(part, "correction_bias", bias, readings)
    kind = "sigmoid_bias" if bias else "softmax"
    evidence = part.place(bias) if bias else f"{part.place(router)} and no bias of the choice"
    add("text.moe.router", kind, evidence, "tensors")
    _experts(part, readings)
    shared = {role: part.find(f"shared.{role}") for role in ("gate", "up", "down")}
    if shared["gate"]:
        for role, found in shared.items():
            _name(part, f"shared.{role}", found, readings)
        shape, says = part.shape(shared["gate"])
        width = readings.get("text.moe.intermediate_size")
        if shape is not None and width and shape[0] % width == 0:
            add(
                "text.moe.shared.count", shape[0] // width, f"{says}, experts of {width}", "tensors"
            )
    else:
        add("text.moe.shared", None, f"no shared expert in {group.prefix}{routed[0]}.", "tensors")
    if not dense:
        for name in ("gate", "up", "gate_up", "down"):
            add(f"weights.text.{name}", None, "every layer has experts", "tensors")


def _experts(part: _Part, readings: Readings) -> None:
    """One matrix per expert, or all in one tensor whose direction a shape may show."""
    add, names, group = readings.add, part.names, part.group
    fused = part.find("gate_up", "")
    if fused:
        _name(part, "gate_up", fused, readings)
        down = part.find("down", "")
        _name(part, "down", down, readings)
        for role in ("expert", "gate", "up"):
            add(f"weights.text.moe.{role}", None, part.place(fused), "tensors")
        _direction(part, fused, down, readings)
        return
    for template in names.known.of("text.moe.expert"):
        start, end = template.split("{expert}")
        first = part.numbers[0]
        numbers = names.experts(template)[first][0]
        if not numbers:
            continue
        start += f"{min(numbers)}{end}"
        found = [n for n in group.members[first] if n.startswith(start)]
        add("weights.text.moe.expert", template, group.key(first, start), "tensors")
        add("text.moe.checkpoint", "per_expert", group.key(first, found[0]), "tensors")
        add("weights.text.moe.gate_up", None, group.key(first, found[0]), "tensors")
        for role in ("gate", "up", "down"):
            for name in names.known.of(f"text.moe.{role}"):
                key = f"{start}{name}.weight"
                if key in group.members[first]:
                    add(f"weights.text.moe.{role}", name, group.key(first, key), "tensors")
                    shape = group.members[first][key]
                    if role == "gate" and shape is not None:
                        says = f"{group.key(first, key)} is {list(shape)}"
                        add("text.moe.intermediate_size", shape[0], says, "tensors")
        _every_expert(part, template, readings)
        return
    readings.gap("text.moe", f"no experts under a known name in {group.prefix}{part.numbers[0]}.")


def _direction(
    part: _Part, gate_up: tuple[str, str], down: tuple[str, str] | None, readings: Readings
) -> None:
    """Which dimension of the fused experts is the input; one of the two shapes always tells.

    `[E, H, 2I]` and `[E, I, H]` are input first, `[E, 2I, H]` and `[E, H, I]` output first: the
    first pair is ambiguous where H = 2I, and then the second is not.
    """
    first, says = part.shape(gate_up)
    second, says_down = part.shape(down)
    hidden = readings.get("text.hidden_size")
    if first is None or second is None or not hidden or (len(first), len(second)) != (3, 3):
        readings.gap("text.moe.checkpoint", "the shapes of the experts are not known")
        return
    ways = {
        "fused_in_out": (first[1], first[2], second[2], second[1]),
        "fused_out_in": (first[2], first[1], second[1], second[2]),
    }
    evidence = f"{says}, {says_down}, hidden size {hidden}"
    fitting = {
        way: width
        for way, (inner, double, outer, width) in ways.items()
        if inner == outer == hidden and double == 2 * width
    }
    if len(fitting) != 1:
        readings.conflict("text.moe.checkpoint", f"{says}, {says_down}", f"hidden size {hidden}")
        return
    ((way, width),) = fitting.items()
    readings.add("text.moe.checkpoint", way, evidence, "tensors")
    readings.add("text.moe.intermediate_size", width, evidence, "tensors")


def _every_expert(part: _Part, template: str, readings: Readings) -> None:
    """Marks the experts' tensors as used; their number is that of the router's rows."""
    wanted = readings.reading("text.moe.num_experts")
    experts = part.names.experts(template)
    for number in part.numbers:
        numbers, keys = experts[number]
        part.names.unused -= keys
        if wanted and (len(numbers), max(numbers, default=-1)) != (wanted.value, wanted.value - 1):
            evidence = f"{len(numbers)} experts in {part.group.prefix}{number}."
            readings.conflict("text.moe.num_experts", wanted.evidence, evidence)
            return


# --- vision -----------------------------------------------------------------------------------


def _vision(names: TensorNames, readings: Readings) -> None:
    group, add, prefix = names.blocks, readings.add, names.vision_prefix
    assert group is not None and prefix is not None
    count = _count(group)
    add("vision.depth", count, f"blocks up to {group.prefix}{count - 1}.", "tensors")
    add("weights.vision.block", names.block_name, f"{group.prefix}0.", "tensors")
    _patch_embed(names, readings)
    for path, place in (("vision.embed_norm", "embed_norm"), ("vision.final_norm", "final_norm")):
        _single_norm(names, path, place, readings)
    part = _Part(group, range(count), names, readings, "vision")
    _block_norms(part, readings)
    _block_attention(part, readings)
    _block_mlp(part, readings)
    scales = {role: part.find(role, "") for role in ("scale1", "scale2")}
    for role, found in scales.items():
        _name(part, role, found, readings)
    scaled = all(scales.values())
    evidence = part.place(scales["scale1"]) or f"no scale among {group.prefix}0. and others"
    add("vision.layer_scale", scaled, evidence, "tensors")
    _tables(names, readings)
    _deepstack(names, readings)
    _merger(names, readings)


def _patch_embed(names: TensorNames, readings: Readings) -> None:
    prefix, add = names.vision_prefix or "", readings.add
    found = names.one(prefix, "vision.patch_embed")
    if found is None:
        return
    key = f"{prefix}{found}.weight"
    add("weights.vision.patch_embed", found, key, "tensors")
    bias = f"{prefix}{found}.bias"
    there = bias in names.shapes
    names.unused.discard(bias)
    evidence = bias if there else f"{key} and no bias"
    add("vision.patch_embed.bias", there, evidence, "tensors")
    shape = names.shapes[key]
    if shape is None:
        return
    says = f"{key} is {list(shape)}"
    if len(shape) not in (4, 5) or shape[-1] != shape[-2]:
        readings.refuse("vision.patch_embed.kind", says)
        return
    add("vision.patch_embed.kind", "conv3d" if len(shape) == 5 else "conv2d", says, "tensors")
    add("vision.hidden_size", shape[0], says, "tensors")
    add("vision.patch_embed.in_channels", shape[1], says, "tensors")
    frames = shape[2] if len(shape) == 5 else 1
    add("vision.patch_embed.temporal_patch_size", frames, says, "tensors")
    add("vision.patch_embed.patch_size", shape[-1], says, "tensors")


def _single_norm(names: TensorNames, path: str, place: str, readings: Readings) -> None:
    prefix = names.vision_prefix or ""
    found = names.one(prefix, f"vision.{place}")
    if found is None:
        readings.add(path, None, f"none of the known names after {prefix}", "tensors")
        readings.add(f"weights.vision.{place}", None, f"none after {prefix}", "tensors")
        return
    key = f"{prefix}{found}"
    readings.add(f"weights.vision.{place}", found, f"{key}.weight", "tensors")
    readings.add(f"{path}.kind", _norm_kind(names, key), f"{key}.weight", "tensors")


def _norm_kind(names: TensorNames, key: str) -> str:
    """A layer norm has a bias."""
    names.unused.discard(f"{key}.bias")
    return "layer" if f"{key}.bias" in names.shapes else "rms"


def _block_norms(part: _Part, readings: Readings) -> None:
    for role in ("norm1", "norm2"):
        found = part.find(role)
        _name(part, role, found, readings)
        if found:
            bias = part.find(role, "bias")
            evidence = part.place(bias) or f"{part.place(found)} and no bias"
            readings.add("vision.norm.kind", "layer" if bias else "rms", evidence, "tensors")


def _block_attention(part: _Part, readings: Readings) -> None:
    add = readings.add
    fused = part.find("qkv")
    separate = {role: part.find(role) for role in ("q", "k", "v")}
    _name(part, "qkv", fused, readings)
    for role, found in separate.items():
        _name(part, role, found, readings)
    if fused:
        add("vision.attention.qkv_layout", "fused_thirds", part.place(fused), "tensors")
        biases = {"qkv": part.find("qkv", "bias")}
        _even(part, "vision.attention.qkv_bias", biases, ("qkv",), readings, fused)
    elif all(separate.values()):
        evidence = f"{part.place(separate['q'])}, of k and of v"
        add("vision.attention.qkv_layout", "separate", evidence, "tensors")
        biases = {role: part.find(role, "bias") for role in ("q", "k", "v")}
        roles = ("q", "k", "v")
        _even(part, "vision.attention.qkv_bias", biases, roles, readings, separate["q"])
    else:
        readings.gap(
            "vision.attention", f"no q, k and v under known names in {part.group.prefix}0."
        )
    proj = part.find("proj")
    _name(part, "proj", proj, readings)
    bias = part.find("proj", "bias")
    if proj:
        evidence = part.place(bias) or f"{part.place(proj)} and no bias"
        add("vision.attention.output_bias", bool(bias), evidence, "tensors")
    norms = {role: part.find(role) for role in ("q_norm", "k_norm")}
    for role, found in norms.items():
        _name(part, role, found, readings)
    shape, says = part.shape(norms["q_norm"])
    if not norms["q_norm"]:
        evidence = f"no norm of queries among {part.group.prefix}0. and others"
        add("vision.attention.qk_norm", "none", evidence, "tensors")
    elif shape is not None and shape != (readings.get("vision.hidden_size"),):
        readings.refuse("vision.attention.qk_norm", f"{says}, not the width of all heads together")
    else:
        evidence = says or part.place(norms["q_norm"])
        add("vision.attention.qk_norm", "full_width_rms", evidence, "tensors")


def _block_mlp(part: _Part, readings: Readings) -> None:
    plain = {role: part.find(role) for role in ("fc1", "fc2")}
    gated = {role: part.find(role) for role in ("gate", "up", "down")}
    kind, roles = ("swiglu", gated) if gated["gate"] else ("plain", plain)
    first = roles["gate"] if kind == "swiglu" else roles["fc1"]
    if first is None:
        readings.gap("vision.mlp", f"no MLP under a known name in {part.group.prefix}0.")
        return
    for role, found in {**plain, **gated}.items():
        _name(part, role, found if role in roles else None, readings)
    readings.add("vision.mlp.kind", kind, part.place(first), "tensors")
    biases = {role: part.find(role, "bias") for role in roles}
    _even(part, "vision.mlp.bias", biases, tuple(roles), readings, first)
    shape, says = part.shape(first)
    if shape is not None:
        readings.add("vision.mlp.intermediate_size", shape[0], says, "tensors")


def _tables(names: TensorNames, readings: Readings) -> None:
    """The class token and the position table, whose rows count the class token."""
    prefix, add = names.vision_prefix or "", readings.add
    token = names.one(prefix, "vision.class_token", ("",))
    _single(names, "class_token", token, readings)
    if token is None:
        add("vision.class_token", None, f"none of the known names after {prefix}", "tensors")
    table = names.one(prefix, "vision.pos_embed") or names.one(prefix, "vision.pos_embed", ("",))
    _single(names, "pos_embed", table, readings)
    if table is None:
        add("vision.position", None, f"no position table after {prefix}", "tensors")
        return
    key = next(k for k in (f"{prefix}{table}.weight", f"{prefix}{table}") if k in names.shapes)
    shape = names.shapes[key]
    if shape is not None and len(shape) >= 2:
        says = f"{key} is {list(shape)}"
        add("vision.position.num_embeddings", shape[-2], says, "tensors")


def _deepstack(names: TensorNames, readings: Readings) -> None:
    if names.levels is None:
        evidence = f"no merger of a level after {names.vision_prefix}"
        readings.add("vision.deepstack", None, evidence, "tensors")
        readings.add("weights.vision.deepstack", None, evidence, "tensors")
        return
    group, count = names.levels, _count(names.levels)
    part = _Part(group, range(count), names, readings, "vision.deepstack")
    evidence = f"levels up to {group.prefix}{count - 1}."
    readings.add("weights.vision.deepstack.prefix", names.level_name, evidence, "tensors")
    for role in ("norm", "fc1", "fc2"):
        _name(part, role, part.find(role), readings)
        part.find(role, "bias")
    levels = readings.reading("vision.deepstack.indices")
    if levels is None:
        readings.gap("vision.deepstack.indices", f"{evidence}, and config.json names no blocks")
    elif len(levels.value) != count:
        readings.conflict("vision.deepstack.indices", levels.evidence, evidence)


def _merger(names: TensorNames, readings: Readings) -> None:
    add, prefix = readings.add, names.merger_prefix
    if prefix is None:
        readings.gap("vision.merger", "no merger under a name of a known family")
        return
    roles = {r: names.one(prefix, f"vision.merger.{r}") for r in ("norm", "fc1", "fc2", "gate",
                                                                  "up", "down")}  # fmt: skip
    conv = names.one(names.vision_prefix or "", "vision.merger.conv", ("weight", "bias"))
    if conv is None:  # an MLP of two layers under names that a gated one has too
        for role in ("gate", "up", "down"):
            roles[role] = None
    for role, name in {**roles, "conv": conv}.items():
        evidence = f"{prefix}{name}.weight" if name else f"not among the names after {prefix}"
        add(f"weights.vision.merger.{role}", name, evidence, "tensors")
    op = "strided_conv" if conv else "window"
    add("vision.merger.op", op, f"{prefix}{roles['fc1']}.weight", "tensors")
    if not names.projector:
        own = prefix.removeprefix(names.vision_prefix or "")
        add("weights.vision.merger.prefix", own, f"{prefix}{roles['fc1']}.weight", "tensors")
    else:
        add("weights.vision.merger.prefix", None, f"{prefix} lies beside the tower", "tensors")
    if roles["norm"]:
        add("vision.merger.norm", _norm_kind(names, f"{prefix}{roles['norm']}"),
            f"{prefix}{roles['norm']}.weight", "tensors")  # fmt: skip
    bias = f"{prefix}{roles['fc1']}.bias"
    for name in roles.values():
        names.unused.discard(f"{prefix}{name}.bias")
    evidence = bias if bias in names.shapes else f"{prefix}{roles['fc1']}.weight and no bias"
    add("vision.merger.bias", bias in names.shapes, evidence, "tensors")
    shapes = {r: names.shapes.get(f"{prefix}{n}.weight") for r, n in roles.items() if n}
    if op == "window":
        _window_widths(prefix, roles, shapes, readings)
    else:
        conv_key = f"{names.vision_prefix}{conv}.weight"
        _conv_widths(prefix, conv_key, roles, {**shapes, "conv": names.shapes[conv_key]}, readings)


def _window_widths(
    prefix: str, roles: dict[str, str | None], shapes: dict[str, Shape | None], readings: Readings
) -> None:
    width, add = readings.get("vision.hidden_size"), readings.add
    fc1, fc2, norm = (shapes.get(role) for role in ("fc1", "fc2", "norm"))
    if fc1 is None or not width:
        return
    says = f"{prefix}{roles['fc1']}.weight is {list(fc1)}"
    area = fc1[1] / width
    side = round(area**0.5)
    if side * side == area:
        add("vision.merger.merge_size", side, f"{says}, the tower is {width} wide", "tensors")
    else:
        readings.conflict("vision.merger.merge_size", says, f"the tower is {width} wide")
    if fc2 is not None:
        says2 = f"{prefix}{roles['fc2']}.weight is {list(fc2)}"
        add("vision.out_hidden_size", fc2[0], says2, "tensors")
        if fc1[1] != fc2[0]:
            inner = {fc1[1]: "joined", fc2[0]: "out"}.get(fc1[0])
            if inner:
                add("vision.merger.inner", inner, f"{says}, {says2}", "tensors")
            else:
                readings.refuse("vision.merger.inner", f"{says}, {says2}")
        else:
            readings.gap("vision.merger.inner", f"{says}: joined and text width are equal")
    if norm is not None and fc1[1] != width:
        position = {width: "before_merge", fc1[1]: "after_merge"}.get(norm[0])
        says3 = f"{prefix}{roles['norm']}.weight is {list(norm)}"
        if position:
            add("vision.merger.norm_position", position, says3, "tensors")
        else:
            readings.conflict("vision.merger.norm_position", says3, says)


def _conv_widths(
    prefix: str, conv_key: str, roles: dict[str, str | None], shapes: dict[str, Shape | None],
    readings: Readings,
) -> None:  # fmt: skip
    conv, gate = shapes.get("conv"), shapes.get("gate")
    if conv is not None and len(conv) == 4:
        says = f"{conv_key} is {list(conv)}"
        readings.add("vision.merger.merge_size", conv[-1], says, "tensors")
        readings.add("vision.out_hidden_size", conv[0], says, "tensors")
        readings.add("vision.hidden_size", conv[1], says, "tensors")
    if gate is not None:
        says = f"{prefix}{roles['gate']}.weight is {list(gate)}"
        readings.add("vision.merger.inner", gate[0], says, "tensors")


# --- layout, head, what is left ---------------------------------------------------------------


def _layout(names: TensorNames, spec: Spec, readings: Readings) -> None:
    """The prefixes, as one of the family's layouts or as one of their own."""
    head = None if names.head is None else names.head.removesuffix("weight")
    prefixes = {
        "text": names.text_prefix,
        "vision": names.vision_prefix,
        "projector": names.merger_prefix if names.projector else None,
        "head": head,
    }
    if prefixes["text"] is None or prefixes["vision"] is None:
        return
    for layout in spec.weights.layouts:
        own = {part: getattr(layout, part) for part in prefixes}
        if all(own[part] == prefixes[part] or (part == "head" and head is None) for part in own):
            readings.add("weights.layouts", layout.name, _listed(prefixes.values()), "tensors")
            return
    readings.add("weights.layouts", tuple(prefixes.values()), _listed(prefixes.values()), "tensors")


def _head(names: TensorNames, readings: Readings) -> None:
    if names.head is None:
        evidence = "no lm_head.weight among the tensors"
        readings.add("text.tie_word_embeddings", True, evidence, "tensors")
        return
    shape = names.take(names.head)
    readings.add("text.tie_word_embeddings", False, f"{names.head} is there", "tensors")
    if shape is not None and len(shape) == 2:
        says = f"{names.head} is {list(shape)}"
        readings.add("text.vocab_size", shape[0], says, "tensors")
        readings.add("text.hidden_size", shape[1], says, "tensors")


def _left_over(names: TensorNames, readings: Readings) -> None:
    if names.unused:
        first = [printable(key) for key in sorted(names.unused)[:MAX_LISTED]]
        more = (
            f" and {len(names.unused) - len(first)} more" if len(names.unused) > len(first) else ""
        )
        readings.gap("weights", f"no known part of a model is stored as {', '.join(first)}{more}")


def _even(
    part: _Part, path: str, found: dict[str, tuple[str, str] | None], roles: Sequence[str],
    readings: Readings, weight: tuple[str, str] | None,
) -> None:  # fmt: skip
    """A flag that several tensors must agree on."""
    there = [role for role in roles if found[role]]
    if there and len(there) < len(roles):
        lacking = next(role for role in roles if role not in there)
        readings.refuse(path, f"{part.place(found[there[0]])} is there, that of {lacking} is not")
        return
    evidence = part.place(found[roles[0]]) if there else f"{part.place(weight)} and no bias"
    readings.add(path, bool(there), evidence, "tensors")


def _name(part: _Part, role: str, found: tuple[str, str] | None, readings: Readings) -> None:
    path = f"weights.{part.where}.{role}"
    if found is None:
        evidence = f"not in {part.group.prefix}{part.numbers[0]}."
        readings.add(path, None, evidence, "tensors")
    else:
        readings.add(path, found[0], part.place(found), "tensors")


def _single(names: TensorNames, role: str, found: str | None, readings: Readings) -> None:
    evidence = (
        f"{names.vision_prefix}{found or ''}" if found else f"not after {names.vision_prefix}"
    )
    readings.add(f"weights.vision.{role}", found, evidence, "tensors")


def _listed(values: Iterable[Any]) -> str:
    return "keys begin with " + ", ".join(str(value) for value in values if value)
