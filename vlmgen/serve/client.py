"""A small client: one question with pictures and videos to a running server."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vlmgen.errors import UsageError, VlmgenError

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

DEFAULT_URL = "http://127.0.0.1:8000/v1"


class ServerError(VlmgenError):
    """The server cannot be reached or refused the request."""

    code = "VG908"
    exit_code = 6


def media_part(path: Path, kind: str) -> dict[str, Any]:
    """One picture or video as a part of a chat message.

    Args:
        path: The file; its bytes are sent as they are.
        kind: `image` or `video`.

    Raises:
        UsageError: The file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    fallback = {"image": "image/jpeg", "video": "video/mp4"}[kind]
    guessed = mimetypes.guess_type(path.name)[0] or fallback
    mime = guessed if guessed.startswith(f"{kind}/") else fallback
    url = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def message(question: str, images: Sequence[Path], videos: Sequence[Path]) -> dict[str, Any]:
    """A user message: pictures, then videos, then the question."""
    content = [media_part(path, "image") for path in images]
    content += [media_part(path, "video") for path in videos]
    return {"role": "user", "content": [*content, {"type": "text", "text": question}]}


def ask(
    question: str,
    images: Sequence[Path] = (),
    videos: Sequence[Path] = (),
    *,
    url: str = DEFAULT_URL,
    model: str | None = None,
    system: str | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
) -> Iterator[str]:
    """Ask a server and yield the answer as it comes.

    Args:
        question: Text after the pictures.
        images: Files.
        videos: Files.
        url: Base address of the OpenAI API.
        model: None takes the one the server has.
        system: System prompt.
        max_tokens: Longest answer.
        temperature: 0 is greedy.

    Raises:
        ServerError: No server, or it refused the request; the message is the server's.
    """
    import openai

    messages = [{"role": "system", "content": system}] if system else []
    messages.append(message(question, images, videos))
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    try:
        name = model or client.models.list().data[0].id
        chunks = client.chat.completions.create(
            model=name,
            # Videos are vLLM's addition to OpenAI's types.
            messages=cast("list[ChatCompletionMessageParam]", messages),
            max_tokens=max_tokens,
            temperature=temperature,
            stream=True,
        )
        for chunk in chunks:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content
    except openai.APIConnectionError:
        raise ServerError(
            f"no server answers at {url}",
            hint="start one with `vlmgen serve PACKAGE --checkpoint DIR`, or give --url",
        ) from None
    except openai.APIError as error:
        # Once an answer streams, a refusal comes as an event and not as a status.
        body = error.body if isinstance(error.body, dict) else {}
        status = getattr(error, "status_code", None) or body.get("code") or "an error"
        text = body.get("message") or error.message
        raise ServerError(f"the server answered {status}: {text}") from None
