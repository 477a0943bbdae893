"""Ids and back; where documents begin and end; files that are no tokenizers."""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.data.records import DocumentPiece, document_tokens
from jaxmem.data.tokenizer import Bytes, tokenizer_for
from jaxmem.errors import UserError


@given(st.text())
def test_bytes_come_back(text: str) -> None:
    ids = Bytes().encode(text)
    assert ids.tolist() == list(text.encode())
    assert Bytes().decode([*ids, 256]) == text


def test_a_tokenizer_file(tokenizer_file: str) -> None:
    tokenizer = tokenizer_for(tokenizer_file)
    reference = json.loads(Path(tokenizer_file).read_text())["model"]["vocab"]
    assert 257 < tokenizer.vocab_size == len(reference)
    assert tokenizer.end == reference["<|end_of_text|>"]
    assert tokenizer.begin == (reference["<|begin_of_text|>"],)
    for text in ("the cat sat", "naïve\n\t😀", ""):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text.encode()).tolist() == ids.tolist()
    assert len(tokenizer.encode("the cat sat")) < len("the cat sat")
    assert [ids.tolist() for ids in tokenizer.encode_many(["the", "cat"])] == [
        tokenizer.encode("the").tolist(),
        tokenizer.encode("cat").tolist(),
    ]
    assert tokenizer_for(str(Path(tokenizer_file).parent)).identity == tokenizer.identity


def test_a_document_begins_and_ends_once_and_cannot_do_so_itself(tokenizer_file: str) -> None:
    tokenizer = tokenizer_for(tokenizer_file)
    pieces = [
        DocumentPiece("the", True, False),
        DocumentPiece(b"cat", False, False),
        DocumentPiece("hat", False, True),
        DocumentPiece("", True, True),
    ]
    found = [ids.tolist() for ids in document_tokens(tokenizer, pieces)]
    the, cat, hat = (tokenizer.encode(word).tolist() for word in ("the", "cat", "hat"))
    begin, end = tokenizer.begin[0], tokenizer.end
    assert found == [[begin, *the], cat, [*hat, end], [begin, end]]
    written = "a<|end_of_text|>b<|begin_of_text|>"
    ids = tokenizer.encode(written).tolist()
    assert end not in ids
    assert begin not in ids
    assert tokenizer.decode(ids) == written


def test_truncation_and_padding_of_the_file_are_not_obeyed(tokenizer_file: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    changed = Tokenizer.from_file(tokenizer_file)
    changed.enable_truncation(3)
    changed.enable_padding(length=9)
    changed.save(str(tmp_path / "tokenizer.json"))
    found = tokenizer_for(str(tmp_path / "tokenizer.json"))
    text = "xyz " * 20
    assert found.encode(text).tolist() == tokenizer_for(tokenizer_file).encode(text).tolist()


def test_the_end_can_be_named_beside_the_file(tokenizer_file: str, tmp_path: Path) -> None:
    content = Path(tokenizer_file).read_text().replace("<|end_of_text|>", "<stop>")
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"no end-of-document token.*tokenizer_config\.json"):
        tokenizer_for(str(path))
    for eos in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert tokenizer_for(str(path)).end == json.loads(content)["model"]["vocab"]["<stop>"]
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: invalid JSON"):
        tokenizer_for(str(path))


def test_only_a_special_token_ends_documents_by_its_name(tokenizer_file: str, tmp_path: Path) -> None:
    """Gemma's `</s>` ends struck text in HTML; its documents end with `<eos>`."""
    from tokenizers import AddedToken, Tokenizer

    changed = Tokenizer.from_str(Path(tokenizer_file).read_text().replace("<|end_of_text|>", "<stop>"))
    changed.add_tokens([AddedToken("</s>")])
    path = str(tmp_path / "tokenizer.json")
    changed.save(path)
    assert tokenizer_for(path).end == changed.token_to_id("</s>")  # there is no other
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<stop>"}))
    assert tokenizer_for(path).end == changed.token_to_id("<stop>")
    changed.add_special_tokens([AddedToken("<eos>", special=True)])
    changed.save(path)
    assert tokenizer_for(path).end == changed.token_to_id("<eos>")
    assert changed.token_to_id("</s>") not in tokenizer_for(path).ends


def test_files_that_are_no_tokenizers(tmp_path: Path, tokenizer_file: str) -> None:
    with pytest.raises(
        UserError, match=r"data\.tokenizer=byte: .*byte: No such file.*use data\.tokenizer=bytes or the path"
    ):
        tokenizer_for("byte")
    broken = tmp_path / "tokenizer.json"
    for content in (b"", b"{}", b"[" * 100_000, b"\xff\x00", Path(tokenizer_file).read_bytes()[:2000]):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=r"not a valid tokenizer\.json"):
            tokenizer_for(str(broken))
    words = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "[UNK]"}}
    broken.write_text(json.dumps({**words, "added_tokens": []}))
    with pytest.raises(UserError, match=r"not a valid tokenizer\.json: .*\[UNK\]"):  # which its vocabulary lacks
        tokenizer_for(str(broken))
    shutil.copy(tokenizer_file, broken)
    assert tokenizer_for(str(tmp_path)).vocab_size > 257


def replaced(string: str, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": string}, "content": content}


SINGLE = [{"SpecialToken": {"id": "X", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
PAIR = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
PREPEND = {"type": "Prepend", "prepend": "a" * 99}


def processor(special_tokens: object) -> dict[str, object]:
    return {"type": "TemplateProcessing", "single": SINGLE, "pair": PAIR, "special_tokens": special_tokens}


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}},
        {"normalizer": {"type": "Sequence", "normalizers": [PREPEND, *[replaced("a", "aa")] * 20]}},
        {"decoder": {"type": "Sequence", "decoders": [replaced("a", "aa")] * 20}},
        {"post_processor": processor({})},
        {"post_processor": processor({"X": {"id": "X", "ids": [999999], "tokens": ["X"]}})},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}},
    ],
)
def test_tokenizers_that_panic_or_grow_without_limit(changed: dict[str, object], tokenizer_file: str, tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(Path(tokenizer_file).read_text()) | changed))
    with pytest.raises(UserError, match=r"tokenizer\.json: not a valid tokenizer\.json: "):
        tokenizer_for(str(path)).encode("a" * 40 + "!")


def test_half_of_a_surrogate_pair_is_no_text(tokenizer_file: str) -> None:
    for tokenizer in (Bytes(), tokenizer_for(tokenizer_file)):
        for encode in (tokenizer.encode, tokenizer.encode_with_offsets):
            with pytest.raises(UserError, match="the text is not valid UTF-8"):
                encode("a\ud800")
