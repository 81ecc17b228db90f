"""The record of skipped positions: what it keeps, what it does not, and how large it is."""

import pytest
import torch

from vllm_b70.speculation.draft_history import DraftHistory

CPU = torch.device("cpu")


def record(history, positions, accepted=None, slot=1):
    at = torch.tensor(positions)
    hidden = at[:, None].float().expand(-1, 4)
    history.record(torch.full_like(at, slot), at, at + 100, at, hidden, accepted)


def kept(history, positions, slot=1):
    at = torch.tensor(positions)
    found, tokens, _, hidden = history.recall(torch.full_like(at, slot), at)
    assert (tokens[found] == at[found] + 100).all() and (hidden[found, 0] == at[found]).all()
    return at[found].tolist()


def test_rejected_rows_are_not_kept_and_void_what_stood_there():
    history = DraftHistory(2, 8, 4, torch.float32, CPU)
    record(history, [3, 4])
    record(history, [9, 10, 11, 12], torch.tensor([True, True, False, False]))
    assert kept(history, range(13)) == [9, 10]
    assert kept(history, range(13), slot=0) == []
    record(history, [11])
    assert kept(history, range(13)) == [9, 10, 11]


@pytest.mark.parametrize("axes", [1, 3])
def test_its_size_is_what_it_allocates(axes):
    sizes = 3, 259, 64, torch.bfloat16
    history = DraftHistory(*sizes, CPU, axes)
    tensors = [value for value in vars(history).values() if isinstance(value, torch.Tensor)]
    assert DraftHistory.size(*sizes, axes) == sum(tensor.nbytes for tensor in tensors)


def test_a_9b_takes_two_mebibytes_a_request():
    assert round(DraftHistory.size(1, 259, 4096, torch.bfloat16) / 2**20, 1) == 2.0
