"""Custom operators: a Triton kernel, a plain PyTorch reference and a test for each."""
