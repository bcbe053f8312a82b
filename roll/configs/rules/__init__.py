"""What keys may not say together, one file per subject."""
