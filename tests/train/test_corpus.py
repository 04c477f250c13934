"""`open_corpus`: the standard library, text, folders and token files; what is refused, and in which words."""

from __future__ import annotations

import os
import re
import struct
import sys
import sysconfig
from array import array
from pathlib import Path

import pytest
import torch

from weft.train import corpus as corpus_module
from weft.train.corpus import Corpus, open_corpus


def texts_of(corpus: Corpus) -> list[bytes]:
    """The documents without the byte before each."""
    ends = [*corpus.starts.tolist()[1:], len(corpus.tokens)]
    whole = bytes(corpus.tokens.tolist())
    found = [whole[start:end] for start, end in zip(corpus.starts.tolist(), ends, strict=True)]
    assert all(document[0] == 0 and 0 not in document[1:] for document in found)
    return [document[1:] for document in found]


def write_tokens(path: Path, tokens: list[int], code: str = "H", header: tuple[int, int, int] | None = None) -> Path:
    head = b"" if header is None else struct.pack("<256i", *header, *[0] * 253)
    path.write_bytes(head + array(code, tokens).tobytes())
    return path


def test_the_standard_library() -> None:
    corpus = open_corpus(None)
    texts = texts_of(corpus)
    library = Path(sysconfig.get_path("stdlib"))
    for name in ("argparse.py", "json/decoder.py", "unittest/mock.py", "lib2to3/pytree.py"):
        path = library / name
        assert not path.exists() or path.read_bytes() in texts, name
    for name in ("test/support/__init__.py", "unittest/test/test_case.py", "idlelib/idle_test/htest.py"):
        path = library / name
        assert not path.exists() or path.read_bytes() not in texts, name
    assert Path(pytest.__file__).read_bytes() not in texts
    assert (
        corpus.name == f"Python {sys.version_info.major}.{sys.version_info.minor} standard library, {len(texts)} files"
    )
    assert len(texts) > 300 and corpus.vocabulary == 256 and corpus.tokens.dtype == torch.uint8
    assert open_corpus(None).digest == corpus.digest


def test_what_is_not_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = ["site-packages/x.py", "dist-packages/x.py", "a/test/x.py", "a/tests/x.py", "idlelib/idle_test/x.py"]
    others += ["__pycache__/x.py", "config-3.11-x86_64-linux-gnu/x.py", "_sysconfigdata__linux_.py", "LICENSE.txt"]
    for name in ("x.py", "a/b/testing.py", *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert sorted(texts_of(open_corpus(None))) == [b"a/b/testing.py", b"x.py"]


def test_a_library_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=f"no source of the standard library at {tmp_path}; give --data PATH"):
        open_corpus(None)


def test_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "verse.txt"
    path.write_bytes("Grüße\n".encode())
    corpus = open_corpus(path)
    assert texts_of(corpus) == ["Grüße\n".encode()]
    assert corpus.name == str(path) and corpus.vocabulary == 256
    assert open_corpus(path, vocabulary=320).vocabulary == 320
    before = corpus.digest
    path.write_bytes("Grüsse\n".encode())
    assert open_corpus(path).digest != before


def folder_of_texts(folder: Path) -> list[bytes]:
    for place in ("a", "b/c", ".git"):
        (folder / place).mkdir(parents=True)
    texts = []
    for number in range(12):
        texts.append(f"text {number}".encode())
        (folder / ("a", "b", "b/c")[number % 3] / f"{number}.md").write_bytes(texts[-1])
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / ".hidden").write_text("secret")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    (folder / "nothing.txt").touch()
    os.mkfifo(folder / "pipe")  # must not be opened: nobody writes to it
    return texts


def test_a_folder(tmp_path: Path) -> None:
    texts = folder_of_texts(tmp_path)
    corpus = open_corpus(tmp_path)
    assert sorted(texts_of(corpus)) == sorted(texts)
    assert corpus.name == f"{tmp_path}, 12 files (left out: 1 binary, 1 empty, 2 hidden, 1 unreadable)"


