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
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmgen.errors import UsageError, ValidationFailed, VlmgenError

QUESTION = "What is in the picture?"
PICTURE, HEIGHT, WIDTH = "astronaut", 192, 160
NEW_TOKENS = 32
START_SECONDS = 300.0


@contextmanager
def running_server(package: Path, checkpoint: Path, log: Path) -> Iterator[str]:
    """`vlmgen serve` in float32 until the block ends; yields the address of its API.

    Raises:
        VlmgenError: It ended or did not answer in time; the message names the log.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "vlmgen", "serve", str(package), "--checkpoint"]
    command += [str(checkpoint), "--dtype", "float32", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise VlmgenError(f"the server did not start; its log is {log}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for kind in (signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, kind)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    continue


def _answers(port: int) -> bool:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def served_tokens(url: str, png: bytes) -> list[int]:
    """Greedy token ids of the served answer."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
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


def run(package: Path, checkpoint: Path, log: Path) -> bool:
    """Ask both and print both answers; whether they are equal."""
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
    print(f"starting vLLM with {package} (log: {log}) ...", flush=True)
    with running_server(package, checkpoint, log) as url:
        served = served_tokens(url, buffer.getvalue())
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
    """Run with the package, the checkpoint and where the log goes."""
    if len(sys.argv) != 3:
        raise UsageError("usage: python -m vlmgen.serve.demo PACKAGE CHECKPOINT")
    package, checkpoint = map(Path, sys.argv[1:])
    if not run(package, checkpoint, checkpoint.with_name(f"{checkpoint.name}-serve.log")):
        raise ValidationFailed("the served answer differs from Hugging Face's")


if __name__ == "__main__":
    try:
        main()
    except VlmgenError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
