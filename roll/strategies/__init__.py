"""Backends behind `TrainStrategy` and `InferEngine`."""
