"""What a run is trained on: the tokens of all documents one after the other, from text, folders or token files.

Text is taken byte by byte, and every document is preceded by byte 0, "a document begins": so each token has a next one
to predict, and a model can end a document.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import stat
import struct
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
BYTES = 256  # the vocabulary of text
_READING = "train: reading data %s"
_DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}
_HEADER = 256 * 4  # of token files that have one: int32 magic, version, number of tokens, and nothing
_MAGICS = (20240520, 20240801)  # of two-byte and of four-byte tokens, as llm.c writes them
_CHUNK = 1 << 22  # tokens or bytes looked at together: the check of a file needs little memory
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Documents, one after the other.

    name: what it is, for people. tokens: ``[n]`` uint8, uint16 or int32, perhaps a file that is mapped, not read.
    starts: ``[d]`` int64, where documents begin; the first is 0. vocabulary: every token is below it. digest: of the
    content; ranks that train together must have the same.
    """

    name: str
    tokens: Tensor
    starts: Tensor
    vocabulary: int
    digest: str

    def split(self, held_out: float) -> tuple[Corpus, Corpus]:
        """(training part, held-out part): the last ``held_out`` of the tokens is kept for validation. No copies.

        The cut is at the beginning of a document, if there is one that leaves between half and one and a half times
        what was asked for; else within a document.

        >>> training, validation = open_corpus(None).split(0.1)
        """
        total = len(self.tokens)
        if not 0 < held_out < 1 or total < 2:
            raise ValueError(f"train: --held-out must be above 0 and below 1, got {held_out} of {total} tokens")
        size = min(max(1, round(total * held_out)), total - 1)
        cut = total - size
        if len(self.starts) > 1:
            nearest = int(self.starts[1:][(self.starts[1:] - cut).abs().argmin()])
            cut = nearest if 2 * abs(nearest - cut) <= size else cut
        begin = torch.zeros(1, dtype=torch.int64)
        starts = self.starts[self.starts < cut], torch.cat([begin, self.starts[self.starts > cut] - cut])
        return self._part("training", 0, cut, starts[0]), self._part("held-out", cut, total, starts[1])

    def _part(self, name: str, start: int, end: int, starts: Tensor) -> Corpus:
        digest = hashlib.sha256(f"{self.digest} {start} {end}".encode()).hexdigest()
        return Corpus(f"{self.name}, {name} part", self.tokens[start:end], starts, self.vocabulary, digest)


def open_corpus(
    path: Path | None, *, vocabulary: int | None = None, token_bytes: int = 2, document_token: int | None = None
) -> Corpus:
    """The corpus at ``path``: a text file, a folder of them or a token file ``*.bin``. None: Python's standard library.

    vocabulary: of a token file; if left out, its largest token + 1, rounded up to a multiple of 64. token_bytes: 1, 2
    or 4, of each token of a token file (little-endian). document_token: the one that begins documents there; if left
    out, the file is one document. A token file may have the header of llm.c. It is mapped, and looked through once.

    >>> open_corpus(None).vocabulary
    256
    """
    if path is not None and path.suffix.lower() == ".bin" and not os.path.isdir(path):
        return _open_tokens(path, vocabulary, token_bytes, document_token)
    for name, given in (("--token-bytes", token_bytes != 2), ("--document-token", document_token is not None)):
        if given:
            raise ValueError(f"train: {name} is for a token file, and --data {path} is not a .bin; leave it out")
    if vocabulary is not None and vocabulary < BYTES:
        raise ValueError(f"train: --vocabulary {vocabulary} is too small for the {BYTES} bytes of text; leave it out")
    name, packed, starts = _read_library() if path is None else _read_text(path)
    digest = hashlib.sha256(packed).hexdigest()
    return Corpus(name, torch.frombuffer(packed, dtype=torch.uint8), starts, vocabulary or BYTES, digest)


def _refuse(path: Path, words: str) -> NoReturn:
    raise ValueError(f"train: --data {path} {words}")


def _mode_of(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        _refuse(path, "does not exist; give a text file, a folder or a token file (.bin)")
    except OSError as error:
        _refuse_unreadable(path, error)


def _refuse_unreadable(path: Path, error: OSError) -> NoReturn:
    _refuse(path, f"cannot be read ({error.strerror}); give a path that this user may read")


# Text


def _read_text(path: Path) -> tuple[str, bytearray, Tensor]:
    """(name, packed documents, where they begin) of a text file, or of the text files below a folder."""
    mode = _mode_of(path)
    if stat.S_ISDIR(mode):
        return _read_folder(path)
    if not stat.S_ISREG(mode):
        _refuse(path, "is neither a file nor a folder; give a text file, a folder or a token file (.bin)")
    packed = bytearray(b"\0")
    if path.stat().st_size:
        logger.info(_READING, path)
    try:
        where = _append_text(path, packed)
    except OSError as error:
        _refuse_unreadable(path, error)
    if where is not None:
        _refuse(path, f"is not text (byte {where} is 0); give a text file, or name a token file *.bin")
    if len(packed) == 1:
        _refuse(path, "is empty; give a file with text")
    return str(path), packed, torch.zeros(1, dtype=torch.int64)


def _append_text(path: Path, packed: bytearray) -> int | None:
    """Add the text in a file, piece by piece; at a zero byte nothing is added, and its place returned."""
    begin = len(packed)
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            if (zero := piece.find(0)) >= 0:
                where = len(packed) - begin + zero
                del packed[begin:]
                return where
            packed += piece
    return None


def _read_folder(folder: Path) -> tuple[str, bytearray, Tensor]:
    left_out: Counter[str] = Counter()
    packed, starts = _pack(folder, _walk(folder, left_out), left_out)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()) if count)
    left = f" (left out: {reasons})" if reasons else ""
    if not packed:
        _refuse(folder, f"has no text files{left}; give a folder with text, or one token file (.bin) by its own path")
    return f"{folder}, {len(starts)} file{'s' * (len(starts) > 1)}{left}", packed, starts


