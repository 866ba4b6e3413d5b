"""How much each unit matters: S_p and the plain measures beside it."""
