"""Tokens without a vocabulary: words, and hashed pieces of words.

A text is its words, in composed form (NFC) and upper case, numbers digit by digit. A mark, such as an accent or a vowel
sign of Hindi, and a joiner belong to the character before them. A word is the set of its pieces: itself and its
character 2- to 5-grams with marked ends, each hashed into one of `buckets` (as in fastText, Bojanowski et al., 2017,
arXiv:1607.04606). A word never seen in training still has known pieces.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_ASCII = re.compile(r"\d|[^\W\d_]+|[^\w\s-]")


class TextBatch(NamedTuple):
    """Tokens of b texts of up to T words, n of them distinct."""

    words: Tensor
    """int64, (b, T): 1 + index of a distinct word; 0 pads."""
    pieces: Tensor
    """int64, one-dimensional: the pieces of the distinct words, one word after another."""
    offsets: Tensor
    """int64, (n,): the start of each distinct word's pieces."""


def tokenize(texts: Sequence[str], *, max_words: int, buckets: int) -> TextBatch:
    """Split texts into words and pieces. Words beyond `max_words` are cut off; an empty text is one empty word."""
    rows = [split_words(text)[:max_words] or [""] for text in texts]
    distinct = {word: index for index, word in enumerate(dict.fromkeys(word for row in rows for word in row))}
    words = torch.zeros(len(rows), max_words, dtype=torch.int64)
    for row, target in zip(rows, words, strict=True):
        target[: len(row)] = torch.tensor([distinct[word] + 1 for word in row])
    pieces = [_pieces(word, buckets) for word in distinct]
    lengths = torch.tensor([0, *map(len, pieces)])
    flat = torch.tensor([piece for word in pieces for piece in word], dtype=torch.int64)
    return TextBatch(words, flat, lengths.cumsum(0)[:-1])


def first_texts(batch: TextBatch, count: int) -> TextBatch:
    """Return the tokens of the first so many texts: the same as those of `tokenize` on these texts.

    >>> whole = tokenize(["a b", "c a", "b"], max_words=2, buckets=64)
    >>> first_texts(whole, 1).words.tolist(), len(first_texts(whole, 1).offsets)
    ([[1, 2]], 2)
    """
    words = batch.words[:count].clone()  # copies do not hold the memory of the other texts
    distinct = int(words.max())  # words are numbered in the order of the texts
    stop = int(batch.offsets[distinct]) if distinct < len(batch.offsets) else len(batch.pieces)
    return TextBatch(words, batch.pieces[:stop].clone(), batch.offsets[:distinct].clone())


def split_words(text: str) -> list[str]:
    """Split a text into upper-case words; each digit and each punctuation mark but a hyphen is a word."""
    return (_ASCII if text.isascii() else _words()).findall(
        unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).upper())
    )


def identity(text: str) -> str:
    """Return the words of a text, equal for texts that the encoder reads alike."""
    return " ".join(split_words(text))


@cache
def _words() -> re.Pattern[str]:
    """Return the words of texts with marks, which stand on or about another character; U+200C and U+200D join."""
    codes = (*range(0x300, 0x20000), *range(0xE0100, 0xE01F0))  # there are no marks in others
    marks = [c for c in map(chr, codes) if unicodedata.category(c).startswith("M")]
    rare = "".join(c for c in marks if c > "\uffff")  # slow as members of one class, so only tried where one may be
    mark = rf"(?:[\u200c\u200d{''.join(marks).removesuffix(rare)}]|(?=[\U00010000-\U0010ffff])[{rare}])"
    return re.compile(rf"\d{mark}*|[^\W\d_]+(?:{mark}+[^\W\d_]*)*|[^\w\s-]{mark}*")


@lru_cache(maxsize=1 << 16)
def _pieces(word: str, buckets: int) -> tuple[int, ...]:
    marked = f"<{word}>"
    grams = {marked[i : i + n] for n in (2, 3, 4, 5) for i in range(len(marked) - n + 1)} | {f"={word}"}
    return tuple(sorted(zlib.crc32(gram.encode()) % buckets for gram in grams))
