"""Every module alone: the same weights, the same real inputs, Hugging Face's result and ours.

Inputs of the inner modules are what Hugging Face's own modules receive when real pictures and
prompts run through them. Names of Hugging Face's modules follow from the spec's weight names.

The vision tower's are in `vision_modules.py`. Shapes: t tokens, r merged rows, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vlmgen.spec.types import stated
from vlmgen.validate.checks import Check, InputsOf, parent, spread
from vlmgen.validate.driver import PackageDriver
from vlmgen.validate.reference import Prompt, Reference
from vlmgen.validate.vision_modules import VisionChecks

LIMIT = 1e-5
"""Largest relative error of a module in float32."""

DECODE_STEPS = 3
CLEARLY_AHEAD = 0.1  # in standard deviations of a token's scores over the experts
TEXT_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


@dataclass
class TextCase:
    """One prompt, with what Hugging Face's decoder modules received for it.

    Args:
        prompt: The prompt.
        positions: int64 `[3, t]`, or `[t]` where the text has one position axis.
        inputs: Hugging Face module path -> hidden states `[t, H]`.
        rows: Item -> Hugging Face's vision rows, `[r, W]`, so that the tower's error stays out.
        settled: Layer with experts -> bool `[t]`, tokens whose choice of experts is clear.
    """

    prompt: Prompt
    positions: torch.Tensor
    inputs: dict[str, torch.Tensor]
    rows: dict[str, torch.Tensor]
    settled: dict[int, torch.Tensor]

    @property
    def name(self) -> str:
        """For messages."""
        return self.prompt.name


class ModuleChecks:
    """All module checks of one package and one reference.

    Args:
        reference: Float32 reference; its modules' inputs become the inputs of the checks.
        driver: The package, loaded from the same checkpoint.
        prompts: Prompts for the text modules.
        round_to: Inputs are rounded to this dtype first, for comparisons in it.
    """

    def __init__(
        self,
        reference: Reference,
        driver: PackageDriver,
        prompts: Sequence[Prompt],
        round_to: torch.dtype | None = None,
    ) -> None:
        self.names = HuggingFaceNames(reference)
        self._round_to = round_to
        self.text_cases = [self._text_case(reference, driver, prompt) for prompt in prompts]
        self._vision = VisionChecks(reference, driver, round_to)

    # ---------------------------------------------------------------------------------- the list

    def vision(self) -> list[Check]:
        """Checks of the vision tower, bottom up."""
        return self._vision.checks()

    def text(self) -> list[Check]:
        """Checks of the text decoder, bottom up.

        Where values are rounded, two equally good results may choose different experts for a token
        whose best scores are close, and differ by a whole expert. The parts in which that can
        happen are compared on the tokens whose choice is clear in the float32 reference.
        """
        names, cases = self.names, self.text_cases
        layers = [(case, index) for case in cases for index in names.layers]
        dense = [(case, index) for case, index in layers if not names.has_experts(index)]
        experts = [(case, index) for case, index in layers if names.has_experts(index)]

        def part(
            name: str,
            hf: Callable[..., Any],
            ours: Callable[..., Any],
            over: Sequence[Any],
            chooses: bool = False,
        ) -> Check:
            def rows(output: torch.Tensor, case: Any) -> torch.Tensor:
                if self._round_to is None or not chooses or not names.has_experts(case[1]):
                    return output
                return output[case[0].settled[case[1]]]

            return Check(
                name,
                lambda reference, case: rows(hf(names, reference, case), case),
                lambda driver, case: rows(ours(names, driver, case), case),
                over,
            )

        return [
            part("rms norm", hf_text_norm, our_text_norm, layers),
            part("rotary tables", hf_text_rotary, our_text_rotary, cases),
            part("attention prefill", hf_text_attention, our_attention_prefill, layers),
            part("attention decode", hf_attention_decode, our_attention_decode, layers),
            *([part("mlp", hf_text_mlp, our_text_mlp, dense)] if dense else []),
            *(
                [
                    part("router", hf_router, our_router, experts),
                    part("experts prefill", hf_text_mlp, our_text_mlp, experts),
                    part("experts decode", hf_experts_decode, our_experts_decode, experts, True),
                ]
                if experts
                else []
            ),
            *([part("shared experts", hf_shared, our_shared, experts)] if names.shared(0) else []),
            part("decoder layer", hf_layer, our_layer, layers, True),
            part("full text tower", hf_text_tower, our_text_tower, cases),
        ]

    # --------------------------------------------------------------------------------- the inputs

    def _text_case(self, reference: Reference, driver: PackageDriver, prompt: Prompt) -> TextCase:
        with InputsOf(reference.text, self.names.text_paths()) as inputs:
            reference.logits(prompt)
        if reference.spec.text.rope.kind == "plain":
            positions = torch.arange(len(prompt.token_ids))
        else:
            positions, _ = driver.model.get_mrope_input_positions(prompt.token_ids, prompt.features)
        hidden = {path: self._rounded(value[0][0]) for path, value in inputs.items()}
        rows = {f.identifier: self._rounded(reference.rows_of(f)) for f in prompt.features}
        settled = {
            index: settled_tokens(reference, self.names.router(index), inputs[path][0][0])
            for index in self.names.layers
            if self.names.has_experts(index) and (path := self.names.mlp(index))
        }
        return TextCase(prompt, positions, hidden, rows, settled)

    def _rounded(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self._round_to is None else hidden.to(self._round_to)


class HuggingFaceNames:
    """Paths of Hugging Face's modules below its text tower, derived from the weight names."""

    def __init__(self, reference: Reference) -> None:
        self._text = reference.spec.weights.text
        self._moe = reference.spec.text.moe
        config = reference.config
        self.first_dense = self._first_dense(config.get_text_config())
        self.layers = spread(config.get_text_config().num_hidden_layers)

    def layer(self, index: int) -> str:
        """A decoder layer."""
        return self._text.layer.format(layer=index).rstrip(".")

    def attention(self, index: int) -> str:
        """A decoder layer's attention."""
        return f"{self.layer(index)}.{parent(self._text.q)}"

    def has_experts(self, index: int) -> bool:
        """Whether a decoder layer has experts in the place of its MLP."""
        return self._moe is not None and index >= self.first_dense

    def _first_dense(self, config: Any) -> int:
        keys = self._moe.config_keys.first_dense if self._moe else ()
        return next((getattr(config, key) for key in keys if hasattr(config, key)), 0)

    def mlp(self, index: int) -> str:
        """A decoder layer's MLP, or what holds its experts."""
        if self.has_experts(index):
            return parent(self.router(index))
        return f"{self.layer(index)}.{parent(stated(self._text.gate or self._text.gate_up))}"

    def router(self, index: int) -> str:
        """A decoder layer's router."""
        return f"{self.layer(index)}.{stated(self._text.moe).router}"

    def shared(self, index: int) -> str | None:
        """A decoder layer's shared experts, where the family has them."""
        shared = self._text.moe.shared if self._text.moe else None
        return f"{self.layer(index)}.{parent(shared.gate)}" if shared else None

    def norms(self, index: int) -> dict[str, str]:
        """The norms of a decoder layer: the package's name -> path."""
        norms = {name: getattr(self._text, name) for name in TEXT_NORMS}
        return {name: f"{self.layer(index)}.{key}" for name, key in norms.items() if key}

    def text_paths(self) -> list[str]:
        """Every module of the decoder whose input is needed."""
        per_layer = (self.layer, self.attention, self.mlp)
        inner = [path(index) for index in self.layers for path in per_layer]
        return [*inner, *(norm for i in self.layers for norm in self.norms(i).values())]


