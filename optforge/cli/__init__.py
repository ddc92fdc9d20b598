"""The command line: Typer outside, the Hydra job inside."""
