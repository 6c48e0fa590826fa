"""Each device rule: a minimal piece that breaks it is found, its good twin is not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from vlmgen.check.api import recorded_api
from vlmgen.check.device_rules import check_device_rules
from vlmgen.check.finding import RULES
from vlmgen.check.source import read_package

WITH_DICT = "self, x: torch.Tensor, m: dict"
SCALE = "self.scale = nn.Parameter(torch.empty(1, dtype=config.dtype))"


def forward(body: str, init: str = "", signature: str = "self, x: torch.Tensor") -> str:
    """A module with this forward and these lines in __init__."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    made = textwrap.indent(textwrap.dedent(init).strip(), " " * 8)
    return (
        "class Layer(nn.Module):\n    def __init__(self, config) -> None:\n"
        f"        super().__init__()\n{made}\n\n"
        f"    def forward({signature}) -> torch.Tensor:\n{lines}\n"
    )


def init(body: str) -> str:
    """A module with these lines in __init__."""
    return forward("return x", body)


# code -> pairs of (bad, good)
CASES: dict[str, list[tuple[str, str]]] = {
    "VG201": [
        (forward("return x * x.max().item()"), forward("return x * x.max()")),
        (forward("n = x.tolist()\nreturn x"), forward("n = list(x.shape)\nreturn x")),
        (forward("return x[: int(x[0])]"), forward("return x[: int(x.shape[0])]")),
        (
            forward("return helper(x)") + "\ndef helper(x: torch.Tensor):\n    return x.item()\n",
            forward("return x") + "\ndef host(x: torch.Tensor):\n    return x.item()\n",
        ),
    ],
    "VG202": [
        (
            forward("if x.sum() > 0:\n    return -x\nreturn x"),
            forward("if x.shape[0] > 0:\n    return -x\nreturn x"),
        ),
        (forward("while x.any():\n    x = x - 1\nreturn x"), forward("return x.clamp(min=0)")),
        (forward("assert x.min() >= 0\nreturn x"), forward("assert x.dim() == 2\nreturn x")),
        (forward("y = x * 2\nreturn y if y[0] else x"), forward("return x if x is None else -x")),
        (
            forward("z = x == 1\nreturn x if not z else -x"),
            forward("return torch.where(x == 1, x, -x)"),
        ),
        (
            forward("return x if self.scale > 1 else -x", SCALE),
            forward("return x if self.scale > 1 else -x", "self.scale = config.scale"),
        ),
        (
            forward("return x if m['n'] > x[0] else -x", signature=WITH_DICT),
            forward("return x if m['n'] > m['k'] else -x", signature=WITH_DICT),
        ),
    ],
    "VG203": [
        (forward("return x[x > 0]"), forward("return torch.where(x > 0, x, 0)")),
        (forward("return x.nonzero()"), forward("return x.masked_fill(x == 0, 1)")),
        (forward("m = x == 1\nreturn x[m]"), forward("m = x.shape[0]\nreturn x[m]")),
    ],
    "VG204": [
        (forward("return x.to('cuda')"), forward("return x.to(torch.float32)")),
        (forward("return x.cuda()"), forward("return x.float()")),
        (
            forward("y = torch.zeros(2)\nreturn y.to(x.device)"),
            forward("return torch.zeros(2, device=x.device)"),
        ),
        (init("self.a = config.table.to('neuron')"), init("self.a = config.table")),
    ],
    "VG205": [
        (forward("a, b = x.chunk(2, dim=-1)\nreturn a"), forward("a = x[..., :2]\nreturn a")),
        (forward("return torch.split(x, 2, -1)[0]"), forward("return torch.split(x, 2, 0)[0]")),
        (forward("return x.split(4, 2)[0]"), forward("return x.split(4)[0]")),
    ],
    "VG206": [
        (forward("return x.permute(0, 1, 2, 3, 4)"), forward("return x.permute(0, 1, 2, 3)")),
        (forward("return x.view(1, 2, 3, 4, -1)"), forward("return x.view(1, 2, 3, -1)")),
        (
            forward("return x.view(*x.shape[:3], 2, -1)"),
            forward("return x.view(*x.shape[:2], 2, -1)"),
        ),
        (
            forward("return torch.permute(x, (0, 1, 2, 3, 4))"),
            forward("return torch.permute(x, (0, 1))"),
        ),
    ],
    "VG207": [
        (
            forward("return NF.qkv_proj(hidden=x, qkv_weights=self.w, bias=self.b)",
                    "self.b = nn.Parameter(torch.empty(8, dtype=config.dtype))"),
            forward("return NF.qkv_proj(hidden=x, qkv_weights=self.w, bias=self.b[None])",
                    "self.b = nn.Parameter(torch.empty(8, dtype=config.dtype))"),
        ),
        (
            forward("return NF.attention_decode(X=x, bias_qkv=self.b)",
                    "self.b = nn.Parameter(torch.empty(8, dtype=config.dtype))"),
            forward("return NF.attention_decode(X=x, bias_qkv=self.b)",
                    "self.b = nn.Parameter(torch.empty(1, 8, dtype=config.dtype))"),
        ),
        (
            forward("return NF.o_proj(active=x, weight=x, bias=x.view(-1))"),
            forward("return NF.o_proj(active=x, weight=x, bias=x.view(1, -1))"),
        ),
    ],
    "VG208": [
        (init("self.layer_idx = config.number"), init("self.num_layers = config.number")),
        (
            "class Block(nn.Module):\n    def __init__(self, config, place):\n"
            "        super().__init__()\n        self.place = place\n\n"
            + init("self.blocks = nn.ModuleList(Block(config, i) for i in range(config.depth))"),
            "class Block(nn.Module):\n    def __init__(self, config, place):\n"
            "        super().__init__()\n        self.place = place\n\n"
            + init("self.blocks = nn.ModuleList(Block(config, True) for _ in range(config.depth))"),
        ),
    ],
    "VG209": [
        (forward("return nn.functional.gelu(x)"), forward("return 0.5 * x * (1 + torch.erf(x))")),
        (init("self.act = nn.GELU()"), init("self.act = gelu_tanh")),
        ("from torch.nn.functional import gelu\n", "from torch.nn.functional import embedding\n"),
    ],
    "VG210": [
        (
            init("self.w = nn.Parameter(torch.empty(2, 2))"),
            init("self.w = nn.Parameter(torch.empty(2, 2, dtype=config.dtype))"),
        ),
        (init("self.l = nn.Linear(2, 2)"), init("self.l = nn.Linear(2, 2, dtype=config.dtype)")),
    ],
    "VG211": [
        (
            forward("return NF.attention_decode(X=x, rmsnorm_QK_pre_rope_enabled=True)"),
            forward("return NF.attention_decode(X=x, rmsnorm_QK_pre_rope_enabled=True, "
                    "rmsnorm_QK_pre_rope_eps=self.eps)"),
        ),
        (
            init("self.n = nn.LayerNorm(4, dtype=config.dtype)"),
            init("self.n = nn.LayerNorm(4, eps=config.eps, dtype=config.dtype)"),
        ),
        (
            forward("return NF.mlp(hidden=x, gate_w=x, up_w=x, down_w=x, norm_type=kind)"),
            forward("return NF.mlp(hidden=x, gate_w=x, up_w=x, down_w=x)"),
        ),
    ],
    "VG212": [
        (
            init("self.register_buffer('f', torch.zeros(4, device='cpu'))"),
            init("self.register_buffer('f', torch.zeros(4, device='cpu'), persistent=False)"),
        ),
        (
            init("self.register_buffer('f', torch.zeros(4), persistent=False)"),
            init("self.register_buffer('f', frequencies(4), persistent=False)")
            + "\ndef frequencies(n: int) -> torch.Tensor:\n"
            "    return 2.0 * torch.arange(n, device='cpu')\n",
        ),
    ],
    "VG213": [
        (
            init("self.f = 1.0 / (10000 ** (torch.arange(0, 8, 2) / 8))"),
            init("self.f = 1.0 / (10000 ** (torch.arange(0, 8, 2, device='cpu') / 8))"),
        ),
        (
            init("self.w = nn.Parameter(torch.empty(2, dtype=config.dtype))\n"
                 "nn.init.normal_(self.w)"),
            init("self.w = nn.Parameter(torch.empty(2, dtype=config.dtype))"),
        ),
        (
            init("self.w = nn.Parameter(torch.empty(2, dtype=config.dtype))\nself.v = self.w + 1"),
            init("self.w = nn.Parameter(torch.empty(2, dtype=config.dtype))\nself.v = 2 + 1"),
        ),
        (
            init("self.f = frequencies(4)")
            + "\ndef frequencies(n: int) -> torch.Tensor:\n    return 2.0 * torch.arange(n)\n",
            init("self.f = frequencies(4)")
            + "\ndef frequencies(n: int) -> torch.Tensor:\n"
            "    return 2.0 * torch.arange(n, device='cpu')\n",
        ),
        (
            init("self.w = nn.Parameter(torch.empty(2, dtype=config.dtype))\nself.w.fill_(1)"),
            init("self.w = nn.Parameter(torch.empty(2, dtype=config.dtype))\n"
                 "self.w.requires_grad_(False)"),
        ),
    ],
    "VG214": [
        (forward("print(x)\nreturn x"), forward("return x")),
        ("def host():\n    breakpoint()\n", "def host():\n    return None\n"),
    ],
    "VG215": [
        ("import einops\n", "import numpy\n"),
        ("from safetensors import safe_open\n", "from transformers import PretrainedConfig\n"),
    ],
    "VG216": [
        (
            init("self.router_weight = nn.Parameter(torch.empty(2, dtype=config.dtype))"),
            init("self.router_weight = nn.Parameter(torch.empty(2, dtype=torch.float32))"),
        ),
    ],
}  # fmt: skip

