"""The end of the demo: a served answer about a real picture, next to Hugging Face's.

    python -m vlmgen.serve.demo PACKAGE CHECKPOINT

Starts `vlmgen serve` on a free port, asks with the OpenAI client, asks Hugging Face the same,
prints both and ends the server. A tiny checkpoint has random weights: its answer means nothing,
but both must give the same.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vlmgen.errors import UsageError, ValidationFailed, VlmgenError
from vlmgen.serve.launch import package_server

if TYPE_CHECKING:
    import openai

QUESTION = "What is in the picture?"
PICTURE, HEIGHT, WIDTH = "astronaut", 192, 160
NEW_TOKENS = 32


def served_tokens(client: openai.OpenAI, png: bytes) -> list[int]:
    """Greedy token ids of the served answer."""
    picture = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": picture}},
                    {"type": "text", "text": QUESTION},
                ],
            }
        ],
        temperature=0,
        max_tokens=NEW_TOKENS,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    return list(answer.choices[0].model_extra["token_ids"])  # type: ignore[index]


def run(package: Path, checkpoint: Path, folder: Path) -> bool:
    """Ask both and print both answers; whether they are equal.

    Args:
        package: Folder of a generated package.
        checkpoint: Folder of a checkpoint.
        folder: For the server's log and caches.
    """
    from PIL import Image

    from vlmgen import standin

    os.environ.setdefault(standin.CPU_MODE_VARIABLE, "1")
    standin.require()
    from vlmgen.spec.load import load_spec
    from vlmgen.validate.pictures import picture
    from vlmgen.validate.reference import Media, Reference

    pixels = picture(PICTURE, HEIGHT, WIDTH)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    starting = package_server(package, checkpoint, folder)
    print(f"starting vLLM with {package} (log: {starting.log}) ...", flush=True)
    with starting as server:
        served = served_tokens(server.client(), buffer.getvalue())
    reference = Reference(checkpoint, load_spec(package / "spec.yaml"))
    prompt = reference.prompt(PICTURE, Media("image", pixels), QUESTION)
    reference.model.generation_config.eos_token_id = None
    output = reference.model.generate(**prompt.inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    expected = output[0, len(prompt.token_ids) :].tolist()
    decode = reference.processor.tokenizer.decode
    print(f"picture       {PICTURE}, {WIDTH} x {HEIGHT} pixels\nquestion      {QUESTION}")
    print(f"served        {decode(served)!r}\nHugging Face  {decode(expected)!r}")
    same = sum(a == b for a, b in zip(served, expected, strict=True))
    print(f"{same} of {len(expected)} tokens are equal")
    return served == expected


def main() -> None:
    """Run with the package and the checkpoint."""
    if len(sys.argv) != 3:
        raise UsageError("usage: python -m vlmgen.serve.demo PACKAGE CHECKPOINT")
    package, checkpoint = map(Path, sys.argv[1:])
    if not run(package, checkpoint, checkpoint.with_name(f"{checkpoint.name}-serve")):
        raise ValidationFailed("the served answer differs from Hugging Face's")


if __name__ == "__main__":
    try:
        main()
    except VlmgenError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
