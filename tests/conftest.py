"""What all tests share."""

import os

# Set before torch is imported: two cores, and no test may depend on how many threads run.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
