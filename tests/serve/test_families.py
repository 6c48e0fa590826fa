"""Every family's package, served by vLLM: greedy tokens are those of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.serve.conftest import ROOT
from tests.serve.prompts import VIDEO_OPTIONS, image, messages_of, video
from vlmgen.serve.launch import Server, package_server
from vlmgen.spec import Spec, load_spec
from vlmgen.validate.reference import Media, Reference

NEW_TOKENS = 16
FAMILIES = [path.parent.name for path in sorted((ROOT / "generated").glob("*/spec.yaml"))]
CONFIG = {"neuron_config": {"num_batched_tokens_buckets": [1024], "num_seqs_buckets": [1, 4]}}
OPTIONS = (
    "--max-model-len", "1024", "--max-num-seqs", "4", "--served-model-name", "tiny",
    "--media-io-kwargs", json.dumps(VIDEO_OPTIONS), "--additional-config", json.dumps(CONFIG),
)  # fmt: skip

PICTURES: dict[str, list[str | Media]] = {
    "text": ["The capital of France is"],
    "long text": ["Count the words of this sentence, please. " * 12],
    "picture": [image(0), "What is that?"],
    "portrait": ["Look:", image(1), "Name the colours."],
    "three pictures": [image(0), "one", image(1), "two", image(4), "Which is the widest?"],
}
VIDEOS: dict[str, list[str | Media]] = {
    "video": [video(0), "What moves?"],
    "picture and video": [image(3), "then", video(1), "Compare."],
    "video and picture": [video(0), "then", image(1), "Compare."],
}


@dataclass
class Served:
    """A family's package behind a server, and Hugging Face's model of the same checkpoint."""

    spec: Spec
    server: Server
    reference: Reference

    def answer(self, parts: list[str | Media]) -> list[int]:
        """Greedy tokens of the server."""
        answer = self.server.client().chat.completions.create(
            model="tiny",
            messages=messages_of(parts),
            temperature=0,
            max_tokens=NEW_TOKENS,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        return list(answer.choices[0].model_extra["token_ids"])

    def expected(self, name: str, parts: list[str | Media]) -> list[int]:
        """Greedy tokens of Hugging Face."""
        both = {part.kind for part in parts if isinstance(part, Media)} == {"image", "video"}
        # transformers' model takes one token for pictures and frames, and refuses both together.
        composed = both and self.spec.tokens.video_prompt == "per_frame_image_token"
        return self.reference.greedy(
            self.reference.prompt(name, *parts, composed=composed), NEW_TOKENS
        )


# One of each kind of tower: windows, experts with frames as pictures, tiles. Qwen3-VL is served by
# the tests beside this one.
SHORT = ("glm4v_moe", "internvl", "qwen2_5_vl")


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=() if f in SHORT else pytest.mark.matrix) for f in FAMILIES],
)
def family(request: pytest.FixtureRequest) -> str:
    """One family after the other; each is served once."""
    return request.param


@pytest.fixture(scope="module")
def served(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The family's package behind `vlmgen serve`, with a tiny checkpoint."""
    from vlmgen.tiny.build import build_tiny

    package, folder = ROOT / "generated" / family, tmp_path_factory.mktemp(family)
    spec = load_spec(package / "spec.yaml")
    checkpoint = build_tiny(spec, folder / "tiny")
    reference = Reference(checkpoint, spec)
    with package_server(package, checkpoint, folder / "server", *OPTIONS) as server:
        yield Served(spec, server, reference)


def prompts_of(spec: Spec) -> dict[str, list[str | Media]]:
    """The prompts that a family has: pictures, and videos where it takes them."""
    return PICTURES if spec.inputs.video is None else {**PICTURES, **VIDEOS}


@pytest.mark.slow
@pytest.mark.proof("served")
def test_served_tokens_equal_hugging_face(served: Served, family: str):
    differing = {}
    for name, parts in prompts_of(served.spec).items():
        answer, expected = served.answer(parts), served.expected(name, parts)
        if answer != expected:
            differing[name] = (answer, expected)
    assert differing == {}


@pytest.mark.slow
@pytest.mark.proof("served")
def test_answers_do_not_depend_on_what_is_served_beside_them(served: Served, family: str):
    """All prompts at once, in one batch as far as it reaches."""
    from concurrent.futures import ThreadPoolExecutor

    prompts = prompts_of(served.spec)
    alone = {name: served.answer(parts) for name, parts in prompts.items()}
    with ThreadPoolExecutor(4) as pool:
        together = dict(zip(prompts, pool.map(served.answer, prompts.values()), strict=True))
    assert together == alone


@pytest.mark.slow
@pytest.mark.proof("served")
def test_videos_are_refused_where_the_family_has_none(served: Served, family: str):
    import openai

    if served.spec.inputs.video is not None:
        served.answer(VIDEOS["video"])
        return
    with pytest.raises(openai.APIStatusError) as caught:
        served.answer(VIDEOS["video"])
    assert caught.value.status_code == 400
    assert served.answer(PICTURES["text"]) == served.expected("text", PICTURES["text"])


def test_every_spec_with_a_package_is_served():
    specs = {path.stem for path in (ROOT / "specs").glob("*.yaml")}
    assert {Path(name).name for name in FAMILIES} <= specs
