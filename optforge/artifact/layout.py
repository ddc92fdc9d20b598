"""Names that the writer and the reader of an artifact agree on."""

FORMAT_VERSION = 1
NAME = "artifact"
PREVIOUS = ".artifact.previous"
"""Where the old artifact lies between the two renames that replace it; whole if a kill falls between them."""
GIVEN = "given"
"""Name of the model in the run of a module that lived in a Python program."""
