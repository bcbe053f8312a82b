"""What every pipeline does around its steps: clusters, checkpoints, logs, exports."""
