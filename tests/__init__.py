"""Tests. Without a GPU kernels run in Triton's interpreter, which has to be chosen before anything imports triton."""

import autoq.kernels.launch  # noqa: F401
