"""Shared by the stages that fit: layer-by-layer passes and closed-form solves."""
