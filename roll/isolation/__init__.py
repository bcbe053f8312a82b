"""Code that isn't trusted or may crash: child processes, and the sandbox."""
