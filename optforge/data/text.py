"""Real text for language models: Wikipedia articles, news, or a file of the user's own.

Articles are cleaned by a few plain rules that never change with time, so that a perplexity can be compared with one of
last year. Cleaning is lazy: a few thousand tokens read a few articles.
"""

from __future__ import annotations

import bz2
import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from xml.etree import ElementTree

from optforge import fetch
from optforge.errors import DataError, Problem, near
from optforge.models.base import Loaded

if TYPE_CHECKING:
    from torch import Tensor

CORPORA = ("wikipedia", "news")
_CHARACTERS_PER_TOKEN = 6
"""More than English has, so that one pass of the tokenizer is enough as a rule."""

_PROMPT_WORDS = 12
_SHORTEST_ARTICLE = 500


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text as token ids, in the order of the corpus."""

    corpus: str = "wikipedia"
    """wikipedia (101 articles) or news (300 items); not used when `path` is given."""
    path: str | None = None
    """A UTF-8 text file of your own; null uses the corpus."""

    real: ClassVar[bool] = True

    def check(self) -> Iterator[Problem]:
        if self.path is not None:
            if not Path(self.path).expanduser().is_file():
                yield Problem(where="data.path", what=f"{self.path} is not a file", fix="give a UTF-8 text file")
        elif self.corpus not in CORPORA:
            fix = near(self.corpus, CORPORA) or f"one of {', '.join(CORPORA)}"
            yield Problem(where="data.corpus", what=f"unknown corpus {self.corpus!r}", fix=fix)
        else:
            absent = fetch.missing("wikipedia")
            if absent is not None:
                yield absent

    def tokens(self, loaded: Loaded, count: int, seed: int = 0) -> Tensor:
        """The first `count` token ids of the corpus, int64, shape [count]; documents follow one another without markers."""
        import torch

        if loaded.tokenizer is None:
            raise DataError(Problem(where="data", what=f"{loaded.name} has no tokenizer for text", fix="use data=random_tokens"))
        found = 0
        for text in self._growing(count * _CHARACTERS_PER_TOKEN):
            ids = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= count:
                return torch.tensor(ids[:count], dtype=torch.int64)
            found = len(ids)
        raise DataError(
            Problem(where="data", what=f"{self._name} holds {found} tokens, {count} are wanted", fix=f"set quality.tokens={found}")
        )

    def batches(self, loaded: Loaded, count: int, batch_size: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None]]:
        raise DataError(
            Problem(where="data", what=f"{loaded.name} takes images or tensors, not text", fix="use data=inputs or an image set")
        )

    def prompts(self) -> list[str]:
        """The first words of the first two documents (of one document: also of its middle)."""
        found = []
        for document in self.documents():
            found.append(" ".join(document.split()[:_PROMPT_WORDS]))
            if len(found) == 2:
                return found
        words = next(self.documents(), "").split()
        middle = words[len(words) // 2 :][:_PROMPT_WORDS]
        return [*found, " ".join(middle)] if len(words) > 4 * _PROMPT_WORDS else found

    def documents(self) -> Iterator[str]:
        """Clean documents, one string each.

        Raises:
            DataError: the corpus is not on this machine, or the file is not UTF-8 text.
        """
        if self.path is not None:
            yield _user_text(Path(self.path).expanduser())
            return
        folder = fetch.require("wikipedia")
        if self.corpus == "news":
            yield from (line + "\n" for line in (folder / "lee_background.cor").read_text(encoding="utf-8").splitlines() if line.strip())
            return
        for wikitext in _articles(next(folder.glob("enwiki-*.bz2"))):
            text = clean(wikitext)
            if len(text) >= _SHORTEST_ARTICLE:
                yield text + "\n\n"

    def _growing(self, wanted: int) -> Iterator[str]:
        """The corpus from its beginning: `wanted` characters and more, then twice as many, at last all of it.

        As one text, because a tokenizer joins the end of a document with the beginning of the next.
        """
        text = ""
        for document in self.documents():
            if len(text) >= wanted:
                yield text
                wanted = 2 * len(text)
            text += document
        yield text

    @property
    def _name(self) -> str:
        return self.path or self.corpus


def _user_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(Problem(where="data.path", what=f"{path} does not exist")) from error
    except UnicodeDecodeError as error:
        raise DataError(Problem(where="data.path", what=f"{path} is not UTF-8 text (byte {error.start})")) from error
    if not text.strip():
        raise DataError(Problem(where="data.path", what=f"{path} is empty"))
    return text


def _articles(path: Path) -> Iterator[str]:
    """Raw wikitext of each article of a MediaWiki dump; redirects are left out."""
    with bz2.open(path) as file:
        try:
            for _, element in ElementTree.iterparse(file):
                if element.tag.endswith("}text") and element.text and not element.text.lstrip().lower().startswith("#redirect"):
                    yield element.text
                if element.tag.endswith("}page"):
                    element.clear()
        except (ElementTree.ParseError, EOFError, OSError) as error:
            raise DataError(Problem(where=str(path), what=f"is damaged ({error})", fix="delete its folder and fetch it again")) from error


_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
_FILE = re.compile(r"\[\[(?:File|Image|Category|[a-z]{2,12}(?:-[a-z]+)*):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]", re.IGNORECASE)
_SIMPLE = (
    (re.compile(r"<!--.*?-->", re.DOTALL), ""),
    (re.compile(r"<ref[^>/]*/>", re.IGNORECASE), ""),
    (re.compile(r"<(ref|math|gallery|timeline|source|code|pre)\b[^>]*>.*?</\1\s*>", re.DOTALL | re.IGNORECASE), ""),
)
_INLINE = (
    (re.compile(r"\[\[[^\[\]|]*\|([^\[\]]*)\]\]"), r"\1"),
    (re.compile(r"\[\[([^\[\]]*)\]\]"), r"\1"),
    (re.compile(r"\[(?:https?|ftp)://\S+\s+([^\]]*)\]"), r"\1"),
    (re.compile(r"\[(?:https?|ftp)://\S+\]"), ""),
    (re.compile(r"</?[a-zA-Z][^<>]*>"), ""),
    (re.compile(r"'{2,}"), ""),
    (re.compile(r"__[A-Z]+__"), ""),
    (re.compile(r"\(\s*[;,][;,\s]*"), "("),  # what a removed pronunciation leaves at the start of its brackets
    (re.compile(r"\s*\(\s*\)"), ""),
)
_TAIL = re.compile(
    r"^==+\s*(?:See also|References|Notes|Footnotes|External links|Further reading|Bibliography)\s*==+.*", re.M | re.S | re.I
)


def clean(wikitext: str) -> str:
    """Plain paragraphs of a wikitext article.

    Comments, references, templates, tables, files and the closing lists go; links and emphasis leave their text;
    headings and list items go, since they are not sentences.
    """
    text = html.unescape(html.unescape(wikitext))
    for pattern, replacement in _SIMPLE:
        text = pattern.sub(replacement, text)
    text = _TAIL.sub("", text)
    for pattern in (_TEMPLATE, _TABLE, _FILE):
        text = _until_settled(pattern, text)
    for pattern, replacement in _INLINE:
        text = pattern.sub(replacement, text)
    lines = (re.sub(r"[ \t\xa0]+", " ", line).strip() for line in text.splitlines())
    kept = [line for line in lines if line and line[0] not in "=*#:;|!{}<"]
    return "\n".join(kept)


def _until_settled(pattern: re.Pattern[str], text: str) -> str:
    """Removes innermost matches again and again, for markup that nests."""
    while True:
        shorter = pattern.sub("", text)
        if shorter == text:
            return text
        text = shorter
