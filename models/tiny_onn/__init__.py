"""TinyONN: any dense decoder with sparse FFNs, for carves that no architecture of transformers can express."""