PAIRS = [(code, bad, good) for code, pairs in CASES.items() for bad, good in pairs]


def test_every_device_rule_has_a_case() -> None:
    assert {code for code in RULES if code.startswith("VG2")} == set(CASES)


@pytest.mark.parametrize(
    ("code", "bad", "good"), PAIRS, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(PAIRS)]
)
def test_the_bad_twin_is_found_and_the_good_one_is_not(snippet, code, bad, good) -> None:
    found = check_device_rules(snippet(bad), recorded_api())
    assert [f.code for f in found if f.code == code], f"{code} not in {found}"
    assert all(f.path.endswith("model.py") and f.line > 5 for f in found)
    assert not [f for f in check_device_rules(snippet(good), recorded_api()) if f.code == code]


def test_the_committed_package_keeps_every_rule(package: Path) -> None:
    assert check_device_rules(read_package(package), recorded_api()) == []


@pytest.mark.parametrize(
    ("name", "old", "new", "code"),
    [
        ("model.py", "return self.weight * x.to(hidden.dtype)",
         "return self.weight * (x / x.max().item())", "VG201"),
        ("model.py", "hidden = self.norm(hidden)", "if hidden.sum() > 0: hidden = hidden\n"
         "        hidden = self.norm(hidden)", "VG202"),
        ("utils/merge_vision_embeds.py", "return padded[:-1]", "return padded[:rows.max().item()]",
         "VG201"),
        ("vision_encoder.py", "hidden = gelu_tanh(", "hidden = nn.functional.gelu(", "VG209"),
        ("vision_encoder.py", "half = y.shape[-1] // 2", "half = y.cpu().shape[-1] // 2", "VG204"),
        ("model.py", "rmsnorm_QK_pre_rope_eps=self.q_layernorm.eps,", "", "VG211"),
        ("model.py", "dtype=torch.float32, device='cpu') / head_dim", "dtype=torch.float32) / "
         "head_dim", "VG213"),
        ("model.py", "_settings), persistent=False", "_settings)", "VG212"),
    ],
)  # fmt: skip
def test_a_seeded_fault_in_the_package_is_found(edited, name, old, new, code) -> None:
    findings = check_device_rules(read_package(edited(name, old, new)), recorded_api())
    assert code in {finding.code for finding in findings}


def test_host_code_is_free(package: Path) -> None:
    """`embed_multimodal` moves tensors and packing reads the grids; neither is compiled."""
    modules = read_package(package).modules
    text = Path(modules["utils.block_packing"].path).read_text()
    assert ".tolist()" in text and ".to(device)" in Path(modules["model"].path).read_text()
