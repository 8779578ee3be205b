"""Triton kernels, one operation a file; each equals its torch reference in autoq.formats bit for bit."""
