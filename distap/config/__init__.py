"""The configuration of a training: a YAML recipe with dotted overrides, checked key by key."""
