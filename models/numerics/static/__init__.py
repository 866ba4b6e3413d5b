"""Static check: where training code loses precision, found without running it."""
