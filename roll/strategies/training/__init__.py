"""What training backends share: micro-batches, optimizers, offload, state files."""