def _walk(folder: Path, left_out: Counter[str]) -> Iterator[Path]:
    """The files below a folder without hidden ones, not through links to folders."""

    def refuse_or_count(error: OSError) -> None:
        if error.filename == str(folder):
            _refuse_unreadable(folder, error)
        left_out["unreadable"] += 1

    for place, folders, files in os.walk(folder, onerror=refuse_or_count):
        left_out["hidden"] += sum(name.startswith(".") for name in folders + files)
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(place, name) for name in files if not name.startswith("."))


def _read_library() -> tuple[str, bytearray, Tensor]:
    """The source of the standard library without its tests, and without what was written when Python was built."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY and not name.startswith("config-")]
        paths += [Path(place, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    packed, starts = _pack(folder, paths, Counter())
    if not packed:
        raise ValueError(f"train: there is no source of the standard library at {folder}; give --data PATH")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"Python {version} standard library, {len(starts)} files", packed, starts


def _pack(folder: Path, paths: Iterable[Path], left_out: Counter[str]) -> tuple[bytearray, Tensor]:
    """The text in these files, in an order that every machine has in common and that mixes folders; where files begin.

    The order is that of a hash of the paths below ``folder``: what is held out at the end is then a fair sample.
    """

    def key(path: Path) -> bytes:
        return hashlib.sha256(os.fsencode(path.relative_to(folder).as_posix())).digest()

    packed, starts, ordered = bytearray(), [], sorted(paths, key=key)
    if ordered:
        logger.info(_READING, folder)
    for path in ordered:
        begin = len(packed)
        packed += b"\0"
        if (reason := _why_not(path, packed)) is None:
            starts.append(begin)
        else:
            del packed[begin:]
            left_out[reason] += 1
    return packed, torch.tensor(starts, dtype=torch.int64)


def _why_not(path: Path, packed: bytearray) -> str | None:
    """Add the text in a file; why nothing was added, if so."""
    begin = len(packed)
    if not os.path.isfile(path):
        return "unreadable"
    try:
        where = _append_text(path, packed)
    except OSError:
        return "unreadable"
    return "binary" if where is not None else "empty" if len(packed) == begin else None


# Token files


def _open_tokens(path: Path, vocabulary: int | None, token_bytes: int, document_token: int | None) -> Corpus:
    if token_bytes not in _DTYPES:
        raise ValueError(f"train: --token-bytes must be 1, 2 or 4, got {token_bytes}")
    if not stat.S_ISREG(_mode_of(path)):
        _refuse(path, "is not a file; give a token file")
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                _refuse(path, "is empty; give a file with tokens")
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        _refuse_unreadable(path, error)
    content = mapped[_find_begin(path, mapped, token_bytes) :]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nobody writes to it
        tokens = torch.frombuffer(content, dtype=_DTYPES[token_bytes])

    logger.info(_READING, path)
    # One look at everything, for the largest token, the documents and the digest.
    largest, places, digest = 0, [torch.zeros(1, dtype=torch.int64)], hashlib.sha256(f"{document_token}".encode())
    for at in range(0, len(tokens), _CHUNK):
        digest.update(content[at * token_bytes : (at + _CHUNK) * token_bytes])
        values = tokens[at : at + _CHUNK].int()  # uint16 has no maximum
        largest = max(largest, _check(path, values, at, vocabulary))
        if document_token is not None:
            places.append((values == document_token).nonzero().view(-1) + at)
    starts = torch.cat(places)
    if document_token is not None and len(starts) == 1:
        _refuse(path, f"has no token {document_token}; --document-token must be one that begins documents, or left out")
    vocabulary = vocabulary or -(-(largest + 1) // 64) * 64
    return Corpus(str(path), tokens, starts.unique(), vocabulary, digest.hexdigest())


def _find_begin(path: Path, content: memoryview, token_bytes: int) -> int:
    """Where the tokens begin in a token file, whose size must be right."""
    size = len(content)
    if size < 12 or struct.unpack_from("<i", content)[0] not in _MAGICS:
        if size % token_bytes:
            _refuse(path, f"has {size} bytes, not a multiple of --token-bytes {token_bytes}; is it whole?")
        return 0
    count = struct.unpack_from("<i", content, 8)[0]
    if count < 1 or size != _HEADER + count * token_bytes:
        fitting = [width for width in _DTYPES if count > 0 and size == _HEADER + count * width]
        fix = f"pass --token-bytes {fitting[0]}" if fitting else "is it whole?"
        wanted = f"{count} tokens of {token_bytes} bytes after {_HEADER} bytes"
        _refuse(path, f"has {size} bytes, but its header says {wanted}; {fix}")
    return _HEADER


def _check(path: Path, values: Tensor, at: int, vocabulary: int | None) -> int:
    """The largest of these tokens, which begin at ``at`` in the file; one outside the vocabulary is refused."""
    low, high = (int(bound) for bound in values.aminmax())
    if low >= 0 and (vocabulary is None or high < vocabulary):
        return high
    limit = 2**31 if low < 0 or vocabulary is None else vocabulary
    wrong = values < 0 if low < 0 else values >= limit
    where = int(wrong.nonzero()[0])
    value = int(values[where]) % 2**32
    fix = "check --token-bytes" if low < 0 else "leave out --vocabulary to have it found, or check --token-bytes"
    _refuse(path, f"has token {value} at {at + where}, which is not below {limit}; {fix}")
