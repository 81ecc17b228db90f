"""The record of where recurrent states are kept, with 3 drafts and with 6."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.battlemage_cases.case import Case


def cases() -> Iterator[Case]:
    for columns in (4, 7):
        for mixed in (False, True):
            yield _case(columns, mixed)


def _case(columns: int, mixed: bool) -> Case:
    pointers = (
        "query_starts", "seq_lens", "table", "in_prompt", "kept_first", "kept_count", "starts",
        "read", "columns", "lost",
    )  # fmt: skip
    return Case(
        kernel="state_columns.place",
        dtype="i32",
        types={name: "*i32" for name in pointers},
        constants={
            "TABLE_ROW": 16,
            "COLUMNS": columns,
            "BC": 1 << (columns - 1).bit_length(),
            "MIXED": mixed,
        },
        tile={"warps": 1, "stages": 2},
        dpas=0,
        unaligned=pointers,
    )
