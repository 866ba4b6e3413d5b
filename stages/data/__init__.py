"""Text in, token sequences out: what the stages read for calibration and for held-out evaluation."""
