"""The families: what their towers are, what is published, what was proven when, what is refused.

Everything comes from the specs and from stored results; a proof that was not run says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmgen.errors import OutputError
from vlmgen.proofs import KINDS, Proof, load, modules_sha256
from vlmgen.spec.axes import AXES, LATER_KEYS, show
from vlmgen.spec.derive import derive
from vlmgen.spec.load import load_spec
from vlmgen.spec.model import Spec

NOT_RUN = "not run"


@dataclass(frozen=True)
class Cell:
    """One proof of one family.

    Args:
        kind: Name of the proof.
        state: `passed`, `failed`, `stale` (passed on other modules), or `not run`.
        proof: The stored run, or None.
    """

    kind: str
    state: str
    proof: Proof | None

    def text(self) -> str:
        """What the run found and when, whatever has changed since."""
        if self.proof is None:
            return NOT_RUN
        word = "ok" if self.proof.passed else "FAILED"
        figures = f"{self.proof.worst} of {self.proof.limit}" if self.proof.limit else ""
        parts = (word, f"{self.proof.checks} checks", figures, self.proof.date)
        return ", ".join(part for part in parts if part)

    def text_today(self) -> str:
        """The same, and whether it was of the package as it is today."""
        return self.text() + (", the package has changed since" if self.state == "stale" else "")


@dataclass(frozen=True)
class Family:
    """One family.

    Args:
        spec: Its spec.
        path: The spec's file.
        package: Whether a package was generated.
        text: Traits of the text tower.
        vision: Traits of the vision tower.
        prompt: How pictures and videos stand in a prompt.
        cells: Every proof, in the order of `KINDS`.
        refused: What the family's package refuses.
    """

    spec: Spec
    path: Path
    package: bool
    text: tuple[str, ...]
    vision: tuple[str, ...]
    prompt: tuple[str, ...]
    cells: tuple[Cell, ...]
    refused: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        spec = self.spec
        return {
            "family": spec.family,
            "title": spec.title,
            "spec": str(self.path),
            "architecture": spec.architecture,
            "model_type": spec.model_type,
            "package": self.package,
            "text": list(self.text),
            "vision": list(self.vision),
            "prompt": list(self.prompt),
            "checkpoints": {
                entry.name: {
                    "also": list(entry.also),
                    "parameters": derive(spec, entry.name).parameters,
                }
                for entry in spec.checkpoints
            },
            "proofs": {
                cell.kind: {"state": cell.state, **(asdict(cell.proof) if cell.proof else {})}
                for cell in self.cells
            },
            "refused": list(self.refused),
        }


def families(specs: Path, generated: Path) -> list[Family]:
    """Every family of a directory of specs, by name.

    Raises:
        SpecError: A spec is faulty.
        OutputError: There are no specs, or stored results are no results.
    """
    paths = sorted(specs.glob("*.yaml"))
    if not paths:
        raise OutputError(f"{specs}: holds no specs (*.yaml)")
    return [_family(path, specs, generated) for path in paths]


def _family(path: Path, specs: Path, generated: Path) -> Family:
    spec = load_spec(path)
    package = generated / spec.family
    there = (package / "pyproject.toml").is_file()
    return Family(
        spec,
        path,
        there,
        tuple(_text_traits(spec)),
        tuple(_vision_traits(spec)),
        tuple(_prompt_traits(spec)),
        tuple(_cells(spec, specs, package if there else None)),
        tuple(_refused(spec)),
    )


def _cells(spec: Spec, specs: Path, package: Path | None) -> Iterator[Cell]:
    proofs = load(specs, spec.family)
    modules = modules_sha256(package) if package else ""
    for kind in KINDS:
        proof = proofs.get(kind.name)
        if proof is None:
            yield Cell(kind.name, NOT_RUN, None)
        elif not proof.passed:
            yield Cell(kind.name, "failed", proof)
        else:
            yield Cell(kind.name, "passed" if proof.modules == modules else "stale", proof)


# --- traits -----------------------------------------------------------------------------------


def _text_traits(spec: Spec) -> Iterator[str]:
    text = spec.text
    attention, rope, moe = text.attention, text.rope, text.moe
    if text.norm.topology != "pre":
        yield f"{text.norm.topology} norms"
    yield "q/k/v bias" if attention.qkv_bias else "no bias"
    if attention.qk_norm != "none":
        yield "norm of q and k"
    order = f"{rope.order} M-RoPE" if rope.kind == "mrope" else "plain rotation"
    yield order + (f" of {rope.partial:g} of a head" if rope.partial < 1 else "")
    if rope.pairing != "half":
        yield f"{rope.pairing} pairs"
    if text.mlp.layout != "separate" and (moe is None or moe.first_dense):
        yield "gate and up in one matrix"
    if moe is not None:
        shared = f", {moe.shared.count} shared" if moe.shared else ""
        dense = f", after {moe.first_dense} dense layer(s)" if moe.first_dense else ""
        yield f"{moe.num_experts} experts, {moe.top_k} a token ({moe.router}{shared}){dense}"
        yield f"experts stored {moe.checkpoint}"


def _vision_traits(spec: Spec) -> Iterator[str]:
    vision = spec.vision
    attention = vision.attention
    yield vision.input
    yield vision.patch_embed.kind + ("" if vision.patch_embed.bias else " without bias")
    if vision.class_token:
        yield "class token"
    yield vision.position.kind if vision.position else "no position table"
    if vision.rope:
        yield f"{vision.rope.kind} rotation"
    yield f"{vision.norm.kind} norm"
    window = f" of {attention.window.size} pixels" if attention.window else ""
    yield f"attention within a {attention.bounds}{window}"
    if attention.qk_norm != "none":
        yield f"{attention.qk_norm} of q and k"
    yield f"{vision.mlp.kind} MLP ({vision.mlp.activation})"
    if vision.layer_scale:
        yield "layer scale"
    extra = [name for name in ("embed_norm", "final_norm") if getattr(vision, name)]
    if extra:
        yield " and ".join(extra)
    yield f"merger {vision.merger.op}, {vision.merger.norm} norm {vision.merger.norm_position}"
    if vision.deepstack:
        yield f"{vision.num_levels} deepstack levels"


def _prompt_traits(spec: Spec) -> Iterator[str]:
    tokens = spec.tokens
    yield f"positions {tokens.positions}"
    yield f"video prompt {tokens.video_prompt}"
    if tokens.seconds:
        yield f"{tokens.seconds.tokens_per_second} positions a second"


EVERY_PACKAGE_REFUSES = (
    "checkpoints of another architecture, or whose structure differs from the spec's",
    "checkpoints that are stored quantised, and quantisation in neuron_config but bf16",
    "sliding windows, scaled rotary positions, and what else no template implements",
    "pictures and frames that are larger than the vision attention block",
)


def _refused(spec: Spec) -> Iterator[str]:
    """What a package says no to that others do not, as far as its spec decides it."""
    if spec.tokens.video_prompt == "none":
        yield "videos"
    if spec.vision.input == "tiles":
        side = derive(spec).position_grid * spec.vision.patch_embed.patch_size
        yield f"tiles of another size than {side} x {side} pixels in the default checkpoint"
    illegal = [entry.name for entry in spec.checkpoints if derive(spec, entry.name).text_tp == (1,)]
    if illegal:
        yield f"text TP above 1 for {', '.join(illegal)}"


def not_generated() -> list[tuple[str, str, str]]:
    """(axis, value, families that need it) of every value that no template implements yet."""
    rows = [
        (path, show(value), ", ".join(dict.fromkeys(users)))
        for path, axis in AXES.items()
        for value, users in axis.later.items()
    ]
    rows += [(path, "any", ", ".join(dict.fromkeys(users))) for path, users in LATER_KEYS.items()]
    return rows


# --- the page ---------------------------------------------------------------------------------

_INTRODUCTION = """# Families

