"""Tests and notebooks run beside processes that build kernels: each has one thread.

Threads of OpenMP that spin while they wait for a core cost more than they compute.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, here and in every process begun here
