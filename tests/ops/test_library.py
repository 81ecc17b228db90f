"""numba has the threads that torch has, in each process its own number."""

import os
import subprocess
import sys

SCRIPT = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import numpy, torch
torch.set_num_threads(int(sys.argv[1]))
from vllm_b70.ops import library
library.start_numba()
import numba

@numba.njit(parallel=True)
def add(x):
    for i in numba.prange(len(x)):
        x[i] += 3

x = numpy.zeros(8)
numba.get_num_threads()  # launches the threads, as a function from numba's cache on disk does
add(x)  # is compiled after that, where numba reads its variables again
print(numba.get_num_threads(), int(x.sum()), flush=True)
if len(sys.argv) > 2:
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], *sys.argv[2:]])
"""


def run(*threads, **environ):
    clean = {k: v for k, v in os.environ.items() if "NUMBA_NUM_THREADS" not in k}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *threads],
        env=clean | environ, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_what_is_compiled_once_threads_run_finds_the_same_number():
    """One core and two threads: numba's own default is another number than torch's."""
    assert run("2") == ["2 24"]


def test_a_process_has_its_own_number_and_not_its_parents():
    assert run("2", "1") == ["2 24", "1 24"]


def test_a_users_number_is_kept():
    assert run("2", NUMBA_NUM_THREADS="1") == ["1 24"]
