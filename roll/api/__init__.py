"""`roll.train` and its siblings: what `import roll` offers, loaded at first use."""
