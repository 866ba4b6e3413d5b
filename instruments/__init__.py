"""Tools that observe any torch model; they know nothing of MoE and import nothing of models, stages or pipeline."""
