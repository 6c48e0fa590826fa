"""`.vlmgen/` of a package: what it was generated from, and the text of every file as generated.

`manifest.json` holds no time and no path of the machine, so that equal input gives equal bytes. It
answers two questions without rendering anything: is the package up to date, and was a file edited
by hand?

`base/<sha256>` holds the generated text of every file, from which `vlmgen update` merges. When an
edit is noticed its base is gone from the disk, and the old templates are gone after an upgrade, so
neither "store what was edited" nor "render it again" would do. The texts are stored plain: git
keeps a blob once however many paths have it, so the base of an unedited file costs a repository
nothing but its name; compressed it would be a second blob with every change, and its bytes would
depend on the build of zlib. `.gitattributes` keeps the folder out of diffs and its line ends as
they are.

`edits.json` exists where hand edits were taken over, see `vlmgen.render.edits`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vlmgen.errors import OutputError
from vlmgen.render.paths import is_safe_path

FOLDER = ".vlmgen"
MANIFEST_PATH = f"{FOLDER}/manifest.json"
EDITS_PATH = f"{FOLDER}/edits.json"
ATTRIBUTES_PATH = f"{FOLDER}/.gitattributes"
ATTRIBUTES = b"base/* -text -diff linguist-generated\n"
BASE_FOLDER = f"{FOLDER}/base"
FORMAT = 2
NO_HASH = "0" * 64
_HASH = re.compile(r"[0-9a-f]{64}\Z")
_BASE = re.compile(re.escape(BASE_FOLDER) + r"/[0-9a-f]{64}\Z")

# The modules of vlmgen that decide the text of a package. Those that load and check a spec, and
# those that write files, are not among them: changing a message there leaves the packages alone.
GENERATOR = (
    "check/parallel.py",
    "render/blocks.py",
    "render/chain.py",
    "render/environment.py",
    "render/escaping.py",
    "render/format.py",
    "render/package.py",
    "render/plan.py",
    "render/vision_words.py",
    "render/words.py",
    "spec/checkpoints.py",
    "spec/derive.py",
    "spec/extends.py",
    "spec/model.py",
    "spec/neuron.py",
    "spec/text.py",
    "spec/tokens.py",
    "spec/vision.py",
    "spec/weights.py",
    "tiny/family.py",
    "weights/table.py",
)


def sha256(content: bytes) -> str:
    """Lower-case hexadecimal SHA-256."""
    return hashlib.sha256(content).hexdigest()


def text_sha256(text: bytes) -> str:
    """Hash of a text file, the same for either line end."""
    return sha256(text.replace(b"\r\n", b"\n"))


def generator_sha256(package: Path | None = None) -> str:
    """Hash of the modules in `GENERATOR`.

    Args:
        package: Directory of the `vlmgen` package; by default the running one.
    """
    root = package or Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for name in GENERATOR:
        digest.update(f"{name}\0{text_sha256((root / name).read_bytes())}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Manifest:
    """What a generated package came from.

    Args:
        vlmgen: Version of vlmgen.
        generator: Hash of the generating code.
        layout: `out-of-tree` or `in-tree`.
        origin: The spec file, relative to the package; its bare name where it lies elsewhere.
        spec: Hash of the spec file.
        bases: Hash of every spec that it extends, by file name, the nearest first.
        results: Hash of the stored validation results, or None where there are none.
        templates: Hash of every template used, by name.
        sources: Hash of every file of vlmgen that the package copies or quotes, by path.
        files: Hash of every generated file but those in `.vlmgen/`, by path.
        templates_from: Folder of template overrides that the command line named, written as
            `origin` is; None where it named none.
        overrides: Names of the templates that came from a folder of overrides.
    """

    vlmgen: str
    generator: str
    layout: str
    origin: str
    spec: str
    bases: Mapping[str, str]
    results: str | None
    templates: Mapping[str, str]
    sources: Mapping[str, str]
    files: Mapping[str, str]
    templates_from: str | None = None
    overrides: Sequence[str] = ()

    def to_bytes(self) -> bytes:
        """The manifest as JSON with sorted keys."""
        body = {"format": FORMAT, **asdict(self)}
        return (json.dumps(body, indent=2, sort_keys=True) + "\n").encode("ascii")

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Manifest:
        """Read a manifest.

        Args:
            content: The file.
            where: Its path, for messages.

        Raises:
            OutputError: It is not a manifest.
        """
        try:
            body = json.loads(content)
            files = body["files"]
            if body["format"] != FORMAT or set(body) != {"format", *cls.__dataclass_fields__}:
                # Of another version: good for telling which files were generated, never current.
                layout = body.get("layout")
                layout = layout if isinstance(layout, str) else ""
                manifest = cls("", NO_HASH, layout, "", NO_HASH, {}, None, {}, {}, files)
            else:
                manifest = cls(**{name: body[name] for name in cls.__dataclass_fields__})
            manifest._check()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise OutputError(
                f"{where}: not a manifest of vlmgen ({error}), so it cannot be told which files of "
                "the directory were generated",
                hint="move the directory away and generate anew",
            ) from error
        return manifest

    def _check(self) -> None:
        for text in (self.vlmgen, self.layout, self.origin, self.templates_from or "."):
            if not isinstance(text, str):
                raise ValueError(f"{text!r} is not text")
        hashes: list[Any] = [self.generator, self.spec, *self.templates.values()]
        hashes += [
            *self.bases.values(),
            *self.sources.values(),
            *self.files.values(),
            *([] if self.results is None else [self.results]),
        ]
        for value in hashes:
            if not is_hash(value):
                raise ValueError(f"{value!r} is not a SHA-256")
        paths = (*self.files, *self.sources, *self.templates, *self.bases, *self.overrides)
        for path in paths:
            if not is_safe_path(path) or is_own(path):
                raise ValueError(f"{path!r} is not a path within the package")


def is_hash(value: Any) -> bool:
    """Whether a value is a hash as `sha256` writes it."""
    return isinstance(value, str) and bool(_HASH.match(value))


def base_path(digest: str) -> str:
    """Where the generated text of a hash lies in a package."""
    return f"{BASE_FOLDER}/{digest}"


def is_own(path: str) -> bool:
    """Whether a path of a package is one of vlmgen's records, not of the package itself."""
    return path in (MANIFEST_PATH, EDITS_PATH, ATTRIBUTES_PATH) or bool(_BASE.match(path))


def read_manifest(target: Path) -> Manifest | None:
    """The manifest of a package directory, None where there is none.

    Raises:
        OutputError: It is a symlink or no manifest.
    """
    path = target.joinpath(*PurePosixPath(MANIFEST_PATH).parts)
    if path.parent.is_symlink() or path.is_symlink():
        raise OutputError(
            f"{path}: is or lies behind a symbolic link; vlmgen reads and writes none"
        )
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return Manifest.from_bytes(content, str(path))


def known_texts(manifest: Manifest, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """The texts that were generated the last time, by path, as far as they are known.

    Args:
        manifest: The package's manifest.
        contents: Its files, records included.
    """
    found: dict[str, bytes] = {}
    for path, digest in manifest.files.items():
        for content in (contents.get(base_path(digest)), contents.get(path)):
            if content is not None and sha256(content) == digest:
                found[path] = content
                break
    return found
