"""Which expressions of a function are tensors, and where they lie, as far as the source says it."""

from __future__ import annotations

import ast

from vlmgen.check.compiled import Code, is_torch_module
from vlmgen.check.types import FunctionType, ObjectType, OwnClass, OwnFunction, Types

FACTORIES = frozenset(
    "arange empty eye full linspace logspace ones rand randint randn randperm scalar_tensor tensor "
    "as_tensor zeros from_numpy empty_strided".split()
)
# Attributes and methods of a tensor that are no tensor.
FACTS = frozenset(
    "shape dtype device ndim layout is_cuda is_meta requires_grad size dim numel stride "
    "is_contiguous element_size get_device item tolist numpy data_ptr nelement is_floating_point "
    "storage_offset names itemsize nbytes".split()
)
NOT_TENSORS = frozenset(
    "device dtype Size finfo iinfo is_tensor is_floating_point compile no_grad inference_mode "
    "get_default_dtype set_grad_enabled".split()
)
BOOLEANS = frozenset("isnan isinf isfinite eq ne lt le gt ge logical_and logical_or logical_not "
                     "any all".split())  # fmt: skip


def call_name(node: ast.Call) -> str:
    """Dotted name of what is called, or the last part after something that is no name."""
    parts: list[str] = []
    func: ast.expr = node.func
    while isinstance(func, ast.Attribute):
        parts.append(func.attr)
        func = func.value
    parts.append(func.id if isinstance(func, ast.Name) else "")
    return ".".join(reversed(parts))