# -------------------------------------------------------------------------------------- text parts

Layer = tuple[TextCase, int]


def _hf_tables(
    names: HuggingFaceNames, model: Reference, case: TextCase
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[1, t, R]` in the model's dtype, R rotated elements of a head."""
    anything = torch.empty(1, dtype=model.dtype)
    batch = case.positions[..., None, :]  # [3, 1, t] or [1, t]
    return model.text.rotary_emb(anything, batch)


def _our_tables(
    driver: PackageDriver, case: TextCase, first: int = 0, last: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[t, D / 2]` of the tokens first .. last - 1."""
    return driver.model.language_model.rotary_emb(case.positions[..., first:last])


def _causal_mask(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    lowest = torch.full((tokens, tokens), torch.finfo(dtype).min, dtype=dtype)
    return lowest.triu(1)[None, None]


def hf_text_norm(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    return torch.cat(
        [
            model.text.get_submodule(path)(case.inputs[path].to(model.dtype))
            for path in names.norms(index).values()
        ]
    )


def our_text_norm(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    layer = driver.model.language_model.layers[index]
    return torch.cat(
        [
            getattr(layer, name)(case.inputs[path].to(driver.dtype))
            for name, path in names.norms(index).items()
        ]
    )


def hf_text_rotary(names: HuggingFaceNames, model: Reference, case: TextCase) -> torch.Tensor:
    """One angle per pair; pairs that are not rotated have the angle zero."""
    text = model.spec.text
    angles = []
    for table, unrotated in zip(_hf_tables(names, model, case), (1.0, 0.0), strict=True):
        rotated = table[0]
        half = rotated.shape[-1] // 2
        pairs = rotated[:, ::2] if text.rope.pairing == "adjacent" else rotated[:, :half]
        rest = round(half / text.rope.partial) - half
        angles += [pairs, pairs.new_full((len(pairs), rest), unrotated)]
    return torch.cat(angles, dim=-1)


def our_text_rotary(names: HuggingFaceNames, driver: PackageDriver, case: TextCase) -> torch.Tensor:
    return torch.cat(_our_tables(driver, case), dim=-1)


def hf_text_attention(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    path = names.attention(index)
    hidden = case.inputs[path].to(model.dtype)
    return model.text.get_submodule(path)(
        hidden_states=hidden[None],
        position_embeddings=_hf_tables(names, model, case),
        attention_mask=_causal_mask(len(hidden), model.dtype),
    )[0][0]


def our_attention_prefill(
    names: HuggingFaceNames, driver: PackageDriver, layer: Layer
) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.attention(index)].to(driver.dtype)
    attention = driver.model.language_model.layers[index].self_attn
    return _prefilled(driver, case, attention, hidden)


def _prefilled(
    driver: PackageDriver, case: TextCase, module: torch.nn.Module, hidden: torch.Tensor
) -> torch.Tensor:
    """A layer or its attention over all tokens at once."""
    request = driver.add_request(case.prompt.token_ids, case.prompt.features)
    metadata = driver.attention_metadata(request, 0, len(hidden))
    output = module(hidden, *_our_tables(driver, case), torch.arange(len(hidden)), metadata)
    driver.release(request)
    return output


def hf_attention_decode(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    return hf_text_attention(names, model, layer)[-DECODE_STEPS:]


def our_attention_decode(
    names: HuggingFaceNames, driver: PackageDriver, layer: Layer
) -> torch.Tensor:
    """All but the last tokens as a prefill, then one token at a time through the paged cache."""
    case, index = layer
    hidden = case.inputs[names.attention(index)].to(driver.dtype)
    attention = driver.model.language_model.layers[index].self_attn
    request = driver.add_request(case.prompt.token_ids, case.prompt.features)
    start = len(hidden) - DECODE_STEPS
    outputs = []
    for first, last in [(0, start), *((t, t + 1) for t in range(start, len(hidden)))]:
        metadata = driver.attention_metadata(request, first, last - first)
        tables = _our_tables(driver, case, first, last)
        places = torch.arange(first, last)
        outputs.append(attention(hidden[first:last], *tables, places, metadata))
    driver.release(request)
    return torch.cat(outputs[1:])


def hf_text_mlp(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    path = names.mlp(index)
    return model.text.get_submodule(path)(case.inputs[path].to(model.dtype)[None])[0]


def our_text_mlp(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(driver.dtype)
    return driver.model.language_model.layers[index].mlp(hidden)


def hf_experts_decode(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    """The experts with the norm before them."""
    case, index = layer
    path = names.norms(index)["post_attention_layernorm"]
    hidden = model.text.get_submodule(path)(case.inputs[path].to(model.dtype))
    return model.text.get_submodule(names.mlp(index))(hidden[None])[0]


def our_experts_decode(
    names: HuggingFaceNames, driver: PackageDriver, layer: Layer
) -> torch.Tensor:
    """The same token by token, by the decode step where the package has one of its own."""
    case, index = layer
    ours = driver.model.language_model.layers[index]
    norm = ours.post_attention_layernorm
    tokens = case.inputs[names.norms(index)["post_attention_layernorm"]].to(driver.dtype).split(1)
    if hasattr(ours.mlp, "decode"):
        return torch.cat([ours.mlp.decode(token, norm) for token in tokens])
    return torch.cat([ours.mlp(norm(token)) for token in tokens])


def hf_router(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    """Weight of every expert for every token, `[t, E]`."""
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(model.dtype)
    logits, weights, chosen = model.text.get_submodule(names.router(index))(hidden)
    return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, chosen, weights.float())


def our_router(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(driver.dtype)
    return driver.model.language_model.layers[index].mlp.route(hidden)


def settled_tokens(reference: Reference, router: str, hidden: torch.Tensor) -> torch.Tensor:
    """Tokens whose last chosen expert is clearly ahead of the first that is not: bool `[t]`.

    Args:
        reference: The float32 reference.
        router: Path of the router.
        hidden: What it receives, `[t, H]`.
    """
    moe = stated(reference.spec.text.moe)
    module = reference.text.get_submodule(router)
    with torch.no_grad():
        scores = module(hidden)[0]
        if moe.router == "sigmoid_bias":
            scores = scores.sigmoid() + module.e_score_correction_bias
    top_k = module.top_k
    best = scores.sort(dim=-1, descending=True).values
    gap = best[:, top_k - 1] - best[:, min(top_k, best.shape[1] - 1)]
    return gap > CLEARLY_AHEAD * scores.std(dim=-1)


def hf_shared(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(model.dtype)
    return model.text.get_submodule(names.shared(index))(hidden)


def our_shared(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.mlp(index)].to(driver.dtype)
    return driver.model.language_model.layers[index].mlp.shared(hidden)


def hf_layer(names: HuggingFaceNames, model: Reference, layer: Layer) -> torch.Tensor:
    case, index = layer
    path = names.layer(index)
    hidden = case.inputs[path].to(model.dtype)
    return model.text.get_submodule(path)(
        hidden[None],
        position_embeddings=_hf_tables(names, model, case),
        attention_mask=_causal_mask(len(hidden), model.dtype),
    )[0]


def our_layer(names: HuggingFaceNames, driver: PackageDriver, layer: Layer) -> torch.Tensor:
    case, index = layer
    hidden = case.inputs[names.layer(index)].to(driver.dtype)
    return _prefilled(driver, case, driver.model.language_model.layers[index], hidden)


def hf_text_tower(names: HuggingFaceNames, model: Reference, case: TextCase) -> torch.Tensor:
    """The decoder's output; vision rows are merged in and added by deepstack."""
    ids = case.prompt.inputs["input_ids"]
    embeddings = model.text.embed_tokens(ids).clone()
    width = embeddings.shape[-1]
    vision: dict[str, Any] = {}
    if case.rows:
        rows = torch.cat([case.rows[f.identifier] for f in case.prompt.features]).to(model.dtype)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        for feature in case.prompt.features:
            span = feature.mm_position
            embed = True if span.is_embed is None else span.is_embed
            mask[0, span.offset : span.offset + span.length] = embed
        main, *levels = rows.split(width, dim=-1)
        embeddings[mask] = main
        if levels:
            vision = {"visual_pos_masks": mask, "deepstack_visual_embeds": levels}
    positions = case.positions[..., None, :]
    output = model.text(
        inputs_embeds=embeddings,
        attention_mask=torch.ones_like(ids),
        position_ids=positions,
        use_cache=False,
        **vision,
    )
    return output.last_hidden_state[0]


def our_text_tower(names: HuggingFaceNames, driver: PackageDriver, case: TextCase) -> torch.Tensor:
    """The same from the reference's vision rows, put into the encoder cache by the host."""
    request = driver.add_request(case.prompt.token_ids, case.prompt.features)
    for feature in request.features:
        driver.encoder_cache.put(feature.identifier, case.rows[feature.identifier])
    output: list[torch.Tensor] = []
    handle = driver.model.language_model.register_forward_hook(
        lambda module, args, result: output.append(result)
    )
    try:
        driver.prefill(request)
    finally:
        handle.remove()
        driver.release(request)
    return output[0][: len(request.token_ids)]
