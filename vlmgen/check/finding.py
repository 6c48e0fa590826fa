"""What a check reports: one finding is one line."""

from __future__ import annotations

from dataclasses import dataclass

#: Every code and the rule behind it. Codes are stable: a number is never given another meaning.
RULES: dict[str, str] = {
    "VG001": "a package has spec.yaml and one module directory with config, factory and model",
    "VG002": "every module parses",
    "VG003": "a package carries the manifest of its generation",
    "VG004": "the files of a package are those that vlmgen wrote, or edits that it took over",
    "VG005": "an overriding template starts from the packaged template of today",
    "VG006": "a package holds no conflict markers",
    "VG007": "the committed packages are what the specs give today",
    "VG101": "imports from the plugin and from vLLM name recorded modules",
    "VG102": "names taken from the plugin and from vLLM exist there",
    "VG103": "calls use keywords that the signature has",
    "VG104": "calls give every required argument",
    "VG105": "the plugin is called with keywords only: new parameters cannot shift old ones",
    "VG106": "methods and attributes of the plugin's objects exist",
    "VG107": "only calls whose signature is recorded can be proven",
    "VG110": "the model class has the members that the runner looks up",
    "VG111": "the model's methods take what the runner passes",
    "VG112": "forward takes exactly the keywords that the runner passes",
    "VG113": "the tower's parameters are the warm-up inputs, the cache buffer and the write ids",
    "VG114": "the factory answers the platform's questions through class methods",
    "VG115": "registration reaches vLLM's registry and the plugin's own table",
    "VG120": "the installed plugin has the recorded signatures",
    "VG201": "compiled code reads no tensor value on the host",
    "VG202": "compiled code does not branch on tensor values",
    "VG203": "compiled code makes no tensor whose shape depends on values",
    "VG204": "construction and compiled code move no tensor between devices",
    "VG205": "compiled code does not split or chunk an inner dim, which miscompiles",
    "VG206": "compiled code stays at rank 4 in permutes and views",
    "VG207": "biases reach the plugin's kernels as [1, n]",
    "VG208": "no integer per layer, which would make each layer a graph of its own",
    "VG209": "activations are written out, since the device's patched GELU does not trace",
    "VG210": "parameters state their dtype",
    "VG211": "every norm states its eps",
    "VG212": "buffers lie on the CPU explicitly and are not persistent",
    "VG213": "constructors do no arithmetic on tensors, which are meta while a model is built",
    "VG214": "no print and no debugger",
    "VG215": "a package imports torch, transformers, vllm, vllm_neuron, numpy and the standard "
    "library only",
    "VG216": "router weights are float32",
    "VG300": "the proof needs the published keys and sizes of the family",
    "VG301": "every parameter is filled from the checkpoint",
    "VG302": "every parameter is filled once",
    "VG303": "every checkpoint key is used or listed as ignored",
    "VG304": "every key that a parameter asks for is published",
    "VG305": "what a loader returns has the parameter's shape",
    "VG306": "together the ranks read every element of a checkpoint tensor",
    "VG307": "the package loads what is published",
    "VG308": "both key layouts fill the same parameters from the same tensors",
    "VG309": "the spec states the published sizes",
    "VG401": "the spec's Neuron defaults are legal for every checkpoint",
    "VG402": "the generated config refuses the same parallel sizes as vlmgen's table",
    "VG403": "the generated config lists the legal parallel sizes",
}


@dataclass(frozen=True, order=True)
class Finding:
    """One broken rule.

    Args:
        path: The file, as the package was named on the command line.
        line: 1-based line, 1 where the whole file is meant.
        code: Stable code, a key of `RULES`.
        message: What is wrong, with the value.
        fix: What to do.
        detail: More lines, such as a diff; empty for none.
    """

    path: str
    line: int
    code: str
    message: str
    fix: str
    detail: str = ""

    @property
    def rule(self) -> str:
        """The rule that is broken, one sentence."""
        return RULES[self.code]

    def __str__(self) -> str:
        return (
            f"{self.path}:{self.line}: {self.code} {_one_line(self.message)} ({self.rule}) "
            f"-> {_one_line(self.fix)}"
        )


def _one_line(text: str) -> str:
    return " ".join(text.split())