`vlmgen families --out docs/families.md` writes this page from the specs and from stored results; a
test compares the two. A cell says what the last stored run of a proof found, and when (UTC); "not
run" means that no run is stored. `vlmgen families` also says where a package has changed since.
"""


def page(found: Sequence[Family]) -> str:
    """The page `docs/families.md`."""
    parts = [_INTRODUCTION, "## Proofs\n", _proof_table(found), "## Towers\n"]
    parts.append(
        _table(
            ("family", "text", "vision", "prompt"),
            [(f.spec.title, *("; ".join(t) for t in (f.text, f.vision, f.prompt))) for f in found],
        )
    )
    parts += ["## Published checkpoints\n", _checkpoint_table(found), "## Refused\n"]
    parts.append("Every package refuses:\n")
    parts.append("".join(f"- {what}\n" for what in EVERY_PACKAGE_REFUSES))
    rows = [(f.spec.title, "; ".join(f.refused)) for f in found if f.refused]
    parts.append(_table(("family", "its package also refuses"), rows))
    parts.append("Axis values that other models need and that no template implements yet:\n")
    parts.append(_table(("axis", "value", "needed by"), [_code(row) for row in not_generated()]))
    parts.append("## How a proof is run\n")
    parts.append(_table(("proof", "command"), [(k.title, f"`{k.command}`") for k in KINDS]))
    return "\n".join(parts)


def _code(row: tuple[str, str, str]) -> tuple[str, str, str]:
    return f"`{row[0]}`", f"`{row[1]}`", row[2]


def _proof_table(found: Sequence[Family]) -> str:
    columns = ("proof", *(f"`{family.spec.family}`" for family in found))
    rows = []
    for index, kind in enumerate(KINDS):
        rows.append((kind.title, *(family.cells[index].text() for family in found)))
    return _table(columns, rows)


def _checkpoint_table(found: Sequence[Family]) -> str:
    rows = []
    for family in found:
        for entry in family.spec.checkpoints:
            size = derive(family.spec, entry.name).parameters / 1e9
            names = ", ".join((entry.name, *entry.also))
            rows.append((family.spec.title, names, f"{size:.2f}"))
    return _table(("family", "checkpoint", "parameters (B)"), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
