"""`hf_infer`: sampling with transformers in the process of the worker."""
