"""``vllm-b70 shortlist``: make a shortlist for a model, and say what it covers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make and look at shortlists of draft tokens.", no_args_is_help=True)

Model = Annotated[Path, typer.Argument(help="Folder of the model, with its tokenizer.json.")]
Texts = Annotated[
    list[Path] | None,
    typer.Argument(help="Text files; none: the text that this Python installation ships."),
]


@app.command("build")
def build(
    model: Model,
    out: Annotated[Path, typer.Option(help="The list to write.")],
    texts: Texts = None,
    size: Annotated[int, typer.Option(min=1, help="Tokens, special ones included.")] = 65536,
) -> None:
    """List the tokens that are most frequent in some text, and all special ones.

    Without TEXTS that is Python's standard library, its documentation and licence: English prose
    and code. Drafts in other languages are better served by a list made from texts in them.
    """
    from vllm_b70.speculation import shortlist

    tokenizer = _tokenizer(model)
    ids = shortlist.choose(tokenizer, _read(texts, held_out=False), size)
    shortlist.write(out, tokenizer, ids)
    typer.echo(f"{out}: {len(ids)} of {tokenizer.get_vocab_size()} tokens")


@app.command("report")
def report(
    model: Model,
    listed: Annotated[Path, typer.Argument(metavar="LIST", help="A shortlist.")],
    texts: Texts = None,
) -> None:
    """Check a list, and say what share of the tokens of some text it covers.

    Without TEXTS that is a tenth of Python's own text, which ``build`` leaves out.
    """
    from vllm_b70.speculation import shortlist

    tokenizer = _tokenizer(model)
    try:
        shortlist.check(listed, tokenizer, tokenizer.get_vocab_size())
        ids = shortlist.read_ids(listed, tokenizer.get_vocab_size())
    except shortlist.ShortlistError as error:
        raise _stop(str(error)) from error
    found, total = shortlist.coverage(tokenizer, ids, _read(texts, held_out=True))
    if not total:
        raise _stop("the texts are empty: give others.")
    typer.echo(
        f"{listed}: {len(ids)} of {tokenizer.get_vocab_size()} tokens cover {found} of {total} "
        f"({found / total:.2%})"
    )


def _tokenizer(model: Path):  # type: ignore[no-untyped-def]
    from tokenizers import Tokenizer

    path = model / "tokenizer.json"
    if not path.is_file():
        raise _stop(f"{model} has no tokenizer.json: give the folder of a model.")
    return Tokenizer.from_file(str(path))


def _read(texts: list[Path] | None, held_out: bool) -> Iterator[str]:
    from rich.console import Console
    from rich.progress import track

    from vllm_b70.speculation.shortlist import python_texts

    paths = texts or python_texts(held_out)
    for path in paths:
        if not path.is_file():
            raise _stop(f"{path} is no file: give text files.")
    for path in track(paths, "tokenising", console=Console(stderr=True), transient=True):
        yield path.read_text("utf-8", errors="ignore")


def _stop(message: str) -> typer.Exit:
    typer.echo(f"vllm-b70: {message}", err=True)
    return typer.Exit(2)
