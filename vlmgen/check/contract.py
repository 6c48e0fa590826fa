"""Every use of the plugin and of vLLM in a package, against the contract."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from vlmgen.check.api import SUBMODULE_ONLY, Api, Signature, differences
from vlmgen.check.finding import Finding
from vlmgen.check.source import Module, PackageSource
from vlmgen.check.types import (
    ClassType,
    FunctionType,
    ModuleType,
    ObjectType,
    Scope,
    Type,
    Types,
    functions_of,
)

# Called positionally by the plugin itself, so their parameter names are nobody's promise.
POSITIONAL_METHODS = {("SafetensorsWeightLoader", "load"), ("SliceView", "__getitem__")}


def check_contract(source: PackageSource, api: Api) -> list[Finding]:
    """Names, calls and attributes of a package and its tests.

    Args:
        source: The package.
        api: The contract, recorded or installed.
    """
    types = Types(source, api)
    findings: list[Finding] = []
    for module in source.modules.values():
        findings += _imports(module, api)
        for scope, body in _scopes(types, module):
            for node in body:
                findings += _uses(node, scope, module, api)
    return sorted(set(findings))


def used_names(source: PackageSource, api: Api) -> dict[tuple[str, str], str]:
    """What a package uses of the plugin: (module, dotted name) -> `path:line` of the first use."""
    types = Types(source, api)
    used: dict[tuple[str, str], str] = {}
    for module in source.modules.values():
        for scope, body in _scopes(types, module):
            for node in body:
                if not isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
                    continue
                found = scope.infer(node.func if isinstance(node, ast.Call) else node)
                is_call = isinstance(node, ast.Call)
                for key in _keys(found, is_call):
                    used.setdefault(key, f"{module.path}:{node.lineno}")
    return used


def _keys(found: Type | None, is_call: bool) -> Iterator[tuple[str, str]]:
    if isinstance(found, FunctionType) and not found.is_method:
        module, _, name = found.label.rpartition(".")
        yield module, name
    elif isinstance(found, FunctionType):
        yield "", found.label
    elif isinstance(found, (ClassType, ObjectType)):
        yield found.api.module, found.api.name
        if isinstance(found, ObjectType) and is_call and found.api.is_module:
            yield "", f"{found.api.name}.forward"


def check_drift(
    source: PackageSource, recorded: Api, live: Api, trouble: dict[tuple[str, str], str]
) -> list[Finding]:
    """Where the installed plugin differs from the recorded contract in what a package uses.

    Args:
        source: The package.
        recorded: The recorded contract.
        live: The installed plugin's.
        trouble: What could not be read from it, see `installed_api`.
    """
    findings = []
    owners = {c.name: c.module for m in recorded.modules.values() for c in m.classes.values()}
    for (module, name), where in sorted(used_names(source, recorded).items()):
        path, _, line = where.rpartition(":")
        home = module or owners.get(name.split(".")[0], "vllm")
        if home.split(".")[0] == "vllm":
            continue
        problem = trouble.get((home, name)) or trouble.get((home, ""))
        problem = problem or _signature_drift(recorded, live, home, name)
        if problem:
            findings.append(
                Finding(
                    path,
                    int(line),
                    "VG120",
                    f"{home}.{name}: the installed one {problem}",
                    "read the new signature, update the recorded contract and the templates",
                )
            )
    return findings


def _signature_drift(recorded: Api, live: Api, home: str, name: str) -> str:
    old, new = recorded.modules[home], live.modules.get(home)
    if new is None:
        return "is in no importable module"
    cls, _, method = name.partition(".")
    if method:
        before = old.classes[cls].methods.get(method)
        after = new.classes[cls].methods.get(method) if cls in new.classes else None
    elif name in old.functions:
        before, after = old.functions[name], new.functions.get(name)
    else:
        before = old.classes[name].init if name in old.classes else None
        after = new.classes[name].init if name in new.classes else None
    if before is None:
        return ""
    return differences(before, after) if after is not None else "does not exist"


# ------------------------------------------------------------------ imports


def _imports(module: Module, api: Api) -> Iterator[Finding]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if api.covers(alias.name) and not _exists(api, alias.name):
                    yield _unknown_module(module, node.lineno, alias.name, api)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if not api.covers(node.module):
                continue
            if not _exists(api, node.module):
                yield _unknown_module(module, node.lineno, node.module, api)
                continue
            for alias in node.names:
                yield from _unknown_name(module, node.lineno, node.module, alias.name, api)


def _exists(api: Api, name: str) -> bool:
    return name in api.modules or api.is_package(name)


def _unknown_module(module: Module, line: int, name: str, api: Api) -> Finding:
    top = name.split(".")[0]
    legal = ", ".join(sorted(m for m in api.modules if m.split(".")[0] == top))
    return Finding(
        module.path, line, "VG101", f"no module {name!r} is recorded", f"recorded: {legal}"
    )


def _unknown_name(module: Module, line: int, home: str, name: str, api: Api) -> Iterator[Finding]:
    known = api.modules.get(home)
    if name == "*":
        yield Finding(
            module.path, line, "VG102", f"star import from {home}", "import the names that are used"
        )
    elif (home, name) in SUBMODULE_ONLY:
        yield Finding(
            module.path,
            line,
            "VG102",
            f"{home} does not export {name!r}",
            f"import it from {SUBMODULE_ONLY[home, name]}",
        )
    elif not _exists(api, f"{home}.{name}") and name not in (known.names() if known else ()):
        legal = ", ".join(known.names()) if known else "modules only"
        yield Finding(
            module.path, line, "VG102", f"{home} has no {name!r}", f"recorded there: {legal}"
        )


# --------------------------------------------------------------------- uses


def _scopes(types: Types, module: Module) -> Iterator[tuple[Scope, list[ast.AST]]]:
    """Every function with the nodes in it, then everything outside functions."""
    inside: set[int] = set()
    for function, owner in functions_of(module):
        nodes = list(ast.walk(function))
        inside.update(id(node) for node in nodes)
        yield types.scope(module, function, owner), nodes
    empty = ast.parse("def _(): pass").body[0]
    assert isinstance(empty, ast.FunctionDef)
    rest = [node for node in ast.walk(module.tree) if id(node) not in inside]
    empty.body = [
        node for node in module.tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))
    ]
    yield types.scope(module, empty), rest


def _uses(node: ast.AST, scope: Scope, module: Module, api: Api) -> Iterator[Finding]:
    if isinstance(node, ast.Call):
        yield from _call(node, scope, module)
    elif isinstance(node, ast.Attribute):
        base = scope.infer(node.value)
        if isinstance(base, ModuleType):
            yield from _unknown_name(module, node.lineno, base.name, node.attr, api)
        elif isinstance(base, (ObjectType, ClassType)) and not base.api.has(node.attr):
            legal = ", ".join(sorted({*base.api.methods, *base.api.attributes})) or "none"
            yield Finding(
                module.path,
                node.lineno,
                "VG106",
                f"{base.api.name} has no recorded {node.attr!r}",
                f"recorded: {legal}",
            )


def _call(node: ast.Call, scope: Scope, module: Module) -> Iterator[Finding]:
    callee = scope.infer(node.func)
    signature: Signature | None
    free = 0  # leading arguments that may go by position
    if isinstance(callee, FunctionType):
        label, signature = callee.label, callee.signature
        if callee.is_method and (
            not signature.keywords or (callee.owner, label.split(".")[-1]) in POSITIONAL_METHODS
        ):
            free = len(node.args)
        home = label if not callee.is_method else _home(scope, node)
    elif isinstance(callee, ClassType):
        label, signature = callee.api.name, callee.api.init
        home = callee.api.module
    elif isinstance(callee, ObjectType) and "forward" in callee.api.methods:
        label, signature = f"{callee.api.name}.forward", callee.api.methods["forward"]
        home, free = callee.api.module, 1  # a torch module is called with its input
    else:
        return
    if signature is None:
        return
    if not signature.known:
        yield Finding(
            module.path,
            node.lineno,
            "VG107",
            f"the signature of {label} is not recorded",
            "record it in the contract, or do without the call",
        )
        return
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    keywords = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
    open_end = starred or len(keywords) < len(node.keywords)
    positional = 0 if starred else len(node.args)
    problems = list(signature.problems(positional, keywords, open_end=open_end))
    for code, message, fix in problems:
        yield Finding(module.path, node.lineno, code, f"{label}: {message}", fix)
    is_plugin = home.split(".")[0] in ("vllm_neuron", "nkilib")
    if is_plugin and not module.is_test and len(node.args) > free and not problems:
        names = [p.name for p in signature.params[free : len(node.args)]]
        yield Finding(
            module.path,
            node.lineno,
            "VG105",
            f"{label}: {', '.join(map(repr, names)) or 'arguments'} by position",
            "pass " + (", ".join(f"{name}=..." for name in names) or "keywords"),
        )


def _home(scope: Scope, node: ast.Call) -> str:
    """The module of the class whose method is called."""
    base = scope.infer(node.func.value) if isinstance(node.func, ast.Attribute) else None
    return base.api.module if isinstance(base, (ObjectType, ClassType)) else ""
