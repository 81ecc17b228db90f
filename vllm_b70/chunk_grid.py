"""Prompt chunks end on a grid counted from the prompt's start, or at the prompt's end.

The chunked kernel of the gated delta net and a blocked attention give a row bits that depend on
where its chunk began. vLLM ends a chunk wherever the step's token budget ends, which is decided by
the other requests. On the grid, every chunk boundary is a boundary of the kernels' own blocks, so
the cuts no longer show.
"""

from __future__ import annotations

#: Tokens; the chunk length of the gated-delta-net kernels (FLA's and vLLM's CPU one).
GRID = 64


def chunk_tokens(start: int, tokens: int, prompt_tokens: int, grid: int = GRID) -> int:
    """How many of the ``tokens`` that a step offers a request may take.

    Args:
        start: Position of the first token, counted from the prompt's start.
        tokens: Tokens the budget allows, at least 0.
        prompt_tokens: Length of the prompt. Tokens past it (a request that was preempted and
            computes its output again) are not prompt tokens and never share a chunk with them.
        grid: Tokens between admissible chunk ends.

    Returns:
        Tokens to schedule: ``tokens`` past the prompt, else the largest number that ends the
        chunk on the grid or at the prompt's end; 0 if neither is within reach.
    """
    if start >= prompt_tokens:
        return tokens
    end = min(start + tokens, prompt_tokens)
    if end < prompt_tokens:
        end = end // grid * grid
    return max(0, end - start)


def check_chunk(start: int, tokens: int, grid: int = GRID) -> None:
    """Raise if a prompt chunk begins off the grid, which means that the one before ended off it.

    Raises:
        RuntimeError: The chunk cannot be computed exactly.
    """
    if start % grid:
        raise RuntimeError(
            f"a prompt chunk of {tokens} tokens begins at position {start}, which is not a "
            f"multiple of {grid}: the scheduler cut a prompt off the chunk grid, so the result "
            "would depend on the other requests; report this as a bug of vllm_b70."
        )


def least_batched_tokens(max_num_seqs: int, max_draft_depth: int, grid: int = GRID) -> int:
    """Smallest token budget with which a prompt always advances beside a full batch of decodes.

    Args:
        max_num_seqs: Most requests in one step.
        max_draft_depth: Most draft tokens of a request in one step.
        grid: Tokens between admissible chunk ends.
    """
    return max_num_seqs * (max_draft_depth + 1) + grid


def most_blocks(tokens: int, max_num_seqs: int, grid: int = GRID) -> int:
    """Most blocks of the grid that the prompt chunks of one step can have.

    Args:
        tokens: The step's budget.
        max_num_seqs: Most requests in one step; each one's last block may hold a single token.
        grid: Tokens of a block.
    """
    sequences = min(tokens, max_num_seqs)
    return sequences + (tokens - sequences) // grid
