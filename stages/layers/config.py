"""Constants of the stage that finds which layers to keep dense."""

VERSION = 2

TOKENS, LENGTH = 1024, 256  # of text on which each layer's cost is measured, and of its sequences at most
NARROWER = 0.75  # the second width, relative to the first
LEAST_GAIN = 0.03  # share of the predicted cost that one more dense layer must save
