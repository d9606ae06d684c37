"""Use a trained network: export, search, serve; and write the recipe to begin with."""