def test_the_order_of_a_folder_is_its_names_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the order in which files were made or are listed, nor where the folder lies."""
    names = [f"{number}/{letter}" for number in range(5) for letter in "abc"]
    for folder, order in (("one", names), ("two", names[::-1])):
        for name in order:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    one = open_corpus(tmp_path / "one")
    real = os.walk
    monkeypatch.setattr(os, "walk", lambda *args, **options: reversed(list(real(*args, **options))))
    two = open_corpus(tmp_path / "two")
    assert one.digest == two.digest and torch.equal(one.tokens, two.tokens)
    assert texts_of(one) != [name.encode() for name in names]  # the end is no folder's alone


def test_files_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open.txt").write_text("open")
    (tmp_path / "closed.txt").write_text("closed")
    closed = write_tokens(tmp_path / "closed.bin", [1, 2])
    real = Path.open

    def refuse(path: Path, *args: object, **options: object) -> object:
        if path.stem == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)
    assert open_corpus(tmp_path).name == f"{tmp_path}, 1 file (left out: 2 unreadable)"
    for path in (tmp_path / "closed.txt", closed):
        words = f"train: --data {path} cannot be read (Permission denied); give a path that this user may read"
        with pytest.raises(ValueError, match=re.escape(words)):
            open_corpus(path)


def test_folders_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "open.txt").write_text("open")
    real = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert open_corpus(tmp_path).name == f"{tmp_path}, 1 file (left out: 1 unreadable)"
    with pytest.raises(ValueError, match=r"closed cannot be read \(Permission denied\)"):
        open_corpus(tmp_path / "closed")


@pytest.mark.parametrize(("code", "width", "top"), [("B", 1, 255), ("H", 2, 65_535), ("i", 4, 2**31 - 1)])
def test_a_raw_token_file(tmp_path: Path, code: str, width: int, top: int) -> None:
    tokens = [0, 127, top, 1, top // 2 + 1]
    corpus = open_corpus(write_tokens(tmp_path / "x.bin", tokens, code), token_bytes=width)
    assert corpus.tokens.long().tolist() == tokens
    assert corpus.vocabulary == top + 1 and corpus.starts.tolist() == [0]


def test_a_token_file_with_a_header(tmp_path: Path) -> None:
    tokens = [50_256, 17, 40_000, 50_256, 9]
    path = write_tokens(tmp_path / "x.bin", tokens, header=(20240520, 1, 5))
    corpus = open_corpus(path, document_token=50_256)
    assert corpus.tokens.tolist() == tokens and corpus.starts.tolist() == [0, 3]
    assert corpus.vocabulary == 50_304  # 50257, rounded up
    assert open_corpus(path, vocabulary=50_257).vocabulary == 50_257
    assert open_corpus(path).digest != corpus.digest  # other documents
    wide = write_tokens(tmp_path / "wide.bin", tokens, "i", header=(20240801, 7, 5))
    assert open_corpus(wide, token_bytes=4).tokens.tolist() == tokens


def test_documents_and_digest_over_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [5, 1, 9, 9, 2, 9, 3, 4, 9, 70]
    path = write_tokens(tmp_path / "x.bin", tokens)
    whole = open_corpus(path, document_token=9)
    assert whole.starts.tolist() == [0, 2, 3, 5, 8]  # what comes before the first mark is a document too
    for chunk in (1, 2, 3, 9, 10):
        monkeypatch.setattr(corpus_module, "_CHUNK", chunk)
        cut = open_corpus(path, document_token=9)
        assert torch.equal(cut.starts, whole.starts) and cut.digest == whole.digest and cut.vocabulary == 128
        with pytest.raises(ValueError, match=r"x\.bin has token 9 at 2, which is not below 9; leave out --vocabulary"):
            open_corpus(path, vocabulary=9)
    write_tokens(path, [*tokens[:-1], 71])
    assert open_corpus(path, document_token=9).digest != whole.digest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_token_file_is_mapped(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "x.bin", [1] * 10_000, header=(20240520, 1, 10_000))
    corpus = open_corpus(path)
    where = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    begin, end = (int(bound, 16) for bound in where[0].split()[0].split("-"))
    assert len(where) == 1 and where[0].split()[1].startswith("r--")
    for part in (corpus, *corpus.split(0.1)):
        assert begin <= part.tokens.data_ptr() and part.tokens.data_ptr() + part.tokens.nbytes <= end


def refusals(folder: Path) -> dict[str, tuple[Path, dict[str, int], str]]:
    """What is asked for, and the words."""
    empty, odd, text = folder / "empty.bin", folder / "odd.bin", folder / "text.txt"
    empty.touch()
    odd.write_bytes(b"12345")
    text.write_text("text")
    (folder / "none.txt").touch()
    (folder / "binary.txt").write_bytes(b"abc\0")
    (folder / "bare" / "in").mkdir(parents=True)
    (folder / "shards").mkdir()
    write_tokens(folder / "shards" / "1.bin", [1, 2])
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "pipe.bin")
    short = write_tokens(folder / "short.bin", [1, 2, 3], header=(20240520, 1, 4))
    wide = write_tokens(folder / "wide.bin", [1, 2, 3], "i", header=(20240801, 7, 3))
    torn = folder / "torn.bin"
    torn.write_bytes(struct.pack("<iii", 20240520, 1, 2))
    bare = write_tokens(folder / "header.bin", [], header=(20240520, 1, 0))
    high = write_tokens(folder / "high.bin", [1, 50_300, 60_000])
    below = write_tokens(folder / "below.bin", [1, -1], "i")
    missing = folder / "missing"
    return {
        "missing": (missing, {}, f"{missing} does not exist; give a text file, a folder or a token file (.bin)"),
        "missing tokens": (folder / "no.bin", {}, "no.bin does not exist"),
        "below a file": (text / "x", {}, "text.txt/x does not exist"),
        "pipe": (folder / "pipe.txt", {}, "pipe.txt is neither a file nor a folder"),
        "pipe of tokens": (folder / "pipe.bin", {}, "pipe.bin is not a file"),
        "empty text": (folder / "none.txt", {}, "none.txt is empty; give a file with text"),
        "binary": (folder / "binary.txt", {}, "binary.txt is not text (byte 3 is 0)"),
        "empty folder": (folder / "bare", {}, "bare has no text files; give a folder with text"),
        "folder of tokens": (
            folder / "shards",
            {},
            "shards has no text files (left out: 1 binary); give a folder with text, or one token file (.bin)",
        ),
        "empty tokens": (empty, {}, "empty.bin is empty; give a file with tokens"),
        "odd": (odd, {}, "odd.bin has 5 bytes, not a multiple of --token-bytes 2; is it whole?"),
        "not of four": (high, {"token_bytes": 4}, "high.bin has 6 bytes, not a multiple of --token-bytes 4"),
        "short": (
            short,
            {},
            "short.bin has 1030 bytes, but its header says 4 tokens of 2 bytes after 1024 bytes; is it whole?",
        ),
        "wide": (wide, {}, "3 tokens of 2 bytes after 1024 bytes; pass --token-bytes 4"),
        "torn header": (torn, {}, "torn.bin has 12 bytes, but its header says 2 tokens"),
        "header alone": (bare, {}, "header.bin has 1024 bytes, but its header says 0 tokens"),
        "vocabulary": (high, {"vocabulary": 50_257}, "high.bin has token 50300 at 1, which is not below 50257; leave"),
        "above int32": (below, {"token_bytes": 4}, "has token 4294967295 at 1, which is not below 2147483648; check"),
        "no such document": (high, {"document_token": 7}, "high.bin has no token 7; --document-token must be one that"),
        "token bytes": (high, {"token_bytes": 3}, "train: --token-bytes must be 1, 2 or 4, got 3"),
        "vocabulary of text": (text, {"vocabulary": 255}, "train: --vocabulary 255 is too small for the 256 bytes"),
        "token bytes of text": (text, {"token_bytes": 4}, f"--token-bytes is for a token file, and --data {text} is"),
        "document of text": (text, {"document_token": 0}, "--document-token is for a token file"),
    }


def test_what_is_refused(tmp_path: Path) -> None:
    for name, (path, options, words) in refusals(tmp_path).items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011  (the words are compared below)
            open_corpus(path, **options)
        message = str(caught.value)
        assert words in message, (name, message)
        assert message.startswith("train: ") and "\n" not in message, name


@pytest.mark.parametrize("held_out", [0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("documents", [1, 2, 3, 40, 400])
def test_a_split_loses_nothing(documents: int, held_out: float) -> None:
    total = 1000
    starts = torch.tensor(sorted({0, *torch.randperm(total, generator=torch.Generator().manual_seed(5))[:documents - 1]
                                  .tolist()}))  # fmt: skip
    corpus = Corpus("numbers", torch.arange(total, dtype=torch.int32), starts, total, "digest")
    training, validation = corpus.split(held_out)
    assert torch.cat([training.tokens, validation.tokens]).tolist() == list(range(total))
    cut = len(training.tokens)
    assert training.starts[0] == validation.starts[0] == 0
    assert training.starts.max() < cut and validation.starts.max() < total - cut
    assert len(training.starts) + len(validation.starts) == len({*starts.tolist(), cut})
    assert {*training.starts.tolist(), *(validation.starts + cut).tolist()} == {*starts.tolist(), cut}
    assert 0.5 * held_out <= len(validation.tokens) / total <= 1.5 * held_out or documents == 1
    if documents == 400:
        assert cut in starts.tolist()  # whole documents
    if documents == 1:
        assert len(validation.tokens) == round(total * held_out)
    assert len({corpus.digest, training.digest, validation.digest, corpus.split(0.2)[0].digest}) == 4
    assert validation.tokens.data_ptr() == corpus.tokens.data_ptr() + 4 * cut  # not copied
    assert training.name == "numbers, training part" and validation.vocabulary == total


def test_small_and_wrong_splits() -> None:
    two = Corpus("two", torch.zeros(2, dtype=torch.uint8), torch.tensor([0]), 256, "")
    assert [len(part.tokens) for part in two.split(0.01)] == [len(part.tokens) for part in two.split(0.99)] == [1, 1]
    for wrong in (0.0, 1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="--held-out must be above 0 and below 1, got"):
            two.split(wrong)


def test_binary_files_are_not_read_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is looked at piece by piece: one that turns out to be no text is left at once, and costs no memory."""
    monkeypatch.setattr(corpus_module, "_CHUNK", 1 << 16)
    with (tmp_path / "image.raw").open("wb") as file:
        file.truncate(1 << 42)  # of which nothing is on the disk
    (tmp_path / "a.txt").write_text("text" * 100_000)
    (tmp_path / "b.txt").write_bytes(b"x" * 200_000 + b"\0")
    found = open_corpus(tmp_path)
    assert bytes(found.tokens.tolist()) == b"\0" + b"text" * 100_000 and "left out: 2 binary" in found.name
    with pytest.raises(ValueError, match=r"b.txt is not text \(byte 200000 is 0\)"):
        open_corpus(tmp_path / "b.txt")
    with pytest.raises(ValueError, match=r"image.raw is not text \(byte 0 is 0\)"):
        open_corpus(tmp_path / "image.raw")


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would wait for its writer for ever."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "folder" / "pipe.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder" / "link.txt").symlink_to(tmp_path / "pipe.txt")
    assert "left out: 2 unreadable" in open_corpus(tmp_path / "folder").name
    with pytest.raises(ValueError, match="is neither a file nor a folder"):
        open_corpus(tmp_path / "folder" / "link.txt")
