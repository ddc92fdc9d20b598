"""A step's whole program, compiled ahead of time by XLA for a TPU that is not in the machine.

`compile.compile_step` is the one entry. It must run in a process of its own: importing torchax renames PyTorch's private
device and breaks `torch.compile` wherever it happens. `optforge.plan.xla` starts that process and reads what it found.
"""
