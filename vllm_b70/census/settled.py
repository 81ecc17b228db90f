"""What was settled of linears, and the files that keep it.

It decides the bits of every answer, so it is part of a server's configuration. A shape has a file
of its own, which follows the shape, the machine and the software and nothing else of the server:
drafts, users and budgets must not change an answer. It is written once, by whoever comes first, and
a start that finds it takes what it says.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_b70.census.certificate import make_key
from vllm_b70.census.verdict import Named
from vllm_b70.ops import row_classes
from vllm_b70.plugin import PluginError
from vllm_b70.settings import current


@dataclass(frozen=True)
class Settled:
    """The route of a weight's shape.

    Attributes:
        op, shape: As a probe of the census has them.
        spans: Of the class that the vendor's kernel is called with; empty for our own kernel.
        why: In words.
    """

    op: str
    shape: str
    spans: tuple[int, ...]
    why: str

    def line(self, rows: Iterable[int]) -> str:
        """For the log.

        Args:
            rows: Of typical steps.
        """
        if not self.spans:
            return f"{self.op} {self.shape}: our own kernel ({self.why})"
        members = row_classes.members_of(self.spans)
        calls = []
        for count in rows:
            called = [c for _, c in row_classes.pieces(members, count)]
            calls.append(f"{count} rows in {len(called)} of {max(called)}")
        return (
            f"{self.op} {self.shape}: the vendor's kernel, class of {len(members)} from "
            f"{members[0]} to {members[-1]} rows ({self.why}); {', '.join(calls)}"
        )


#: Field of vLLM's ``additional_config`` that holds what was settled: the key of vLLM's compile
#: cache and that of the census's certificate follow it.
FIELD = "vllm_b70_linears"
#: What torch says of a card that belongs to that one alone, as its properties print it.
OF_ONE_CARD = re.compile(r",? ?\b(uuid|pci_\w+)=[^,)]*")
#: Ends of variables that say which devices there are, or where files are: no kernel reads them.
WHERE = ("VISIBLE_DEVICES", "AFFINITY_MASK", "DEVICE_SELECTOR", "_DIR", "_HOME", "_PATH", "_ROOT")


def routes(settled: Iterable[Settled]) -> list[list[Any]]:
    """What decides bits, for JSON: op, shape and spans of each."""
    return [[one.op, one.shape, list(one.spans)] for one in settled]


def digest(settled: Iterable[Settled]) -> str:
    """Of ``routes``, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(routes(settled))).encode()).hexdigest()[:16]


def key_of(named: Named, device: torch.device, rank: tuple[int, int]) -> dict[str, Any]:
    """All that has a say; but not when binaries were unpacked, so that the file may be copied to
    another machine of the kind.

    Args:
        named: The op and shape.
        device: Where it runs.
        rank: Of the worker, and of how many: each keeps what it found itself.
    """
    key = make_key(device, [named], {"linear": current().linear, "rank": list(rank)})
    sizes = {n: v.split()[0] for n, v in key["versions"].items() if n.endswith(".so")}
    kind = key["device"] | {"capability": OF_ONE_CARD.sub("", key["device"]["capability"])}
    environ = {n: v for n, v in key["environ"].items() if not n.endswith(WHERE)}
    return key | {"versions": key["versions"] | sizes, "device": kind, "environ": environ}


def folder() -> Path:
    """Where the files are."""
    import vllm.envs as envs

    return Path(envs.VLLM_CACHE_ROOT) / "vllm_b70" / "linears"


def path_of(key: dict[str, Any]) -> Path:
    """Where what was settled under a key is kept: the only file of a folder of its own."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return folder() / name / "settled.json"


def load(key: dict[str, Any]) -> Settled | None:
    """What was settled under a key; None if nothing was.

    Raises:
        PluginError: The file cannot be read or believed: choosing anew might choose otherwise.
    """
    path = path_of(key)
    try:
        content = json.loads(path.read_text())
        said = content["settled"]
        found = Settled(said["op"], said["shape"], tuple(said["spans"]), said["why"])
        sound = content["key"] == json.loads(json.dumps(key))
        sound &= content["digest"] == digest([found]) and key["shapes"] == [[found.op, found.shape]]
        if not sound:
            raise ValueError("it does not hold what it should")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PluginError(
            f"VLLM_B70_LINEAR={current().linear} cannot look for its earlier choice ({error}): "
            f"make {folder()} readable to this user, or set VLLM_CACHE_ROOT to a folder that is."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise PluginError(
            f"VLLM_B70_LINEAR={current().linear} cannot read its earlier choice, {path} ({error}): "
            "copy it from a server of the same configuration, or remove it to choose anew."
        ) from error
    return found


def keep(key: dict[str, Any], settled: Settled) -> Settled:
    """Keep what was settled, unless another process was first.

    A folder that holds its file already takes the name of the key: that fails if one is there, on
    every file system, those without hard links included.

    Returns:
        What is kept and counts.

    Raises:
        OSError: It cannot be kept.
        PluginError: Another process was first, and its file cannot be believed.
    """
    path = path_of(key)
    content = {"digest": digest([settled]), "settled": asdict(settled), "key": key}
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=path.parent.parent, suffix=".tmp"))
    try:
        with open(made / path.name, "w") as file:
            file.write(json.dumps(content, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        # Other users of the cache read it.
        os.chmod(made / path.name, 0o644)
        os.chmod(made, 0o755)
        try:
            os.rename(made, path.parent)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            if (found := load(key)) is None:
                raise  # Something else lies there, and the next start would choose anew.
            return found
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return settled
