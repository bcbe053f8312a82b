"""From files and generators to tokenised prompts in a resumable order. Imports torch, transformers or datasets nowhere
at import time."""
