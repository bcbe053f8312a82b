"""What a configuration needs of this machine: files, packages, accelerators."""
