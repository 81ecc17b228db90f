"""The sum over cards, in processes of their own over gloo."""

import pytest
import torch
import torch.multiprocessing as multiprocessing

pytest.importorskip("vllm")

SIZES = [(1, 8), (3, 8), (64, 4096), (2, 3, 5)]


def operand(rank, shape, dtype):
    """Large, small and opposite values: any other order or rounding shows."""
    generator = torch.Generator().manual_seed(rank)
    value = torch.randn(shape, generator=generator) * 10.0 ** torch.randint(
        -3, 4, shape, generator=generator
    )
    return value.to(dtype)


def worker(rank, world, port, folder):
    import torch.distributed as dist

    from vllm_b70.layers.communicator import RankOrderXpuCommunicator

    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    communicator = RankOrderXpuCommunicator(
        cpu_group=dist.group.WORLD, device=torch.device("cpu"), device_group=dist.group.WORLD
    )
    sums = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for shape in SIZES:
            x = operand(rank, shape, dtype)
            before = x.clone()
            sums[shape, dtype] = communicator.all_reduce(x)
            assert torch.equal(x, before)
        # Neither the rows around a row nor how it lies in memory show.
        x = operand(rank, (64, 4096), dtype)
        sums["row", dtype] = communicator.all_reduce(x[17:18])
        sums["strided", dtype] = communicator.all_reduce(x[:, ::2])
    for scatter in (communicator.reduce_scatter, communicator.reduce_scatterv):
        with pytest.raises(NotImplementedError, match="no exact sum"):
            scatter(x)
    with pytest.raises(NotImplementedError, match="covers floats"):
        communicator.all_reduce(torch.zeros(3, dtype=torch.int64))
    torch.save(sums, f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_the_sum_is_that_of_the_ranks_in_order(world, tmp_path, free_port):
    """Three ranks as well: with two, the order of an addition cannot show."""
    multiprocessing.spawn(worker, (world, free_port, str(tmp_path)), nprocs=world)
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(world)]
    for (shape, dtype), got in ranks[0].items():
        if isinstance(shape, str):
            continue
        operands = [operand(rank, shape, dtype) for rank in range(world)]
        want = operands[0].double()
        total = operands[0].float()
        for x in operands[1:]:
            total, want = total + x.float(), want + x.double()
        assert torch.equal(got, total.to(dtype)) and got.shape == torch.Size(shape)
        assert all(torch.equal(r[shape, dtype], got) for r in ranks)
        assert torch.allclose(got.double(), want, rtol=1e-2, atol=1e-2)
        if shape == (64, 4096):
            assert torch.equal(ranks[0]["row", dtype], got[17:18])
            assert torch.equal(ranks[0]["strided", dtype], got[:, ::2])
            if world == 3 and dtype != torch.float32:
                rounded = (operands[0] + operands[1]) + operands[2]
                backwards = operands[2].float() + operands[1].float() + operands[0].float()
                assert not torch.equal(got, rounded)
                assert not torch.equal(total, backwards)
