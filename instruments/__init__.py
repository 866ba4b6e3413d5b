"""What watches any torch model; knows nothing of MoE and imports nothing of models, stages or pipeline."""
