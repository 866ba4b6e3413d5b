"""Layer-by-layer passes and closed-form solves, shared by the stages that fit."""
