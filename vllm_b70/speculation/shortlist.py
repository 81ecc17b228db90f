"""Shortlists: the only tokens that the 4-bit draft head scores.

A list is a text file for one vocabulary. Its first line names that vocabulary by the hash of its
tokens and ids, so that a list made for another tokenizer, which would ruin acceptance without a
word, is refused; then one token id a line, in any order. ``#`` begins a remark.

    # vocabulary sha256:5c1f...
    0
    17
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

#: One in so many files of Python's own text is held out, to report coverage on.
HELD_OUT = 10
_HEADER = re.compile(r"# vocabulary sha256:([0-9a-f]{64})")


class ShortlistError(ValueError):
    """A shortlist that cannot be used; the message says where and what to do."""


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """SHA-256 over every id and its token; how the tokenizer's file is laid out does not matter."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    lines = (f"{number}\t{token}\n" for token, number in vocabulary.items())
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def special_ids(tokenizer: Tokenizer) -> list[int]:
    """The added tokens, which end turns and frame tools and thoughts: every list has them."""
    return sorted(tokenizer.get_added_tokens_decoder())


def read_ids(path: Path, vocabulary: int) -> list[int]:
    """The ids of a list, ascending.

    Args:
        path: The list.
        vocabulary: The model's vocabulary size.

    Raises:
        ShortlistError: A line is no id, an id stands twice or is not in the vocabulary, or there is
            none; the message names the line.
    """
    seen: dict[int, int] = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit()):
            raise _error(path, number, f"{text[:40]!r} is no token id")
        token = int(text)
        if token >= vocabulary:
            raise _error(path, number, f"{token} is not in the vocabulary of {vocabulary} tokens")
        if token in seen:
            raise _error(path, number, f"{token} stands in line {seen[token]} already")
        seen[token] = number
    if not seen:
        raise ShortlistError(f"the shortlist {path} has no token id; {_AGAIN}.")
    return sorted(seen)


_AGAIN = "make it with `vllm-b70 shortlist build`, or leave VLLM_B70_DRAFT_SHORTLIST out"


def _error(path: Path, line: int, what: str) -> ShortlistError:
    return ShortlistError(f"{path}, line {line}: {what}; {_AGAIN}.")


def check(path: Path, tokenizer: Tokenizer, vocabulary: int) -> None:
    """Refuse a list that is not for this model.

    Args:
        path: The list.
        tokenizer: What the server tokenises with.
        vocabulary: The model's vocabulary size.

    Raises:
        ShortlistError: As ``read_ids``; or the list is for another vocabulary, or lacks a special
            token.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ShortlistError(f"the shortlist {path} cannot be read ({error}); {_AGAIN}.") from error
    header = _HEADER.fullmatch(lines[0].strip()) if lines else None
    if header is None:
        raise _error(path, 1, "it must be '# vocabulary sha256:' and a hash")
    if header[1] != vocabulary_hash(tokenizer):
        raise _error(path, 1, "the list is for another tokenizer than the server's")
    missing = set(special_ids(tokenizer)) - set(read_ids(path, vocabulary))
    if missing:
        raise ShortlistError(
            f"the shortlist {path} lacks the special token {min(missing)}, without which drafts "
            f"never end a turn; {_AGAIN}."
        )


def tokens(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each text."""
    for text in texts:
        yield tokenizer.encode(text, add_special_tokens=False).ids


def choose(tokenizer: Tokenizer, texts: Iterable[str], size: int) -> list[int]:
    """The special tokens and the most frequent others, ``size`` in all or as many as occur; of
    equally frequent ones the lower id. Ascending."""
    counts: Counter[int] = Counter()
    for ids in tokens(tokenizer, texts):
        counts.update(ids)
    special = special_ids(tokenizer)
    for token in special:
        counts.pop(token, None)
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    return sorted(special + ranked[: max(0, size - len(special))])


def coverage(tokenizer: Tokenizer, ids: Sequence[int], texts: Iterable[str]) -> tuple[int, int]:
    """How many tokens of the texts are in the list, and how many there are."""
    listed, found, total = set(ids), 0, 0
    for text_ids in tokens(tokenizer, texts):
        found += sum(token in listed for token in text_ids)
        total += len(text_ids)
    return found, total


def write(path: Path, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Write a list."""
    lines = [f"# vocabulary sha256:{vocabulary_hash(tokenizer)}", *map(str, ids)]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def python_texts(held_out: bool) -> list[Path]:
    """Text that every Python installation has: the standard library's sources with their
    documentation, the language reference in ``pydoc_data``, the licence.

    Args:
        held_out: The files kept aside, one in ``HELD_OUT`` by the hash of its name; or the others.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(p for end in ("py", "txt") for p in root.rglob(f"*.{end}")):
        name = path.relative_to(root)
        if name.parts[0] in ("site-packages", "dist-packages"):
            continue
        digest = hashlib.sha256(name.as_posix().encode()).digest()
        if (digest[0] % HELD_OUT == 0) == held_out:
            found.append(path)
    return found
