"""What a machine does: its peaks, the times of single operators as models run them, and what its host adds to each.

    point.py          one measured operator, as plain data
    clock.py          seconds of a call: a loop on a CPU, a captured graph on CUDA
    case.py           one operator to measure, and the tensors it runs on
    products.py       matrix products of real layers, in every dtype and kernel of this package
    attention.py      causal prefill, masked decode over a static cache, the backward pass
    convolutions.py   those of the image classifiers
    elementwise.py    norms, activations, look-ups, copies, the optimizer's update; as PyTorch and as Inductor run them
    overheads.py      host seconds of an operator, of a compiled kernel, of entering a compiled region
    peaks.py          memory bandwidth and the rate of large products
    survey.py         all of it, within a budget of seconds

The same code runs on a CPU and on CUDA. A point is a single operator on random numbers and never a model, so that
predictions made from points can be held against whole models (`benchmarks/prediction.py`).
"""
