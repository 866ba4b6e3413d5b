"""Dense and MoE architectures, checkpoint IO, routing and capture: everything that knows foreign weights."""
