"""vLLM as an inference engine: `engine.build`."""
