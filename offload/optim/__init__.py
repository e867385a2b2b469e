"""What a step does: rules, recipe, loss scale, torch's own classes. Not where bytes are."""
