"""From YAML to the dataclasses, and pages that are generated from them."""
