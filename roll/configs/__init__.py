"""Typed, inert configuration: `load_config` gives a frozen `RLVRConfig`. Imports neither torch nor Ray."""
