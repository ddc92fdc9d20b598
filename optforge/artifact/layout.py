"""Names that the writer and the reader of an artifact agree on."""

FORMAT_VERSION = 1
NAME = "artifact"
PREVIOUS = ".artifact.previous"
"""Where the old artifact lies between the two renames that replace it; whole if a kill falls between them."""
