"""Text as token ids: cleaned by plain rules, in order, never shorter than asked for without saying so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from optforge import fetch
from optforge.data.text import Text, clean
from optforge.data.tokens import RandomTokens
from optforge.errors import DataError
from optforge.models.base import Loaded

needs_wikipedia = pytest.mark.skipif(fetch.find("wikipedia") is None, reason=f"run `{fetch.command('wikipedia')}`")


@pytest.fixture
def loaded() -> Loaded:
    words = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Loaded(
        module=nn.Identity(),
        family="causal_lm",
        name="toy",
        vocab_size=4,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"),
    )


@pytest.mark.parametrize(
    ("wikitext", "plain"),
    [
        ("'''Bold''' and ''slanted''", "Bold and slanted"),
        ("A [[link]], a [[page|name]].", "A link, a name."),
        ("Said{{cite|a={{nested}}}} once<ref name=a>x</ref> more<ref name=b />.", "Said once more."),
        ("Before\n{| class=x\n| cell\n{|\n| inner\n|}\n|}\nAfter", "Before\nAfter"),
        ("[[File:A.jpg|thumb|a [[b]] c]]Text", "Text"),
        ("== Heading ==\n* item\n# item\n: indented\nText", "Text"),
        ("Text\n== See also ==\n* [[More]]\nTail", "Text"),
        ("a &amp; b &lt;br /&gt;<!-- hidden\n -->", "a & b"),
        ("See [http://example.org the site] and [http://example.org].", "See the site and ."),
        ("Achilles ({{lang|grc|x}}; , Akhilleus) was", "Achilles (Akhilleus) was"),
        ("Empty ({{x}}) here", "Empty here"),
    ],
)
def test_wikitext_is_cleaned(wikitext: str, plain: str) -> None:
    assert clean(wikitext) == plain


def test_a_file_of_ones_own_is_read_in_order(tmp_path: Path, loaded: Loaded) -> None:
    file = tmp_path / "own.txt"
    file.write_text("one two three two one")
    ids = Text(path=str(file)).tokens(loaded, 4)
    assert ids.tolist() == [1, 2, 3, 2] and ids.dtype == torch.int64


def test_a_text_that_is_too_short_says_both_numbers(tmp_path: Path, loaded: Loaded) -> None:
    file = tmp_path / "own.txt"
    file.write_text("one two three")
    with pytest.raises(DataError, match=r"holds 3 tokens, 10 are wanted; set quality.tokens=3"):
        Text(path=str(file)).tokens(loaded, 10)


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b" \n", "is empty"), (b"a\xff", r"not UTF-8 text \(byte 1\)")])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, loaded: Loaded, content: bytes, message: str) -> None:
    file = tmp_path / "own.txt"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        Text(path=str(file)).tokens(loaded, 1)


def test_a_missing_file_and_a_wrong_corpus_are_problems() -> None:
    assert [problem.where for problem in Text(path="/nowhere/a.txt").check()] == ["data.path"]
    (problem,) = Text(corpus="wikipedai").check()
    assert "did you mean wikipedia" in problem.fix


def test_without_the_articles_the_command_that_brings_them_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    monkeypatch.setenv("OPTFORGE_CACHE", str(tmp_path))
    (problem,) = Text().check()
    assert "python -m optforge.fetch wikipedia" in problem.fix
    with pytest.raises(DataError, match=r"python -m optforge\.fetch wikipedia"):
        Text().tokens(loaded, 1)


def test_prompts_of_one_document_are_its_start_and_its_middle(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text(" ".join(str(number) for number in range(100)))
    start, middle = Text(path=str(file)).prompts()
    assert start.split()[0] == "0" and middle.split()[0] == "50" and len(start.split()) == 12


def test_random_tokens_follow_the_seed_and_the_vocabulary(loaded: Loaded) -> None:
    ids = RandomTokens().tokens(loaded, 1000, seed=1)
    assert torch.equal(ids, RandomTokens().tokens(loaded, 1000, seed=1))
    assert not torch.equal(ids, RandomTokens().tokens(loaded, 1000, seed=2))
    assert ids.unique().tolist() == [0, 1, 2, 3] and not RandomTokens().real


@needs_wikipedia
def test_the_real_articles_hold_no_markup() -> None:
    documents = list(Text().documents())
    assert 90 <= len(documents) <= 101
    joined = "\n".join(documents)
    assert documents[0].startswith("Anarchism is a political philosophy")
    for markup in ("[[", "]]", "<ref", "'''", "{|"):
        assert joined.count(markup) <= len(joined) / 100_000, markup


@needs_wikipedia
def test_the_real_news_are_300_items_with_two_prompts() -> None:
    assert len(list(Text(corpus="news").documents())) == 300
    assert len(Text(corpus="news").prompts()) == 2
