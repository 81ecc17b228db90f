"""Shortlists: what is refused and where, who is always in, and the command line."""

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from vllm_b70.cli import app
from vllm_b70.speculation import shortlist
from vllm_b70.speculation.shortlist import ShortlistError

WORDS = ["the", "cat", "sat", "on", "mat", "dog", "rare"]


def make_tokenizer(words=WORDS):
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*words, "?"])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    make_tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def test_the_most_frequent_and_all_special_tokens():
    tokenizer = make_tokenizer()
    ids = shortlist.choose(tokenizer, ["the cat sat on the mat", "the dog sat"], 4)
    # "the" 3 times, "sat" 2, then of the others the lowest; <|end|> never occurs.
    assert ids == [0, 1, 2, 8] and shortlist.special_ids(tokenizer) == [8]
    assert shortlist.coverage(tokenizer, ids, ["the cat ran"]) == (2, 3)
    assert shortlist.choose(tokenizer, ["the"], 100) == [0, 8]
    assert shortlist.choose(tokenizer, ["the"], 1) == [8]


def test_round_trip(tmp_path):
    path, tokenizer = tmp_path / "list", make_tokenizer()
    shortlist.write(path, tokenizer, [0, 5, 8])
    assert shortlist.read_ids(path, 9) == [0, 5, 8]
    shortlist.check(path, tokenizer, 9)
    path.write_text(path.read_text() + "# a remark\n\n 3  # dog\n")
    assert shortlist.read_ids(path, 9) == [0, 3, 5, 8]


@pytest.mark.parametrize(
    ("lines", "line", "what"),
    [
        (["0", "8", "1.5"], 4, "'1.5' is no token id"),
        (["0", "-1", "8"], 3, "'-1' is no token id"),
        (["0", "٣", "8"], 3, "is no token id"),
        (["0", "1 2", "8"], 3, "'1 2' is no token id"),
        (["0", "8", "5", "0"], 5, "0 stands in line 2 already"),
        (["0", "8", "9"], 4, "9 is not in the vocabulary of 9 tokens"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, line, what):
    path, tokenizer = tmp_path / "list", make_tokenizer()
    shortlist.write(path, tokenizer, lines)
    with pytest.raises(ShortlistError) as error:
        shortlist.check(path, tokenizer, 9)
    assert f"{path}, line {line}: " in str(error.value) and what in str(error.value)
    assert "vllm-b70 shortlist build" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0\n8\n", "line 1: it must be '# vocabulary"),
        ("", "line 1: it must be"),
        ("# vocabulary sha256:12\n0\n8\n", "line 1: it must be"),
        ("HEADER\n", "has no token id"),
        ("HEADER\n0\n", "lacks the special token 8"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_bad_list_is_refused(tmp_path, text, what):
    path, tokenizer = tmp_path / "list", make_tokenizer()
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        header = f"# vocabulary sha256:{shortlist.vocabulary_hash(tokenizer)}"
        path.write_text(text.replace("HEADER", header))
    with pytest.raises(ShortlistError, match=what):
        shortlist.check(path, tokenizer, 9)


def test_a_list_for_another_tokenizer_is_refused(tmp_path):
    path = tmp_path / "list"
    shortlist.write(path, make_tokenizer(), [0, 8])
    swapped = make_tokenizer([WORDS[1], WORDS[0], *WORDS[2:]])
    with pytest.raises(ShortlistError, match="another tokenizer than the server's"):
        shortlist.check(path, swapped, 9)


def test_build_and_report(model, tmp_path):
    text, held_out, out = tmp_path / "text", tmp_path / "held", tmp_path / "list"
    text.write_text("the cat sat on the mat")
    held_out.write_text("the dog")
    run = CliRunner().invoke(
        app, ["shortlist", "build", str(model), str(text), "--out", str(out), "--size", "6"]
    )
    assert run.exit_code == 0 and "6 of 9 tokens" in run.output
    assert shortlist.read_ids(out, 9) == [0, 1, 2, 3, 4, 8]
    run = CliRunner().invoke(app, ["shortlist", "report", str(model), str(out), str(held_out)])
    assert run.exit_code == 0 and "cover 1 of 2 (50.00%)" in run.output


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["build", "NOWHERE", "--out", "OUT"], "has no tokenizer.json"),
        (["build", "MODEL", "NOWHERE", "--out", "OUT"], "is no file"),
        (["report", "MODEL", "NOWHERE"], "cannot be read"),
    ],
)
def test_the_command_line_says_what_is_wrong(model, tmp_path, arguments, what):
    places = {"NOWHERE": tmp_path / "no", "OUT": tmp_path / "list", "MODEL": model}
    run = CliRunner().invoke(app, ["shortlist", *(str(places.get(a, a)) for a in arguments)])
    assert run.exit_code == 2 and what in run.output


def test_pythons_own_text_is_split_once():
    rest, held_out = shortlist.python_texts(False), shortlist.python_texts(True)
    assert not set(rest) & set(held_out)
    assert 0.05 < len(held_out) / (len(rest) + len(held_out)) < 0.2
    assert any(path.name == "topics.py" for path in rest + held_out)
