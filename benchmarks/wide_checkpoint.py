"""A random checkpoint of a real model's widths with few layers, for servers on a GPU.

    python benchmarks/wide_checkpoint.py 9b DIR     # 8 layers, compressed-tensors
    python benchmarks/wide_checkpoint.py 27b DIR    # 4 layers, GPTQ
    python benchmarks/wide_checkpoint.py 9b DIR --format bf16

The layout and the making are those of the tiny checkpoints; the values are drawn on the device,
which takes seconds instead of minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from vllm_b70.checkpoints import tiny
from vllm_b70.checkpoints.tiny import TinyShape

#: Widths of Qwen3.5-9B and of the 27B, with a part of their vocabulary.
WIDE = {
    "9b": TinyShape(
        heads=16, kv_heads=4, linear_key_heads=16, linear_value_heads=32, intermediate=12288,
        hidden=4096, layers=8, vocab=65536, head_dim=256, linear_head_dim=128, max_positions=40960,
    ),
    "27b": TinyShape(
        heads=24, kv_heads=4, linear_key_heads=16, linear_value_heads=48, intermediate=17408,
        hidden=5120, layers=4, vocab=65536, head_dim=256, linear_head_dim=128, max_positions=40960,
    ),
}  # fmt: skip


def mix(shape: TinyShape) -> float:
    """Size of the residual updates under which the next token follows the rule as often as in a
    tiny checkpoint (1.5 there): neither never nor always, so that drafts fail and succeed.

    The rule's logit stands out by sqrt(hidden) times the share of the embedding in the stream, in
    standard deviations of the others; it has to match the largest of ``vocab`` of them.
    """
    largest = {1024: 3.2, 65536: 4.4}[shape.vocab]
    share = (largest + 0.5) / math.sqrt(shape.hidden)
    return math.sqrt((share**-2 - 1) / (2 * shape.layers))


class DeviceRandom(tiny._Random):
    """Normal values from the device's generator, one seed a name."""

    def normal(self, name: str, size: tuple[int, ...], std: float) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        return (torch.randn(*size, device=device, generator=generator) * std).cpu()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=sorted(WIDE))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--format", choices=["ct", "gptq", "bf16"], help="default: the real one's")
    arguments = parser.parse_args()
    wide = WIDE[arguments.shape]
    if arguments.layers:
        wide = TinyShape(**{**vars(wide), "layers": arguments.layers})
    tiny.SHAPES = {**tiny.SHAPES, arguments.shape: wide}
    tiny._Random = DeviceRandom
    tiny._MIX = mix(wide)
    layout = arguments.format or {"9b": "ct", "27b": "gptq"}[arguments.shape]
    tiny.make_tiny(arguments.directory, format=layout, shape=arguments.shape, group_size=128)


if __name__ == "__main__":
    main()
