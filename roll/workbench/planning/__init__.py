"""Will it fit? Memory of every role by device and phase, from the model's config.json, without torch."""
