"""Hydra's door to `optforge.sweep`: `hydra/launcher=optforge`, the default of `optforge run -m`.

`hydra_plugins` is a namespace package that other distributions share, so it has no file of its own.
"""
