"""Rules that a device imposes and a CPU does not show, on the source of a package.

Source: the project's design, section on device rules; runner contract 1.4 (construction on meta)
and 6 (graphs). `RULES` in `finding.py` states each rule.

Compiled code is every `forward` of a torch module and what it calls in the package. What the
runner calls on the host (`embed_multimodal`, packing, positions) is free.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator

from vlmgen.check.api import Api
from vlmgen.check.compiled import Code, compiled_code, construction_code, method_of, torch_modules
from vlmgen.check.finding import Finding
from vlmgen.check.source import Module, PackageSource
from vlmgen.check.tensors import FACTORIES, TensorScope, call_name
from vlmgen.check.types import FunctionType, Types, functions_of, is_self_attribute

ALLOWED_IMPORTS = frozenset({"torch", "transformers", "vllm", "vllm_neuron", "nkilib", "numpy"})
HOST_READS = frozenset({"item", "tolist", "numpy", "__array__"})
HOST_CASTS = frozenset({"int", "float", "bool", "range"})
VALUE_SHAPES = frozenset({"nonzero", "masked_select", "unique", "unique_consecutive", "argwhere"})
MOVES = frozenset({"cuda", "cpu", "npu", "neuron"})
SPLITS = frozenset({"split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk",
                    "unsafe_split"})  # fmt: skip
LAYER_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx",
                           "block_index", "idx", "index", "level"})  # fmt: skip
DTYPED_LAYERS = frozenset({"Linear", "LayerNorm", "RMSNorm", "Embedding", "Conv1d", "Conv2d",
                           "Conv3d", "GroupNorm"})  # fmt: skip
BIASES = {
    "qkv_proj": ("bias", "norm_b"),
    "attention_decode": ("bias_qkv", "bias_out"),
    "o_proj": ("bias",),
    "mlp": ("gate_b", "up_b", "down_b", "norm_b"),
}
# (function, argument that turns a norm on) -> the eps that it then needs.
EPS = {
    "attention_decode": {
        "rmsnorm_X_enabled": "rmsnorm_X_eps",
        "rmsnorm_QK_pre_rope_enabled": "rmsnorm_QK_pre_rope_eps",
        "rmsnorm_QK_post_rope_enabled": "rmsnorm_QK_post_rope_eps",
    },
    "qkv_proj": {
        "norm_type": "eps",
        "qk_norm_pre_rope_q_norm": "qk_norm_pre_rope_eps",
        "qk_norm_post_rope_q_norm": "qk_norm_post_rope_eps",
    },
    "mlp": {"norm_type": "eps"},
    "router": {"gamma": "eps"},
}

Report = Callable[[ast.AST, str, str, str], Finding]


def check_device_rules(source: PackageSource, api: Api) -> list[Finding]:
    """Every rule on every module of a package; its tests are free.

    Args:
        source: The package.
        api: The contract, which tells what a called name is.
    """
    types = Types(source, api)
    findings: list[Finding] = []
    for module in source.own:
        findings += _imports(module)
        findings += _anywhere(module, types)
    for code in compiled_code(types):
        findings += _compiled(code, types)
    for code in construction_code(types):
        findings += _construction(code, types)
    findings += _layer_numbers(types)
    return sorted(set(findings))


def _reporter(module: Module) -> Report:
    def report(node: ast.AST, code: str, message: str, fix: str) -> Finding:
        return Finding(module.path, getattr(node, "lineno", 1), code, message, fix)

    return report


# ----------------------------------------------------------------- anywhere


def _imports(module: Module) -> Iterator[Finding]:
    report = _reporter(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        else:
            continue
        for name in names:
            top = name.split(".")[0]
            if top not in ALLOWED_IMPORTS and top not in sys.stdlib_module_names:
                yield report(
                    node, "VG215", f"imports {name}", "do without it, or move the code to tests"
                )
            if top in ("pdb", "bdb"):
                yield report(node, "VG214", f"imports {name}", "remove the debugger")


def _anywhere(module: Module, types: Types) -> Iterator[Finding]:
    report = _reporter(module)
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Attribute, ast.ImportFrom, ast.Name)):
            name = ast.unparse(node) if not isinstance(node, ast.ImportFrom) else ""
            gelu = name in ("torch.gelu", "torch.nn.GELU", "nn.GELU", "F.gelu", "ACT2FN")
            gelu = gelu or name.endswith(("functional.gelu", "functional.gelu_"))
            if isinstance(node, ast.ImportFrom):
                gelu = any(alias.name in ("gelu", "GELU", "ACT2FN") for alias in node.names)
            if gelu:
                yield report(
                    node, "VG209", f"uses {name or 'an imported GELU'}",
                    "write the formula out with erf or tanh"
                )  # fmt: skip
        if isinstance(node, ast.Assign):
            yield from _router_dtype(node, report)
        if not isinstance(node, ast.Call):
            continue
        name = call_name(node)
        if name in ("print", "breakpoint", "pdb.set_trace", "torch._dynamo.graph_break"):
            yield report(node, "VG214", f"calls {name}", "remove it, or use the module's logger")
        yield from _layer_dtype(node, name, report)
    for function, owner in functions_of(module):
        scope = types.scope(module, function, owner)
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                callee = scope.infer(node.func)
                if isinstance(callee, FunctionType) and not callee.is_method:
                    yield from _kernel_call(node, callee.label.split(".")[-1], module, types, owner)


def _layer_dtype(node: ast.Call, name: str, report: Report) -> Iterator[Finding]:
    last = name.split(".")[-1]
    keywords = {keyword.arg for keyword in node.keywords}
    if name in ("nn.Parameter", "torch.nn.Parameter", "Parameter"):
        inner = node.args[0] if node.args else None
        if not (isinstance(inner, ast.Call) and _has_dtype(inner)):
            yield report(
                node, "VG210", "a parameter without explicit dtype",
                "nn.Parameter(torch.empty(..., dtype=...), requires_grad=False)"
            )  # fmt: skip
    if name in (f"nn.{last}", f"torch.nn.{last}") and last in DTYPED_LAYERS:
        if not keywords & {"dtype", None}:
            yield report(node, "VG210", f"{last} without explicit dtype", "pass dtype=config.dtype")
        if last.endswith("Norm") and not keywords & {"eps", None}:
            yield report(node, "VG211", f"{last} without explicit eps", "pass eps from the config")


def _router_dtype(node: ast.Assign, report: Report) -> Iterator[Finding]:
    """A router's weight is float32 whatever the model's dtype."""
    names = [t.attr for t in node.targets if isinstance(t, ast.Attribute) and is_self_attribute(t)]
    if not any("router" in name for name in names):
        return
    for call in ast.walk(node.value):
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            if keyword.arg == "dtype" and ast.unparse(keyword.value) != "torch.float32":
                yield report(
                    node,
                    "VG216",
                    f"{', '.join(names)} has dtype {ast.unparse(keyword.value)}",
                    "make it dtype=torch.float32",
                )


def _has_dtype(call: ast.Call) -> bool:
    return any(keyword.arg in ("dtype", None) for keyword in call.keywords)


def _kernel_call(
    node: ast.Call, function: str, module: Module, types: Types, owner: str
) -> Iterator[Finding]:
    report = _reporter(module)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    for name in BIASES.get(function, ()):
        value = given.get(name)
        if value is not None and not _is_row(value, types, owner):
            yield report(
                value, "VG207", f"{function}({name}=...) is not [1, n]",
                "pass bias[None] or store the parameter as [1, n]"
            )  # fmt: skip
    for switch, eps in EPS.get(function, {}).items():
        value = given.get(switch)
        off = value is None or (isinstance(value, ast.Constant) and not value.value)
        off = off or (value is not None and ast.unparse(value).endswith("NO_NORM"))
        if not off and eps not in given and None not in given:
            yield report(
                node, "VG211", f"{function} with {switch} leaves {eps} to its default",
                f"pass {eps}=... from the config"
            )  # fmt: skip


def _is_row(value: ast.expr, types: Types, owner: str) -> bool:
    """Whether an expression is visibly `[1, n]`, or None."""
    if isinstance(value, ast.Constant):
        return value.value is None
    if isinstance(value, ast.IfExp):
        return _is_row(value.body, types, owner) and _is_row(value.orelse, types, owner)
    if isinstance(value, ast.Subscript):
        index = value.slice.elts[0] if isinstance(value.slice, ast.Tuple) else value.slice
        return isinstance(index, ast.Constant) and index.value is None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.args:
        first = value.args[0]
        number = first.value if isinstance(first, ast.Constant) else None
        if value.func.attr == "unsqueeze":
            return number == 0
        if value.func.attr in ("view", "reshape"):
            return number == 1 and len(value.args) == 2
        return False
    if is_self_attribute(value) and owner in types.classes:
        assert isinstance(value, ast.Attribute)
        return any(_makes_row(v) for v in _init_values(types, owner, value.attr))
    return False


def _makes_row(value: ast.expr) -> bool:
    """`nn.Parameter(torch.empty(1, n, ...))` or a helper called with `1, n`."""
    for node in ast.walk(value):
        if isinstance(node, ast.Call) and len(node.args) == 2:
            first = node.args[0]
            if isinstance(first, ast.Constant) and first.value == 1:
                return True
    return False


def _init_values(types: Types, owner: str, attribute: str) -> Iterator[ast.expr]:
    _, cls = types.classes[owner]
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign):
            if any(is_self_attribute(target, attribute) for target in node.targets):
                yield node.value


# ----------------------------------------------------------------- compiled


def _compiled(code: Code, types: Types) -> Iterator[Finding]:
    report = _reporter(code.module)
    scope = TensorScope(types, code)
    where = code.label
    for node in ast.walk(code.node):
        if isinstance(node, ast.Call):
            yield from _compiled_call(node, scope, report, where)
        elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
            if scope.decides(node.test):
                kind = type(node).__name__.removesuffix("Exp").lower()
                yield report(
                    node, "VG202", f"`{kind} {ast.unparse(node.test)}` in {where} reads a tensor",
                    "use torch.where, or decide by shapes and metadata integers"
                )  # fmt: skip
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                if scope.decides(test):
                    yield report(
                        test, "VG202", f"filter `{ast.unparse(test)}` in {where} reads a tensor",
                        "use torch.where"
                    )  # fmt: skip
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            if scope.is_tensor(node.value) and scope.is_mask(node.slice):
                yield report(
                    node, "VG203", f"boolean index `{ast.unparse(node)}` in {where}",
                    "use torch.where or masked_fill"
                )  # fmt: skip


def _compiled_call(
    node: ast.Call, scope: TensorScope, report: Report, where: str
) -> Iterator[Finding]:
    name = call_name(node)
    last = name.split(".")[-1]
    method = isinstance(node.func, ast.Attribute)
    on_tensor = isinstance(node.func, ast.Attribute) and scope.is_tensor(node.func.value)
    functional = name == f"torch.{last}"
    if method and last in HOST_READS and not functional:
        yield report(
            node, "VG201", f".{last}() in {where}",
            "keep the value a tensor, or compute it on the host"
        )  # fmt: skip
    if name in HOST_CASTS and any(scope.is_tensor(argument) for argument in node.args):
        yield report(node, "VG201", f"{name}() of a tensor in {where}", "keep the value a tensor")
    if (on_tensor or functional) and last in VALUE_SHAPES:
        yield report(
            node, "VG203", f"{last} in {where}", "use a fixed shape, with torch.where for the rest"
        )
    if name == "torch.where" and len(node.args) == 1:
        yield report(node, "VG203", f"one-argument where in {where}", "use three arguments")
    yield from _moves(node, scope, report, where)
    if (method or functional) and last in SPLITS:
        yield from _split(node, functional, last, scope, report, where)
    yield from _rank(node, functional, last, report, where)


def _moves(node: ast.Call, scope: TensorScope, report: Report, where: str) -> Iterator[Finding]:
    if not isinstance(node.func, ast.Attribute):
        return
    last = node.func.attr
    if last in MOVES and not call_name(node).startswith("torch."):
        yield report(
            node, "VG204", f".{last}() in {where}", "let the runner move the model and the inputs"
        )
        return
    if last != "to":
        return
    targets = [*node.args, *(k.value for k in node.keywords if k.arg in ("device", "other"))]
    for target in targets:
        text = ast.unparse(target)
        if isinstance(target, ast.Constant) and isinstance(target.value, str):
            moved = True
        else:
            moved = text.split(".")[-1] == "device" or "device(" in text or scope.is_tensor(target)
        if moved:
            yield report(
                node, "VG204", f".to({text}) in {where}",
                "create the tensor where it belongs, with device=other.device"
            )  # fmt: skip


def _split(
    node: ast.Call, functional: bool, last: str, scope: TensorScope, report: Report, where: str
) -> Iterator[Finding]:
    position = 2 if functional else 1
    dim: ast.expr | None = node.args[position] if len(node.args) > position else None
    for keyword in node.keywords:
        dim = keyword.value if keyword.arg == "dim" else dim
    if dim is None or (isinstance(dim, ast.Constant) and dim.value == 0):
        return
    yield report(
        node, "VG205", f"{last} on dim {ast.unparse(dim)} in {where}", "slice: x[..., :width]"
    )


def _rank(
    node: ast.Call, functional: bool, last: str, report: Report, where: str
) -> Iterator[Finding]:
    if last not in ("permute", "view", "reshape", "expand", "unflatten"):
        return
    arguments = list(node.args[1 if functional else 0 :])
    if len(arguments) == 1 and isinstance(arguments[0], (ast.Tuple, ast.List)):
        arguments = list(arguments[0].elts)
    rank = sum(_dims(argument) for argument in arguments)
    if rank > 4:
        yield report(
            node, "VG206", f"rank-{rank} {last} in {where}",
            "merge dims first, or slice and concatenate"
        )  # fmt: skip


def _dims(argument: ast.expr) -> int:
    """How many dims an argument of view stands for; `*x.shape[:2]` is two."""
    if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Subscript):
        part = argument.value.slice
        if isinstance(part, ast.Slice) and part.lower is None:
            if isinstance(part.upper, ast.Constant) and isinstance(part.upper.value, int):
                return max(part.upper.value, 1)
    return 1


# ------------------------------------------------------------- construction


def _construction(code: Code, types: Types) -> Iterator[Finding]:
    report = _reporter(code.module)
    scope = TensorScope(types, code)
    where = code.label
    for node in code.nodes():
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.AugAssign)):
            if scope.mixes(node):
                yield report(
                    node, "VG213", f"`{ast.unparse(node)}` in {where} computes on a tensor",
                    'make its inputs with device="cpu", or compute when the weights are loaded'
                )  # fmt: skip
        elif isinstance(node, ast.Call):
            yield from _construction_call(node, scope, report, where)


def _construction_call(
    node: ast.Call, scope: TensorScope, report: Report, where: str
) -> Iterator[Finding]:
    name = call_name(node)
    last = name.split(".")[-1]
    yield from _moves(node, scope, report, where)
    if name.startswith(("nn.init.", "torch.nn.init.", "init.")):
        yield report(
            node, "VG213", f"{name} in {where}", "leave parameters empty, the checkpoint fills them"
        )
    elif isinstance(node.func, ast.Attribute) and scope.on_device(node.func.value):
        if last not in ("requires_grad_", "size", "dim", "numel", "register_hook", "to"):
            yield report(
                node, "VG213", f".{last}() of a tensor in {where}",
                'make the tensor with device="cpu", or compute when the weights are loaded'
            )  # fmt: skip
    elif name == f"torch.{last}" and last not in FACTORIES:
        if any(scope.on_device(argument) for argument in _flat(node.args)):
            yield report(
                node, "VG213", f"{name} in {where} computes on a tensor",
                'make its inputs with device="cpu"'
            )  # fmt: skip
    if last == "register_buffer":
        yield from _buffer(node, scope, report, where)


def _flat(arguments: list[ast.expr]) -> Iterator[ast.expr]:
    for argument in arguments:
        if isinstance(argument, (ast.List, ast.Tuple)):
            yield from argument.elts
        else:
            yield argument


def _buffer(node: ast.Call, scope: TensorScope, report: Report, where: str) -> Iterator[Finding]:
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    persistent = keywords.get("persistent", node.args[2] if len(node.args) > 2 else None)
    if not (isinstance(persistent, ast.Constant) and persistent.value is False):
        yield report(
            node, "VG212", f"a persistent buffer in {where}",
            "pass persistent=False: buffers are never filled from a checkpoint"
        )  # fmt: skip
    value = keywords.get("tensor", node.args[1] if len(node.args) > 1 else None)
    empty = isinstance(value, ast.Constant) and value.value is None
    if value is not None and not empty and not scope.on_cpu(value):
        yield report(
            node, "VG212", f"a buffer in {where} that is not visibly on the CPU",
            'make it with device="cpu": on the meta device it would stay without values'
        )  # fmt: skip


def _layer_numbers(types: Types) -> Iterator[Finding]:
    """Attributes that hold a layer's own number, or a loop variable of the layer list."""
    numbered: dict[str, set[str]] = {}
    for module, cls in torch_modules(types):
        for node in ast.walk(cls):
            if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
                names = {n.id for g in node.generators for n in ast.walk(g.target)
                         if isinstance(n, ast.Name)} - {"_"}  # fmt: skip
                yield from _numbered_calls(node.elt, names, types, module, numbered)
            elif isinstance(node, ast.For):
                names = {n.id for n in ast.walk(node.target) if isinstance(n, ast.Name)} - {"_"}
                for statement in node.body:
                    yield from _numbered_calls(statement, names, types, module, numbered)
    for module, cls in torch_modules(types):
        report = _reporter(module)
        for node in ast.walk(cls):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if not is_self_attribute(target):
                    continue
                assert isinstance(target, ast.Attribute)
                value = node.value.id if isinstance(node.value, ast.Name) else ""
                is_number = target.attr.lstrip("_") in LAYER_NUMBERS
                if is_number or value in numbered.get(cls.name, ()):
                    yield report(
                        node, "VG208", f"{cls.name}.{target.attr} is a number of its own per layer",
                        "keep the number in the loop over the layers and pass what depends on it"
                    )  # fmt: skip


def _numbered_calls(
    root: ast.AST, names: set[str], types: Types, module: Module, numbered: dict[str, set[str]]
) -> Iterator[Finding]:
    """Note which constructor parameters of package classes receive a loop variable."""
    for node in ast.walk(root):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id not in types.classes:
            continue
        _, cls = types.classes[node.func.id]
        init = method_of(cls, "__init__")
        if init is None:
            continue
        parameters = [argument.arg for argument in init.args.args[1:]]
        passed = dict(zip(parameters, node.args, strict=False))
        passed |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        for parameter, value in passed.items():
            if isinstance(value, ast.Name) and value.id in names:
                numbered.setdefault(cls.name, set()).add(parameter)
    yield from ()
