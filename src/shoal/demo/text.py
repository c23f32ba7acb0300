"""English text for the demo without a download, and a small tokenizer in pure Python.

The text is CPython's own documentation as every installation carries it: the reference manual's topics (the text that
``help("topics")`` shows) and the docstrings of a few modules of the standard library. Paragraphs that are mostly code
are left out, and so is every second copy of a paragraph (topics quote each other), so that nothing is in both halves:

- *train*: the text that the peers learn from;
- *held out*: every 12th paragraph (by hash, not by place), which no peer ever trains on; every loss in the report is
  measured here.

The same Python gives the same text, the same vocabulary and the same `Corpus.digest` in every process; the digest is
part of the run's name, so peers with different tokens do not meet. No torch here.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["MASK", "SEPARATOR", "SPECIALS", "UNKNOWN", "Corpus", "Tokenizer", "load_corpus", "paragraphs"]

UNKNOWN, MASK, SEPARATOR = 0, 1, 2
SPECIALS = ("[unk]", "[mask]", "[sep]")
"""The first entries of every vocabulary, at the indices `UNKNOWN`, `MASK`, `SEPARATOR`."""

_MODULES = (
    *("_pydecimal", "_pyio", "argparse", "codecs", "configparser", "datetime", "difflib", "doctest", "fractions"),
    *("functools", "heapq", "inspect", "ipaddress", "optparse", "os", "pathlib", "pdb", "random", "shutil"),
    *("smtplib", "socketserver", "statistics", "string", "subprocess", "tarfile", "textwrap", "threading"),
    *("traceback", "typing", "uuid", "zipfile"),
)
"""Modules of the standard library with long docstrings; one that is missing is skipped."""

_DOCSTRING = re.compile(r'^[ \t]*[rR]?"""(.*?)"""', re.DOTALL | re.MULTILINE)
_PARAGRAPH_BREAK = re.compile(r"\n\s*\n")
_MARKUP = re.compile(r'["*`“”|\\]+|_{3,}|={3,}|-{3,}|~{3,}')
_WORD = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9]")
_HELD_OUT_ONE_IN = 12


def paragraphs() -> list[str]:
    """Every paragraph of prose that this Python carries, lower case, without markup, each once, in a fixed order."""
    found: dict[str, None] = {}
    for text in _documents():
        for block in _PARAGRAPH_BREAK.split(text):
            paragraph = " ".join(_MARKUP.sub("", block).lower().split())
            if _is_prose(block, paragraph):
                found[paragraph] = None
    return list(found)


def _documents() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
    except ImportError:  # some distributions leave it out; the docstrings are enough to go on
        pass
    library = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        try:
            source = (library / f"{module}.py").read_text(encoding="utf-8")
        except OSError:
            continue
        yield from _DOCSTRING.findall(source)


def _is_prose(block: str, paragraph: str) -> bool:
    if ">>>" in block or "::=" in block or len(paragraph) < 40:
        return False
    letters = sum(map(str.isalpha, paragraph)) + paragraph.count(" ")
    return letters >= 0.88 * len(paragraph) and paragraph.count(" ") >= 6


class Tokenizer:
    """Splits text into whole words where they are frequent, and into pieces of words where not.

    The vocabulary holds the specials, every character, then the most frequent words, then the most frequent pieces of
    the words that are left (written with a leading ``#``; never the beginning of a word). A word outside it becomes its
    longest known beginning and the longest known pieces after it.

    Args:
        vocabulary: the tokens in order; made by `Tokenizer.build`.
    """

    def __init__(self, vocabulary: Iterable[str]) -> None:
        self.vocabulary = tuple(vocabulary)
        self._index = {token: index for index, token in enumerate(self.vocabulary)}
        self._words: dict[str, list[int]] = {}

    @classmethod
    def build(cls, texts: Iterable[str], *, size: int = 2048, pieces: int = 256) -> Tokenizer:
        """Make a vocabulary from `texts`; equal texts give equal vocabularies.

        Args:
            texts: the texts in which words are counted.
            size: tokens at most.
            pieces: so many of them are pieces of words.
        """
        counts = Counter(word for text in texts for word in _WORD.findall(text))
        ranked = [word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
        characters = sorted({character for word in counts for character in word})
        vocabulary = dict.fromkeys([*SPECIALS, *characters, *(f"#{character}" for character in characters)])
        words = [word for word in ranked if len(word) > 1]
        room = max(0, size - len(vocabulary) - pieces)
        vocabulary.update(dict.fromkeys(words[:room]))
        inner: Counter[str] = Counter()
        for word in words[room:]:
            for begin in range(1, len(word) - 1):
                for end in range(begin + 2, min(begin + 5, len(word)) + 1):
                    inner[word[begin:end]] += counts[word] * (end - begin - 1)
        best = sorted(inner.items(), key=lambda item: (-item[1], item[0]))
        vocabulary.update(dict.fromkeys(f"#{piece}" for piece, _ in best[:pieces]))
        return cls(list(vocabulary)[:size])

    @cached_property
    def digest(self) -> str:
        """A SHA-256 of the vocabulary, in hexadecimal: equal digests, equal tokens."""
        return hashlib.sha256("\n".join(self.vocabulary).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, text: str) -> list[int]:
        """The indices of the tokens of `text`."""
        known = self._words
        indices: list[int] = []
        for word in _WORD.findall(text.lower()):
            pieces = known.get(word)
            if pieces is None:
                pieces = known[word] = self._pieces(word)
            indices += pieces
        return indices

    def _pieces(self, word: str) -> list[int]:
        pieces: list[int] = []
        begin = 0
        while begin < len(word):
            for end in range(len(word), begin, -1):
                index = self._index.get(word[begin:end] if begin == 0 else f"#{word[begin:end]}")
                if index is not None:
                    break
            else:
                return [UNKNOWN]
            pieces.append(index)
            begin = end
        return pieces


@dataclass(frozen=True, slots=True)
class Corpus:
    """The demo's text as tokens.

    Attributes:
        tokenizer: the tokenizer that made the tokens.
        train: tokens of the paragraphs to learn from, a separator after each.
        held_out: tokens of the paragraphs that nobody learns from.
        digest: SHA-256 over the vocabulary and both token streams, in hexadecimal.
    """

    tokenizer: Tokenizer
    train: array[int]
    held_out: array[int]
    digest: str


def load_corpus(*, vocabulary_size: int = 2048) -> Corpus:
    """Read the text, build the vocabulary from its training half, and encode both halves. Takes about 0.4 s."""
    train_text: list[str] = []
    held_out_text: list[str] = []
    for paragraph in paragraphs():
        draw = int.from_bytes(hashlib.blake2s(paragraph.encode(), digest_size=4).digest(), "big")
        (train_text if draw % _HELD_OUT_ONE_IN else held_out_text).append(paragraph)
    tokenizer = Tokenizer.build(train_text, size=vocabulary_size)
    train, held_out = (_encode_all(tokenizer, texts) for texts in (train_text, held_out_text))
    digest = hashlib.sha256(tokenizer.digest.encode() + train.tobytes() + b"|" + held_out.tobytes()).hexdigest()
    return Corpus(tokenizer, train, held_out, digest)


def _encode_all(tokenizer: Tokenizer, texts: Iterable[str]) -> array[int]:
    tokens = array("H")
    for text in texts:
        tokens.extend(tokenizer.encode(text))
        tokens.append(SEPARATOR)
    return tokens
