"""TinyONN: any dense decoder with a sparse FFN in every layer, for what no native architecture can express."""
