"""Files that are not what their names say: one clear message, soon."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from pathlib import Path

import pytest

from vlmgen.errors import CheckpointError, VlmgenError
from vlmgen.importer import import_checkpoint
from vlmgen.importer.headers import MAX_HEADER, MAX_JSON, read_checkpoint

from .checkpoints import Headers, safetensors

CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": {"hidden_size": 8},
    "vision_config": {"hidden_size": 8},
}
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
SECONDS = 2.0


def tensors(folder: Path, content: bytes, name: str = "model.safetensors") -> None:
    Headers(dict(CONFIG), None).write(folder)
    (folder / name).write_bytes(content)


def header(text: str | bytes, length: int | None = None, data: bytes = b"") -> bytes:
    content = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def message(path: Path) -> str:
    """The message of an import, which has no control characters and does not take long.

    The limit is time of the processor: a busy machine is no fault.
    """
    started = time.process_time()
    signal.alarm(60)  # waiting for a pipe takes no time of the processor
    try:
        with pytest.raises(VlmgenError) as caught:
            import_checkpoint(path)
    finally:
        signal.alarm(0)
    assert time.process_time() - started < SECONDS
    rendered = caught.value.render()
    assert all(c.isprintable() or c == "\n" for c in rendered)
    assert len(rendered) < 1000
    return rendered


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes are no safetensors file"),
        (b"\x01\x02", "2 bytes are no safetensors file"),
        (header("{}", 1 << 62), "a header of 4611686018427387904 bytes in a file of 10"),
        (b"\xff" * 8, "a header of 18446744073709551615 bytes"),
        (header("{}", 200), "a header of 200 bytes in a file of 10; it is truncated"),
        (header("not json at all"), "is no JSON"),
        (header("[1, 2]"), "is no JSON object"),
        (header(b"\xff\xfe{}"), "is no JSON"),
        (header("[" * 200_000), "is nested too deeply"),
        (header('{"a": NaN}'), "is no JSON: NaN"),
        (header('{"a": ' + "1" * 5000 + "}"), "is no JSON"),
        (header('{"a": 1}'), "entry 'a' is malformed"),
        (header('{"a": {"dtype": "F32"}}'), "entry 'a' is malformed"),
        (header(json.dumps({"a": {**ENTRY, "shape": [-1]}})), "entry 'a' is malformed"),
        (header(json.dumps({"a": {**ENTRY, "shape": [True]}})), "entry 'a' is malformed"),
        (header(json.dumps({"a": {**ENTRY, "shape": ["2"]}})), "entry 'a' is malformed"),
        (header(json.dumps({"a": {**ENTRY, "shape": [1] * 99}})), "entry 'a' is malformed"),
        (header(json.dumps({"a": {**ENTRY, "dtype": "F99"}})), "entry 'a' is malformed"),
        (header(json.dumps({"a": {**ENTRY, "data_offsets": [8, 0]}})), "entry 'a' is malformed"),
        (header(json.dumps({"a": ENTRY}), data=b"1234"), "ends at byte 8 of 4"),
        (header(json.dumps({"\x1b[2J\0": 1})), "entry '\ufffd[2J\ufffd' is malformed"),
    ],
)
def test_safetensors_file_that_is_none(tmp_path, content, expected):
    tensors(tmp_path, content)
    assert expected in message(tmp_path)


def test_header_beyond_the_limit_is_not_read(tmp_path):
    tensors(tmp_path, b"")
    path = tmp_path / "model.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", MAX_HEADER + 1))
        stream.truncate(MAX_HEADER + 100)
    assert f"a header of more than {MAX_HEADER} bytes" in message(tmp_path)


def test_header_of_the_largest_size_is_read_in_time(tmp_path):
    count = 50_000
    shapes = {
        f"model.language_model.layers.{i}.self_attn.q_proj.weight": (1, 1) for i in range(count)
    }
    tensors(tmp_path, safetensors(shapes))
    started = time.process_time()
    assert len(read_checkpoint(tmp_path).shapes) == count
    assert time.process_time() - started < SECONDS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[]", "is no JSON object"),
        ('"text"', "is no JSON object"),
        ("{" * 100_000, "is no JSON"),
        ('{"a":' * 100_000, "is nested too deeply"),
        ("\0\0\0", "is no JSON"),
        ("{}", "config.json has no section of a vision tower"),
        ('{"vision_config": {}, "text_config": {"hidden_size": "big"}}', "hidden_size is 'big'"),
        ('{"vision_config": {}, "text_config": {"hidden_size": true}}', "hidden_size is true"),
        ('{"vision_config": {}, "text_config": {"hidden_size": -1}}', "a size is a positive"),
        ('{"vision_config": {}, "text_config": {"rope_scaling": 3}}', "the field is an object"),
        ('{"vision_config": {}, "architectures": [], "text_config": {}}', "one name is expected"),
        ('{"vision_config": {}, "architectures": [{}], "text_config": {}}', "one name is expected"),
        ('{"vision_config": {"deepstack_visual_indexes": ["x"]}, "text_config": {}}', "indices"),
        ('{"vision_config": {"image_size": [1, 2], "patch_size": 2}, "text_config": {}}', "[1, 2]"),
        ('{"vision_config": {}, "text_config": {"rope_theta": "\\u001b[2J"}}', "rope_theta is"),
    ],
)
def test_config_that_is_none(tmp_path, text, expected):
    (tmp_path / "config.json").write_text(text)
    assert expected in message(tmp_path)
    assert expected in message(tmp_path / "config.json")


def test_huge_config_is_not_parsed(tmp_path):
    (tmp_path / "config.json").write_text('{"a": "' + "x" * MAX_JSON + '"}')
    assert f"is larger than {MAX_JSON} bytes" in message(tmp_path)


def test_missing_files(tmp_path):
    assert "No such file" in message(tmp_path / "nowhere")
    assert "config.json: cannot be read: No such file" in message(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_link_to_nothing_and_in_a_circle(tmp_path, name):
    tensors(tmp_path, safetensors({}))
    path = tmp_path / name
    path.unlink()
    path.symlink_to("nowhere")
    assert f"{name}: cannot be read: No such file" in message(tmp_path)
    path.unlink()
    path.symlink_to(name)
    assert f"{name}: cannot be read: Too many levels of symbolic links" in message(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("target", ["/dev/zero", "/dev/urandom", "/"])
def test_link_to_what_is_no_file(tmp_path, name, target):
    tensors(tmp_path, safetensors({}))
    path = tmp_path / name
    path.unlink()
    path.symlink_to(target)
    assert f"{name}: is not a regular file" in message(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_pipe_is_not_waited_for(tmp_path, name):
    tensors(tmp_path, safetensors({}))
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    assert f"{name}: is not a regular file" in message(tmp_path)


def test_link_to_a_file_is_read(tmp_path):
    """The cache of a hub client is made of links."""
    blobs = tmp_path / "blobs"
    Headers(dict(CONFIG), {"x": (1,)}).write(blobs)
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(path)
    assert read_checkpoint(folder).shapes == {"x": (1,)}


def test_path_with_a_null_byte():
    assert "cannot be read" in message(Path("a\0b"))


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{}", "holds no weight_map"),
        ('{"weight_map": []}', "holds no weight_map"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "which is no file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "which is no file name"),
        ('{"weight_map": {"a": "x\\u0000y.safetensors"}}', "which is no file name"),
        ('{"weight_map": {"a": 3}}', "which is no file name"),
        ('{"weight_map": {"b": "model.safetensors"}}', "'a', which the index does not say"),
        ('{"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}', "lacks 'b'"),
    ],
)
def test_index_that_does_not_fit(tmp_path, index, expected):
    tensors(tmp_path, safetensors({"a": (1,)}))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert expected in message(tmp_path)


def test_shards_without_an_index_must_be_all_there(tmp_path):
    tensors(tmp_path, safetensors({"a": (1,)}), "model-00001-of-00003.safetensors")
    assert "1 of 3 safetensors files and no index" in message(tmp_path)


def test_tensor_in_two_files(tmp_path):
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        tensors(tmp_path, safetensors({"a": (1,)}), name)
    assert "'a' is in two files" in message(tmp_path)


def test_other_weights_are_named_and_left(tmp_path):
    Headers(dict(CONFIG), None).write(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80")
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.shapes is None
    assert checkpoint.notes == (
        "pytorch_model.bin holds no safetensors; its tensors were not read",
    )


def test_checkpoint_error_is_a_bad_spec():
    assert CheckpointError("x").exit_code == 3
