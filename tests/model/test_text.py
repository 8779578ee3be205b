"""Text: full sequences, one BOS, two parts that never overlap."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from autoq.errors import UserError
from autoq.model.text import documents, own_bos, sequences, text_sources


def tokenizer(adds_bos: bool) -> Any:
    words = {"<s>": 0, "<unk>": 1, **{f"w{i}": i + 2 for i in range(500)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", unk_token="<unk>")


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text(" ".join(f"w{i % 500}" for i in range(40_000)))
    return path


def test_case_20_every_sequence_starts_with_one_bos_where_the_tokenizer_adds_one(words: Path) -> None:
    source, _ = text_sources(str(words), None)
    ids = sequences(tokenizer(adds_bos=True), source, 5, 32)
    assert ids.shape == (5, 32)
    assert (ids[:, 0] == 0).all()
    assert (ids[:, 1:] > 0).all()
    without = sequences(tokenizer(adds_bos=False), source, 5, 32)
    assert (without > 0).all()
    assert own_bos(tokenizer(adds_bos=False)) is None


def test_case_18_sequences_are_full_and_follow_each_other(words: Path) -> None:
    source, _ = text_sources(str(words), None)
    ids = sequences(tokenizer(adds_bos=False), source, 4, 50).flatten()
    assert ids[:3].tolist() == [2, 3, 4]
    assert len(ids) == 200


def test_one_file_is_divided_and_two_files_are_used_whole(words: Path, tmp_path: Path) -> None:
    profile, measure = text_sources(str(words), None)
    first, second = list(documents(profile)), list(documents(measure))
    assert first
    assert second
    assert "".join(first + second) == words.read_text()
    other = tmp_path / "other.txt"
    other.write_text("w1 w2")
    whole, rest = text_sources(str(words), str(other))
    assert "".join(documents(whole)) == words.read_text()
    assert list(documents(rest)) == ["w1 w2"]


def test_the_default_text_is_pythons_own_and_its_parts_share_no_document() -> None:
    profile, measure = text_sources(None, None)
    first, second = set(islice(documents(profile), 60)), set(islice(documents(measure), 20))
    assert len(first) > 50
    assert not first & second
    assert list(islice(documents(profile), 3)) == list(islice(documents(profile), 3))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_read_through_datasets(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas

    rows = [{"text": f"w{i} w{i + 1}", "id": i} for i in range(10)]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    else:
        pandas.DataFrame(rows).to_parquet(path)
    source, _ = text_sources(str(path), "stdlib")
    assert list(documents(source)) == [r["text"] for r in rows]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "no text file"),
        ("rows.jsonl", "{not json", "cannot read"),
        ("rows.jsonl", '{"words": "w1"}', "no column 'text'"),
        ("words.txt", b"\xff\xfe\x00\xff", "not UTF-8"),
        ("words.docx", "x", "not one of .txt"),
    ],
)
def test_text_that_cannot_be_read_is_refused_in_one_sentence(
    tmp_path: Path, name: str, content: str | bytes | None, says: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=says) as caught:
        list(documents(text_sources(str(path), "stdlib")[0]))
    assert "\n" not in str(caught.value)


def test_a_text_that_is_too_short_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("w1 w2 w3")
    with pytest.raises(UserError, match=r"has 3 tokens .* need 200"):
        sequences(tokenizer(adds_bos=False), text_sources(str(path), "stdlib")[0], 4, 50)
