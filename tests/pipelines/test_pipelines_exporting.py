"""`roll export`: the weights of every backend's checkpoint as a Hugging Face folder, also without the run."""
