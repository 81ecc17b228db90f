"""Where the recurrent state before a position is kept, on the device; see layers.state_columns.

The positions at which a step begins are exact on the device only: the host learns too late how many
drafts were accepted. One program a request looks up the slot to continue from and records where the
states after this step stand.
"""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize_on_alignment=[
        "query_starts", "seq_lens", "table", "in_prompt", "kept_first", "kept_count", "starts",
        "read", "columns", "lost",
    ]
)  # fmt: skip
def place(
    query_starts,
    seq_lens,
    table,
    in_prompt,
    kept_first,
    kept_count,
    starts,
    read,
    columns,
    lost,
    TABLE_ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    BC: tl.constexpr,
    MIXED: tl.constexpr,
):
    """Grid (requests,).

    Args:
        query_starts: [requests + 1] int32, where each request's rows start.
        seq_lens: [requests] int32, the position after each request's last row.
        table: [requests, COLUMNS] int32, rows TABLE_ROW apart: state slots, column 0 first. A
            request whose column 0 is slot 0 is padding.
        in_prompt: [requests] int32, 1 for a prompt chunk; unread if not MIXED.
        kept_first, kept_count: [slots] int32 by slot of column 0: column c holds the state after
            kept_first + c tokens, for c < kept_count. Updated.
        starts: [requests + 1] int32, filled with ``query_starts``.
        read: [requests] int32, filled: the slot to continue from; 0 for padding and prompt chunks,
            -1 where the state is lost.
        columns: [requests, COLUMNS] int32, filled with ``table``.
        lost: [1] int32, counts requests whose state was not kept.
    """
    request = tl.program_id(0)
    begin = tl.load(query_starts + request)
    end = tl.load(query_starts + request + 1)
    tl.store(starts + request, begin, mask=request == 0)
    tl.store(starts + request + 1, end)
    c = tl.arange(0, BC)
    row = tl.load(table + request * TABLE_ROW + c, mask=c < COLUMNS, other=0)
    tl.store(columns + request * COLUMNS + c, row, mask=c < COLUMNS)

    tokens = end - begin
    own = tl.load(table + request * TABLE_ROW)
    live = (tokens > 0) & (own > 0)
    start = tl.load(seq_lens + request) - tokens
    column = start - tl.load(kept_first + own, mask=live, other=0)
    found = (column >= 0) & (column < tl.load(kept_count + own, mask=live, other=0))
    kept = tl.minimum(tokens, COLUMNS)
    source = tl.load(table + request * TABLE_ROW + tl.where(found, column, 0))
    if MIXED:
        prompt = tl.load(in_prompt + request) != 0
        good = tl.where(prompt, (start == 0) | (found & (column == 0)), found)
        kept = tl.where(prompt, 1, kept)
        source = tl.where(prompt, 0, source)
    else:
        good = found
    tl.store(read + request, tl.where(live, tl.where(good, source, -1), 0))
    tl.store(kept_first + own, start + tokens - kept + 1, mask=live)
    tl.store(kept_count + own, kept, mask=live)
    tl.atomic_add(lost, 1, mask=live & (good == 0))