class TensorScope:
    """Tensors of one function.

    Args:
        types: The package's inference.
        code: The function.
    """

    def __init__(self, types: Types, code: Code) -> None:
        self.types, self.code = types, code
        self.scope = types.scope(code.module, code.node, code.owner)
        self.tensors: set[str] = set()
        self.cpu: set[str] = set()
        self.masks: set[str] = set()
        arguments = code.node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None and _is_tensor_annotation(argument.annotation):
                self.tensors.add(argument.arg)
        self._attributes: dict[tuple[str, str], bool] = {}
        # Twice, so that a name used before its assignment in the source is known as well.
        for _ in range(2):
            for node in ast.walk(code.node):
                self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if _is_tensor_annotation(node.annotation):
                self.tensors.add(node.target.id)
        elif isinstance(node, (ast.For, ast.comprehension)):
            iterated = node.iter
            if isinstance(iterated, (ast.Tuple, ast.List)) and iterated.elts:
                self._bind(node.target, iterated.elts[0])
            elif self.is_tensor(iterated) and isinstance(node.target, ast.Name):
                self.tensors.add(node.target.id)
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target, node.value)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            if self.is_tensor(value):
                self.tensors.add(target.id)
                if self.on_cpu(value):
                    self.cpu.add(target.id)
            if self.is_mask(value):
                self.masks.add(target.id)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for index, element in enumerate(target.elts):
                if isinstance(value, (ast.Tuple, ast.List)) and index < len(value.elts):
                    self._bind(element, value.elts[index])
                elif isinstance(value, ast.GeneratorExp):
                    self._bind(element, value.elt)
                elif isinstance(element, ast.Name) and self._gives_tensors(value):
                    self.tensors.add(element.id)

    def _gives_tensors(self, value: ast.expr) -> bool:
        if not isinstance(value, ast.Call):
            return False
        callee = self.scope.infer(value.func)
        if isinstance(callee, OwnFunction) and callee.node.returns is not None:
            return "Tensor" in ast.unparse(callee.node.returns)
        if isinstance(callee, OwnClass) and callee.instance:
            return True
        return call_name(value).split(".")[-1] in ("split", "chunk", "unbind", "topk", "max", "min")

    def is_tensor(self, node: ast.expr) -> bool:
        """Whether an expression is a tensor."""
        if isinstance(node, ast.Name):
            return node.id in self.tensors
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return self._is_own_tensor(self.code.owner, node.attr)
            if self.is_tensor(node.value):
                return node.attr not in FACTS
            base = self.scope.infer(node.value)
            if isinstance(base, OwnClass) and base.instance:
                return self._is_own_tensor(base.name, node.attr)
            return isinstance(base, ObjectType) and base.api.is_module and node.attr == "weight"
        if isinstance(node, ast.Subscript):
            return self.is_tensor(node.value)
        if isinstance(node, ast.BinOp):
            return self.is_tensor(node.left) or self.is_tensor(node.right)
        if isinstance(node, ast.UnaryOp):
            return not isinstance(node.op, ast.Not) and self.is_tensor(node.operand)
        if isinstance(node, ast.Compare):
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                return False
            if any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
                return self.is_tensor(node.left) or self.is_tensor(node.comparators[0])
            return any(self.is_tensor(part) for part in (node.left, *node.comparators))
        if isinstance(node, ast.IfExp):
            return self.is_tensor(node.body) or self.is_tensor(node.orelse)
        if isinstance(node, ast.NamedExpr):
            return self.is_tensor(node.value)
        return isinstance(node, ast.Call) and self._is_tensor_call(node)

    def _is_tensor_call(self, node: ast.Call) -> bool:
        name = call_name(node)
        last = name.split(".")[-1]
        if name.startswith(("torch.", "nn.functional.", "F.")):
            return (
                last not in NOT_TENSORS and last not in FACTS and not name.startswith("torch.nn.")
            )
        if name in ("nn.Parameter", "Parameter", "torch.nn.Parameter"):
            return True
        if isinstance(node.func, ast.Attribute) and self.is_tensor(node.func.value):
            return last not in FACTS
        callee = self.scope.infer(node.func)
        if isinstance(callee, FunctionType):
            text = callee.label
            return text.startswith("vllm_neuron.functional") or "GroupCoordinator" in text
        if isinstance(callee, OwnFunction):
            returns = callee.node.returns
            return returns is not None and _is_tensor_annotation(returns)
        if isinstance(callee, OwnClass) and callee.instance:
            return is_torch_module(self.types, callee.name)
        return isinstance(callee, ObjectType) and callee.api.is_module

    def _is_own_tensor(self, owner: str, name: str) -> bool:
        """Whether `self.<name>` is a parameter, a buffer or an annotated tensor of a class."""
        key = (owner, name)
        if key not in self._attributes:
            self._attributes[key] = False  # while it is being worked out
            self._attributes[key] = self._find_own_tensor(owner, name)
        return self._attributes[key]

    def _find_own_tensor(self, owner: str, name: str) -> bool:
        if owner not in self.types.classes:
            return False
        _, cls = self.types.classes[owner]
        for node in ast.walk(cls):
            if isinstance(node, ast.AnnAssign):
                target = node.target
                named = isinstance(target, ast.Name) and target.id == name
                named = named or (isinstance(target, ast.Attribute) and target.attr == name)
                if named and _is_tensor_annotation(node.annotation):
                    return True
            elif isinstance(node, ast.Assign):
                for place in node.targets:
                    is_own = isinstance(place, ast.Attribute) and place.attr == name
                    if is_own and _makes_parameter(node.value, self.types, self.code):
                        return True
            elif isinstance(node, ast.Call) and call_name(node) == "self.register_buffer":
                if node.args and isinstance(node.args[0], ast.Constant):
                    if node.args[0].value == name:
                        return True
        return False

    def is_mask(self, node: ast.expr) -> bool:
        """Whether an expression is a boolean tensor."""
        if isinstance(node, ast.Name):
            return node.id in self.masks
        if isinstance(node, ast.Compare):
            return self.is_tensor(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return self.is_mask(node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr, ast.BitXor)):
            return self.is_mask(node.left) or self.is_mask(node.right)
        if isinstance(node, ast.Call):
            name = call_name(node).split(".")[-1]
            return name in BOOLEANS and self.is_tensor(node)
        return False

    def decides(self, test: ast.expr) -> bool:
        """Whether the truth of an expression depends on a tensor's values."""
        if isinstance(test, ast.BoolOp):
            return any(self.decides(value) for value in test.values)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.decides(test.operand)
        if isinstance(test, ast.Call) and call_name(test) in ("any", "all", "bool", "int", "float"):
            return any(self.decides(argument) or self.is_tensor(argument) for argument in test.args)
        if isinstance(test, ast.Compare):
            parts = (test.left, *test.comparators)
            reads = any(_reads(part) for part in parts)
            return self.is_tensor(test) or reads
        return self.is_tensor(test) or _reads(test)

    # ----------------------------------------------------------- devices

    def on_cpu(self, node: ast.expr) -> bool:
        """Whether a tensor is visibly made on the CPU, from tensors that are."""
        if isinstance(node, ast.Name):
            return node.id in self.cpu
        if isinstance(node, ast.Call):
            name = call_name(node)
            last = name.split(".")[-1]
            if name == f"torch.{last}" and last in FACTORIES:
                return _device_is_cpu(node)
            if name == f"torch.{last}":
                return bool(node.args) and not any(self.on_device(a) for a in node.args)
            callee = self.scope.infer(node.func)
            if isinstance(callee, OwnFunction):
                return _makes_on_cpu(self.types, callee)
            if isinstance(node.func, ast.Attribute):
                return self.on_cpu(node.func.value)
        if isinstance(node, ast.BinOp):
            sides = [side for side in (node.left, node.right) if self.is_tensor(side)]
            return bool(sides) and all(self.on_cpu(side) for side in sides)
        if isinstance(node, ast.UnaryOp):
            return self.on_cpu(node.operand)
        if isinstance(node, ast.Subscript):
            return self.on_cpu(node.value)
        return False

    def on_device(self, node: ast.expr) -> bool:
        """Whether an expression is a tensor that may be on the meta device."""
        return self.is_tensor(node) and not self.on_cpu(node)

    def mixes(self, node: ast.AST) -> bool:
        """Whether an operation has an operand that may be on the meta device."""
        if isinstance(node, ast.BinOp):
            return self.on_device(node.left) or self.on_device(node.right)
        if isinstance(node, ast.UnaryOp):
            return not isinstance(node.op, ast.Not) and self.on_device(node.operand)
        if isinstance(node, ast.Compare):
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
                return False
            return any(self.on_device(part) for part in (node.left, *node.comparators))
        if isinstance(node, ast.AugAssign):
            return self.on_device(node.target) or self.on_device(node.value)
        return False


