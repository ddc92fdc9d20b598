"""Runs calibration data through a model, for the steps that decide by what their layers are given.

    samples     inputs of the model, apart from those that quality is measured on
    walk        block by block: only one block has to be on the device, and later blocks see what the changed ones give
    statistics  what is remembered of a layer's inputs
    kept        results of finished blocks in the user's cache, so that a killed run goes on and a second one need not begin

Not to be confused with the calibration of predictions (optforge/plan/calibration.py).
"""
