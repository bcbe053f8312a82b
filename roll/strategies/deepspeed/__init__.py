"""DeepSpeed's ZeRO behind `TrainStrategy`."""
