"""The ops for the CPU: explicit loops that numba compiles, one file an op.

torch has no GEMM whose order of addition is promised: on one AVX-512 machine both ``F.linear`` and
oneDNN gave other bits from 33 or 64 rows on, and MKL's sgemm does between 1 and 2 rows. numba,
which vLLM installs anyway, compiles these loops without reassociating them, so the order written
here is the order that runs, on every CPU and with any number of threads.

The functions take and fill numpy arrays, allocate only scratch, and import neither torch nor vLLM.
"""

import os

# Without it numba would replace exp by a vector version for some elements of a loop only, where
# Intel's library happens to be installed.
os.environ.setdefault("NUMBA_DISABLE_INTEL_SVML", "1")