def _is_tensor_annotation(node: ast.expr) -> bool:
    """`torch.Tensor`, or a union with None; containers of tensors are not."""
    text = ast.unparse(node).strip("'\"")
    parts = [part.strip() for part in text.split("|")]
    return any(part in ("torch.Tensor", "Tensor", "nn.Parameter") for part in parts)


def _makes_parameter(value: ast.expr, types: Types, code: Code) -> bool:
    if isinstance(value, ast.Name):
        return False
    if isinstance(value, ast.IfExp):
        return _makes_parameter(value.body, types, code)
    if not isinstance(value, ast.Call):
        return False
    name = call_name(value)
    if name in ("nn.Parameter", "Parameter", "torch.nn.Parameter"):
        return True
    if name.startswith("torch.") and name.split(".")[-1] in FACTORIES:
        return True
    for module, node in types.functions.get(name, ()):
        if node.returns is not None and ast.unparse(node.returns).endswith("Parameter"):
            return module is not None
    return False


def _reads(node: ast.expr) -> bool:
    """Whether a value is read from a tensor within an expression: `.item()`, `.any()`."""
    return any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and inner.func.attr in ("item", "tolist")
        for inner in ast.walk(node)
    )


def _device_is_cpu(call: ast.Call) -> bool:
    for keyword in call.keywords:
        if keyword.arg == "device":
            text = ast.unparse(keyword.value)
            return text in ("'cpu'", "torch.device('cpu')")
    return False


def _makes_on_cpu(types: Types, function: OwnFunction) -> bool:
    """Whether every tensor that a function of the package makes is made on the CPU."""
    made = [
        node
        for node in ast.walk(function.node)
        if isinstance(node, ast.Call)
        and call_name(node).startswith("torch.")
        and call_name(node).split(".")[-1] in FACTORIES
    ]
    return bool(made) and all(_device_is_cpu(node) for node in made)
